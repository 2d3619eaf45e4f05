"""Children that have no agent: static programs, and programs for another C library or of another root."""
import os
import re
import shutil
from pathlib import Path

import pytest
from conftest import BIN, MIB, PROGRAMS, PYTHON, alone, cli, foliomem, foliomem_only, plain, soak_only

pytestmark = foliomem_only


def line_of(got):
    lines = [line for line in got.err.splitlines() if "without the agent ran" in line]
    assert len(lines) == 1, got.err
    return lines[0]


def mib_of(got, name):
    return float(re.search(rf"{name}\S* ([0-9.]+) MiB", line_of(got))[1])


def test_a_static_child_counts_and_is_said_with_its_size(built):
    got = foliomem(["sh", "-c", "$0 100 1500; :", built("hog.c", "-static")], "256M").ok()
    assert got.out == b"held 1\n"
    assert 95 < mib_of(got, "hog") < 110, got.err
    assert got.stats["peak_bytes"] > 95 * MIB, got.stats


def test_a_fast_static_child_is_said(built):
    """It lives for a tenth of a second, which may pass between two searches if the machine is busy."""
    runs = (foliomem(["sh", "-c", "$0 50 100; :", built("hog.c", "-static")], "256M").ok() for _ in range(5))
    assert any("without the agent ran" in got.err and mib_of(got, "hog") > 5 for got in runs)


@alone
def test_others_give_way_to_a_static_child(built):
    hold = ("import subprocess, sys, time\nrows = [(b'%08d' % i) * 512 for i in range(120 * 256)]\n"
            "hog = subprocess.Popen([sys.argv[1], '100', '6000'])\n"
            "time.sleep(4)\n"
            "own = next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('RssAnon'))\n"
            "assert hog.wait() == 0 and rows == [(b'%08d' % i) * 512 for i in range(len(rows))]\nprint(own >> 10)")
    got = foliomem([PYTHON, "-c", hold, built("hog.c", "-static")], "180M").ok()
    own_mib = int(got.out.split()[-1])
    assert own_mib < 1.03 * 180 - 100, own_mib
    assert got.stats["vmstat"]["pswpout"] > 20 << 8, got.stats["vmstat"]


def test_a_hard_limit_binds_a_static_child(built):
    got = foliomem(["sh", "-c", "$0 200 8000; echo after", built("hog.c", "-static")], "64M", options=["--hard"])
    assert got.code == 137 and b"held" not in got.out, got
    assert "processes without the agent" in got.err and "hog" in got.err, got.err


@soak_only  # It compiles a Go program.
def test_a_go_child_counts(tmp_path):
    if not shutil.which("go"):
        pytest.skip("needs go")
    (tmp_path / "main.go").write_text(
        'package main\nimport ("fmt"; "time")\nfunc main() { b := make([]byte, 80<<20); for i := range b { b[i] = byte(i) }\n'
        'time.Sleep(500 * time.Millisecond); fmt.Println(len(b)) }\n')
    env = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=mod", "GOCACHE": tmp_path / "cache", "HOME": tmp_path, "GO111MODULE": "off"}
    plain(["go", "build", "-o", tmp_path / "gohog", "main.go"], env, tmp_path, timeout=170).ok()
    got = foliomem(["sh", "-c", "$0; :", tmp_path / "gohog"], "256M").ok()
    assert mib_of(got, "gohog") > 70, got.err


def test_short_managed_children_are_not_said():
    got = cli("run", "--limit", "64M", "--", "sh", "-c", "for i in $(seq 200); do /bin/true; done").ok()
    assert "without the agent" not in got.err, got.err


@pytest.mark.skipif(not shutil.which("gdb"), reason="no gdb")
def test_a_process_that_a_debugger_holds_at_its_start_is_not_said():
    """It has loaded nothing yet, and loads the agent when it goes on."""
    gdb = ["gdb", "-nx", "-batch", "-iex", "set debuginfod enabled off", "-ex", "starti", "-ex", "shell sleep 1", "-ex", "continue"]
    got = cli("run", "--limit", "256M", "--", *gdb, "/bin/true", timeout=60).ok()
    assert b"exited normally" in got.out, got.out
    assert "without the agent" not in got.err, got.err


def test_a_small_static_child_is_not_why_the_limit_is_exceeded(built):
    """The data does not compress, for whose sake the limit is exceeded for more than a second."""
    random = "import os, time; b = os.urandom(60 << 20); [(time.sleep(0.5), bytes(b)) for _ in range(6)]"
    got = foliomem(["sh", "-c", '"$0" 1 20000 & "$1" -c "$2"; kill $!', built("hog.c", "-static"), PYTHON, random], "40M").ok()
    assert "does not compress" in got.err, got.err
    assert "leave too little" not in got.err and "without the agent ran" in got.err, got.err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its root")
def test_a_child_in_a_root_with_nothing_but_the_c_library_is_managed(tmp_path, built):
    """There is neither libgcc_s nor /proc there."""
    program, agent = built("grow.c"), Path(BIN).with_name("libfoliomem_agent.so")
    libraries = plain(["ldd", program]).ok().out.decode()
    for file in [program, agent, *re.findall(r"(/\S+)", libraries)]:
        target = tmp_path / str(Path(file)).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    argv = ["chroot", tmp_path, program, "heap", "60", "4000", "1"]
    wanted = plain(argv).ok().out
    got = foliomem(argv, "256M").ok()
    assert got.out == wanted and "ld.so" not in got.err, got.err


@pytest.mark.parametrize("damage", ["cut", "zeros", "foreign"])
def test_an_agent_that_does_not_work_is_refused_before_the_program_starts(damage, tmp_path):
    agent = tmp_path / "libfoliomem_agent.so"
    binary = shutil.copy(BIN, tmp_path / "foliomem")
    whole = Path(BIN).with_name("libfoliomem_agent.so").read_bytes()
    content = {
        "cut": whole[:100_000],
        "zeros": bytes(len(whole)),
        "foreign": next(Path("/usr/lib/x86_64-linux-gnu").glob("libm.so.6")).read_bytes(),
    }[damage]
    agent.write_bytes(content)
    started = tmp_path / "started"
    got = plain([binary, "run", "--limit", "64M", "--", "touch", started])
    assert got.code == 125 and "did not report" in got.err and str(agent) in got.err, (got.code, got.err)
    assert not started.exists()
