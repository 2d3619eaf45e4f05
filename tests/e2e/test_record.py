"""`foliomem record`, and `foliomem lab replay` of what it has recorded."""
import json

import pytest
from conftest import MIB, PROGRAMS, PYTHON, alone, cli, foliomem_only, plain

pytestmark = foliomem_only

# Fills memory, uses some of it again and again, and does both once more in a child; the code is the child's.
PROGRAM = """
import os, subprocess, sys
data = bytearray((os.urandom(1024) + bytes(3072)) * 256 * int(sys.argv[1]))
for _ in range(40):
    for at in range(0, len(data) // 4, 4096):
        data[at] = (data[at] + 1) % 256
print("sum", sum(data[::4096]) > 0, flush=True)
if len(sys.argv) > 2:
    sys.exit(subprocess.run([sys.executable, "-c", os.environ["PROGRAM"], sys.argv[2]]).returncode + 3)
"""

# Runs a program and prints the most that a process of it had in memory.
MOST_KIB = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The trace of a program of 48 MiB with a child of 24, and how recording went."""
    trace = tmp_path_factory.mktemp("record") / "program.mft"
    got = cli("record", "-o", str(trace), "--", PYTHON, "-c", PROGRAM, "48", "24", env={"PROGRAM": PROGRAM}, timeout=60)
    return trace, got


def replay(trace, *options):
    got = cli("lab", "replay", str(trace), *options, "--json", "-", timeout=60)
    assert got.code == 0, got.err
    return json.loads(got.out), got.err


def test_recording_changes_neither_output_nor_exit_code(recorded):
    trace, got = recorded
    bare = plain([PYTHON, "-c", PROGRAM, "48", "24"], env={"PROGRAM": PROGRAM})
    assert (got.code, got.out) == (bare.code, bare.out) == (3, b"sum True\nsum True\n"), got.err
    assert "recorded" in got.err and " of 2 processes in " in got.err and " lost" not in got.err, got.err
    # Some bytes for each event.
    assert trace.stat().st_size < MIB


def test_a_replay_needs_what_the_program_did(recorded):
    trace, _ = recorded
    [roomy], said = replay(trace, "--limit", "300M")
    assert " 2 of 2 processes looked at" in said and " 0 events lost" in said, said
    outcome = roomy["outcome"]
    assert outcome["pgmajfault"] == outcome["pswpout"] == 0
    # The most is when the parent has its bytes twice, for a moment; how large an interpreter is differs between machines.
    measured = plain([PYTHON, "-c", MOST_KIB, PYTHON, "-c", PROGRAM, "48", "24"], env={"PROGRAM": PROGRAM})
    most_pages = int(measured.out.split()[-1]) / 4
    assert 0.9 * most_pages < outcome["peak_pages"] < 1.1 * most_pages, (outcome["peak_pages"], most_pages)


def test_less_room_and_other_settings_make_other_runs(recorded):
    trace, _ = recorded
    runs, _ = replay(trace, "--limit", "75%,50%", "--sizes", "64K", "--vary", "swap.strategy=nonfull-first,cluster-lists")
    assert [run["set"][-1][1] for run in runs] == ["nonfull-first", "cluster-lists"] * 2
    outs = [run["outcome"]["pswpout"] for run in runs]
    assert 0 < outs[0] < outs[2], outs
    again, _ = replay(trace, "--limit", "75%,50%", "--sizes", "64K", "--vary", "swap.strategy=nonfull-first,cluster-lists")
    assert again == runs, "the same trace and settings give the same run"


def test_a_bad_trace_is_refused_with_file_offset_and_reason(recorded, tmp_path):
    whole = recorded[0].read_bytes()
    for bytes_, why in [
        (whole[:-5], "ends in the middle"),
        (whole + b"x", "behind its end"),
        (whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], "damaged"),
        (b"PK\3\4" + whole, "no trace"),
    ]:
        bad = tmp_path / "bad.mft"
        bad.write_bytes(bytes_)
        got = cli("lab", "replay", str(bad))
        assert got.code == 125 and got.err.startswith(f"foliomem: {bad}: at byte ") and why in got.err, got.err
    got = cli("lab", "replay", str(tmp_path / "none.mft"))
    assert got.code == 125 and "cannot read the trace" in got.err, got.err
    got = cli("lab", "replay", str(recorded[0]), "--limit", "much")
    assert got.code == 125 and "limit (from command line)" in got.err, got.err


def test_a_trace_that_cannot_be_written_is_said_before_the_program_runs():
    got = cli("record", "-o", "/nowhere/x.mft", "--", "echo", "ran")
    assert got.code == 125 and got.out == b"" and "/nowhere/x.mft" in got.err, got.err


def recorded_and_replayed(trace):
    """Counters of a run that is recorded within 64 MiB, and of its replay within that."""
    argv = [PYTHON, str(PROGRAMS / "big_array.py"), "96"]
    stats = trace.with_suffix(".json")
    options = ["--limit", "64M", "--quiet", "--stats", str(stats)]
    got = cli("record", "-o", str(trace), *options, "--", *argv, timeout=60)
    assert got.code == 0 and got.out == plain(argv).out, got.err
    # A busy machine may let it wait.
    assert all("thrashing" in line for line in got.err.splitlines()), got.err
    [run], said = replay(trace, "--limit", "64M")
    assert "recorded within" not in said, said
    return json.loads(stats.read_text())["vmstat"], run["outcome"]


# What the machine does meanwhile changes the faults that a run meets: up to 1.9 times as many swap-ins and 8 times as many
# faults. So the middle one of three recordings counts.
@alone
def test_a_limited_run_can_be_recorded_too(tmp_path):
    trace = tmp_path / "limited.mft"
    pairs = [recorded_and_replayed(trace) for _ in range(3)]
    # What it has met is what is met again.
    for counter, least, most in [("pswpin", 0.6, 1.6), ("pgmajfault", 0.5, 2)]:
        ratios = sorted(replayed[counter] / measured[counter] for measured, replayed in pairs)
        assert least < ratios[1] < most, (counter, ratios, pairs)
    # A little less is nearly as much.
    assert "recorded within" not in replay(trace, "--limit", "62M")[1]
    _, said = replay(trace, "--limit", "56M")
    assert "recorded within 64 MiB: " in said, said


@alone
def test_without_a_limit_it_is_recorded_within_half_of_what_it_needs(tmp_path):
    argv = [PYTHON, str(PROGRAMS / "big_array.py"), "160"]
    trace, stats = tmp_path / "half.mft", tmp_path / "half.json"
    got = cli("record", "-o", str(trace), "--stats", str(stats), "--", *argv, timeout=60)
    assert got.code == 0 and got.out == plain(argv).out, got.err
    recorded = json.loads(stats.read_text())
    assert recorded["limit_bytes"] == pytest.approx(recorded["need_peak_bytes"] / 2, rel=0.02), recorded
    assert recorded["peak_bytes"] < 1.1 * recorded["limit_bytes"], recorded
    [half], said = replay(trace)
    assert "recorded within" not in said, said
    limit_mib = int(half["set"][0][1])
    assert limit_mib == pytest.approx(recorded["limit_bytes"] / MIB, rel=0.05), half
    # Half of what it needed in the end is what a run in that meets.
    got = cli("run", "--limit", f"{limit_mib}M", "--stats", str(stats), "--", *argv, timeout=60)
    assert got.code == 0, got.err
    measured, replayed = json.loads(stats.read_text())["vmstat"], half["outcome"]
    assert 0.5 < replayed["pswpin"] / measured["pswpin"] < 2, (replayed, measured)
    assert 0.4 < replayed["pgmajfault"] / measured["pgmajfault"] < 2.5, (replayed, measured)
