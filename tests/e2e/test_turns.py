"""Processes of a run that thrashes take turns."""
import os
import signal
import time

import pytest
from conftest import foliomem, foliomem_only, read_text, start

pytestmark = foliomem_only

MIB = 60
TOGETHER = 'for seed in 1 2 3; do "$0" {mib} {seconds} $seed & done; wait'


def together(random, seconds):
    return ["sh", "-c", TOGETHER.format(mib=MIB, seconds=seconds), random]


def test_processes_that_do_not_fit_together_take_turns(built):
    got = foliomem(together(built("random.c"), 15), "64M", timeout=120).ok()
    assert got.out == b"right\n" * 3
    assert got.stats["turns"] > 0, got.stats["vmstat"]
    off = foliomem(together(built("random.c"), 6), "64M", options=("--turns", "off"), timeout=120).ok()
    assert off.out == b"right\n" * 3 and off.stats["turns"] == 0


@pytest.mark.parametrize("mode, count", [("pipe", 40), ("unmap", 6)])
def test_processes_that_need_each_other_get_on(built, mode, count):
    got = foliomem([built("turns.c"), mode, MIB, count], "48M", timeout=150).ok()
    assert got.out == b"right\n"


def test_what_a_stopped_supervisor_holds_runs_on_and_can_be_killed(built):
    run = start(together(built("random.c"), 10), "64M")
    time.sleep(6)
    os.kill(run.pid, signal.SIGSTOP)
    programs = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_program_of(pid, run.pid)]
    for pid in programs[-1:]:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while not all(map(is_over, programs)) and time.monotonic() < deadline:
        time.sleep(0.1)
    alive = [pid for pid in programs if not is_over(pid)]
    os.kill(run.pid, signal.SIGCONT)
    got = run.finish(30)
    assert (len(programs), alive) == (3, [])
    assert got.out == b"right\n" * 2
    assert got.stats["turns"] > 0


def is_program_of(pid, run):
    """Whether it is one of the three that the shell has started."""
    if not status_of(pid).get("Name", "").startswith("random"):
        return False
    shell = status_of(pid)["PPid"]
    return status_of(shell).get("PPid") == str(run)


def is_over(pid):
    return status_of(pid).get("State", "Z").startswith(("Z", "X"))


def status_of(pid):
    """Fields of /proc/PID/status; none if there is no such process."""
    return dict(line.split(":\t", 1) for line in read_text(f"/proc/{pid}/status").splitlines() if ":\t" in line)
