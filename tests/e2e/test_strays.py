"""Zeros that the kernel puts into a child's memory before foliomem manages it: the child reads its own content all the same."""
import os
from contextlib import ExitStack

import pytest
from conftest import LONG, THP, alone, assert_swapped, foliomem, foliomem_only, huge_page_setting, same_as_plain

pytestmark = foliomem_only


@alone  # It changes settings of the whole machine.
def test_no_child_has_zeros_where_the_kernel_makes_huge_pages(built, torture):
    """khugepaged searches without a pause, and fills the gaps of any memory with zeros."""
    if not os.access(THP / "enabled", os.W_OK):
        pytest.skip("needs root, and a kernel with huge pages")
    with ExitStack() as settings:
        for name, value in {
            "enabled": "always",
            "hugepages-2048kB/enabled": "inherit",
            "khugepaged/scan_sleep_millisecs": "0",
            "khugepaged/alloc_sleep_millisecs": "0",
            "khugepaged/pages_to_scan": "100000",
            "khugepaged/max_ptes_none": "511",
        }.items():
            settings.enter_context(huge_page_setting(name, value))
        mib, forks, limit = (64, 8, "32M") if torture else (256, 60 if LONG else 20, "64M")
        assert same_as_plain([built("fork_gaps.c"), mib, forks], limit, torture).out == b"OK\n"


def test_a_debugger_that_reads_a_new_child_takes_nothing_from_it(built, torture):
    got = foliomem([built("fork_peeked.c")], "40M", torture=torture).ok()
    assert got.out.endswith(b"OK\n")
    assert_swapped(got)
    # What it tests happened: the debugger itself saw no content, because nobody serves its faults.
    assert b"\n0 of" not in got.out, got.out
