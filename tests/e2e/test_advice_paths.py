"""What memory holds does not depend on how a system call is made: by the C library, inline, through an io_uring, or by another
process. The programs check themselves."""
import pytest

from conftest import assert_swapped, foliomem, plain

BY_PIPE = ["vmsplice", "fifo", "tee", "child", "onward"]
BY_SOCKET = ["zerocopy", "sendzc", "fixed"]


def is_right(program, *arguments, torture=False, timeout=None):
    """The program finds its memory right, without foliomem and with it."""
    bare = plain([program, *arguments], timeout=120).ok()
    if bare.out.startswith(b"SKIP"):
        pytest.skip(bare.out.decode())
    result = foliomem([program, *arguments], timeout=timeout or (240 if torture else 120), torture=torture)
    assert result.code == 0, f"{result.out!r}\n{result.err}"
    assert_swapped(result)
    return result


@pytest.mark.parametrize("how", BY_PIPE + BY_SOCKET)
def test_pages_lent_by_inline_calls_reach_the_reader_as_they_were(built, how, torture):
    is_right(built("by_reference.c"), how, torture=torture)


@pytest.mark.parametrize("how", ["vmsplice", "onward", "sendzc"])
def test_pages_lent_after_memory_was_swapped_out_reach_the_reader_as_they_were(built, how, torture):
    is_right(built("by_reference.c"), how, "late", torture=torture)


@pytest.mark.parametrize("when", ["swift", "slow", "threads"])
@pytest.mark.parametrize("way", ["inline", "pidfd"])
def test_a_guard_discards_content_that_was_swapped_out(built, way, when, torture):
    result = is_right(built("guards.c"), way, when, torture=torture)
    if result.stats:
        assert result.stats["vmstat"]["discarded_unheard"] > 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_child_finds_zeros_where_an_inline_call_asked_for_them(built, when, torture):
    is_right(built("fork_advice.c"), when, torture=torture)


def test_advice_of_another_process_changes_no_content(built, torture):
    is_right(built("remote_advice.c"), torture=torture)
