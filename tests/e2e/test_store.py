"""What the compressed store takes without the bytes in it."""
import pytest
from conftest import PLAIN, PROGRAMS, PYTHON, assert_swapped, foliomem


@pytest.mark.skipif(PLAIN, reason="there is no store without foliomem")
@pytest.mark.parametrize("granule", ["4K", "64K"])
def test_holes_are_compacted_away(granule):
    got = foliomem([PYTHON, PROGRAMS / "holes.py"], "80M", options=("--granule", granule)).ok()
    assert got.out == b"True\n"
    assert_swapped(got)
    mm = got.stats["mm_stat"]
    assert mm["mem_used_total"] > 12 << 20, mm
    assert mm["compr_data_size"] >= 0.88 * mm["mem_used_total"], mm
    if granule == "4K":
        assert mm["pages_compacted"] > 0, mm
