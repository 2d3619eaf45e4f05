"""What the lab writes for other tools: pages and Parquet files, read by others than who wrote them."""
import json
import xml.etree.ElementTree as xml

import pyarrow
import pytest
from conftest import PYTHON, cli, foliomem_only
from pyarrow import parquet

pytestmark = foliomem_only

VARY = ["--vary", "workload.swap-allocator.rounds=4,8", "--vary", "swap.strategy=cluster-lists,nonfull-first"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Runs as JSON has them, and the folder with all that was written."""
    folder = tmp_path_factory.mktemp("lab")
    cli("lab", "run", "swap-allocator", *VARY, *(f"--{kind}={folder}/runs.{kind}" for kind in ["json", "html", "parquet"])).ok()
    return json.loads((folder / "runs.json").read_text()), folder


def test_a_page_is_well_formed_and_has_every_figure(written):
    runs, folder = written
    page = xml.parse(folder / "runs.html")
    cells = {"".join(cell.itertext()) for cell in page.iter("{http://www.w3.org/1999/xhtml}td")}
    for run in runs:
        outcome = run["outcome"]
        numbers = [value for value in outcome.values() if isinstance(value, int)]
        numbers += [value for part in outcome["sizes"] + outcome["rounds"] for value in part.values() if isinstance(value, int)]
        missing = {str(number) for number in numbers if number not in (0, 4, 64)} - cells
        assert not missing and outcome["digest"] in cells, missing
    tags = {element.tag.rpartition("}")[2] for element in page.iter()}
    assert "svg" in tags and not tags & {"script", "link", "img", "iframe", "object", "use"}, tags


def test_a_parquet_file_has_a_row_for_each_run_and_typed_columns(written):
    runs, folder = written
    table = parquet.read_table(folder / "runs.parquet")
    types = {name: table.schema.field(name).type for name in table.column_names}
    assert (types["swap.size_mib"], types["swap.keep_copies"], types["swap.strategy"], types["modelled_cpu_seconds"]) == \
        (pyarrow.int64(), pyarrow.bool_(), pyarrow.string(), pyarrow.float64())
    rows = table.to_pylist()
    assert len(rows) == len(runs) == 4
    for row, run in zip(rows, runs, strict=True):
        outcome = run["outcome"]
        assert all(str(row[key]) == value for key, value in run["set"])
        assert row["scenario"] == "swap-allocator" and row["machine.limit_mib"] == 128
        plain = {name: value for name, value in outcome.items() if not isinstance(value, list)}
        assert {name: row[name] for name in plain} == plain
        for size in outcome["sizes"]:
            assert all(row[f"{name}_{size['kib']}k"] == value for name, value in size.items() if name != "kib")
        assert row["swpout_2048k"] == 0 and row["fallback_percent_2048k"] is None
        assert row["rounds_swpout"] == [part["swpout"] for part in outcome["rounds"]]


def test_a_trace_as_a_table_has_all_events(tmp_path):
    trace, table = tmp_path / "x.mft", tmp_path / "x.parquet"
    code = "x = bytearray(b'abcd' * (1 << 22)); print(sum(x[::4096])); import time; time.sleep(0.5)"
    recorded = cli("record", "-o", str(trace), "--limit", "16M", "--", PYTHON, "-c", code, timeout=60).ok()
    exported = cli("lab", "export", str(trace), "-o", str(table)).ok()
    events = parquet.read_table(table).to_pylist()
    assert f" {len(events)} events" in recorded.err and f": {len(events)} events\n" in exported.err, recorded.err
    kinds = [event["kind"] for event in events]
    assert kinds.count("start") == kinds.count("end") == 1
    totals = {"faults", "took", "computed", "delayed", "moved", "machine"}
    assert {"took", "computed", "moved"} <= set(kinds[kinds.index("end") + 1:]) <= totals, kinds[-10:]
    assert all(isinstance(event["time_us"], int) and event["process"] == 0 for event in events)
    filled = sum(event["pages"] for event in events if event["kind"] == "fill")
    assert filled > 16 << 8, "the array and the interpreter"
    pieces = [event for event in events if event["kind"] == "compressed"]
    assert pieces and all(0 <= event["compressed_bytes"] <= event["pages"] << 12 for event in pieces)
    assert [event["pages"] for event in events if event["kind"] == "limit"] == [4096]


def test_what_cannot_be_written_is_said_before_anything_runs(tmp_path):
    for kind in ["json", "html", "parquet"]:
        got = cli("lab", "run", "kernel-build-64k", f"--{kind}", "/nowhere/x")
        assert got.code == 125 and "cannot write the runs to /nowhere/x" in got.err, got.err
    trace = tmp_path / "x.mft"
    cli("record", "-o", str(trace), "--", "true").ok()
    whole = trace.read_bytes()
    got = cli("lab", "export", str(trace), "-o", str(trace))
    assert got.code == 125 and "is the trace itself" in got.err and trace.read_bytes() == whole, got.err
    got = cli("lab", "export", str(trace), "-o", "/nowhere/x")
    assert got.code == 125 and "cannot write /nowhere/x" in got.err, got.err
    got = cli("lab", "export", str(tmp_path / "none.mft"), "-o", str(tmp_path / "none.parquet"))
    assert got.code == 125 and "cannot read the trace" in got.err and not (tmp_path / "none.parquet").exists(), got.err


def test_of_many_runs_the_one_that_fails_is_named():
    got = cli("lab", "run", "swap-allocator", "--vary", "machine.limit_mib=128,16", "--vary", "swap.size_mib=64,2", "--vary",
              "workload.swap-allocator.rounds=1")
    assert got.code == 125 and "machine.limit_mib=16 swap.size_mib=2 " in got.err and "out of memory after" in got.err, got.err
