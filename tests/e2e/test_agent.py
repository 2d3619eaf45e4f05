"""The built agent: what it exports, and that it stays out of the way where there is no run."""
import os
import subprocess
from pathlib import Path

from conftest import BIN, PYTHON, clean_env, foliomem_only

AGENT = Path(BIN).with_name("libfoliomem_agent.so")
HOOKS = {"fork", "_Fork", "forkpty", "daemon", "syscall", "clone", "madvise", "mlockall"}
HOOKS |= {"dl_iterate_phdr", "prctl", "mmap", "mmap64", "mremap", "mprotect", "malloc", "calloc", "realloc", "reallocarray"}
HOOKS |= {"memalign", "aligned_alloc", "posix_memalign", "valloc", "pvalloc", "pthread_create", "thrd_create"}


@foliomem_only
def test_only_the_hooks_are_exported():
    lines = subprocess.run(["nm", "-D", "--defined-only", AGENT], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1].split("@")[0] for line in lines.splitlines()} == HOOKS


@foliomem_only
def test_without_a_run_it_does_nothing():
    env = clean_env({"LD_PRELOAD": AGENT, "FOLIOMEM_CONTROL": f"/proc/{os.getpid()}/fd/999"})
    script = "import os, threading\nprint(len(os.listdir('/proc/self/task')), os.waitpid(os.fork() or os._exit(7), 0)[1] >> 8)"
    done = subprocess.run([PYTHON, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1 7\n", "")
