"""A run that waits for memory most of its time says so, and what it needs; others never do."""
import re
import signal
import time

import pytest
from conftest import PYTHON, foliomem, foliomem_only, start

pytestmark = foliomem_only
THRASHING = re.compile(r"^foliomem: thrashing: the program has waited for memory (\d+)% of the last 3 s; it needs (\d+) MiB so far, "
                       r"and its limit is 64 MiB; nothing would be swapped out in a limit of (\d+) MiB: "
                       r"foliomem ctl (\d+) limit (\d+)M$", re.M)
WHY = re.compile(r"^foliomem: limit 64 MiB too small: (\d+)% of the time waiting for memory; it needs (\d+) MiB; "
                 r"nothing would be swapped out in a limit of (\d+) MiB$", re.M)
# So many threads wait for the few that serve faults, and decompressing takes so long, that most of the time is waiting.
THREADS, SLOW = 8, ["--codec", "zstd:3"]
# Takes sums of an array of 192 MiB until it is killed.
NUMPY = ("import numpy as np, threading\ndata = np.arange(24 << 20, dtype=np.int64) // 100\nprint('filled', flush=True)\n"
         "def walk(part):\n    while True: part[::512].sum()\n"
         f"for part in np.split(data, {THREADS}): threading.Thread(target=walk, args=[part]).start()\n")


def thrash(argv):
    """Runs a program in a third of what it needs until it thrashes and a while longer, and gives what the run has said."""
    running = start(argv, "64M", SLOW)
    running.wait_output(b"filled", 60)
    running.wait_output(b"thrashing: ", 120, running.err)
    time.sleep(3)
    running.proc.send_signal(signal.SIGTERM)
    result = running.finish()
    assert result.code == 143, result.err
    return running.pid, result


@pytest.mark.parametrize("name", ["random", "forward", "numpy"])
def test_a_run_that_waits_most_of_its_time_says_so_once(built, name):
    pid, result = thrash([PYTHON, "-c", NUMPY] if name == "numpy" else [built("walk.c"), 192, 0, name, THREADS])
    assert result.err.count("thrashing") == 1, result.err
    percent, needed, enough, run, limit = map(int, THRASHING.search(result.err).groups())
    assert 50 < percent <= 100 and 190 < needed < 300 and run == pid
    assert needed * 9 // 8 - 2 <= enough == limit <= needed * 9 // 8 + 3
    percent, needed, enough = map(int, WHY.search(result.err).groups())
    assert 190 < needed < 300 and needed * 9 // 8 - 2 <= enough <= needed * 9 // 8 + 3
    stats = result.stats
    assert stats["thrashing"] == 1 and abs(stats["memory_stall_percent"] - percent) < 0.6
    assert 1500 * 10**6 < stats["memory_stall_ns"] <= stats["elapsed_ns"]
    assert abs(stats["memory_stall_percent"] - 100 * stats["memory_stall_ns"] / stats["elapsed_ns"]) < 0.01


def test_in_the_limit_of_the_advice_nothing_is_swapped_out(built):
    _, result = thrash([built("walk.c"), 192, 0, "random", THREADS])
    roomy = foliomem([built("walk.c"), 192, 3000, "random", THREADS], f"{THRASHING.search(result.err)[5]}M").ok()
    assert roomy.stats["vmstat"]["pswpout"] == 0


def check_silent(result):
    result.ok()
    assert "thrashing" not in result.err and "too small" not in result.err, result.err
    assert result.stats["thrashing"] == 0


def test_a_roomy_run_never_says_so(built):
    result = foliomem([built("walk.c"), 192, 8000, "random", THREADS], "512M")
    check_silent(result)
    assert result.stats["memory_stall_ns"] == 0


def test_torture_never_says_so(built):
    result = foliomem([built("walk.c"), 64, 8000, "random", THREADS], "512M", torture=True)
    check_silent(result)
    assert result.stats["memory_stall_ns"] == 0
