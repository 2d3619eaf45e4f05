"""`foliomem advise`: predictions from one recorded run, and what it does not know."""
import json

import pytest
from conftest import MIB, PROGRAMS, PYTHON, alone, cli, foliomem_only, plain

# On a busy machine a recording may lose events, and then little is known.
pytestmark = [foliomem_only, alone]

ARRAY = [PYTHON, str(PROGRAMS / "big_array.py"), "160"]

# Keeps ARGV[1] blocks of 2 MiB, one after the other. With a second argument it reads all of them at its end.
KEEPER = """
import os, sys, time
kept = []
for _ in range(int(sys.argv[1])):
    kept.append((os.urandom(512) + bytes(3584)) * 512)
    time.sleep(0.01)
if len(sys.argv) > 2:
    print(sum(block[at] for block in kept for at in range(0, len(block), 4096)) > 0)
os._exit(0)
"""


@pytest.fixture(scope="module")
def advised(tmp_path_factory):
    """The trace of a recorded run of numpy, the advice about it as JSON, and how the command went."""
    directory = tmp_path_factory.mktemp("advise")
    trace, advice = directory / "array.mft", directory / "advice.json"
    got = cli("advise", "--limit", "96M", "-o", str(trace), "--json", str(advice), "--", *ARRAY, timeout=240)
    assert got.code == 0, got.err
    return trace, json.loads(advice.read_text()), got


def test_a_run_is_recorded_and_its_table_printed_beside_the_program_s_output(advised):
    _, advice, got = advised
    assert got.out == plain(ARRAY).out
    assert "recorded within 96 MiB" in got.err and "slowdown" in got.err and "at most 20% slower: " in got.err, got.err
    assert advice["recorded_limit_bytes"] == 96 * MIB and advice["processes"] == 1, advice
    assert advice["need_bytes"] > 160 * MIB and advice["lost_events"] == 0, advice
    assert 0 < advice["unlimited_seconds"] <= advice["recorded_seconds"], advice
    table = [line for line in got.err.splitlines() if "%" in line and "x " in line and "|" in line]
    known = [point for point in advice["points"] if point["slowdown"]]
    assert len(table) == len(known) > 3, got.err
    assert [float(line.split()[2].rstrip("x")) for line in table] == [round(point["slowdown"], 2) for point in known]


def test_smaller_limits_are_slower_and_unseen_ones_are_not_known(advised):
    _, advice, got = advised
    limits = [point["limit_bytes"] for point in advice["points"]]
    assert limits == sorted(limits, reverse=True), limits
    known = [point["slowdown"] for point in advice["points"] if point["slowdown"]]
    assert known == sorted(known) and known[0] == pytest.approx(1, abs=0.02) and known[0] < known[-1], known
    for point in advice["points"]:
        is_seen = point["limit_bytes"] >= advice["recorded_limit_bytes"] * 15 / 16
        assert (point["unknown"], point["work"] is None) == ((None, False) if is_seen else ("below-recording", True)), point
    assert limits[-1] < 60 * MIB, "unseen limits are there"
    assert "not known: what the program touches within less than it was recorded in" in got.err, got.err
    least = [of["limit_bytes"] for of in advice["least"] if of["limit_bytes"]]
    assert least and least == sorted(least, reverse=True), advice["least"]


def test_predicted_faults_are_those_of_a_run(advised, tmp_path):
    trace, recorded, _ = advised
    stats, advice = tmp_path / "stats.json", tmp_path / "advice.json"
    cli("advise", str(trace), "--at", "96M,128M", "--json", str(advice), timeout=120).ok()
    for point in json.loads(advice.read_text())["points"]:
        limit = f"{point['limit_bytes'] // MIB}M"
        cli("run", "--limit", limit, "--stats", str(stats), "--", *ARRAY, timeout=120).ok()
        measured = json.loads(stats.read_text())["vmstat"]
        assert 0.4 < point["work"]["pswpin"] / measured["pswpin"] < 2.5, (point, measured)
        assert 0.4 < point["work"]["swap_in_faults"] / measured["pgmajfault"] < 2.5, (point, measured)
    assert recorded["recorded_work"]["swap_in_faults"] > 100, recorded


def test_a_trace_gives_the_same_advice_again(advised):
    trace, advice, got = advised
    again = cli("advise", str(trace), "--json", "-", timeout=120).ok()
    assert json.loads(again.out) == advice
    words = cli("advise", str(trace), timeout=120).ok()
    assert words.out.decode() in got.err and words.err == "", (words.out, got.err)
    chosen = json.loads(cli("advise", str(trace), "--at", "100%,110M", "--json", "-", timeout=120).ok().out)
    assert [point["limit_bytes"] // MIB for point in chosen["points"]] == [advice["need_bytes"] // MIB, 110], chosen
    assert chosen["least"] == advice["least"]


def test_least_limits_do_not_depend_on_the_limits_of_the_table(advised):
    trace, advice, _ = advised
    found_mib = [of["limit_bytes"] // MIB for of in advice["least"] if of["limit_bytes"]]
    beside = ",".join(f"{mib + more}M" for mib in found_mib for more in (2, 5, 9))
    chosen = json.loads(cli("advise", str(trace), "--at", beside, "--json", "-", timeout=240).ok().out)
    assert chosen["least"] == advice["least"], (chosen["least"], advice["least"], beside)


def test_what_fits_a_roomy_limit_is_all_that_a_run_in_it_tells(tmp_path):
    argv = [PYTHON, str(PROGRAMS / "big_array.py"), "96"]
    got = cli("advise", "--limit", "1G", "--json", "-", "--quiet", "--", *argv, timeout=120).ok()
    text = got.out.decode()
    assert text.startswith(plain(argv).out.decode()), "the program's output comes first"
    advice = json.loads(text[text.index("{"):])
    assert advice["points"][0]["slowdown"] == pytest.approx(1, abs=0.02), advice
    assert {point["unknown"] for point in advice["points"][2:]} == {"below-recording"}, advice
    assert advice["recorded_work"]["swap_in_faults"] == 0, advice


@pytest.mark.parametrize("uses, leaks", [([], True), (["all"], False)], ids=["kept", "used"])
def test_memory_that_grows_and_is_never_touched_again_leaks(uses, leaks, tmp_path):
    advice = tmp_path / "advice.json"
    argv = [PYTHON, "-c", KEEPER, "80", *uses]
    got = cli("advise", "--limit", "32M", "--json", str(advice), "--", *argv, timeout=120)
    assert got.code == 0, got.err
    leak = json.loads(advice.read_text())["leak"]
    assert (leak is not None, "leaks: " in got.err) == (leaks, leaks), got.err
    if leaks:
        assert 16 * MIB < leak["grown_pages"] * 4096 < 160 * MIB and leak["idle_pages"] <= leak["grown_pages"], leak


def test_a_failing_program_is_said():
    got = cli("advise", "--limit", "64M", "--", "sh", "-c", "exit 7", timeout=60)
    assert got.code == 0 and "the program ended with code 7: the advice is about that run" in got.err, got.err
    got = cli("advise", "--limit", "64M", "--", "/nonexistent/program")
    assert got.code == 127 and "no such program" in got.err, got.err


def test_a_bad_trace_or_command_line_is_refused_with_the_reason(advised, tmp_path):
    whole = advised[0].read_bytes()
    bad = tmp_path / "bad.mft"
    for bytes_, why in [(whole[:-5], "ends in the middle"), (b"PK\3\4" + whole, "no trace")]:
        bad.write_bytes(bytes_)
        got = cli("advise", str(bad))
        assert got.code == 125 and got.out == b"" and got.err.startswith(f"foliomem: {bad}: at byte ") and why in got.err, got.err
    got = cli("advise", str(tmp_path / "none.mft"))
    assert got.code == 125 and "cannot read the trace" in got.err, got.err
    got = cli("advise", str(advised[0]), "--at", "much")
    assert got.code == 125 and "at (from command line)" in got.err, got.err
    got = cli("advise", str(advised[0]), "--json", "/nowhere/x.json")
    assert got.code == 125 and "cannot write the advice to /nowhere/x.json" in got.err, got.err
    for wrong in [["advise"], ["advise", str(advised[0]), "--", "true"], ["advise", "-o", "x.mft", str(advised[0])]]:
        assert cli(*wrong).code == 2, wrong
