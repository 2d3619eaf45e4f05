"""The programs of foliomem beside each other: `foliomem`, `foliomem-lab`, `foliomem-bench` and what that measures."""
import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import BIN, Running, clean_env, cli, foliomem, foliomem_only

pytestmark = foliomem_only


@pytest.mark.parametrize("command", ["lab", "bench"])
def test_another_program_gets_its_arguments_as_they_are(command):
    got = cli(command, "--help").ok()
    assert f"Usage: foliomem {command} ".encode() in got.out, got.out
    got = cli(command, "--hlep")
    assert got.code == 2 and f"(see foliomem {command} --help)" in got.err, got.err
    assert cli(command).code == 2


@pytest.mark.parametrize("command", ["lab", "bench"])
def test_a_program_that_is_missing_is_named_with_what_to_do(command, tmp_path):
    alone = tmp_path / "foliomem"
    shutil.copy(BIN, alone)
    got = Running([str(alone), command, "--help"], clean_env()).finish(20)
    wanted = f"foliomem-{command} is missing: {tmp_path}/foliomem-{command} must lie beside foliomem"
    assert got.code == 125 and wanted in got.err and f"-p foliomem-{command}" in got.err, got.err


def test_access_is_measured_without_precautions(tmp_path):
    """They cost a third of a fault, and few programs need them."""
    corpus = tmp_path / "corpus"
    corpus.write_bytes(b"".join(b"%015d\n" % number for number in range(1 << 12)))
    child = Path(BIN).resolve().with_name("foliomem-bench-access")
    for threads in [1, 3]:
        got = foliomem([child, "random", 32, threads, 30000, corpus], limit="16M").ok()
        assert got.stats["vmstat"]["pswpin"] > 1000, "every thread verifies what it touches"
    got = foliomem([child, "sequential", 96, 1, 50000, corpus], limit="48M").ok()
    measured = json.loads(got.out)
    assert measured["seconds"] > 0 and 0 < measured["touch_p99_ns"] <= measured["touch_p999_ns"], measured
    assert got.stats["vmstat"]["pswpout"] > 1000 and got.stats["vmstat"]["unseen_callers"] == 0


def test_swap_is_measured_without_precautions():
    """The benchmark fails if the runtime takes any: then folios return page by page."""
    rows = json.loads(cli("bench", "swap", "--sizes", "64K", "--no-kernel", "--json", timeout=150).ok().out)
    assert [row["size_kib"] for row in rows] == [64] and rows[0]["ratio"] > 1 and rows[0]["in_mb_s"] > 0, rows


def test_a_program_that_maps_nothing_is_not_searched(tmp_path):
    """Pages that move between the program, the store and free frames are no new memory."""
    corpus = tmp_path / "corpus"
    corpus.write_bytes(random.Random(1).randbytes(1 << 16))
    child = Path(BIN).resolve().with_name("foliomem-bench-access")
    got = foliomem([child, "random", 48, 1, 60000, corpus], limit="32M").ok()
    vmstat = got.stats["vmstat"]
    assert vmstat["pswpin"] > 20000 and 1 <= vmstat["mapping_searches"] < 60, vmstat


def test_what_the_start_of_a_run_takes_is_measured_in_turns_with_none():
    plain, managed = json.loads(cli("bench", "start", "--runs", "5", "--json").ok().out)
    assert (plain["setting"], managed["setting"], plain["runs"], managed["runs"]) == ("plain", "foliomem", 5, 5)
    assert 0 < plain["fastest_milliseconds"] <= plain["milliseconds"] < managed["milliseconds"] < 1000, (plain, managed)


@pytest.mark.skipif(not shutil.which("perl"), reason="needs perl")
def test_a_language_is_compared_without_the_kernel():
    got = cli("bench", "languages", "--only", "perl", "--no-kernel", "--runs", "1", "--scale", "10",
              "--percent", "80", "--json").ok()
    rows = json.loads(got.out)
    assert [row["setting"] for row in rows] == ["none", "foliomem", "foliomem-unpressed"], rows
    assert all(row["program"] == "perl" and row["result_ok"] and row["runs"] == 1 for row in rows), rows
    need, limited, _ = rows
    assert 16 <= limited["limit_mib"] < need["total_peak_mib"], rows
    got = cli("bench", "languages", "--only", "cobol")
    assert got.code != 0 and "lua, luajit, perl" in got.err, got.err


def test_only_the_agent_brings_its_own_heap():
    """The commands allocate by the C library. (`foliomem` is static and has no dynamic symbols.)"""
    for name in ["foliomem-lab", "foliomem-bench"]:
        undefined = subprocess.run(["nm", "-D", "--undefined-only", Path(BIN).resolve().with_name(name)],
                                   capture_output=True, text=True, check=True).stdout
        assert " malloc" in undefined, name
