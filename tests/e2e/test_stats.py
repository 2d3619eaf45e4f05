"""Each counter of `--stats` moves in some test, or in a test of a crate where no program makes it move."""
import json
from pathlib import Path

import pytest
from conftest import MOVED, MOVED_FOLDER, REPO, alone, counters, foliomem, foliomem_only

pytestmark = foliomem_only
# Where what moves them is tested, for those that no end-to-end test moves in each run.
ELSEWHERE = {
    "split_failed": ("docs/reference/stats.md", "always 0: a split is a change of the page table"),
    "store_corrupted": ("crates/core/tests/engine_model/stored_pieces.rs", "vm.store_corrupted.get(), 1"),
    "swpin_fallback_charge": ("crates/core/tests/engine_model/room.rs", "size.swpin_fallback_charge.get()), (1, 1)"),
    "swpout_fallback": ("crates/core/tests/engine_model/room.rs", "size.swpout_fallback.get()), (32, 1)"),
}


@alone
@pytest.mark.skipif(not MOVED_FOLDER, reason="needs the counters of all other tests: make e2e")
def test_every_counter_moves():
    names = {name for name, _ in counters(foliomem(["true"]).ok().stats)}
    moved = MOVED.union(*(json.loads(file.read_text()) for file in Path(MOVED_FOLDER).glob("*.json")))
    assert len(names) > 70
    assert not sorted(names - moved - set(ELSEWHERE))


def test_counters_that_move_elsewhere_do():
    for name, (file, text) in ELSEWHERE.items():
        assert text in (REPO / file).read_text(), name
