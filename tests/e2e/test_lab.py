"""The lab's commands: what they print, and how they refuse."""
import json

from conftest import cli, foliomem_only

pytestmark = foliomem_only


def test_every_listed_scenario_has_a_line():
    lines = cli("lab", "list").out.decode().splitlines()
    assert {"swap-allocator", "kernel-build-64k", "kernel-build-all-sizes"} <= {line.split()[0] for line in lines}
    assert all(len(line.split()) > 3 for line in lines)


def test_runs_are_the_same_by_any_number_of_threads():
    def runs(threads):
        got = cli("lab", "run", "swap-allocator", "--set", "swap.swap_in=page,whole", "--set",
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
        got = cli("lab", "run", "swap-allocator", "--set", setting)
        assert got.code == 125 and f"--set {setting}: " in got.err and why in got.err, got.err


def test_a_program_that_fits_nowhere_ends():
    got = cli("lab", "run", "swap-allocator", "--set", "machine.limit_mib=16", "--set", "swap.size_mib=2")
    assert got.code == 125 and "out of memory after" in got.err and "swap.size_mib" in got.err, got.err
