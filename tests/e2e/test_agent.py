"""The built agent: what it exports, and that it stays out of the way where there is no run."""
import os
import subprocess
from pathlib import Path

from conftest import BIN, PROGRAMS, PYTHON, clean_env, foliomem, foliomem_only, plain

AGENT = Path(BIN).with_name("libfoliomem_agent.so")
HOOKS = {"fork", "_Fork", "forkpty", "daemon", "syscall", "clone", "madvise", "mlockall"}
HOOKS |= {"dl_iterate_phdr", "prctl", "mmap", "mmap64", "mremap", "mprotect", "malloc", "calloc", "realloc", "reallocarray"}
HOOKS |= {"memalign", "aligned_alloc", "posix_memalign", "valloc", "pvalloc", "pthread_create", "thrd_create"}


@foliomem_only
def test_only_the_hooks_are_exported():
    lines = subprocess.run(["nm", "-D", "--defined-only", AGENT], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1].split("@")[0] for line in lines.splitlines()} == HOOKS


@foliomem_only
def test_it_loads_beside_each_c_library():
    """The agent needs no library, no version of a symbol and no symbol, so no glibc is too old for it. Roots with a glibc older
    than 2.31 cannot be had from Debian any more."""
    def read(*options):
        return subprocess.run(["readelf", "-W", *options, AGENT], capture_output=True, text=True, check=True).stdout

    assert "(NEEDED)" not in read("--dynamic") and "No version information" in read("--version-info")
    undefined = [line.split() for line in read("--dyn-syms").splitlines() if " UND " in line and not line.endswith(" UND ")]
    assert undefined and all(symbol[4] == "WEAK" for symbol in undefined), undefined
    # Loaders before glibc 2.36 know no packed relocations.
    assert "(RELR)" not in read("--dynamic") and "(GNU_HASH)" in read("--dynamic")


@foliomem_only
def test_without_a_run_it_does_nothing():
    env = clean_env({"LD_PRELOAD": AGENT, "FOLIOMEM_CONTROL": f"/proc/{os.getpid()}/fd/999"})
    script = "import os, threading\nprint(len(os.listdir('/proc/self/task')), os.waitpid(os.fork() or os._exit(7), 0)[1] >> 8)"
    done = subprocess.run([PYTHON, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1 7\n", "")


def test_a_core_dump_has_nothing_of_the_agent(torture):
    """Its reserved memory would be gigabytes of zeros."""
    command = [PYTHON, PROGRAMS / "dumped.py"]
    assert int(foliomem(command, "64M", torture=torture).ok().out) < int(plain(command).ok().out) + 16
