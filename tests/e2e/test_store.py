"""What the compressed store takes, and with which codec."""
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


@pytest.mark.skipif(PLAIN, reason="there is no store without foliomem")
def test_idle_pieces_are_recompressed(built, torture):
    argv, limit = ([built("purge.c"), 32, 3], "16M") if torture else ([PYTHON, PROGRAMS / "big_array.py", 96], "48M")
    got = foliomem(argv, limit, torture=torture, options=("--recompress", "zstd:3")).ok()
    assert_swapped(got)
    mm = got.stats["mm_stat"]
    assert mm["recompress_tried"] >= mm["recompressed"], mm
    if torture:
        assert mm["recompressed"] > 0 and mm["recompress_saved"] > 4096, mm
