"""The stress program (tests/stress/stress.c) at every folio size, and under torture.

A failure prints its seed; `stress -s SEED` repeats the operations of each thread."""
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import LONG, assert_swapped, foliomem, plain, soak_only

SECONDS = 60 if LONG else 5
SEED = os.environ.get("STRESS_SEED")
SIZES = {"4K only": "none", "16K": "16K", "64K": "64K", "2M": "2M", "mixed": "16K,64K,2M"}


def run_stress(program, mib, limit, **how):
    command = [program, "-t", SECONDS, "-n", 4, "-m", mib] + (["-s", SEED] if SEED else [])
    got = foliomem(command, limit, timeout=SECONDS * 3 + 30, **how)
    print(got.out.decode(), got.err[-3000:])
    lines = got.ok().out.decode().splitlines()
    assert lines[0].startswith("seed ") and lines[-1] == "ok", lines
    did = {name: int(count) for name, count in re.findall(r"([a-z]+) (\d+)", lines[1])}
    assert all(did[op] > 0 for op in ("write", "verify", "grow", "shrink", "move", "carve", "punch", "discard", "protect", "fork")), did
    assert_swapped(got)
    return got.stats["faults"]


@pytest.mark.parametrize("sizes", [pytest.param(name, marks=() if name in ("4K only", "mixed") else soak_only) for name in SIZES])
def test_stress(stress, sizes):
    run_stress(stress, 256, "64M", options=["--sizes", SIZES[sizes]])


def test_no_fault_is_served_again_and_again_while_a_mapping_changes(stress):
    """A thread that is woken before its page is there raises its fault again at once: 12 to 75 of 100 faults were such."""
    served = {kind: times["count"] for kind, times in run_stress(stress, 192, "96M").items()}
    assert served["spurious"] * 20 < sum(served.values()), served


def test_stress_torture(stress):
    run_stress(stress, 80, "24M", torture=True)


@pytest.mark.parametrize("under", [plain, foliomem], ids=["plain", "foliomem"])
def test_the_canary(stress, under):
    """One bit that is flipped behind its back must end the stress program: else its "ok" means nothing."""
    got = under([stress, "-t", 4, "-n", 2, "-m", 64, "-s", 1, "-c"])
    assert got.code == 1 and b"WRONG: seed 1, thread " in got.out and b", expected " in got.out, got.out


def test_random_access(built):
    """Small parts of folios in and out at random, three programs at once, as pages that are just being moved are touched."""
    program = built("random.c")

    def run(seed):
        return foliomem([program, 300, SECONDS, seed], "150M", timeout=SECONDS * 3 + 60)

    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(run, range(3)))
    for got in runs:
        assert got.ok().out == b"right\n", got.out
        assert_swapped(got)


def test_the_next_page_comes_with_a_touched_one(built):
    """Cells of 5 KiB lie across two pages, half of them across no folio of 8K."""
    got = foliomem([built("random.c"), 96, 3, 1], "48M", timeout=60).ok()
    assert got.out == b"right\n", got.out
    vm = got.stats["vmstat"]
    assert vm["swap_ra"] > vm["pgmajfault"] / 4, vm
