"""Limits that follow the cgroups around a run, in real cgroups."""
import json
import os
import signal
import time
from pathlib import Path

import pytest
from conftest import BIN, MIB, PYTHON, alone, cli, foliomem_only, soak_only
from groups import Group, can_make_groups, new_group

V1 = Path("/sys/fs/cgroup/memory")


pytestmark = [foliomem_only, alone, pytest.mark.skipif(not can_make_groups(V1), reason="no right to make cgroups")]


class MemoryGroup(Group):
    def limit(self, mib):
        (self.path / "memory.limit_in_bytes").write_text(str(mib * MIB))
        return self


@pytest.fixture
def group():
    with new_group(V1, MemoryGroup) as made:
        yield made


def run(*options):
    return [BIN, "run", *options, "--"]


# Grows to as many MiB as argument 1 says, of data that compresses, and verifies them. It pauses now and then: here the
# limit is tested, and elsewhere how it holds at the speed of memory.
GROW = ("import sys, time\nrows = []\nfor i in range(int(sys.argv[1]) * 256):\n    rows.append((b'%08d' % i) * 512)\n"
        "    if i % 256 == 0: time.sleep(0.01)\n"
        "assert all(row == (b'%08d' % i) * 512 for i, row in enumerate(rows))\nprint('right')")


def test_a_share_is_one_of_the_lowest_limit_of_all_groups_around(group):
    inner = group.limit(256).inner().limit(512)
    got = inner.start([BIN, "run", "--limit", "50%", "--print-config"]).finish().ok()
    assert b'limit = "128M"' in got.out, got.out


def test_a_limit_above_that_of_a_group_is_said(group):
    got = group.limit(256).start([*run("--limit", "512M"), "true"]).finish().ok()
    assert "above the 256 MiB of the cgroup" in got.err and "--limit container" in got.err, got.err


def test_a_limit_above_all_memory_is_said():
    got = cli("run", "--limit", "900G", "--", "true").ok()
    assert "of this machine" in got.err, got.err


@pytest.mark.parametrize("options", [[], pytest.param(["--limit", "container"], marks=soak_only)], ids=["default", "given"])
def test_a_program_that_needs_more_than_its_group_ends_well(group, options, tmp_path):
    inner = group.limit(256).inner()
    stats = tmp_path / "stats.json"
    running = inner.start([*run(*options, "--stats", stats), PYTHON, "-c", GROW, 400])
    running.stats_path = stats
    got = running.finish(120).ok()
    assert got.out == b"right\n"
    assert got.stats["vmstat"]["pswpout"] > 0 and got.stats["peak_bytes"] < 256 * MIB, got.stats


def test_the_limit_follows_what_others_take(group):
    """Another process of the group takes 96 MiB of 256, and later gives them back."""
    group.limit(256)
    rows = "rows = [(b'%08d' % i) * 512 for i in range(170 * 256)]"
    work = f"import sys\n{rows}\nprint('full', flush=True)\nsys.stdin.readline()\nassert all(row == (b'%08d' % i) * 512 for i, row in enumerate(rows))\nprint('right')"
    reader, writer = os.pipe()
    running = group.start([*run("--limit", "container"), PYTHON, "-c", work], stdin=os.fdopen(reader))
    running.wait_output(b"full", 60)
    # A MiB in 50 ms: the kernel kills where others grow faster than the run can give way.
    hog = group.start([PYTHON, "-c", "import time\nall = []\nfor i in range(96): all.append(b'x' * (1 << 20)); time.sleep(0.05)"])
    hog.finish(60).ok()
    os.write(writer, b"\n")
    os.close(writer)
    assert running.finish(60).ok().out.endswith(b"right\n")


def test_a_limit_by_hand_ends_that_the_run_follows_its_group(group):
    group.limit(256)
    work = "import sys\nrows = [(b'%08d' % i) * 512 for i in range(100 * 256)]\nprint('full', flush=True)\nsys.stdin.readline()\nprint(len(rows))"
    reader, writer = os.pipe()
    running = group.start([*run("--limit", "container"), PYTHON, "-c", work], stdin=os.fdopen(reader))
    running.wait_output(b"full", 60)

    def limit():
        return json.loads(cli("ctl", running.pid, "status", "--json").ok().out)["limit_bytes"] / MIB

    assert limit() > 200
    cli("ctl", running.pid, "limit", "64M", timeout=60).ok()
    group.limit(128)
    time.sleep(1)
    assert limit() == 64
    group.limit(512)
    cli("ctl", running.pid, "limit", "+16M", timeout=60).ok()
    time.sleep(1)
    assert limit() == 80
    os.write(writer, b"\n")
    os.close(writer)
    assert running.finish(60).ok().out.endswith(b"25600\n")


def test_where_no_group_has_a_limit_one_must_be_given(group):
    got = group.start([*run(), "true"]).finish()
    assert got.code == 2 and "no limit given" in got.err, got.err
    got = group.start([*run("--limit", "container"), "true"]).finish()
    assert got.code == 125 and "no cgroup" in got.err, got.err


RANDOM = "import os, time\nparts = [os.urandom(1 << 20) for _ in range(160)]\nprint('intact')"


def killed_by_the_kernel(group, *command):
    """A run that the kernel's OOM killer has ended, because its limit lies above the group's. While the memory of the first
    victim is not free yet, the kernel may come again and find nobody left but foliomem, which then says nothing."""
    for _ in range(10):
        running = group.limit(96).start([*run("--limit", "1G"), *command])
        got = running.finish()
        if running.proc.returncode != -signal.SIGKILL:
            return got
    pytest.fail("the kernel has killed foliomem itself ten times")


def test_a_kill_by_the_kernel_is_told_from_others(group):
    got = killed_by_the_kernel(group, PYTHON, "-c", RANDOM)
    assert got.code == 137, got
    line = next(line for line in got.err.splitlines() if "OOM killer has killed" in line)
    assert "reached its limit of 96 MiB" in line and "limit 1024 MiB" in line and "python" in line, got.err


def test_a_kill_of_a_child_by_the_kernel_is_said_whatever_the_exit_code(group):
    script = f"{PYTHON} -c \"$1\"; echo after $?; exit 3"
    got = killed_by_the_kernel(group, "sh", "-c", script, "sh", RANDOM)
    assert got.code in (3, 137) and "OOM killer has killed" in got.err, (got.code, got.err)


def test_a_kill_from_outside_is_told_from_the_others():
    got = cli("run", "--limit", "64M", "--", "sh", "-c", "kill -9 $$")
    assert got.code == 137 and "neither from foliomem nor from the kernel's OOM killer" in got.err, got.err


def test_a_hard_limit_is_told_from_the_others():
    got = cli("run", "--limit", "64M", "--hard", "--", PYTHON, "-c", RANDOM)
    assert got.code == 137 and "whose limit is hard" in got.err and "python" in got.err, got.err
    assert "needed" in got.err and "limit 64 MiB" in got.err, got.err
