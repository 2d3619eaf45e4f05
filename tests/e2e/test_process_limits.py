"""Limits on the number of processes and threads, which the agent's count against, too: the program goes on."""
from pathlib import Path

import pytest
from conftest import BIN, PYTHON, foliomem_only
from groups import can_make_groups, new_group

V1 = Path("/sys/fs/cgroup/pids")
pytestmark = [foliomem_only, pytest.mark.skipif(not can_make_groups(V1), reason="no right to make groups of processes")]
START = """
import os, sys
group = sys.argv[1]
def leave_room(tasks):
    with open(group + "/pids.current") as now, open(group + "/pids.max", "w") as limit:
        limit.write(str(int(now.read()) + tasks))
def resident_mib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) >> 10
def is_right():
    return all(row == (b"%08d" % number) * 512 for number, row in enumerate(rows))
"""
# Grows where the agent has room for so many threads only, and waits until the limit holds after there is room again.
GROW = START + """
import time
leave_room(int(sys.argv[2]))
rows = [(b"%08d" % number) * 512 for number in range(96 * 256)]
assert is_right()
with open(group + "/pids.max", "w") as limit:
    limit.write("max")
while resident_mib() > 70:
    time.sleep(0.01)
assert is_right()
print("OK")
"""
# Forks, most of its memory swapped out, where there is room for so many processes and threads only.
FORK = START + """
rows = [(b"%08d" % number) * 512 for number in range(96 * 256)]
leave_room(int(sys.argv[2]))
child = os.fork()
if child == 0:
    os._exit(0 if is_right() else 1)
assert os.waitpid(child, 0)[1] == 0 and is_right()
print("OK")
"""


@pytest.fixture
def group():
    with new_group(V1) as made:
        yield made


def run(group, program, *arguments, options=()):
    argv = [BIN, "run", "--limit", "64M", *options, "--", PYTHON, "-c", program, group.path, *arguments]
    return group.start(argv).finish(60)


@pytest.mark.parametrize("room", range(5))
def test_a_program_goes_on_until_there_is_room_for_the_agents_threads(group, room):
    got = run(group, GROW, str(room)).ok()
    assert got.out == b"OK\n"
    said = [line for line in got.err.splitlines() if "goes on without the limit until the agent can start threads" in line]
    # Two handlers, a reclaimer and the guard are enough, and are all on two CPUs.
    assert len(said) == (1 if room < 4 else 0), got.err
    assert all("pids.max" in line for line in said), said


def test_a_hard_limit_stops_a_program_that_cannot_be_kept_in_it(group):
    got = run(group, GROW, "0", options=["--hard"])
    assert got.code == 125 and "cannot start a thread" in got.err and "pids.max" in got.err, got


@pytest.mark.parametrize("room", range(1, 8))
def test_a_child_has_all_its_memory_whatever_its_companion_has_no_room_for(group, room):
    """With room for some of its threads, the companion has the memory in its hands when it gives up."""
    got = run(group, FORK, str(room)).ok()
    # The child, an intermediate process and the companion come first.
    assert got.out == b"OK\n" and ("goes on without the limit" in got.err) == (room < 7), got
