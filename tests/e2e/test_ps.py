"""`foliomem ps`: the runs of a user, as a table and as JSON."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BIN, MIB, RUNS, clean_env, cli, foliomem_only, plain, start

pytestmark = foliomem_only
# Touches 96 MiB that compress, sleeps until a line comes, and verifies them.
IDLE = ("import os\nrows = [b'%012d' % number * 4096 for number in range(2000)]\nprint(os.getpid(), flush=True)\nos.read(0, 1)\n"
        "assert all(int(row[:12]) == number for number, row in enumerate(rows))\nprint('good', flush=True)\n")
# Reads 128 MiB again and again.
BUSY = ("rows = [b'%012d' % number * 4096 for number in range(2700)]\nprint('ready', flush=True)\n"
        "while True: assert all(int(row[:12]) == number for number, row in enumerate(rows))\n")


def listed():
    return {run["pid"]: run for run in json.loads(cli("ps", "--json").ok().out)}


@pytest.fixture
def idle():
    read, write = os.pipe()
    running = start([sys.executable, "-c", IDLE], "1G", stdin=read)
    os.close(read)
    running.program = int(running.wait_output(b"\n"))
    yield running
    os.write(write, b"\n")
    os.close(write)
    assert running.finish().ok().out.endswith(b"good\n")
    assert running.pid not in listed()


def test_a_run_is_listed_with_what_it_takes_and_has_stored(idle):
    before = listed()[idle.pid]
    assert before["program"] == f"{sys.executable} -c {IDLE}" and before["processes"] == 1 and before["limit_bytes"] == 1024 * MIB
    assert 90 * MIB < before["taken_bytes"] == before["resident_bytes"] and before["stored_bytes"] == before["content_bytes"] == 0
    assert before["ratio"] is None and before["swap_file_bytes"] == 0 and before["waiting_percent"] == 0
    cli("ctl", idle.program, "reclaim", "all", "--wait").ok()
    after = listed()[idle.pid]
    assert after["content_bytes"] > 80 * MIB > before["taken_bytes"] / 2 > after["taken_bytes"]
    assert after["stored_bytes"] + after["resident_bytes"] == after["taken_bytes"]
    assert after["ratio"] == pytest.approx(after["content_bytes"] / after["stored_bytes"]) and after["ratio"] > 4
    status = json.loads(cli("ctl", idle.pid, "status", "--json").ok().out)
    assert after["stored_bytes"] == pytest.approx(status["mm_stat"]["mem_used_total"], rel=0.02)
    assert after["limit_bytes"] == status["limit_bytes"]
    assert after["needed_bytes"] == pytest.approx(status["needed_bytes"], rel=0.02)


def test_rates_are_of_now():
    running = start([sys.executable, "-c", BUSY], "64M")
    running.wait_output(b"ready")
    # It may get no CPU for a while.
    seen = [listed()[running.pid]]
    while not (seen[-1]["faults_per_s"] > 100 and 0 < seen[-1]["waiting_percent"] < 150):
        assert len(seen) < 50, seen
        seen.append(listed()[running.pid])
    os.killpg(running.pid, signal.SIGSTOP)
    time.sleep(0.1)
    stopped = listed()[running.pid]
    os.killpg(running.pid, signal.SIGCONT)
    assert stopped["faults_per_s"] < seen[-1]["faults_per_s"] / 10, (stopped, seen[-1])
    running.kill()


def test_the_table_fits_a_terminal_and_a_program_cannot_write_to_it(idle):
    name = f"\x1b[31m{'long ' * 40}\n\x07"
    other = start(["sh", "-c", "echo ready; sleep 30", name], "64M")
    other.wait_output(b"ready")
    cli("ctl", idle.program, "reclaim", "all", "--wait").ok()
    text = cli("ps").ok().out.decode()
    other.kill()
    head, *lines = text.splitlines()
    assert head.split() == ["PID", "LIMIT", "RESIDENT", "STORED", "RATIO", "SWAP", "FAULTS/S", "WAIT%", "PROGRAM"]
    rows = {int(line.split()[0]): line for line in lines}
    assert all(len(line) <= 80 and line.isprintable() for line in lines), text
    assert rows[idle.pid].split()[1] == "1.00G" and f"  {Path(sys.executable).name} -c import" in rows[idle.pid]
    assert "sh -c echo ready" in rows[other.pid]
    # Each number ends where its title does, and the program begins below its own.
    for title in head.split()[:-1]:
        end = head.index(title) + len(title)
        assert all(line[end - 1] != " " and line[end] == " " for line in rows.values()), (title, text)
    assert all(line[head.index("PROGRAM")] != " " for line in rows.values()), text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_others_see_nothing_and_are_told_so(idle, public):
    # No other test has this user.
    user, binary = ["setpriv", "--reuid=65033", "--regid=65033", "--clear-groups"], public.folder / "foliomem"
    got = plain([*user, binary, "ps"], timeout=20).ok()
    assert got.out.split()[0] == b"PID" and got.out.count(b"\n") == 1 and got.err == "foliomem: there are no runs of this user\n", got
    got = plain([*user, binary, "ps", "--json"], timeout=20).ok()
    assert json.loads(got.out) == [] and "no runs" in got.err


def test_runs_that_end_while_they_are_listed_are_left_out():
    """And those of which the supervisor is killed."""
    end = time.monotonic() + 4
    while time.monotonic() < end:
        runs = [subprocess.Popen([BIN, "run", "--quiet", "--limit", "64M", "--", "sleep", str(0.1 * index)], env=clean_env(),
                                 stdin=subprocess.DEVNULL) for index in range(5)]
        killed = start(["sleep", "30"], "64M")
        lister = subprocess.Popen([BIN, "ps", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_env())
        time.sleep(0.05 + 0.02 * (next(RUNS) % 5))
        killed.kill()
        out, err = lister.communicate(timeout=20)
        assert lister.returncode == 0 and (not err or b"there are no runs" in err), err
        for run in json.loads(out):
            assert run["limit_bytes"] > 0 and run["program"], run
        assert [run.wait(20) for run in runs] == [0] * len(runs)
