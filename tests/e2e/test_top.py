"""`foliomem top`: in a real terminal, by what stands on its screen, and as text and JSON."""
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BIN, MIB, RUNS, clean_env, cli, foliomem_only, start
from terminal import HAS_TMUX, Terminal, until

pytestmark = [foliomem_only, pytest.mark.skipif(not HAS_TMUX, reason="no tmux here")]
# Touches so many MiB that compress, says so, sleeps until a line comes, and verifies them.
IDLE = ("import os, sys\nrows = [b'%012d' % number * 4096 for number in range(int(sys.argv[1]) * 21)]\nprint(os.getpid(), flush=True)\n"
        "os.read(0, 1)\nassert all(int(row[:12]) == number for number, row in enumerate(rows))\nprint('good', flush=True)\n")
HEAD = ["PID", "LIMIT", "RESIDENT", "STORED", "RATIO", "SWAP", "FAULTS/S", "WAIT%", "PROGRAM"]
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Idle:
    """A run that sleeps."""

    def __init__(self, mib=96, limit="1G"):
        read, self.write = os.pipe()
        self.run = start([sys.executable, "-c", IDLE, mib], limit, stdin=read)
        os.close(read)
        self.pid, self.program = self.run.pid, int(self.run.wait_output(b"\n"))

    def finish(self):
        os.write(self.write, b"\n")
        os.close(self.write)
        assert self.run.finish().ok().out.endswith(b"good\n")


@pytest.fixture
def idle():
    running = Idle()
    yield running
    running.finish()


@pytest.fixture
def terminal():
    with Terminal() as opened:
        yield opened


@pytest.fixture
def tall():
    """A terminal with room for the runs of other tests, too."""
    with Terminal(rows=150) as opened:
        yield opened


def size(text):
    return float(text[:-1]) * UNITS[text[-1]]


def rows(screen):
    """The rows of the table: their words, by pid."""
    found = {}
    for line in screen.splitlines()[2:]:
        words = line.split()
        # Rows of the table end their numbers where the titles do; the line above the plot does not.
        if words and re.match(r" *\d+ ", line[:8]) and len(line) > 58 and line[57] != " " and line[58:60] == "  ":
            found[int(words[0])] = words
    return found


def top(terminal, *words):
    terminal.enter(" ".join([BIN, "top", *map(str, words)]))
    return terminal.wait(lambda screen: "foliomem top" in screen.splitlines()[0] and "q quit" in screen)


def quit_top(terminal):
    terminal.press("q")
    terminal.wait(lambda screen: screen.rstrip().endswith("ready>"))


def test_a_run_is_shown_with_what_is_true(tall, idle):
    terminal = tall
    top(terminal)
    row = terminal.wait(lambda screen: rows(screen).get(idle.pid))
    head = terminal.screen().splitlines()[1]
    assert [word.lstrip("▲▼") for word in head.split()] == HEAD
    assert row[1] == "1.00G" and 90 * MIB < size(row[2]) < 130 * MIB and row[3] == "0K" and row[4] == "-", row
    assert row[8] == "▸" and row[9].startswith("python"), row
    cli("ctl", idle.program, "reclaim", "all", "--wait").ok()
    listed = {run["pid"]: run for run in json.loads(cli("ps", "--json").ok().out)}[idle.pid]
    close = lambda text, name: size(text) == pytest.approx(listed[name], rel=0.1, abs=2 * MIB)
    terminal.wait(lambda screen: (row := rows(screen).get(idle.pid)) and close(row[2], "resident_bytes") and row[3] != "0K"
                  and close(row[3], "stored_bytes") and float(row[4]) > 4)
    quit_top(terminal)


def test_a_screen_of_80_by_24_has_table_plot_and_keys_and_any_size_works(terminal, idle):
    top(terminal, idle.program)
    # It is the only run, so its processes are shown and it is in the plot.
    screen = terminal.wait(lambda screen: idle.program in rows(screen) and "█" in screen)
    lines = screen.splitlines()
    assert len(lines) == 24 and all(len(line) <= 80 for line in lines), screen
    assert "1 run, 1 process, " in lines[0] and list(rows(screen)) == [idle.pid, idle.program], screen
    assert re.match(rf"{idle.pid} python.* limit 1.00G  needs .*  1 process  \d+:\d\d", lines[15]), screen
    for number, title in ((16, "RESIDENT"), (18, "STORED"), (20, "FAULTS/S")):
        assert lines[number].startswith(title) and lines[number + 1].startswith(" at most"), screen
    assert re.match(r" {17}\S+ (s|min) ago +now$", lines[22]) and lines[23].endswith("q quit"), screen
    terminal.resize(40, 10)
    # Right after that the screen has parts of the last picture. There is no room for the plot.
    terminal.wait(lambda screen: len(screen.splitlines()) == 10 and "PID" in screen and str(idle.pid) in screen
                  and "at most" not in screen and "RESIDENT    " not in screen)
    terminal.resize(150, 50)
    terminal.wait(lambda screen: len(screen.splitlines()) == 50 and screen.count("at most") == 3
                  and "import os, sys" in rows_text(screen, idle.pid))
    quit_top(terminal)


def rows_text(screen, pid):
    return next((line for line in screen.splitlines()[2:] if line.split()[:1] == [str(pid)]), "")


def test_rows_are_sorted_by_the_chosen_column(tall, idle):
    terminal = tall
    small = Idle(16, "2G")
    top(terminal)
    # Other tests may have runs, too.
    mine = lambda screen: [pid for pid in rows(screen) if pid in (idle.pid, small.pid)]
    terminal.wait(lambda screen: mine(screen) == sorted([idle.pid, small.pid]))
    terminal.press(">", ">")
    terminal.wait(lambda screen: "▼RESIDENT" in screen and mine(screen) == [idle.pid, small.pid])
    terminal.press("r")
    terminal.wait(lambda screen: "▲RESIDENT" in screen and mine(screen) == [small.pid, idle.pid])
    terminal.press("<")
    terminal.wait(lambda screen: "▼LIMIT" in screen and mine(screen) == [small.pid, idle.pid])
    quit_top(terminal)
    small.finish()


def test_processes_are_shown_and_hidden_with_their_tree(terminal):
    running = start(["sh", "-c", "sh -c 'sleep 1000 & wait' & echo ready; wait"], "64M")
    running.wait_output(b"ready")
    top(terminal, running.pid)
    # Each is further to the right than its parent.
    shown = lambda screen: [line[60:] for line in screen.splitlines()[2:14] if line.strip()]
    terminal.wait(lambda screen: [re.sub(r"(sh -c|sleep).*", r"\1", line) for line in shown(screen)] == [
        "▾ sh -c", "  sh -c", "    sh -c", "      sleep"])
    terminal.press("Enter")
    terminal.wait(lambda screen: len(shown(screen)) == 1 and shown(screen)[0].startswith("▸ sh -c"))
    terminal.press("a")
    terminal.wait(lambda screen: len(shown(screen)) == 4)
    quit_top(terminal)
    running.kill()


def test_a_limit_is_changed_and_the_result_is_said(terminal, idle):
    top(terminal, idle.pid)
    limit_of = lambda: json.loads(cli("ctl", idle.pid, "status", "--json").ok().out)["limit_bytes"]
    terminal.wait(lambda screen: idle.pid in rows(screen))
    terminal.press("l")
    terminal.wait(lambda screen: f"new limit of run {idle.pid}: " in screen and screen.rstrip().endswith("Esc: no change"))
    terminal.enter("64M")
    terminal.wait(lambda screen: f"run {idle.pid}: the limit is 64 MiB, and the run takes" in screen)
    assert limit_of() == 64 * MIB
    terminal.wait(lambda screen: (row := rows(screen).get(idle.pid)) and row[1] == "64.0M" and size(row[2]) < 67 * MIB and row[3] != "0K")
    terminal.type("l")
    terminal.enter("8M")
    terminal.wait(lambda screen: f"run {idle.pid}: 8M is 8388608 bytes, too small for a limit" in screen)
    terminal.type("l2G")
    terminal.press("Escape")
    terminal.wait(lambda screen: "q quit" in screen)
    assert limit_of() == 64 * MIB
    terminal.type("l")
    terminal.enter("+64M")
    terminal.wait(lambda screen: f"run {idle.pid}: the limit is 128 MiB" in screen)
    assert limit_of() == 128 * MIB
    quit_top(terminal)


def test_a_run_that_ends_while_it_is_shown_is_said(tall, idle):
    terminal = tall
    short = Idle(16)
    top(terminal, short.pid)
    terminal.wait(lambda screen: short.program in rows(screen))
    short.finish()
    screen = terminal.wait(lambda screen: "(ended) python" in screen and "ended after" in screen)
    assert short.program not in rows(screen) and "0 runs, 0 processes" in screen, screen
    # A mapping would keep the memory of the ended run.
    until(lambda: "foliomem-control" not in Path(f"/proc/{pid_in(terminal)}/maps").read_text())
    terminal.press("l")
    terminal.wait(lambda screen: f"run {short.pid} has ended" in screen)
    quit_top(terminal)
    # Nothing is left of it for who looks at all.
    top(terminal)
    screen = terminal.wait(lambda screen: idle.pid in rows(screen))
    assert short.pid not in rows(screen), screen
    quit_top(terminal)


def test_two_hundred_processes_can_be_looked_through(terminal):
    running = start(["sh", "-c", "for each in $(seq 200); do sleep 1000 & done; echo ready; wait"], "256M")
    running.wait_output(b"ready", timeout=120)
    top(terminal, running.pid)
    terminal.wait(lambda screen: "1 run, 201 processes" in screen)
    terminal.press("End")
    last = terminal.wait(lambda screen: "sleep 1000" in screen and running.pid not in rows(screen) and list(rows(screen)))[-1]
    living = json.loads(cli("top", running.pid, "--json").ok().out)[0]["living"]
    assert len(living) == 201 and last == max(process["pid"] for process in living)
    terminal.press("Home")
    terminal.wait(lambda screen: running.pid in rows(screen))
    quit_top(terminal)
    running.kill()


def terminal_state(terminal):
    """What a program may leave behind: modes of the line, the cursor, the alternate screen."""
    end = f"end {next(RUNS)}"
    terminal.enter(f"clear; stty -g; echo {end}")
    screen = terminal.wait(lambda screen: re.search(rf"^{end}$", screen, re.M) and screen)
    return screen.split(end)[0], terminal.value("cursor_flag"), terminal.value("alternate_on")


def test_the_terminal_is_as_before_after_each_end(terminal, idle):
    before = terminal_state(terminal)
    assert before[1:] == ("1", "0")
    for end in ("q", "C-c", "Escape"):
        top(terminal)
        assert terminal.value("alternate_on") == "1" and terminal.value("cursor_flag") == "0"
        terminal.press(end)
        terminal.wait(lambda screen: screen.rstrip().endswith("ready>"))
        assert terminal_state(terminal) == before, end
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        top(terminal)
        os.kill(pid_in(terminal), number)
        terminal.wait(lambda screen: screen.rstrip().endswith("ready>"))
        terminal.enter("echo code $?")
        terminal.wait(lambda screen: f"code {128 + number}" in screen)
        assert terminal_state(terminal) == before, number


def pid_in(terminal):
    """The program that the shell of the terminal runs."""
    shell = terminal.value("pane_pid")
    return int(Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[0])


def test_it_can_be_stopped_and_goes_on(terminal, idle):
    before = terminal_state(terminal)
    top(terminal, idle.pid)
    terminal.press("C-z")
    terminal.wait(lambda screen: "Stopped" in screen and screen.rstrip().endswith("ready>"))
    assert terminal_state(terminal) == before
    terminal.enter("fg")
    terminal.wait(lambda screen: "q quit" in screen and idle.pid in rows(screen))
    terminal.press("?")
    terminal.wait(lambda screen: "change the limit of the run" in screen and "time that threads wait" in screen)
    terminal.press("q")
    terminal.wait(lambda screen: "change the limit of the run" not in screen)
    quit_top(terminal)
    assert terminal_state(terminal) == before


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "vt100"}, {"LC_ALL": "C"}], ids=["no-color", "vt100", "ascii"])
def test_colours_and_letters_are_those_that_the_terminal_has(idle, env):
    inside = {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color", **env}
    with Terminal() as terminal:
        terminal.enter("export " + " ".join(f"{name}={value}" for name, value in inside.items()))
        top(terminal, idle.pid)
        letters = "#" if env.get("LC_ALL") else "█"
        terminal.wait(lambda screen: idle.program in rows(screen) and letters in screen)
        screen = terminal.screen("-e")
        colours = [code for codes in re.findall(r"\x1b\[([0-9;]*)m", screen) for code in codes.split(";") if code in ("38", "48")
                   or code.isdigit() and 30 <= int(code) <= 37]
        assert bool(colours) == ("LC_ALL" in env), screen
        assert screen.isascii() == ("LC_ALL" in env), screen
        quit_top(terminal)


def test_one_picture_is_text_and_json_has_processes(idle):
    for words in (["top", "--once"], ["top"], ["top", idle.program, "--once"]):
        got = cli(*words).ok()
        head, *lines = got.out.decode().splitlines()
        assert head.split() == HEAD and all(len(line) <= 80 and line.isprintable() for line in lines), got.out
        at = next(number for number, line in enumerate(lines) if line.split()[0] == str(idle.pid))
        assert lines[at + 1].split()[0] == str(idle.program) and lines[at].split()[1] == "1.00G", lines
        assert lines[at + 1][60:].startswith("  python") and "\x1b" not in got.out.decode(), lines
    assert len(lines) == 2, "one process shows its run alone"
    run, = json.loads(cli("top", idle.program, "--json").ok().out)
    listed = {run["pid"]: run for run in json.loads(cli("ps", "--json").ok().out)}[idle.pid]
    process, = run["living"]
    assert set(run) == {*listed, "living"} and run["pid"] == idle.pid and run["program"] == listed["program"]
    assert process["pid"] == idle.program and process["parent_pid"] == idle.pid and process["program"].endswith(IDLE + " 96")
    assert set(process) == set(listed) - {"processes", "limit_bytes", "needed_bytes"} | {"parent_pid"}
    assert 90 * MIB < process["taken_bytes"] <= run["taken_bytes"] + MIB
    with subprocess.Popen([BIN, "top", "--once"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_env()) as unread:
        unread.stdout.close()
        assert unread.stderr.read() == b"" and unread.wait(60) == 0


def test_what_is_no_run_is_said(idle):
    got = cli("top", os.getpid())
    assert got.code == 125 and got.err == f"foliomem: process {os.getpid()} is not part of a run of foliomem\n", got
    got = cli("top", 4194304, "--json")
    assert got.code == 125 and "there is no process 4194304" in got.err
    assert cli("top", "me").code == 2
