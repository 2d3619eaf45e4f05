"""Other systems: roots of Debian with older and newer C libraries, a root with musl, and a root with nothing but foliomem.

The Debian roots are made by debootstrap once and kept in target/roots.
"""
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import BIN, PROGRAMS, PYTHON, REPO, foliomem, foliomem_only, plain, soak_only

ROOTS = REPO / "target/roots"
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
SUITES = {"bullseye": "2.31", "bookworm": "2.36", "trixie": "2.41"}
MIRROR = "http://deb.debian.org/debian"
# SQLite's source, which scripts/setup takes out of a crate.
SQLITE = REPO / "target/sqlite"
MUSL = Path("/lib/ld-musl-x86_64.so.1")
needs_musl = pytest.mark.skipif(not shutil.which("musl-gcc"), reason="no musl (musl-tools)")
PROGRAM = """
import os, threading
data = bytearray(100 << 20)
for at in range(0, len(data), 4096):
    data[at] = at // 4096 & 255
wanted = sum(data[::4096])
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if sum(data[::4096]) == wanted else 1)
    assert os.waitpid(child, 0)[1] == 0
found = []
threads = [threading.Thread(target=lambda: found.append(sum(data[::4096]))) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert found == [wanted] * 4 and os.system("true") == 0
print(os.confstr("CS_GNU_LIBC_VERSION"))
"""


def install(root):
    """Puts foliomem into a root."""
    folder = root / "foliomem"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in ("foliomem", "libfoliomem_agent.so"):
        shutil.copy(Path(BIN).with_name(name), folder)


def inside(root, *argv, with_proc=True, timeout=60):
    """Runs a program with that root directory, in mounts of its own."""
    for name in ("proc", "dev"):
        if (root / name).is_symlink():
            (root / name).unlink()
        (root / name).mkdir(exist_ok=True)
    mounts = f"mount -t proc proc {root}/proc; mount --bind /dev {root}/dev;" if with_proc else ""
    return plain(["unshare", "--mount", "sh", "-c", f'{mounts} exec chroot {root} "$@"', "sh", *argv], timeout=timeout)


def debian(suite):
    """A root of that suite: its first packages and Python, unpacked."""
    root = ROOTS / suite
    if not (root / "complete").exists():
        if not shutil.which("debootstrap"):
            pytest.skip("no debootstrap")
        shutil.rmtree(root, ignore_errors=True)
        ROOTS.mkdir(exist_ok=True)
        made = subprocess.run(["debootstrap", "--variant=minbase", "--foreign", "--include=python3-minimal", suite, root, MIRROR],
                              capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"no {suite} to be had: {made.stdout[-300:]}")
        for archive in sorted((root / "var/cache/apt/archives").glob("*.deb")):
            # Links of the root, as from /lib, stay.
            unpack = f"dpkg-deb --fsys-tarfile {archive} | tar -x --keep-directory-symlink -C {root}"
            subprocess.run(unpack, shell=True, check=True)
        (root / "complete").touch()
    install(root)
    return root


@foliomem_only
@soak_only
@AS_ROOT
@pytest.mark.parametrize("suite, version", SUITES.items())
def test_a_program_of_an_older_or_newer_debian_keeps_the_limit(suite, version):
    root = debian(suite)
    got = inside(root, "/foliomem/foliomem", "run", "--limit", "64M", "--", "/usr/bin/python3", "-c", PROGRAM, timeout=120).ok()
    assert got.out.split() == [b"glibc", version.encode()] and "from swap" in got.err and "without" not in got.err, got.err


@needs_musl
@pytest.mark.parametrize("torture", [False, pytest.param(True, marks=soak_only)], ids=["normal", "torture"])
def test_a_musl_program_keeps_the_limit(tmp_path, torture):
    program = tmp_path / "musl"
    plain(["musl-gcc", "-O2", "-Wall", "-o", program, PROGRAMS / "any_libc.c"]).ok()
    got = foliomem([program], "40M", torture=torture, timeout=120).ok()
    assert got.out == b"OK\n"
    assert not got.stats or got.stats["vmstat"]["pswpin"] > 0 and got.stats["processes"] > 3, got.stats
    # Each process has the agent, whichever library it and its parent have.
    mixed = foliomem(["sh", "-c", f"{program} && python3 -c 'print(2)' && {program}"], "40M", torture=torture, timeout=120).ok()
    assert mixed.out == b"OK\n2\nOK\n" and "without the agent" not in mixed.err, mixed.err


# Programs for musl, with the limit in MiB: SQLite, and one whose threads begin, end, use malloc and fork.
MUSL_PROGRAMS = {
    "any": (["any_libc.c"], ["-DNO_SHELL"], [], 40),
    "churn": (["churn.c"], [], ["40", "3"], 64),
    "sqlite": (["sqlite.c", SQLITE / "sqlite3.c"], [f"-I{SQLITE}", "-DSQLITE_OMIT_LOAD_EXTENSION"], ["100000"], 64),
}


@foliomem_only
@AS_ROOT
@needs_musl
@pytest.mark.parametrize("name", ["any", "churn", pytest.param("sqlite", marks=soak_only)])
def test_a_root_with_musl_alone_runs_programs_inside_the_limit(tmp_path, name):
    sources, flags, arguments, limit = MUSL_PROGRAMS[name]
    if name == "sqlite" and not SQLITE.exists():
        pytest.skip("no source of SQLite (scripts/setup test)")
    for folder in ("bin", "lib", "tmp"):
        (tmp_path / folder).mkdir()
    shutil.copy(MUSL, tmp_path / "lib")
    program = [tmp_path / "bin/program", *arguments]
    plain(["musl-gcc", "-O1", *flags, "-o", program[0], *(PROGRAMS / source for source in sources)], timeout=600).ok()
    install(tmp_path)
    wanted = plain(program, timeout=120).ok().out
    got = inside(tmp_path, "/foliomem/foliomem", "run", "--limit", f"{limit}M", "--", "/bin/program", *arguments, timeout=300).ok()
    assert got.out == wanted and "from swap" in got.err and "without" not in got.err, got.err


@foliomem_only
@AS_ROOT
def test_a_root_with_nothing_else_starts_foliomem_which_says_what_is_missing(tmp_path):
    if plain(["ldd", BIN]).code == 0 and b"statically" not in plain(["ldd", BIN]).out:
        pytest.skip("this foliomem is not static: make build")
    shutil.copy(BIN, tmp_path / "foliomem")
    got = inside(tmp_path, "/foliomem", "doctor", with_proc=False)
    text = got.out.decode()
    assert got.code == 1 and "MISSING /proc " in text and "MISSING agent " in text, (text, got.err)
    got = inside(tmp_path, "/foliomem", "run", "--limit", "64M", "--", "/foliomem", "--version")
    assert got.code == 125 and "the agent is missing: it must be /libfoliomem_agent.so" in got.err, got.err


@foliomem_only
def test_a_run_inside_a_run_has_its_own_limit():
    """The inner foliomem, which is static, loads no agent; its program does."""
    inner = [BIN, "run", "--limit", "64M", "--", PYTHON, "-c", "print(len(set(bytearray(100 << 20)[::4096])))"]
    got = foliomem(inner, "256M").ok()
    assert got.out == b"1\n" and "of 64 MiB" in got.err and "without" not in got.err, got.err
