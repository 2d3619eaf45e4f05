"""System calls that read from or write into buffers that are swapped out, or say something about them."""
import pytest
from conftest import LONG, assert_swapped, foliomem, plain, same_as_plain

MODES = ["pipe", "file", "direct", "socket", "process_vm", "futex", "io_uring", "io_uring_fixed",
         "wipeonfork", "guard", "mlockall"]


@pytest.mark.parametrize("mode", MODES)
def test_syscall(mode, torture, built, tmp_path):
    # What is registered with a ring is pinned.
    pinned = "fixed" in mode
    size, limit = (4 if pinned else 12, "16M") if torture else (16, "48M" if pinned else "32M")
    command = [built("syscalls.c"), mode, size]
    if plain(command, cwd=tmp_path).code == 77:
        pytest.skip(f"this kernel or file system has no {mode}")
    got = foliomem(command, limit, torture=torture, cwd=tmp_path).ok()
    assert got.out == f"{mode} ok\n".encode()
    if not (pinned and torture):
        assert_swapped(got)


def test_the_kernel_clears_the_words_of_threads_that_end(built, torture):
    """A thread of clone(2) cannot take a fault when it ends, so the word that the kernel then clears must be resident."""
    same_as_plain([built("cleared_words.c"), 16], "32M", torture)


def test_a_mapping_that_grows_page_by_page(built, torture):
    """Between being found and being registered it grows: what the kernel keeps apart then is made one for the next step."""
    for _ in range(3 if LONG else 1):
        same_as_plain([built("regrow.c"), 40 if torture else 80], "24M", torture)


def test_memory_that_is_added_to_a_mapping_becomes_part_of_it(built, torture):
    """When it is registered it is merged with the mapping below, as the kernel merged them for the program, which moves both as one."""
    same_as_plain([built("joined.c"), 16 if torture else 96], "64M", torture)


def test_reserved_address_space(built, torture):
    """What is committed step by step, taken back, executed or moved is as it would be without us, though we register reserves."""
    same_as_plain([built("reserve.c")], "64M", torture)
