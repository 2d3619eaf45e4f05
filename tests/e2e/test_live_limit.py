"""`foliomem ctl PID limit`: the limit of a run is changed while it goes on."""
import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from conftest import BIN, LONG, MIB, PYTHON, clean_env, cli, few_cases, foliomem_only, start

pytestmark = foliomem_only
# Touches some MiB, says so, waits for a line, and verifies them: rows that compress, or random bytes.
ROWS = ("import os, sys\nrows = [b'%012d' % number * 4096 for number in range(int(sys.argv[1]) * 21)]\n"
        "print(os.getpid(), flush=True)\nos.read(0, 1)\n"
        "assert all(row == b'%012d' % number * 4096 for number, row in enumerate(rows))\nprint('good', flush=True)\n")
NOISE = ("import hashlib, os, sys\nparts = [os.urandom(1 << 20) for _ in range(int(sys.argv[1]))]\n"
         "sums = [hashlib.md5(part).digest() for part in parts]\nprint(os.getpid(), flush=True)\nos.read(0, 1)\n"
         "assert [hashlib.md5(part).digest() for part in parts] == sums\nprint('good', flush=True)\n")


class Waiting:
    """A program that waits for a line."""

    def __init__(self, code, mib, limit, options=()):
        read, self.write = os.pipe()
        self.run = start([PYTHON, "-c", code, mib], limit, options, stdin=read)
        os.close(read)
        self.pid = int(self.run.wait_output(b"\n"))

    def change(self, *words, code=0):
        got = cli("ctl", self.pid, "limit", *words, timeout=60)
        assert got.code == code, (words, got.out, got.err)
        return got

    def limit_mib(self):
        return json.loads(cli("ctl", self.pid, "status", "--json").ok().out)["limit_bytes"] / MIB

    def pss_mib(self):
        """Anonymous memory of the program, foliomem's own included, as the kernel counts it."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) / 1024

    def finish(self):
        os.write(self.write, b"\n")
        os.close(self.write)
        got = self.run.finish(120).ok()
        assert got.out.endswith(b"good\n")
        return got


def test_a_lower_limit_holds_when_the_command_returns_and_nothing_is_lost():
    running = Waiting(ROWS, 160, "2G")
    assert running.pss_mib() > 150
    for limit in (96, 48):
        said = running.change(f"{limit}M").out.decode()
        assert said.startswith(f"limit   {limit} MiB\ntaken   "), said
        assert running.limit_mib() == limit and running.pss_mib() < limit * 1.05 + 8, running.pss_mib()
    got = running.finish()
    assert got.stats["limit_bytes"] == 48 * MIB and not got.stats["limit_exceeded"] and "going over" not in got.err, got.err


def test_a_hard_limit_can_be_lowered_far_below_what_the_run_takes():
    running = Waiting(ROWS, 160, "2G", ["--hard"])
    running.change("40M")
    assert running.pss_mib() < 50
    running.finish()


def test_a_higher_limit_holds_at_once_and_changes_add_up():
    running = Waiting(ROWS, 80, "32M")
    before = time.monotonic()
    running.change("+32M")
    assert running.limit_mib() == 64 and time.monotonic() - before < 5
    changes = [subprocess.Popen([BIN, "ctl", str(running.pid), "limit", "+16M", "--timeout", "0"], env=clean_env()) for _ in range(4)]
    assert [change.wait(20) for change in changes] == [0] * 4
    running.change("-28M")
    assert running.limit_mib() == 100
    running.finish()


def test_a_limit_can_become_a_share_of_the_need_and_a_size_again():
    running = Waiting(ROWS, 160, "1G")
    running.change("need/2")
    assert 75 < running.limit_mib() < 100 and running.pss_mib() < 115, (running.limit_mib(), running.pss_mib())
    running.change("+8M")
    assert running.limit_mib() % 1 == 0 or running.limit_mib() > 75
    running.change("512M")
    assert running.limit_mib() == 512
    running.finish()


def test_a_limit_that_cannot_hold_is_said_with_the_cause():
    running = Waiting(NOISE, 96, "1G")
    got = running.change("32M", code=125)
    assert "the limit of 32 MiB does not hold yet: after " in got.err and "does not compress into the limit; use --swap" in got.err, got.err
    got = running.change("33M", "--timeout", "1", code=125)
    assert "the limit of 33 MiB does not hold yet: after 1" in got.err, got.err
    # It is set all the same.
    end = time.monotonic() + 20
    while running.limit_mib() != 33:
        assert time.monotonic() < end, running.limit_mib()
        time.sleep(0.1)
    running.change("1G")
    running.finish()


def test_wrong_limits_change_nothing():
    running = Waiting(ROWS, 16, "64M")
    for word, said in {
        "8M": "limit (from command line): 8M is 8388608 bytes, too small for a limit: at least 16 MiB are needed",
        "-49M": "limit (from command line): 64 MiB -49M is 15728640 bytes, too small for a limit",
        "512": "did you mean 512M?", "much": '"much" is not a size', "+5%": "a share of memory is not possible here",
        "need/99": "is no share", "container": "container is a limit for the start of a run", "": "is not a size",
    }.items():
        got = running.change(word, code=125)
        assert said in got.err and got.err.count("\n") == 1, got.err
    for words in ([], ["64M", "--timeout", "soon"], ["64M", "--timeout", "-1"], ["64M", "65M"]):
        assert cli("ctl", running.pid, "limit", *words).code == 2, words
    assert running.limit_mib() == 64
    running.finish()
    got = running.change("64M", code=125)
    assert f"there is no process {running.pid}" in got.err, got.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_the_limit_of_somebody_elses_run_cannot_be_changed(public):
    running = Waiting(ROWS, 16, "64M")
    words = ["setpriv", "--reuid=65034", "--regid=65034", "--clear-groups", public.folder / "foliomem", "ctl", str(running.pid)]
    got = subprocess.run([*words, "limit", "32M"], capture_output=True, text=True, env=clean_env())
    assert got.returncode == 125 and "as its user, or as root" in got.stderr, got.stderr
    assert running.limit_mib() == 64
    running.finish()


def test_a_run_that_ends_or_does_not_answer_meanwhile_is_said():
    running = Waiting(NOISE, 64, "1G")
    changing = subprocess.Popen([BIN, "ctl", str(running.pid), "limit", "24M"], env=clean_env(), stderr=subprocess.PIPE)
    time.sleep(1)
    os.kill(running.run.pid, signal.SIGKILL)
    assert changing.wait(20) == 125 and b"ended before its limit was changed" in changing.stderr.read()
    running.run.kill()
    os.close(running.write)
    running = Waiting(ROWS, 64, "1G")
    os.kill(running.run.pid, signal.SIGSTOP)
    got = running.change("24M", "--timeout", "1", code=125)
    assert "does not answer" in got.err, got.err
    os.kill(running.run.pid, signal.SIGCONT)
    running.change("+8M")
    assert running.limit_mib() == 32, "the change that was asked for counts"
    running.finish()


def test_another_change_meanwhile_is_said():
    running = Waiting(NOISE, 64, "1G")
    changing = subprocess.Popen([BIN, "ctl", str(running.pid), "limit", "24M"], env=clean_env(), stderr=subprocess.PIPE)
    time.sleep(1)
    running.change("1G")
    assert changing.wait(20) == 125 and b"was changed again meanwhile, to 1024 MiB" in changing.stderr.read()
    running.finish()


def test_changes_are_in_the_trace(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    trace, table = tmp_path / "x.mft", tmp_path / "x.parquet"
    read, write = os.pipe()
    recording = subprocess.Popen([BIN, "record", "-o", str(trace), "--limit", "512M", "--", PYTHON, "-c", ROWS, "96"], stdin=read,
                                 stdout=subprocess.PIPE, env=clean_env())
    pid = int(recording.stdout.readline())
    limits = [64, 70, 71, 256]
    for limit in limits:
        cli("ctl", pid, "limit", f"{limit}M", timeout=60).ok()
        time.sleep(0.3)
    os.write(write, b"\n")
    assert recording.wait(60) == 0
    os.close(read)
    os.close(write)
    cli("lab", "export", str(trace), "-o", str(table)).ok()
    # Between them are the steps.
    seen = [event["pages"] / 256 for event in parquet.read_table(table).to_pylist() if event["kind"] == "limit"]
    assert seen[0] == 512 and [limit for limit in seen if limit in limits] == limits, seen


@few_cases
def test_memory_is_right_while_the_limit_goes_up_and_down(stress, torture):
    mib, seconds = (64, 6) if torture else (192, 60 if LONG else 8)
    seed = random.randrange(1 << 32)
    print("limits from seed", seed)
    chance = random.Random(seed)
    running = start([stress, "-t", seconds, "-n", 4, "-m", mib], f"{mib // 2}M", torture=torture)
    done = threading.Event()
    changed = []

    def change():
        while not done.wait(chance.uniform(0, 0.3)):
            word = chance.choice([f"{chance.randint(mib // 4, 2 * mib)}M", f"{chance.randint(mib // 4, 2 * mib)}M", "+16M", "-16M", "need/2"])
            wait = chance.choice(["0", "0.3"])
            changed.append((word, cli("ctl", running.pid, "limit", word, "--timeout", wait, timeout=60)))

    changer = threading.Thread(target=change)
    changer.start()
    try:
        got = running.finish(seconds * 3 + 60)
    finally:
        done.set()
        changer.join()
    print(got.err[-2000:])
    assert got.ok().out.decode().splitlines()[-1] == "ok", got.out
    assert got.stats["vmstat"]["pswpout"] > 0
    assert sum(one.code == 0 for _, one in changed) >= 8, changed
    known = ("does not hold yet", "too small for a limit", "changed again", "does not answer", "there is no process", "ended before",
             "not part of a run", "cannot be reached")
    assert all(one.code == 0 or any(word in one.err for word in known) for _, one in changed), changed
