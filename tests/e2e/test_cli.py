"""What a user sees of foliomem itself: exit codes, signals, stdin and stdout, options, bad input."""
import json
import os
import pty
import signal
import stat
import subprocess
import time

import pytest
from conftest import BIN, MIB, PLAIN, PROGRAMS, PYTHON, clean_env, cli, foliomem, foliomem_only, plain, start

PRESSED = "b = bytearray(b'0123456789abcdef' * (8 << 20)); assert b.count(b'f') == 8 << 20"  # 128 MiB of compressible data
# A warning, which --quiet does not leave out: on a busy machine a run may wait for memory most of the time.
THRASHES = "foliomem: thrashing: "
# Python looks for signals between byte codes: one that comes after it looked and before it sleeps is seen after the sleep,
# and a fault in there makes that likely. Sent to a group, a signal comes once more from the supervisor.
HANDLER = ("import signal, sys, time\n"
           "def stop(number, frame): signal.signal(number, signal.SIG_IGN); print('got', number, flush=True); sys.exit(7)\n"
           "signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)\n"
           f"{PRESSED}\nprint('ready', flush=True)\nfor _ in range(3000): time.sleep(0.01)")


# ---- exit codes and signals ----

@pytest.mark.parametrize("code", [0, 1, 2, 3, 77, 125, 126, 127, 137, 255])
def test_exit_code(code):
    assert foliomem(["sh", "-c", f"exit {code}"]).code == code


@pytest.mark.parametrize("name", ["HUP", "INT", "QUIT", "ABRT", "KILL", "SEGV", "PIPE", "TERM", "USR1"])
def test_death_by_signal(name):
    wanted = 128 + getattr(signal, f"SIG{name}")
    assert foliomem(["sh", "-c", f"ulimit -c 0; kill -{name} $$; sleep 5"]).code == wanted


def test_exit_under_pressure():
    assert foliomem([PYTHON, "-c", f"import os\n{PRESSED}\nos._exit(9)"], "32M").code == 9


def test_crash_under_pressure():
    crash = f"import ctypes, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n{PRESSED}\nctypes.string_at(8)"
    assert foliomem([PYTHON, "-c", crash], "32M").code == 128 + signal.SIGSEGV


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_forwarded(number):
    running = start([PYTHON, "-c", HANDLER], "32M")
    running.wait_output(b"ready\n")
    os.kill(running.pid, number)
    got = running.finish(20)
    assert (got.code, got.out) == (7, b"ready\ngot %d\n" % number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_that_ends_the_program(number):
    running = start(["sh", "-c", "echo ready; exec sleep 30"])
    running.wait_output(b"ready\n")
    os.kill(running.pid, number)
    assert running.finish(20).code == 128 + number


def test_ctrl_c_reaches_the_whole_group():
    running = start([PYTHON, "-c", HANDLER], "32M")
    running.wait_output(b"ready\n")
    os.killpg(running.pid, signal.SIGINT)
    assert running.finish(20).code == 7


def test_kill_9_of_the_program():
    running = start([PYTHON, "-c", f"import os, time\n{PRESSED}\nprint(os.getpid(), flush=True)\ntime.sleep(30)"], "32M")
    os.kill(int(running.wait_output(b"\n")), signal.SIGKILL)
    got = running.finish(20)
    assert got.code == 137
    assert PLAIN or got.stats, "no stats of a killed program"


@foliomem_only
def test_what_a_killed_foliomem_leaves_the_next_run_removes(tmp_path):
    def left():
        return list(tmp_path.iterdir())

    sleeping = ["sh", "-c", "echo ready; exec sleep 30"]
    killed, living = (start(sleeping, env={"TMPDIR": tmp_path}) for _ in range(2))
    for running in (killed, living):
        running.wait_output(b"ready\n")
    os.kill(killed.pid, signal.SIGKILL)
    killed.finish(20)
    assert len(left()) == 2
    # A young one may belong to a run that begins.
    for folder in left():
        os.utime(folder, (0, 0))
    foliomem(["sleep", "1"], env={"TMPDIR": tmp_path}).ok()
    assert len(left()) == 1
    os.kill(living.pid, signal.SIGTERM)
    living.finish(20)
    assert left() == []


# ---- stdin, stdout, terminal ----

def test_stdin_and_stdout_are_the_programs():
    data = os.urandom(8 * MIB)
    got = foliomem(["cat"], stdin=data).ok()
    assert got.out == data


def test_arguments_and_environment_are_untouched():
    arguments = ["", "a b", "--limit", "-x", "é", "$HOME", "--"]
    got = foliomem([PYTHON, "-c", "import sys, os; print(sys.argv[1:], os.environ['MARK'], os.getcwd())", *arguments],
                   env={"MARK": "x=y"}, cwd="/tmp").ok()
    assert got.out.decode() == f"{arguments} x=y /tmp\n"


def test_open_descriptors_are_those_of_a_bare_run():
    """The program neither sees nor inherits descriptors at the low numbers it would get itself."""
    script = "import os; print(os.open('/dev/null', os.O_RDONLY), os.open('/dev/null', os.O_RDONLY))"
    assert foliomem([PYTHON, "-c", script]).ok().out == plain([PYTHON, "-c", script]).ok().out


@foliomem_only
def test_terminal():
    """On a terminal the program has it: isatty, reading a line, and Ctrl-C."""
    script = "import sys, time\nprint(sys.stdin.isatty(), input('name? '), flush=True)\n[time.sleep(0.01) for _ in range(3000)]"
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(BIN, [BIN, "run", "--limit", "64M", "--", PYTHON, "-c", script], clean_env())
    seen, end = b"", time.monotonic() + 20
    sent = 0
    while time.monotonic() < end:
        try:
            seen += os.read(fd, 4096)
        except OSError:
            break
        if sent == 0 and b"name? " in seen:
            sent += os.write(fd, b"Ada\n")
        elif sent == 4 and b"True Ada" in seen:
            sent += os.write(fd, b"\x03")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(fd)
    assert b"True Ada" in seen and b"KeyboardInterrupt" in seen, seen
    assert status in (130, -signal.SIGINT)


# ---- options ----

@foliomem_only
def test_summary_is_one_line_on_stderr():
    got = cli("run", "--limit", "32M", "--", PYTHON, "-c", PRESSED).ok()
    assert got.out == b""
    # On a busy machine the run may wait for memory. It then prints lines that say so: they are left out.
    [line] = [line for line in got.err.splitlines() if "waiting for memory" not in line and "thrashing" not in line]
    assert line.startswith("foliomem: peak "), got.err


HOLD = "import mmap, time; held = {}; [held.write(b'x' * (1 << 20)) for _ in range(60)]; time.sleep(1.5); print('held')"


@foliomem_only
def test_shared_memory_is_said():
    got = cli("run", "--limit", "32M", "--", PYTHON, "-c", HOLD.format("mmap.mmap(-1, 60 << 20)")).ok()
    lines = [line for line in got.err.splitlines() if "does not hold" in line]
    assert got.out == b"held\n" and len(lines) == 1 and "shared memory" in lines[0], got.err
    assert lines[0].startswith("foliomem: python"), got.err


@foliomem_only
@pytest.mark.parametrize("inside", [[], [BIN, "run", "--limit", "24M", "--"]], ids=["", "of a run inside the run"])
def test_of_what_is_managed_it_is_not_said(inside):
    """Nor of what shares its parent's memory for a moment."""
    spawns = f"import subprocess\n{PRESSED}\nfor _ in range(200): subprocess.run(['true'], close_fds=False)\n"
    got = cli("run", "--limit", "32M", "--", *inside, PYTHON, "-c", spawns).ok()
    assert "does not hold" not in got.err and "without the agent" not in got.err, got.err


def stats_in(got):
    """The statistics on stderr, without warnings before them."""
    return json.loads("".join(line for line in got.err.splitlines() if not line.startswith(THRASHES)))


@foliomem_only
def test_quiet():
    got = cli("run", "--limit", "32M", "--quiet", "--", PYTHON, "-c", PRESSED).ok()
    said = [line for line in got.err.splitlines() if not line.startswith(THRASHES)]
    assert (got.out, said) == (b"", [])


@foliomem_only
def test_stats_to_stderr():
    got = cli("run", "--limit", "32M", "--quiet", "--stats", "-", "--", PYTHON, "-c", PRESSED).ok()
    stats = stats_in(got)
    assert got.out == b"" and stats["limit_bytes"] == 32 * MIB


@foliomem_only
def test_stats_fields():
    stats = foliomem([PYTHON, PROGRAMS / "big_array.py", "96"], "32M").ok().stats
    assert stats["limit_bytes"] == 32 * MIB and stats["processes"] == 1 and stats["limit_exceeded"] is False
    assert stats["need_peak_bytes"] > 96 * MIB > stats["peak_bytes"] > 8 * MIB
    sizes = {k: v for k, v in stats.items() if k.startswith("hugepages-")}
    counters = {"anon_fault_alloc", "anon_fault_fallback", "anon_fault_fallback_charge", "swpout", "swpout_fallback", "swpin",
                "swpin_fallback", "swpin_fallback_charge", "split", "split_deferred", "split_failed", "nr_anon",
                "nr_anon_partially_mapped"}
    assert "hugepages-64kB" in sizes
    assert all(counters <= set(v) for v in sizes.values()), sizes
    assert sum(v["anon_fault_alloc"] for v in sizes.values()) > 0 and sum(v["swpout"] for v in sizes.values()) > 0
    assert {"pgfault", "pgmajfault", "pswpin", "pswpout"} <= set(stats["vmstat"])
    mm = stats["mm_stat"]
    assert {"orig_data_size", "compr_data_size", "mem_used_total", "mem_used_max", "same_pages", "huge_pages"} <= set(mm)
    assert mm["mem_used_max"] > 0
    for kind in ("first_touch", "staged", "swap_in", "spurious"):
        fault = stats["faults"][kind]
        assert {"count", "p50_ns", "p99_ns", "max_ns", "total_ns"} <= set(fault)
        assert fault["p50_ns"] <= fault["p99_ns"] and fault["max_ns"] <= fault["total_ns"] or fault["count"] == 0, (kind, fault)
    assert stats["faults"]["first_touch"]["count"] > 0 and stats["faults"]["swap_in"]["count"] > 0


def settings(*options, env=None):
    """What --print-config shows, without the comments that say where a value comes from."""
    shown = cli("run", *map(str, options), "--print-config", "--", "true", env=env).ok().out.decode()
    return [line.split("#")[0].strip() for line in shown.splitlines()]


@foliomem_only
def test_options_from_environment_and_config(tmp_path):
    """A flag, a variable and a configuration file mean the same, and the flag wins over the variable."""
    config = tmp_path / "foliomem.toml"
    config.write_text('limit = "48M"\nsizes = "16K,64K"\ncodec = "zstd:2"\n')
    flags = ["--limit", "48M", "--sizes", "16K,64K", "--codec", "zstd:2"]
    variables = {"FOLIOMEM_LIMIT": "48M", "FOLIOMEM_SIZES": "16K,64K", "FOLIOMEM_CODEC": "zstd:2"}
    shown = [settings(*flags),
             settings(env=variables),
             settings("--config", config),
             settings(*flags, env=dict(variables, FOLIOMEM_LIMIT="99M"))]
    assert shown[0] and all(one == shown[0] for one in shown), shown
    assert settings("--limit", "49M", env=variables) != shown[0]


@foliomem_only
@pytest.mark.parametrize("how", ["variable", "config"])
def test_limit_given_another_way_is_applied(how, tmp_path):
    config = tmp_path / "foliomem.toml"
    config.write_text('limit = "32M"\n')
    options, env = ([], {"FOLIOMEM_LIMIT": "32M"}) if how == "variable" else (["--config", str(config)], {})
    got = cli("run", *options, "--quiet", "--stats", "-", "--", PYTHON, "-c", PRESSED, env=env).ok()
    stats = stats_in(got)
    assert stats["limit_bytes"] == 32 * MIB and stats["vmstat"]["pswpout"] > 0


@foliomem_only
def test_limit_in_percent():
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    got = cli("run", "--limit", "10%", "--quiet", "--stats", "-", "--", "true").ok()
    assert abs(json.loads(got.err)["limit_bytes"] - ram / 10) < ram / 100


@foliomem_only
def test_no_pressure_no_swap():
    # A program that is far from its limit is looked at seldom.
    hold = "import time\nheld = bytes(range(256)) * (32 << 12)\ntime.sleep(1.5)"
    stats = foliomem([PYTHON, "-c", hold], "512M").ok().stats
    assert stats["vmstat"]["pswpout"] == 0 and stats["need_peak_bytes"] >= 32 * MIB


# ---- bad input ----

@pytest.fixture
def bad(tmp_path):
    """Files that cannot be run, each by its name."""
    (tmp_path / "text").write_text("#!/bin/sh\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }\n")
    (tmp_path / "broken.toml").write_text("limit = [\n")
    (tmp_path / "unknown.toml").write_text('limt = "64M"\n')
    (tmp_path / "no-interpreter").write_text("#!/no/such/interpreter\n")
    os.chmod(tmp_path / "no-interpreter", 0o755)
    (tmp_path / "garbage").write_bytes(b"\x7fELF" + bytes(60))
    os.chmod(tmp_path / "garbage", 0o755)
    return tmp_path


BAD = {
    "no program": (["run", "--limit", "64M"], 2, ""),
    "no program after --": (["run", "--limit", "64M", "--"], 2, ""),
    "no command": ([], 2, ""),
    "unknown command": (["walk"], 2, "walk"),
    "unknown option": (["run", "--limit", "64M", "--limmit", "1M", "--", "true"], 2, "limmit"),
    "unknown option first": (["run", "--limmit", "64M", "--limit", "64M", "--", "true"], 2, "limmit"),
    "no limit": (["run", "--", "true"], (2, 125), "--limit"),
    "limit without a value": (["run", "--limit"], 2, "limit"),
    "limit too small": (["run", "--limit", "1M", "--", "true"], 125, "16"),
    "limit just too small": (["run", "--limit", "16777215", "--", "true"], 125, "16"),
    "limit no size": (["run", "--limit", "banana", "--", "true"], (2, 125), "banana"),
    "limit no share": (["run", "--limit", "need/0", "--", "true"], 125, "need/2"),
    "limit negative": (["run", "--limit=-5M", "--", "true"], (2, 125), "5M"),
    "limit overflow": (["run", "--limit", "99999999999999999999G", "--", "true"], (2, 125), "9999"),
    "unknown size": (["run", "--limit", "64M", "--sizes", "17K", "--", "true"], (2, 125), "17K"),
    "size too large": (["run", "--limit", "64M", "--sizes", "4M", "--", "true"], (2, 125), "4M"),
    "unknown codec": (["run", "--limit", "64M", "--codec", "zip", "--", "true"], (2, 125), "zip"),
    "unknown level": (["run", "--limit", "64M", "--codec", "zstd:999", "--", "true"], (2, 125), "999"),
    "unknown granule": (["run", "--limit", "64M", "--granule", "3K", "--", "true"], (2, 125), "3K"),
    "config missing": (["run", "--config", "{dir}/missing.toml", "--", "true"], 125, "missing.toml"),
    "config broken": (["run", "--config", "{dir}/broken.toml", "--", "true"], 125, "broken.toml"),
    "config unknown key": (["run", "--config", "{dir}/unknown.toml", "--", "true"], 125, "limt"),
    "program missing": (["run", "--limit", "64M", "--", "no-such-program-here"], 127, "no-such-program-here"),
    "path missing": (["run", "--limit", "64M", "--", "{dir}/missing"], 127, "missing"),
    "not executable": (["run", "--limit", "64M", "--", "{dir}/text"], 126, "text"),
    "a directory": (["run", "--limit", "64M", "--", "{dir}/folder"], 126, "folder"),
    "not a program": (["run", "--limit", "64M", "--", "{dir}/garbage"], (125, 126), "garbage"),
    "no interpreter": (["run", "--limit", "64M", "--", "{dir}/no-interpreter"], (126, 127), "interpreter"),
    "stats cannot be written": (["run", "--limit", "64M", "--stats", "{dir}/no/such/stats.json", "--", "true"], 125, "stats.json"),
}


@foliomem_only
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, bad):
    arguments, codes, mentioned = BAD[name]
    got = cli(*(a.replace("{dir}", str(bad)) for a in arguments))
    assert got.code in (codes if isinstance(codes, tuple) else (codes,)), (got.code, got.err)
    assert got.out == b""
    assert len(got.err.strip().splitlines()) == 1 and got.err.startswith("foliomem: "), got.err
    assert mentioned in got.err


@foliomem_only
def test_bad_variable():
    got = cli("run", "--", "true", env={"FOLIOMEM_LIMIT": "banana"})
    assert got.code == 125 and "FOLIOMEM_LIMIT" in got.err and len(got.err.strip().splitlines()) == 1, got.err


@foliomem_only
def test_static_binary(bad):
    if subprocess.run(["gcc", "-static", "-o", bad / "static", bad / "empty.c"], capture_output=True).returncode:
        pytest.skip("no static libc")
    got = cli("run", "--limit", "64M", "--", str(bad / "static"))
    assert got.code == 125 and "static" in got.err and len(got.err.strip().splitlines()) == 1, got.err


@foliomem_only
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a setuid file of another user")
def test_setuid_binary(bad):
    program = bad / "setuid"
    subprocess.run(["gcc", "-o", program, bad / "empty.c"], check=True)
    os.chown(program, 65534, 65534)
    os.chmod(program, 0o755 | stat.S_ISUID)
    got = cli("run", "--limit", "64M", "--", str(program))
    assert got.code == 125 and "setuid" in got.err and len(got.err.strip().splitlines()) == 1, got.err


@foliomem_only
def test_the_version_says_what_it_was_built_from():
    short = cli("--version").ok().out.decode()
    assert short.startswith("foliomem ") and short.count("\n") == 1
    for arguments in (["--version", "--verbose"], ["--verbose", "--version"]):
        lines = cli(*arguments).ok().out.decode().splitlines()
        assert lines[0] == short.strip()
        assert [line.split(": ")[0] for line in lines[1:]] == ["commit", "target", "profile", "features"], lines
        assert all(line.split(": ")[1] for line in lines[1:]), lines
    assert cli("--verbose").code == 2
