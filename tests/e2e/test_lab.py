"""The lab's commands: what they print, and how they refuse."""
import json

from conftest import REPO, cli, foliomem_only, soak_only

pytestmark = foliomem_only


def test_every_listed_scenario_has_a_line():
    lines = cli("lab", "list").out.decode().splitlines()
    assert {"swap-allocator", "kernel-build-64k", "kernel-build-all-sizes"} <= {line.split()[0] for line in lines}
    assert all(len(line.split()) > 3 for line in lines)


def test_runs_are_the_same_by_any_number_of_threads():
    def runs(threads):
        got = cli("lab", "run", "swap-allocator", "--vary", "swap.swap_in=page,whole", "--vary",
                  "workload.swap-allocator.rounds=8", "--threads", threads, "--json", "-")
        return json.loads(got.out)
    page, whole = runs("2")
    assert runs("1") == [page, whole]
    assert page["outcome"]["rounds"][7]["swpout_fallback"] > 9 * page["outcome"]["rounds"][7]["swpout"]
    assert all(round["swpout_fallback"] == 0 for round in whole["outcome"]["rounds"])


def test_a_bad_scenario_is_refused_with_file_line_and_reason(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text('about = "x"\nseed = many\n')
    got = cli("lab", "run", str(bad))
    assert got.code == 125 and got.err.startswith(f"foliomem: {bad}:2: "), got.err
    for setting, why in [("swap.strategy=best", "unknown swap strategy"), ("swap.size=3", "there is no")]:
        got = cli("lab", "run", "swap-allocator", "--vary", setting)
        assert got.code == 125 and f"--vary {setting}: " in got.err and why in got.err, got.err


def test_a_program_that_fits_nowhere_ends():
    got = cli("lab", "run", "swap-allocator", "--vary", "machine.limit_mib=16", "--vary", "swap.size_mib=2")
    assert got.code == 125 and "out of memory after" in got.err and "swap.size_mib" in got.err, got.err


def test_costs_come_from_a_file_or_it_is_refused_with_its_line(tmp_path):
    reference = (REPO / "crates/lab/src/costs/reference.toml").read_text()
    slow = tmp_path / "slow.toml"

    def seconds(costs):
        slow.write_text(costs)
        got = cli("lab", "run", "swap-allocator", "--costs", str(slow), "--vary", "workload.swap-allocator.rounds=2",
                  "--json", "-").ok()
        return json.loads(got.out)[0]["outcome"]["modelled_cpu_seconds"]
    assert seconds(reference.replace("fault_ns = 5700", "fault_ns = 5700000")) > 10 * seconds(reference)
    slow.write_text(reference.replace("touch_ns = 100", "touch_ns = fast"))
    got = cli("lab", "run", "swap-allocator", "--costs", str(slow))
    line = reference[:reference.index("touch_ns")].count("\n") + 1
    assert got.code == 125 and got.err.startswith(f"foliomem: {slow}:{line}: "), got.err
    got = cli("lab", "run", "swap-allocator", "--costs", str(tmp_path / "none.toml"))
    assert got.code == 125 and "cannot read the costs" in got.err and "lab calibrate" in got.err, got.err


@soak_only
def test_calibrate_writes_costs_that_run_takes(tmp_path):
    costs = tmp_path / "costs.toml"
    cli("lab", "calibrate", "-o", str(costs), timeout=180).ok()
    got = cli("lab", "run", "swap-bandwidth", "--costs", str(costs), "--vary", "workload.swap-bandwidth.rounds=1").ok()
    assert "Linux" in got.err and "CPUs" in got.err, got.err
    assert "modelled" in got.out.decode()


def test_the_speed_of_the_lab_is_measured():
    rows = json.loads(cli("bench", "lab", "--runs", "1", "--json", timeout=150).ok().out)
    assert [row["scenario"] for row in rows] == ["usemem", "swap-allocator", "kernel-build-64k", "replay"]
    assert all(row["events_per_s"] > 1e5 and row["page_events"] > 1e5 for row in rows), rows
    assert rows[0]["bytes_per_page"] < 64, rows[0]
