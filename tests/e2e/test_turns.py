"""Processes of a run that thrashes take turns."""
import ctypes
import json
import os
import signal
import time

import pytest
from conftest import BIN, foliomem, foliomem_only, plain, read_text, start

pytestmark = foliomem_only

MIB = 60
TOGETHER = 'for seed in 1 2 3; do "$0" {mib} {seconds} $seed & done; wait'


def together(random, seconds):
    return ["sh", "-c", TOGETHER.format(mib=MIB, seconds=seconds), random]


def test_processes_that_do_not_fit_together_take_turns(built):
    got = foliomem(together(built("random.c"), 10), "64M", timeout=120).ok()
    assert got.out == b"right\n" * 3
    assert got.stats["turns"] > 0, got.stats["vmstat"]
    off = foliomem(together(built("random.c"), 4), "64M", options=("--turns", "off"), timeout=120).ok()
    assert off.out == b"right\n" * 3 and off.stats["turns"] == 0


@pytest.mark.parametrize("mode, count", [("pipe", 40), ("unmap", 6), ("threads", 600)])
def test_processes_that_need_each_other_get_on(built, mode, count):
    got = foliomem([built("turns.c"), mode, MIB, count], "48M", timeout=150).ok()
    assert got.out == b"right\n"


def test_what_a_stopped_supervisor_holds_runs_on_and_can_be_killed(built):
    run = start(together(built("random.c"), 10), "64M")
    time.sleep(6)
    os.kill(run.pid, signal.SIGSTOP)
    programs = [pid for pid in processes() if is_program_of(pid, run.pid)]
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


def test_the_memory_of_a_held_process_can_be_read(built):
    run = start(together(built("random.c"), 12), "64M")
    deadline = time.monotonic() + 12
    has_read = False
    held = 0
    while not (has_read and held) and time.monotonic() < deadline:
        time.sleep(0.1)
        held = max(held, held_processes(run.pid))
        has_read = has_read or any(reads_while_held(pid) for pid in processes() if is_program_of(pid, run.pid))
    assert run.finish(60).ok().out == b"right\n" * 3
    assert has_read
    assert 1 <= held <= 2


def held_processes(run):
    runs = json.loads(plain([BIN, "ps", "--json"]).ok().out)
    return sum(found["held_processes"] for found in runs if found["pid"] == run)


def reads_while_held(pid):
    """Whether the process waits for memory all the time in which 4 MiB of it are read."""
    before = state_of(pid)
    if before[0] != "handle_userfault":
        return False
    time.sleep(0.5)
    if state_of(pid) != before:
        return False
    data = min(mappings(pid), key=lambda mapping: abs(mapping[1] - mapping[0] - (MIB << 20)))
    content = read_memory(pid, sum(data) // 2 & -4096, 4 << 20)
    return any(content) and state_of(pid) == before


class Piece(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


def read_memory(pid, start, size):
    content = ctypes.create_string_buffer(size)
    here, there = Piece(ctypes.addressof(content), size), Piece(start, size)
    got = ctypes.CDLL(None).process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return content.raw[:max(got, 0)]


def state_of(pid):
    """What the first thread waits for, and how long the process has run in user mode."""
    stat = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return read_text(f"/proc/{pid}/wchan"), stat[11:12]


def mappings(pid):
    """Start and end of all writable mappings without a file."""
    lines = [line.split() for line in read_text(f"/proc/{pid}/maps").splitlines()]
    return [tuple(int(end, 16) for end in line[0].split("-")) for line in lines if len(line) == 5 and "w" in line[1]]


def processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


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
