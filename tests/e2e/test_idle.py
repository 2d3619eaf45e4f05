"""`foliomem run --idle`: a process that uses no CPU is compressed as a whole, and of others what they do not use."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BIN, MIB, alone, clean_env, cli, foliomem, foliomem_only, note_moved, read_text, start

pytestmark = foliomem_only
# Touches memory that compresses, sleeps until a line comes, verifies it, and again to the end of its input.
SLEEPER = """
import os, sys
rows = [b'%012d' % number * 4096 for number in range(int(sys.argv[1]))]
print(os.getpid(), flush=True)
while os.read(0, 1):
    assert all(int(row[:12]) == number for number, row in enumerate(rows))
    print("good", flush=True)
"""
# The same in a parent, who waits for a child that has a copy and sleeps.
FORKED = SLEEPER.replace("print(os.getpid()", "child = os.fork()\nif child:\n    ended = os.wait()[1]\n    assert all("
                         "int(row[:12]) == number for number, row in enumerate(rows))\n    sys.exit(ended)\nprint(os.getpid()")
# Works on all pages of the last rows all the time, and verifies all rows at the end.
BUSY = """
import os, sys
rows, used = [b'%012d' % number * 4096 for number in range(3000)], int(sys.argv[1])
pages = [row[::4096] for row in rows[-used:]]
print(os.getpid(), flush=True)
os.set_blocking(0, False)
while True:
    assert all(row[::4096] == page for row, page in zip(rows[-used:], pages))
    try:
        if not os.read(0, 1):
            break
    except BlockingIOError:
        pass
assert all(row == b'%012d' % number * 4096 for number, row in enumerate(rows))
"""
# Gets new memory all the time.
GROWING = BUSY.replace("while True:", "import mmap\nblock = bytes(8 << 20)\nwhile True:\n    with mmap.mmap(-1, 8 << 20, "
                       "mmap.MAP_PRIVATE) as new:\n        new.write(block)")


# Half of each row is random, so a row compresses to half.
HALF_RANDOM = FORKED.replace("b'%012d' % number * 4096", "b'%012d' % number + random.randbytes(24000) + bytes(24000)").replace(
    "import os, sys", "import os, random, sys\nrandom.seed(7)")
# A parent with four children, in two generations. All have the same rows at first, are idle in turns, verify all rows,
# and change some. The parent kills a child without a word, at a random time. Who ends last has verified all rows.
FAMILY = """
import os, random, signal, sys, time
random.seed(int(sys.argv[1]))
def row(number, version):
    return random.Random(number * 1000 + version).randbytes(14000) + b"%d " % version * 7000
versions = [0] * 1500
rows = [row(number, 0) for number in range(len(versions))]
def work(rounds, seed):
    random.seed(seed)
    for _ in range(rounds):
        time.sleep(3.5 + 2 * random.random())
        for number, version in enumerate(versions):
            assert rows[number] == row(number, version), number
        for number in random.sample(range(len(versions)), 60):
            versions[number] += 1 + seed
            rows[number] = row(number, versions[number])
children = []
for seed in range(3):
    if (child := os.fork()) == 0:
        if seed == 2:
            grandchild = os.fork()
            work(2, seed + 10 * (grandchild == 0))
            if grandchild:
                assert os.wait()[1] == 0
        else:
            work(2 + 99 * (seed == 0), seed)
        os._exit(0)
    children.append(child)
time.sleep(5 + 4 * random.random())
os.kill(children[0], signal.SIGKILL)
ends = [os.waitpid(child, 0)[1] for child in children]
assert ends == [signal.SIGKILL, 0, 0], ends
work(1, 77)
print("good")
"""


class Run:
    """A run with --idle, of a Python program that prints its pid and reads commands."""

    def __init__(self, script, *arguments, options=("--idle", "1s"), env=None):
        argv = [BIN, "run", *options, "--", sys.executable, "-c", script, *map(str, arguments)]
        self.run = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_env(env))
        self.pid = int(self.run.stdout.readline())

    def wake(self):
        """Has the program verify its memory."""
        self.run.stdin.write(b"x")
        self.run.stdin.flush()
        assert self.run.stdout.readline() == b"good\n", self.run.communicate(timeout=60)

    def status(self):
        figures = json.loads(cli("ctl", self.run.pid, "status", "--json").ok().out)
        note_moved(figures)
        return figures

    def until(self, holds, what):
        """Waits until the status is as wanted."""
        deadline = time.monotonic() + 90
        while not holds(figures := self.status()):
            assert time.monotonic() < deadline, (what, figures)
            time.sleep(0.1)
        return figures

    def finish(self):
        out, err = self.run.communicate(timeout=90)
        assert self.run.returncode == 0 and out == b"", (out, err)


def compressed(pages_mib, taken_mib):
    return lambda figures: figures["vmstat"]["pswpout"] * 4096 > pages_mib * MIB and figures["taken_bytes"] < taken_mib * MIB


@pytest.mark.parametrize("options", [("--idle", "1s"), ("--idle", "1s", "--limit", "2G")], ids=["without a limit", "with one"])
def test_an_idle_process_is_compressed_each_time_it_becomes_idle(options):
    run = Run(SLEEPER, 2000, options=options)
    # It is far from its limit: nothing but --idle activates the agent.
    before = run.until(compressed(80, 32), "compressed")["vmstat"]["pswpout"]
    run.wake()

    # It may be compressed again before anybody sees that it was back.
    def is_compressed_again(figures):
        was_back = figures["vmstat"]["pswpin"] * 4096 > 80 * MIB
        return was_back and figures["vmstat"]["pswpout"] > before and figures["taken_bytes"] < 32 * MIB

    run.until(is_compressed_again, "compressed again")
    run.wake()
    run.finish()


@alone  # Only idle CPUs recompress.
def test_what_stays_idle_takes_still_less_with_a_slower_codec():
    words = SLEEPER.replace("b'%012d' % number * 4096", "b'%012d' % number + b''.join(random.choices(words, k=10000))")
    script = words.replace("import os, sys", "import os, random, sys\nrandom.seed(7)\nwords = [random.randbytes(8) for _ in range(64)]")
    taken = {}
    for option in ("off", "zstd"):
        run = Run(script, 1000, options=("--idle", "1s", "--recompress", option))
        figures = run.until(compressed(60, 60), "compressed")
        if option == "zstd":
            # All of it saves a tenth or more, and that goes back to the system.
            figures = run.until(lambda figures: figures["mm_stat"]["recompress_saved"] > 5 * MIB, "recompressed")
            figures = run.until(lambda figures: figures["taken_bytes"] < taken["off"] - 4 * MIB, "given back")
        taken[option] = figures["taken_bytes"]
        run.wake()
        run.finish()


def test_a_process_asleep_is_asked_once():
    run = Run(SLEEPER, 2000)
    swapped_out = run.until(compressed(80, 32), "compressed")["vmstat"]["pswpout"]
    cpu_time = read_text(f"/proc/{run.pid}/schedstat").split()[0]
    cli("ctl", run.run.pid, "resume", "--wait").ok()
    assert run.status()["taken_bytes"] > 80 * MIB
    # It used no CPU, so it stays as it is, however long it sleeps.
    time.sleep(4)
    figures = run.status()
    assert figures["taken_bytes"] > 80 * MIB and figures["vmstat"]["pswpout"] == swapped_out
    assert read_text(f"/proc/{run.pid}/schedstat").split()[0] == cpu_time, "it was woken"
    run.wake()
    run.finish()


def wakes(pid):
    """How often the threads of a process went to sleep."""
    texts = [read_text(path / "status") for path in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("voluntary"))


def test_an_idle_run_hardly_wakes():
    run = Run(SLEEPER, 2000)
    run.until(compressed(80, 32), "compressed")
    # The companions are the supervisor's children, too.
    agents = [run.run.pid, *(int(pid) for pid in read_text(f"/proc/{run.run.pid}/task/{run.run.pid}/children").split())]
    deadline, rate = time.monotonic() + 60, None
    while rate is None or rate > 20:
        assert time.monotonic() < deadline, rate
        before, began = sum(map(wakes, agents)), time.monotonic()
        time.sleep(3)
        rate = (sum(map(wakes, agents)) - before) / (time.monotonic() - began)
    run.wake()
    run.finish()


def cpu_ns(pids):
    """The CPU time of the threads of those processes that have not ended."""
    tasks = [task for pid in pids for task in Path("/proc").glob(f"{pid}/task/*/schedstat")]
    return sum(int((read_text(task).split() or [0])[0]) for task in tasks)


MANY_AT_REST = """
import subprocess, sys
kept = "import sys; kept = bytearray(b'x' * (8 << 20)); print(flush=True); sys.stdin.read()"
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
children = [subprocess.Popen([sys.executable, "-c", kept], **pipes) for _ in range(20)]
assert all(child.stdout.readline() for child in children)
print("started", flush=True)
sys.stdin.read()
sys.exit(sum(child.stdin.close() or child.wait() for child in children))
"""


def test_many_processes_at_rest_take_hardly_any_cpu_time():
    """Without --idle, and far from the limit: more processes than two for each CPU."""
    run = start([sys.executable, "-c", MANY_AT_REST], "4G", stdin=subprocess.PIPE)
    run.wait_output(b"started", 60)
    deadline, share = time.monotonic() + 60, None
    while share is None or share > 0.25:
        assert time.monotonic() < deadline, share
        agents = [int(pid) for pid in read_text(f"/proc/{run.pid}/task/{run.pid}/children").split()]
        before, began = cpu_ns(agents), time.monotonic_ns()
        time.sleep(4)
        share = (cpu_ns(agents) - before) / (time.monotonic_ns() - began)
    assert len(agents) > 20, agents
    run.proc.stdin.close()
    run.finish().ok()


def test_what_a_busy_process_does_not_use_is_compressed():
    run = Run(BUSY, 500)
    figures = run.until(compressed(100, 70), "compressed")
    # What it uses comes back at once, and is not swapped out.
    assert figures["vmstat"]["pswpin"] * 4096 < 30 * MIB, figures["vmstat"]
    run.finish()


def test_what_a_busy_process_uses_stays():
    run = Run(BUSY, 3000)
    # On a busy machine each touch costs more, so the search is slow.
    run.until(lambda figures: figures["vmstat"]["pgdeactivate"] * 4096 > 16 * MIB, "searched")
    time.sleep(4)
    figures = run.status()
    assert figures["vmstat"]["pswpout"] * 4096 < 30 * MIB and figures["taken_bytes"] > 110 * MIB, figures["vmstat"]
    run.finish()


def test_nothing_is_done_to_a_process_that_gets_new_memory_all_the_time():
    run = Run(GROWING, 500)
    time.sleep(5)
    figures = run.status()
    assert figures["vmstat"]["pgadopted"] == 0 and figures["vmstat"]["pswpout"] == 0 and figures["taken_bytes"] > 110 * MIB
    run.finish()


def test_a_forked_child_and_its_parent_are_compressed():
    run = Run(FORKED, 2000)
    figures = run.until(compressed(80, 64), "compressed")
    assert len(figures["living"]) == 2
    run.wake()
    run.run.stdin.close()
    assert run.run.wait(timeout=90) == 0, run.run.stderr.read()


def test_what_relatives_share_is_stored_once():
    run = Run(HALF_RANDOM, 1000, options=("--idle", "1s", "--recompress", "off"))
    # What both have counts for both in bd_count.
    is_shared = lambda figures: figures["bd_stat"]["joined"] > 300 and figures["bd_stat"]["bd_count"] * 4096 > 44 * MIB  # noqa: E731
    figures = run.until(is_shared, "shared")
    assert figures["shared_store_bytes"] < 0.7 * figures["bd_stat"]["bd_count"] * 4096, figures
    assert figures["swap_bytes"] == 0 and figures["taken_bytes"] > figures["shared_store_bytes"]
    # The child comes back, and joins its parent again when it is idle again.
    run.wake()
    assert run.status()["bd_stat"]["bd_reads"] > 0
    run.until(is_shared, "shared again")
    run.wake()
    run.finish()


@pytest.mark.parametrize("env", [{}, {"FOLIOMEM_TORTURE": "1"}], ids=["plain", "torture"])
def test_relatives_that_change_and_end_keep_each_others_memory(env):
    options = ["--idle", "1s", "--recompress", "off"]
    got = foliomem([sys.executable, "-c", FAMILY, str(time.time_ns())], limit="512M", options=options, env=env, timeout=280).ok()
    assert got.out == b"good\n" and got.stats["bd_stat"]["failed_reads"] == 0, got
    if not env:
        assert got.stats["bd_stat"]["joined"] > 0, got.stats["bd_stat"]


def test_a_swap_file_takes_the_place_of_the_shared_store(tmp_path):
    run = Run(HALF_RANDOM, 400, options=("--idle", "1s", "--recompress", "off", "--swap", f"{tmp_path}/swap:64M"))
    figures = run.until(compressed(36, 100), "compressed")
    assert figures["shared_store_bytes"] == figures["bd_stat"]["joined"] == 0 and figures["swap_bytes"] == 64 * MIB
    run.wake()
    run.finish()


def test_an_idle_child_of_a_busy_parent_is_compressed_alone():
    script = BUSY.replace("print(os.getpid()", "child = os.fork()\nif not child:\n    os.read(int(sys.argv[2]), 1)\n    sys.exit(any("
                          "int(row[:12]) != number for number, row in enumerate(rows)))\nprint(os.getpid()")
    script = script.replace("while True", "while os.waitpid(child, os.WNOHANG)[0] == 0")
    reader, writer = os.pipe()
    argv = [BIN, "run", "--idle", "3s", "--", sys.executable, "-c", script, "3000", str(reader)]
    run = Run.__new__(Run)
    run.run = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_env(),
                               pass_fds=[reader])
    run.pid = int(run.run.stdout.readline())
    run.until(lambda figures: figures["vmstat"]["pswpout"] * 4096 > 80 * MIB, "the child is compressed")
    os.write(writer, b"x")
    run.finish()


def test_an_idle_process_loses_nothing_under_torture():
    run = Run(SLEEPER, 1000, env={"FOLIOMEM_TORTURE": "1"})
    for _ in range(3):
        run.until(lambda figures: figures["vmstat"]["pswpout"] * 4096 > 40 * MIB, "swapped out")
        time.sleep(1.5)
        run.wake()
    run.finish()


def test_a_small_process_is_not_managed():
    running = start(["sh", "-c", "echo ready; exec sleep 30"], "1G", ["--idle", "1s"])
    running.wait_output(b"ready\n")
    time.sleep(4)
    assert json.loads(cli("ctl", running.pid, "status", "--json").ok().out)["vmstat"]["pgadopted"] == 0
    running.kill()


def test_the_end_of_an_idle_run_is_seen_at_once():
    run = Run(SLEEPER, 2000)
    run.until(compressed(80, 32), "compressed")
    time.sleep(3)
    os.kill(run.pid, 9)
    assert run.run.wait(timeout=30) == 137
    # And what is asked of it meanwhile.
    run = Run(SLEEPER, 2000)
    run.until(compressed(80, 32), "compressed")
    time.sleep(3)
    cli("ctl", run.run.pid, "limit", "1G").ok()
    assert run.status()["limit_bytes"] == 1024 * MIB
    cli("ctl", run.run.pid, "resume", "--wait").ok()
    assert run.status()["taken_bytes"] > 80 * MIB
    run.finish()


@pytest.mark.parametrize("text", ["0s", "10ms", "30", "soon", "-5s"])
def test_a_wrong_time_is_refused(text):
    got = cli("run", f"--idle={text}", "--", "true")
    assert got.code == 125 and "no time after which a process counts as idle: use 30s, 5m or 1h" in got.err, got.err


def test_the_setting_has_the_three_places(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text('idle = "2m"\n')
    shown = cli("run", "--print-config", env={"FOLIOMEM_CONFIG": config}).ok().out.decode()
    assert 'idle = "2m"' in shown
    shown = cli("run", "--print-config", env={"FOLIOMEM_CONFIG": config, "FOLIOMEM_IDLE": "90s"}).ok().out.decode()
    assert 'idle = "1m 30s"' in shown and "FOLIOMEM_IDLE" in shown
    foliomem(["true"], "64M", options=["--idle", "1h"]).ok()
