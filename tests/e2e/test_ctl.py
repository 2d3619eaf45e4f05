"""`foliomem ctl`: status, reclaim and resume. (Folio sizes: test_sizes.py.)"""
import json
import subprocess
import sys

import pytest
from conftest import BIN, MIB, clean_env, cli, foliomem_only, start

pytestmark = foliomem_only
# Touches 96 MiB that compress, sleeps until a line comes, and verifies them.
IDLE = """
import os, sys
rows = [b'%012d' % number * 4096 for number in range(2000)]
children = []
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        own = [b'%012d' % number * 4096 for number in range(1000)]
        os.write(1, b"%d\\n" % os.getpid())
        os.read(0, 1)
        assert all(int(row[:12]) == number for number, row in enumerate(own))
        os._exit(0)
os.write(1, b"%d\\n" % os.getpid())
os.read(0, 1)
assert all(int(row[:12]) == number for number, row in enumerate(rows))
for _ in range(int(sys.argv[1])):
    assert os.wait()[1] == 0
print("good", flush=True)
"""


class Idle:
    """A program that sleeps, far from its limit, and children of it."""

    def __init__(self, children=0, torture=False):
        argv = [BIN, "run", "--limit", "2G", "--", sys.executable, "-c", IDLE, str(children)]
        env = clean_env({"FOLIOMEM_TORTURE": "1"} if torture else {})
        self.run = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        self.pids = [int(self.run.stdout.readline()) for _ in range(children + 1)]

    def finish(self):
        out, err = self.run.communicate(b"x" * len(self.pids), timeout=60)
        assert self.run.returncode == 0 and out == b"good\n", (out, err)


def status(pid):
    return json.loads(cli("ctl", pid, "status", "--json").ok().out)


def taken(figures):
    return {process["pid"]: process["taken_bytes"] for process in figures["living"]}


def test_status_shows_what_stats_do_and_what_is_taken_now():
    idle = Idle()
    figures = status(idle.pids[0])
    assert figures["limit_bytes"] == 2048 * MIB and figures["elapsed_ns"] > 0 and figures["processes"] == 1
    assert 90 * MIB < figures["taken_bytes"] <= figures["peak_bytes"] and figures["needed_bytes"] <= figures["need_peak_bytes"]
    # The process publishes what it takes from time to time: also between the two readings.
    assert taken(figures) == {idle.pids[0]: pytest.approx(figures["taken_bytes"], rel=0.1)}
    assert figures["vmstat"].keys() and figures["faults"].keys()
    assert status(idle.run.pid).keys() == figures.keys(), "the supervisor's pid is the run's, too"
    text = cli("ctl", idle.pids[0], "status").ok().out.decode()
    assert "limit   2048 MiB" in text and f"{idle.pids[0]:<7} takes" in text
    idle.finish()


def test_status_can_be_followed_to_the_end_of_the_run():
    idle = Idle()
    follower = subprocess.Popen([BIN, "ctl", str(idle.pids[0]), "status", "--json", "--every", "0.02"], stdout=subprocess.PIPE,
                                env=clean_env())
    first = [json.loads(follower.stdout.readline()) for _ in range(3)]
    assert [figures["elapsed_ns"] for figures in first] == sorted({figures["elapsed_ns"] for figures in first})
    idle.finish()
    lines = follower.communicate(timeout=10)[0].splitlines()
    assert follower.returncode == 0 and all(json.loads(line) for line in lines)
    # One who reads no further is no error.
    idle = Idle()
    assert subprocess.run(["sh", "-c", f"{BIN} ctl {idle.pids[0]} status --json --every 0.01 | head -n 1"], env=clean_env(),
                          capture_output=True, timeout=20).stderr == b""
    idle.finish()


def test_reclaim_swaps_out_what_is_idle_and_nothing_is_lost():
    idle = Idle()
    pid = idle.pids[0]
    before = status(pid)["taken_bytes"]
    cli("ctl", pid, "reclaim", "30M", "--wait").ok()
    some = status(pid)["taken_bytes"]
    assert before - 60 * MIB < some < before - 20 * MIB, (before, some)
    cli("ctl", pid, "reclaim", "all", "--wait").ok()
    figures = status(pid)
    assert figures["taken_bytes"] < before / 4, figures["taken_bytes"]
    assert figures["needed_bytes"] > before * 0.9 and figures["vmstat"]["pswpout"] * 4096 > 80 * MIB
    idle.finish()


@pytest.mark.parametrize("whole", [False, True], ids=["one process", "the tree"])
def test_reclaim_is_of_one_process_or_of_the_tree(whole):
    idle = Idle(children=2)
    before = taken(status(idle.run.pid))
    assert before.keys() == set(idle.pids)
    asked = {*idle.pids} if whole else {idle.pids[0]}
    cli("ctl", idle.run.pid if whole else idle.pids[0], "reclaim", "all", "--wait").ok()
    after = taken(status(idle.run.pid))
    for pid in idle.pids:
        if pid in asked:
            assert after[pid] < before[pid] * 0.6, (pid, before, after)
        else:
            assert after[pid] > before[pid] * 0.7, (pid, before, after)
    idle.finish()


def test_resume_brings_everything_back_ahead_of_use():
    idle = Idle()
    pid = idle.pids[0]
    before = status(pid)["taken_bytes"]
    cli("ctl", pid, "reclaim", "all", "--wait").ok()
    out = status(pid)
    assert out["taken_bytes"] < before / 4
    cli("ctl", pid, "resume", "--wait").ok()
    resumed = status(pid)
    assert resumed["taken_bytes"] > before * 0.9, (before, resumed)
    assert resumed["vmstat"]["swap_ra"] * 4096 > 80 * MIB, resumed["vmstat"]
    # What was unused before is taken first again, and resumed again.
    cli("ctl", pid, "reclaim", "all", "--wait").ok()
    assert status(pid)["taken_bytes"] < before / 4
    cli("ctl", pid, "resume", "--wait").ok()
    assert status(pid)["taken_bytes"] > before * 0.9
    idle.finish()


def test_resume_ends_at_the_limit():
    idle = Idle()
    pid = idle.pids[0]
    cli("ctl", pid, "reclaim", "all", "--wait").ok()
    cli("ctl", pid, "limit", "64M", "--timeout", "60").ok()
    small = status(pid)["taken_bytes"]
    cli("ctl", pid, "resume", "--wait").ok()
    taken_bytes = status(pid)["taken_bytes"]
    assert max(small, 48 * MIB) < taken_bytes <= 64 * MIB, (small, taken_bytes)
    idle.finish()


def test_resume_of_a_process_that_is_not_managed_does_nothing():
    idle = Idle()
    cli("ctl", idle.pids[0], "resume", "--wait").ok()
    cli("ctl", idle.run.pid, "resume", "--wait").ok()
    assert status(idle.pids[0])["vmstat"]["pgadopted"] == 0
    idle.finish()


def test_resume_is_of_one_process_or_of_the_tree():
    idle = Idle(children=2)
    before = taken(status(idle.run.pid))
    cli("ctl", idle.run.pid, "reclaim", "all", "--wait").ok()
    child = idle.pids[1]
    out = taken(status(idle.run.pid))
    cli("ctl", child, "resume", "--wait").ok()
    one = taken(status(idle.run.pid))
    assert one[child] > out[child] + 16 * MIB, (before, out, one)
    assert all(one[pid] < out[pid] + 8 * MIB for pid in idle.pids if pid != child), (out, one)
    cli("ctl", idle.run.pid, "resume", "--wait").ok()
    after = taken(status(idle.run.pid))
    assert all(after[pid] > before[pid] * 0.8 for pid in idle.pids), (before, after)
    idle.finish()


@pytest.mark.parametrize("children", [0, 2])
def test_reclaim_and_resume_lose_nothing_under_torture(children):
    idle = Idle(children, torture=True)
    for word in [("reclaim", "all"), ("resume",), ("reclaim", "20M"), ("resume",)]:
        cli("ctl", idle.run.pid, *word, "--wait").ok()
    # The last one counts.
    for word in [("reclaim", "all"), ("resume",), ("reclaim", "all")]:
        cli("ctl", idle.run.pid, *word).ok()
    idle.finish()


def test_wrong_amounts_and_intervals_are_refused():
    running = start(["sh", "-c", "echo ready; exec sleep 30"])
    running.wait_output(b"ready\n")
    for words, wanted in {
        ("reclaim", "much"): '"much" is not a size',
        ("reclaim", "50%"): "a share of memory is not possible here",
        ("status", "--json", "--every", "0"): "give at least 0.01 seconds",
        ("status", "--json", "--every", "often"): "give seconds",
    }.items():
        got = cli("ctl", running.pid, *words)
        assert got.code in (2, 125) and wanted in got.err, got.err
    running.kill()
