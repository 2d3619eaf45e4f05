"""What memory holds does not depend on how a system call is made: by the C library, inline, through an io_uring, or by another
process. The programs check themselves."""
import sys

import pytest

from conftest import assert_swapped, few_cases, foliomem, plain, same_as_plain

BY_PIPE = ["vmsplice", "fifo", "tee", "child", "onward"]
BY_SOCKET = ["zerocopy", "sendzc", "fixed"]


# A third of what the programs write to.
LIMIT = "32M"


def is_right(program, *arguments, torture=False):
    """The program finds its memory right, without foliomem and with it."""
    bare = plain([program, *arguments], timeout=120).ok()
    if bare.out.startswith(b"SKIP"):
        pytest.skip(bare.out.decode())
    result = foliomem([program, *arguments], LIMIT, timeout=240 if torture else 120, torture=torture)
    assert result.code == 0, f"{result.out!r}\n{result.err}"
    assert_swapped(result)
    return result


@few_cases
@pytest.mark.parametrize("how", BY_PIPE + BY_SOCKET)
def test_pages_lent_by_inline_calls_reach_the_reader_as_they_were(built, how, torture):
    is_right(built("by_reference.c"), how, torture=torture)


@few_cases
@pytest.mark.parametrize("how", ["vmsplice", "onward", "sendzc"])
def test_pages_lent_after_memory_was_swapped_out_reach_the_reader_as_they_were(built, how, torture):
    is_right(built("by_reference.c"), how, "late", torture=torture)


@few_cases
@pytest.mark.parametrize("when", ["swift", "slow", "threads"])
@pytest.mark.parametrize("way", ["inline", "pidfd"])
def test_a_guard_discards_content_that_was_swapped_out(built, way, when, torture):
    result = is_right(built("guards.c"), way, when, torture=torture)
    if result.stats:
        assert result.stats["vmstat"]["discarded_unheard"] > 0
        assert result.stats["vmstat"]["unseen_callers"] == 1


@pytest.fixture
def inline_library(built, monkeypatch):
    """The code for inline calls, in a library that is loaded late."""
    monkeypatch.setenv("INLINE_CALLS", str(built("inline_call.c", "-shared", "-fPIC")))


@few_cases
@pytest.mark.parametrize("when", ["swift", "slow", "threads"])
@pytest.mark.parametrize("way", ["inline", "pidfd"])
def test_a_guard_by_a_library_that_is_loaded_late_discards_content(built, inline_library, way, when, torture):
    result = is_right(built("guards.c", "-DLIBRARY"), way, when, torture=torture)
    if result.stats:
        assert result.stats["vmstat"]["discarded_unheard"] > 0
        assert result.stats["vmstat"]["unseen_callers"] == 1


@few_cases
@pytest.mark.parametrize("when", ["swift", "threads"])
@pytest.mark.parametrize("way", ["function", "syscall", "pidfd-syscall", "handle", "namespace"])
def test_a_guard_by_the_c_library_is_seen_whichever_way_it_is_called(built, way, when, torture):
    result = is_right(built("guards.c", "-DLIBRARY"), way, when, torture=torture)
    if result.stats:
        assert result.stats["vmstat"]["unseen_callers"] == 0


@few_cases
@pytest.mark.parametrize("when", [(), ("late",)])
@pytest.mark.parametrize("how", ["vmsplice", "tee", "zerocopy"])
def test_pages_lent_by_a_library_that_is_loaded_late_stay_as_they_were(built, inline_library, how, when, torture):
    is_right(built("by_reference.c", "-DLIBRARY"), how, *when, torture=torture)


BY_CTYPES = """
import ctypes, mmap, os, sys
libc = ctypes.CDLL("libc.so.6", use_errno=True)
reader, writer = os.pipe()
lent = mmap.mmap(-1, 16 << 12)
lent.write(b"".join(bytes([65 + page]) * 4096 for page in range(16)))
address = ctypes.addressof(ctypes.c_char.from_buffer(lent))
vector = (ctypes.c_size_t * 2)(address, 16 << 12)
if sys.argv[1] == "function":
    done = libc.vmsplice(writer, vector, 1, 0)
else:
    done = libc.syscall(278, writer, vector, 1, 0)
assert done == 16 << 12, ctypes.get_errno()
pressure = bytearray(80 << 20)
for round in range(3):
    for at in range(0, len(pressure), 4096):
        pressure[at:at + 8] = at.to_bytes(8, "little")
read = b""
while len(read) < 16 << 12:
    read += os.read(reader, 1 << 16)
assert read == lent[:], "other content at the reader"
"""


@pytest.mark.parametrize("way", ["function", "syscall"])
def test_pages_lent_through_ctypes_reach_the_reader_as_they_were(way, torture):
    is_right(sys.executable, "-c", BY_CTYPES, way, torture=torture)


def test_ordinary_programs_make_no_calls_that_are_not_seen(built):
    """Precautions against such calls cost a third of a fault."""
    for program in (["/bin/bash", "-c", "true"], [sys.executable, "-c", "import ctypes, json, sqlite3, ssl"],
                    [built("guards.c", "-DLIBRARY"), "function", "swift"]):
        result = foliomem(program, torture=True).ok()
        assert result.stats["vmstat"]["unseen_callers"] == 0, program


def test_openmp_waits_by_its_own_machine_code_and_needs_no_precautions(built, torture):
    """The numbers of its calls are in registers over loops. With the precautions it takes 50 times as long."""
    result = same_as_plain([built("sweeps.c", "-fopenmp"), 40 if torture else 160], "80M", torture)
    assert result.stats["vmstat"]["unseen_callers"] == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_child_finds_zeros_where_an_inline_call_asked_for_them(built, when, torture):
    is_right(built("fork_advice.c"), when, torture=torture)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_child_lacks_what_the_parent_has_left_out_of_forks(built, when, torture):
    is_right(built("fork_left_out.c"), when, torture=torture)


def test_a_child_has_what_lies_beside_memory_that_is_left_out(built, torture):
    """All managed memory is left out of forks that the agent does not see, which merges mappings that advice keeps apart."""
    is_right(built("fork_beside.c"), torture=torture)


def test_advice_of_another_process_changes_no_content(built, torture):
    is_right(built("remote_advice.c"), torture=torture)
