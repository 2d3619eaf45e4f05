"""What is installed, and where: the same tree in all packages."""
from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from . import elf

REPO = Path(__file__).resolve().parents[2]
# FOLIOMEM_BUILT names another folder with programs: tests make packages of the programs under test.
BUILT = Path(os.environ.get("FOLIOMEM_BUILT") or REPO / "target/release")
# How much time compression takes: gzip's and xz's scale to 9. Tests, whose packages live for seconds, set it.
LEVEL = int(os.environ.get("FOLIOMEM_DIST_LEVEL") or 9)
NAME = "foliomem"
COMMAND = "foliomem"
# Programs that `foliomem lab` and `foliomem bench` start.
COMPANIONS = ("foliomem-lab", "foliomem-bench", "foliomem-bench-swap")
SUMMARY = "Runs programs inside a memory limit that they do not fit in"
DESCRIPTION = """\
foliomem runs a program, and all its children, inside a memory limit that the program does not fit in. Memory that the
program has not used for a while is compressed in memory, in the background. It comes back when the program touches it."""


class DistError(Exception):
    """Why a package cannot be made."""


def workspace(key: str) -> str:
    """A value of Cargo.toml's [workspace.package]."""
    section = (REPO / "Cargo.toml").read_text().split("[workspace.package]")[1].split("\n[")[0]
    found = re.search(rf'^{key} = "(.*)"$', section, re.M)
    if found is None:
        raise DistError(f"Cargo.toml has no {key} in [workspace.package]")
    return found[1]


VERSION = workspace("version")
LICENSE = workspace("license")


def epoch() -> int:
    """The time of all files."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    done = subprocess.run(["git", "-C", REPO, "log", "-1", "--format=%ct"], capture_output=True, text=True)
    # The first second that a ZIP file can hold.
    return int(done.stdout or 0) or 315532800


def run(command: list[str | Path]) -> None:
    """Runs a tool that makes a package, at the time of all files."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch())}
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPO, env=environment)


def agents() -> list[Path]:
    """The agents: one for each C library."""
    found = sorted(BUILT.glob("libfoliomem_agent*.so"))
    if not found or not (BUILT / COMMAND).is_file():
        raise DistError(f"{BUILT} has no foliomem and its agent: make build")
    return found


def glibc(*, with_companions: bool = True) -> str:
    """The oldest glibc that the installed binaries run with."""
    names = (COMMAND, *(COMPANIONS if with_companions else ()))
    dynamic = [BUILT / name for name in names if (BUILT / name).is_file() and not elf.is_static(BUILT / name)]
    needed = [version for path in [*agents(), *dynamic] if (version := elf.glibc_version(path)) is not None]
    return ".".join(map(str, max(needed, default=(2, 17))))


@dataclass
class Tree:
    """Files by their path below the prefix; a program has the mode 755."""

    files: dict[str, bytes] = field(default_factory=dict)
    modes: dict[str, int] = field(default_factory=dict)

    def add(self, path: str, content: bytes | Path, mode: int = 0o644) -> None:
        self.files[path] = content.read_bytes() if isinstance(content, Path) else content
        self.modes[path] = mode

    def add_compressed(self, path: str, content: bytes) -> None:
        self.add(path, gzip.compress(content, 9, mtime=0))

    def write(self, root: Path) -> None:
        """Writes the files below `root`."""
        now = epoch()
        for path, content in sorted(self.files.items()):
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(self.modes[path])
            os.utime(target, (now, now))
        for folder in [*(path for path in root.rglob("*") if path.is_dir()), root]:
            folder.chmod(0o755)
            os.utime(folder, (now, now))


def programs(*, with_companions: bool) -> Tree:
    """The command and its agents, which it finds in ../lib/foliomem."""
    tree = Tree()
    for name in (COMMAND, *(COMPANIONS if with_companions else ())):
        if (BUILT / name).is_file():
            tree.add(f"bin/{name}", BUILT / name, 0o755)
    for agent in agents():
        tree.add(f"lib/foliomem/{agent.name}", agent)
    return tree


def whole(zsh: str) -> Tree:
    """All that a package of a distribution has below /usr; `zsh` is its folder of completions of zsh."""
    tree = programs(with_companions=True)
    reference = REPO / "docs/reference"
    for page in sorted((reference / "man").glob("*.1")):
        tree.add_compressed(f"share/man/man1/{page.name}.gz", page.read_bytes())
    for file in sorted((reference / "completions").iterdir()):
        if file.name.endswith(".bash"):
            tree.add(f"share/bash-completion/completions/{file.stem}", file)
        elif file.name.endswith(".fish"):
            tree.add(f"share/fish/vendor_completions.d/{file.name}", file)
        else:
            tree.add(f"share/zsh/{zsh}/{file.name}", file)
    return tree


def python_module(folder: str) -> Tree:
    """The Python module, in a folder of modules."""
    tree = Tree()
    for file in sorted((REPO / "python/foliomem/src/foliomem").iterdir()):
        if file.is_file():
            tree.add(f"{folder}{NAME}/{file.name}", file)
    return tree


def fresh(folder: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
