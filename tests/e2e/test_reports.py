"""A program finds itself as it would without foliomem: its threads, children, namespaces, filters and ends. The patterns
come from public bug reports of comparable tools. Each program checks itself and its memory, most of which is swapped out."""
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import LONG, PLAIN, PYTHON, assert_swapped, clean_env, few_cases, foliomem

ALONE = ["user-namespace", "mount-namespace", "tasks", "signal-every-task", "waits", "sigchld", "subreaper", "session", "kill-group"]
NOT_BY_FILE = "the kernel lets no fault of ptrace(2) or /proc/PID/mem wait: it fails with EIO and sends no message"
# How often each program finds itself so.
TIMES = 3 if LONG else 1
FORK = ("import os, sys\n"
        "data = [bytes([i % 251]) * 65536 for i in range(int(sys.argv[1]) * 16)]\n"
        "child = os.fork()\n"
        "right = all(b[0] == b[-1] == i % 251 for i, b in enumerate(data))\n"
        "if child == 0: os._exit(not right)\n"
        "print('OK' if right and os.waitpid(child, 0)[1] == 0 else 'WRONG')")


def is_right(argv, torture, out=b"OK\n", times=TIMES, code=0, **how):
    """The program finds all as it is without foliomem, each time, while its memory is swapped out."""
    for _ in range(times):
        got = foliomem(argv, "20M" if torture else "32M", torture=torture, timeout=60, **how)
        assert (got.code, got.out) == (code, out), got.err
        assert_swapped(got)


def mib(torture):
    """A quarter of what the programs take."""
    return 8 if torture else 14


@pytest.mark.parametrize("question", ALONE)
def test_a_program_is_alone(built, question, torture):
    is_right([built("alone.c"), question, mib(torture)], torture)


def test_a_program_that_adopts_orphans_adopts_its_own_only(built):
    is_right([built("alone.c"), "orphans", mib(False)], False, times=1)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("way", ["setuid-by-signals", "setuid-by-library"])
def test_all_threads_of_a_program_change_their_user(built, way, torture):
    is_right([built("alone.c"), way, mib(torture)], torture)


@cache
def warning_python():
    """A Python that warns of a fork in a process of several threads (3.12 and later)."""
    found = [shutil.which(f"python3.{minor}") for minor in range(12, 20)] + [sys.executable]
    found += sorted(map(str, Path.home().glob(".pyenv/versions/3.1[2-9]*/bin/python3")))
    check = "import sys; sys.exit(sys.version_info < (3, 12))"
    works = (python for python in found if python and subprocess.run([python, "-c", check], env=clean_env(), capture_output=True).returncode == 0)
    return next(works, None)


def test_a_fork_of_python_warns_of_no_threads(torture):
    python = warning_python() or pytest.skip("no Python 3.12 or later")
    is_right([python, "-W", "error", "-c", FORK, 4 * mib(torture)], torture)


def test_a_fork_of_this_python_has_its_memory(torture):
    is_right([PYTHON, "-W", "error", "-c", FORK, 4 * mib(torture)], torture, times=1)


@few_cases
@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("filter", ["errno", "kill", "own", "strict"])
def test_a_filter_of_the_program_leaves_its_memory_alone(built, filter, when, torture):
    is_right([built("filtered.c"), filter, when, mib(torture)], torture)


def test_a_filter_kills_no_fork_whose_system_call_writes_ids(built, torture):
    is_right([built("filtered_clone.c"), mib(torture)], torture)


# Numbers of system calls of x86-64.
FILES = {"open": [2], "openat": [257], "any file": [2, 21, 257, 269, 437, 439]}
IDS = {"ids": [39, 110, 186], "set_tid_address": [218]}


@pytest.mark.parametrize("forbidden", (FILES | IDS).items(), ids=lambda item: item[0])
def test_a_filter_kills_no_fork_for_what_the_agent_asks(built, forbidden, torture):
    is_right([built("filtered_fork.c"), mib(torture), *forbidden[1]], torture)


@pytest.mark.parametrize("how", ["stop", "group", "trace", "seize"])
def test_memory_of_a_stopped_program_can_be_read(built, how, torture):
    is_right([built("stopped.c"), how, mib(torture)], torture)


@pytest.mark.xfail(condition=not PLAIN, reason=NOT_BY_FILE, strict=True)
@pytest.mark.parametrize("how", ["stop-file", "trace-file"])
def test_memory_of_a_stopped_program_can_be_read_by_its_file(built, how):
    is_right([built("stopped.c"), how, mib(False)], False, times=1)


@pytest.mark.parametrize("how", ["main-gone", "main-gone-early"])
def test_a_program_whose_main_thread_has_ended_keeps_its_limit(built, how, torture):
    is_right([built("ends.c"), how, mib(torture)], torture, out=b"ready\nOK\n", stdin=b"x")


@pytest.mark.parametrize("how", ["raw", "raw-main-gone", "raw-main-gone-early"])
def test_a_program_ends_when_its_last_thread_does(built, how, torture):
    is_right([built("ends.c"), how, mib(torture)], torture, out=b"ready\n", stdin=b"x")


@pytest.mark.parametrize("how", ["clone-outlives", "vfork-outlives"])
def test_a_child_that_shares_memory_and_outlives_its_parent_has_it(built, how, torture):
    is_right([built("ends.c"), how, mib(torture)], torture)
