"""Tracers, debuggers, profilers and leak checkers see a program that is mostly swapped out as they see it without foliomem."""
import os
import re
import shutil
import signal
import struct
import subprocess
from pathlib import Path

import pytest
from conftest import PLAIN, PYTHON, assert_swapped, clean_env, few_cases, foliomem, plain, start
from test_companion import Piped, who_runs
from test_reports import NOT_BY_FILE

MIB = 16
LIMIT = "32M"
PAGE = 4096
PY_SPY = Path(PYTHON).with_name("py-spy")
needs_strace = pytest.mark.skipif(not shutil.which("strace"), reason="no strace")
needs_gdb = pytest.mark.skipif(not shutil.which("gdb"), reason="no gdb")
WAITS = ("import sys\n"
         "data = [bytes([i % 251]) * 65536 for i in range(1000)]\n"
         "def waits_to_be_looked_at():\n"
         "    print('ready', flush=True)\n"
         "    return sys.stdin.read(1)\n"
         "waits_to_be_looked_at()\n"
         "print('OK' if all(b[0] == b[-1] == i % 251 for i, b in enumerate(data)) else 'WRONG')\n")


@pytest.fixture
def held(built):
    return built("held.c", "-g")


def tool(argv, timeout=60):
    """What a tool says that runs outside of foliomem."""
    done = subprocess.run([str(word) for word in argv], env=clean_env(), stdin=subprocess.DEVNULL, capture_output=True,
                          errors="replace", timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def look_at(argv, look, program=None, limit=LIMIT):
    """Starts a program that waits with most of its memory swapped out, calls `look` with its process id, and lets it go on."""
    piped = Piped(argv, limit)
    piped.run.wait_output(b"ready\n", 60)
    looked = look(next(pid for pid in who_runs(program or argv[0])[0] if os.getsid(pid) == piped.run.pid))
    piped.go_on()
    got = piped.run.finish().ok()
    assert got.out == b"ready\nOK\n"
    assert not got.stats or got.stats["vmstat"]["pswpin"] > 0
    return looked


# ---- strace ----

def traced(log):
    """How many processes and threads strace has seen, which must all have ended."""
    lines = Path(log).read_text(errors="replace").splitlines()
    pids = {line.split()[0] for line in lines}
    ended = {line.split()[0] for line in lines if "+++ exited with 0 +++" in line}
    assert pids == ended
    return len(pids)


@needs_strace
def test_strace_inside_a_run_sees_the_program_only(held, torture, tmp_path):
    argv = ["strace", "-f", "-o", tmp_path / "log", held, "threads", MIB // 2]
    plain(argv).ok()
    wanted = traced(tmp_path / "log")
    got = foliomem(argv, "16M", torture=torture, timeout=120).ok()
    assert got.out == b"OK\n"
    assert_swapped(got)
    assert traced(tmp_path / "log") == wanted


@needs_strace
def test_strace_around_a_run_ends_with_it(held, tmp_path):
    inside = start([held, "threads", MIB // 2], "16M").argv
    argv = ["strace", "-f", "-o", tmp_path / "log", *inside]
    got = plain(argv, timeout=120).ok()
    assert got.out == b"OK\n"
    assert traced(tmp_path / "log") > 1


@needs_strace
def test_strace_attaches_and_detaches(held, tmp_path):
    def trace(pid):
        argv = ["timeout", "-s", "INT", "1", "strace", "-f", "-o", tmp_path / "log", "-p", pid]
        done = subprocess.run([str(word) for word in argv], env=clean_env(), capture_output=True, text=True, timeout=20)
        assert "attached" in done.stderr and "detached" in done.stderr, done.stderr
        assert "with" not in done.stderr.replace(f"Process {pid} attached", ""), "it has threads of the agent"

    look_at([held, "wait", MIB], trace)


# ---- gdb ----

GDB = ["gdb", "-nx", "-batch", "-iex", "set debuginfod enabled off"]


@pytest.fixture
def gdb_calls(held):
    """Skips a test whose debugger cannot call functions of any program: gdb 13 cannot on processors with AMX."""
    got = plain([*GDB, "-ex", "break check", "-ex", "run", "-ex", "print check(&data)", "--args", held, "now", 1])
    if b"$1 = 1" not in got.out:
        pytest.skip(f"this gdb calls no function of a program without foliomem either: {got.err.strip().splitlines()[-1:]}")


@needs_gdb
def test_gdb_attaches_to_a_program_that_is_mostly_swapped_out(held, gdb_calls):
    def debug(pid):
        return tool([*GDB, "-p", pid, "-ex", "info threads", "-ex", "bt", "-ex", "print check(&data)", "-ex", "print check(&pressure)"])

    said = look_at([held, "wait", MIB], debug)
    assert re.search(r"#\d+ .*\bmain \(", said), said
    # One thread, which finds its memory right when the debugger calls it.
    assert said.count("Thread ") <= 2 and "$1 = 1" in said and "$2 = 1" in said, said


@needs_gdb
@pytest.mark.xfail(condition=not PLAIN, reason=NOT_BY_FILE, strict=True)
def test_gdb_reads_memory_that_is_swapped_out(held, tmp_path):
    dump = tmp_path / "dump"
    words = MIB * (1 << 20) // 8
    commands = ["-ex", f"dump binary memory {dump} data.at (data.at+{words})"]
    look_at([held, "wait", MIB], lambda pid: tool([*GDB, "-p", pid, *commands]))
    mask, content = (1 << 64) - 1, dump.read_bytes()
    for page in range(len(content) // PAGE):
        first = (page + 1) * 0x9E3779B97F4A7C15 & mask ^ 0xD1B54A32D192ED03
        assert struct.unpack_from("<2Q", content, page * PAGE) == (first, first + 1 & mask), f"page {page}"


@needs_gdb
@pytest.mark.parametrize("where", ["inside", "around"])
def test_gdb_runs_a_program_with_a_breakpoint(held, where):
    script = ["-ex", "break check", "-ex", "run", "-ex", "bt", "-ex", "continue", "-ex", "continue"]
    if where == "inside":
        got = foliomem([*GDB, *script, "--args", held, "now", MIB], LIMIT, timeout=120).ok()
        assert b"#0  check" in got.out and b"main (" in got.out, got.out
        assert_swapped(got)
    else:
        # The debugger's own program is foliomem, which has no such function.
        script = ["-ex", "set breakpoint pending on", "-ex", "run"]
        inside = start([held, "now", MIB], LIMIT).argv
        got = plain([*GDB, *script, "--args", *inside], timeout=120).ok()
    assert b"OK\n" in got.out and b"exited normally" in got.out, got.out


@needs_gdb
def test_gdb_debugs_threads_and_forks_inside_a_run(held):
    # The debugger needs 60 MiB itself.
    got = foliomem([*GDB, "-ex", "run", "--args", held, "threads", MIB], "48M", timeout=120).ok()
    assert_swapped(got)
    assert b"OK\n" in got.out and b"exited normally" in got.out, got.out


ABORTS = """
import os, resource, sys
who, folder = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)

def abort(name):
    os.mkdir(os.path.join(folder, name))
    os.chdir(os.path.join(folder, name))
    held = bytearray(range(256)) * (90 << 12)
    os.abort()

if who == "program":
    abort(str(os.getpid()))
children = []
for _ in range(2):
    children.append(os.fork() or abort(str(os.getpid())))
sys.exit(sum(not os.WCOREDUMP(os.waitpid(child, 0)[1]) for child in children))
"""


@pytest.mark.parametrize("limit, is_whole", [("64M", False), ("1G", True)])
@pytest.mark.parametrize("who", ["program", "children"])
def test_a_core_dump_with_zeros_is_announced_once(tmp_path, who, limit, is_whole):
    argv = [PYTHON, "-c", ABORTS, who, tmp_path]
    plain(argv)
    if not list(tmp_path.glob("*/*")):
        pytest.skip("no core file is written to the working directory here")
    got = foliomem(argv, limit)
    assert got.code == (128 + signal.SIGABRT if who == "program" else 0), got.err
    assert PLAIN or got.err.count("has zeros in the place of swapped-out memory") == (0 if is_whole else 1), got.err


@needs_gdb
def test_gdb_finds_the_memory_of_a_program_that_is_about_to_end(held, gdb_calls):
    """The companion gives the memory of a program back when that has called exit_group, but not to a debugger's surprise."""
    script = ["-ex", "catch syscall exit_group", "-ex", "run", "-ex", "print check(&data)", "-ex", "print check(&pressure)"]
    got = foliomem([*GDB, *script, "-ex", "continue", "--args", held, "now", MIB], LIMIT, timeout=120).ok()
    assert_swapped(got)
    assert b"$1 = 1" in got.out and b"$2 = 1" in got.out, got.out


# ---- py-spy ----

@pytest.mark.skipif(not PY_SPY.exists(), reason="no py-spy")
@pytest.mark.parametrize("how", [[], ["--nonblocking"], ["--native"]], ids=["stopping", "nonblocking", "native"])
def test_py_spy_dumps_the_stack_of_a_program_that_is_mostly_swapped_out(how):
    python = Path(PYTHON).resolve()
    said = look_at([PYTHON, "-c", WAITS], lambda pid: tool([PY_SPY, "dump", *how, "--pid", pid]), python, "40M")
    assert "waits_to_be_looked_at" in said


# ---- leak checkers ----

def leaks(got):
    """What a leak checker has found."""
    summary = [line.partition("SUMMARY: ")[2] for line in got.err.splitlines() if "SUMMARY: " in line]
    return got.code, got.out, summary


@few_cases
@pytest.mark.parametrize("kind, mib, limit", [("leak", 64, "48M"), ("address", 100, "115M")])
@pytest.mark.parametrize("loses", [[], ["leak"]], ids=["nothing", "memory"])
def test_a_leak_checker_finds_the_same_in_a_program_that_is_swapped_out(built, kind, mib, limit, loses, torture):
    program = built("sanitized.c", f"-fsanitize={kind}", "-g")
    env = {"ASAN_OPTIONS": "detect_leaks=1", "LSAN_OPTIONS": "max_leaks=5"}
    wanted = plain([program, mib, *loses], env=env, timeout=120)
    got = foliomem([program, mib, *loses], limit, env=env, torture=torture, timeout=120)
    if torture and loses:
        # A stale pointer in a register or on a stack hides a block or two, another one than in the plain run.
        assert leaks(got)[:2] == leaks(wanted)[:2] and len(leaks(got)[2]) == 1, got.err[-3000:]
    else:
        assert leaks(got) == leaks(wanted), got.err[-3000:]
    assert bool(loses) == (wanted.code != 0)
    assert not got.stats or got.stats["vmstat"]["pswpin"] > 0
