"""Processes of a run that thrashes take turns."""
import json
import os
import signal
import subprocess
import time

import pytest
from conftest import BIN, foliomem, foliomem_only

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


def test_what_a_stopped_supervisor_holds_runs_on_and_can_be_killed(built, tmp_path):
    stats = tmp_path / "stats.json"
    argv = [BIN, "run", "--limit", "64M", "--stats", stats, "--", *map(str, together(built("random.c"), 10))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        try:
            time.sleep(6)
            run.send_signal(signal.SIGSTOP)
            programs = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_program_of(pid, run.pid)]
            os.kill(programs[-1], signal.SIGTERM)
            deadline = time.monotonic() + 60
            while not all(map(is_over, programs)) and time.monotonic() < deadline:
                time.sleep(0.1)
            alive = [pid for pid in programs if not is_over(pid)]
            run.send_signal(signal.SIGCONT)
            assert (len(programs), alive) == (3, [])
            assert run.communicate(timeout=30)[0] == b"right\n" * 2
            assert json.loads(stats.read_text())["turns"] > 0
        finally:
            run.kill()


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
    try:
        with open(f"/proc/{pid}/status") as status:
            return dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    except OSError:
        return {}
