"""The Python wheel: the module, the command, and the agent.

The command and the agent are in the wheel's `data`, which pip installs below the environment's prefix: bin/foliomem and
lib/foliomem. So the command is the binary itself, and starts without Python.
"""
from __future__ import annotations

import base64
import hashlib
import time
import tomllib
import zipfile
from pathlib import Path

from . import elf
from .contents import LICENSE, NAME, REPO, VERSION, agents, epoch, glibc, programs, python_module


def platforms() -> str:
    """The platforms that the binaries are for, as true as they are."""
    tags = []
    glibc_version = tuple(map(int, glibc(with_companions=False).split(".")))
    if any(elf.is_for_glibc(agent) for agent in agents()):
        tags.append("manylinux_{}_{}_x86_64".format(*glibc_version))
        if glibc_version <= (2, 17):
            tags.append("manylinux2014_x86_64")
    programs_are_static = elf.is_static(Path(agents()[0]).with_name(NAME))
    if programs_are_static and any(elf.is_for_musl(agent) for agent in agents()):
        tags.append("musllinux_1_1_x86_64")
    return ".".join(tags)


def metadata() -> str:
    """The file METADATA."""
    project = tomllib.loads((REPO / "python/foliomem/pyproject.toml").read_text())["project"]
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {NAME}",
        f"Version: {VERSION}",
        f"Summary: {project['description']}",
        f"License: {LICENSE}",
        f"Keywords: {','.join(project['keywords'])}",
        *(f"Classifier: {classifier}" for classifier in project["classifiers"]),
        f"Requires-Python: {project['requires-python']}",
        "Description-Content-Type: text/markdown",
        *(f"License-File: {name}" for name in ("LICENSE-APACHE", "LICENSE-MIT")),
    ]
    return "\n".join(lines) + "\n\n" + (REPO / "README.md").read_text()


def record_line(path: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(content)}\n"


def build(out: Path) -> list[Path]:
    """Writes the wheel."""
    tag = f"py3-none-{platforms()}"
    info, data = f"{NAME}-{VERSION}.dist-info", f"{NAME}-{VERSION}.data"
    tree = python_module("")
    for path, content in programs(with_companions=False).files.items():
        name = path.rpartition("/")[2]
        is_program = path.startswith("bin/")
        tree.add(f"{data}/scripts/{name}" if is_program else f"{data}/data/{path}", content, 0o755 if is_program else 0o644)
    tree.add(f"{info}/METADATA", metadata().encode())
    tags = "".join(f"Tag: py3-none-{platform}\n" for platform in platforms().split("."))
    tree.add(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: {NAME}\nRoot-Is-Purelib: false\n{tags}".encode())
    for name in ("LICENSE-APACHE", "LICENSE-MIT"):
        tree.add(f"{info}/licenses/{name}", REPO / name)
    record = f"{info}/RECORD"
    lines = "".join(record_line(path, content) for path, content in tree.files.items())
    tree.add(record, f"{lines}{record},,\n".encode())
    for old in out.glob(f"{NAME}-*.whl"):
        old.unlink()
    target = out / f"{NAME}-{VERSION}-{tag}.whl"
    when = time.gmtime(epoch())[:6]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, content in tree.files.items():
            file = zipfile.ZipInfo(path, when)
            file.external_attr = (0o100000 | tree.modes[path]) << 16
            file.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(file, content)
    return [target]
