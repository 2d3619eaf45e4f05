"""Folio sizes: the policy, what the program says about its mappings, `foliomem ctl`, and real huge pages."""
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import (BIN, PROGRAMS, PYTHON, THP, alone, assert_swapped, clean_env, cli, foliomem, foliomem_only, huge_page_setting,
                      plain, same_as_plain, start)
from test_limit import sampled

pytestmark = foliomem_only
# 160 MiB and the headroom.
LIMIT = "163M"
# Enough that foliomem manages the program, little enough that nothing is reclaimed.
ENGAGE = "map-unseen 137\ntouch\nmap 16\n"
# Some tenths of a second, in which a busy machine gets to reclaim.
LATER = "map 1\ntouch\n" * 5


def huge_pages_possible():
    """Whether the kernel gives huge pages to who asks for them."""
    def holds(file):
        text = (THP / file).read_text() if (THP / file).exists() else "[never]"
        return re.search(r"\[(\w+)\]", text)[1]
    pmd = holds("hugepages-2048kB/enabled")
    return pmd in ("always", "madvise") or pmd == "inherit" and holds("enabled") != "never"


needs_huge = pytest.mark.skipif(not huge_pages_possible(), reason="the kernel gives no huge pages")


@pytest.fixture(scope="session")
def program(built):
    return built("sizes.c")


def commands(program, text, sizes, limit=LIMIT, **how):
    got = foliomem([program], limit, options=["--sizes", sizes], stdin=text.encode(), **how).ok()
    return got, [int(n) for n in re.findall(rb"huge (-?\d+)", got.out)]


def allocated(stats):
    """First touches by folio size in KiB."""
    counts = {int(name[10:-2]): size["anon_fault_alloc"] for name, size in stats.items() if name.startswith("hugepages-")}
    return {kib: count for kib, count in counts.items() if count}


def large_mib(stats):
    return sum(kib * count for kib, count in allocated(stats).items() if kib > 4) / 1024


# ---- what the program says ----

@pytest.mark.parametrize("sizes, said, large", [
    ("64K", "", True),
    ("64K", "huge\n", True),
    ("64K", "nohuge\n", False),
    ("64K", "disable 0\n", False),
    ("64K=madvise", "", False),
    ("64K=madvise", "huge\n", True),
    ("64K=madvise", "raw-huge\n", True),
    ("64K=madvise", "huge\nnohuge\n", False),
    ("64K=madvise", "nohuge\nhuge\n", True),
    ("64K=inherit", "huge\n", True),
    ("64K=inherit", "", False),
    ("64K=inherit,enabled=always", "", True),
    ("64K=inherit,enabled=never", "huge\n", False),
    ("64K=never", "huge\n", False),
])
def test_what_the_program_says_counts(program, sizes, said, large):
    got, _ = commands(program, ENGAGE + said + "touch\n", sizes)
    # Some of the 16 MiB may be touched before foliomem takes over what is new; 2 before them are touched before anything is said.
    expected = large_mib(got.stats) > 14 if large else large_mib(got.stats) < 3
    assert expected, allocated(got.stats)


@pytest.mark.parametrize("said, sizes, large", [("huge", "64K=madvise", True), ("nohuge", "64K", False)])
def test_advice_before_foliomem_manages_anything(program, said, sizes, large):
    """Advice is as old as the program; its mappings become folios of the sizes it asked for when they are adopted."""
    got, _ = commands(program, f"map-unseen 150\n{said}\ntouch\nmap-unseen 60\nnohuge\ntouch\n" + LATER, sizes)
    assert got.stats["vmstat"]["pswpout"] > 0
    assert (got.stats["hugepages-64kB"]["swpout"] > 100) == large, got.stats["hugepages-64kB"]


def test_advice_on_a_part_follows_splits_and_moves(program):
    """Only the part that asked has large folios, also after it has moved and its middle has gone."""
    moved = "part 4 12\nhuge\nremap\ntouch\n"
    got, _ = commands(program, ENGAGE + moved + "map 8\ntouch\n", "64K=madvise")
    assert 7 < large_mib(got.stats) <= 8, allocated(got.stats)
    cut = "part 0 16\nhuge\npart 4 12\nunmap\npart 12 16\ntouch\npart 0 4\ntouch\n"
    got, _ = commands(program, ENGAGE + cut, "64K=madvise")
    assert 7 < large_mib(got.stats) <= 8, allocated(got.stats)


def test_advice_goes_with_a_mapping_that_is_unmapped(program):
    got, _ = commands(program, ENGAGE + "huge\nunmap\nmap 16\ntouch\n", "64K=madvise")
    assert large_mib(got.stats) < 1, allocated(got.stats)


def test_a_child_has_its_parents_advice(program):
    got, _ = commands(program, ENGAGE + "huge\nfork\ntouch\n", "64K=madvise")
    assert large_mib(got.stats) > 14, allocated(got.stats)
    got, _ = commands(program, ENGAGE + "fork\ntouch\n", "64K=madvise")
    assert large_mib(got.stats) < 1, allocated(got.stats)


# ---- folios that lose a part ----

def assert_splits(stats, split, deferred, partially_mapped, kib=64):
    size = stats[f"hugepages-{kib}kB"]
    assert (size["split_deferred"], size["nr_anon_partially_mapped"]) == (deferred, partially_mapped), size
    # One or two more where the program touched what was just being taken over.
    assert split <= size["split"] <= split + 2, size


@pytest.mark.parametrize("how, partially_mapped", [("dontneed", 0), ("free", 0), ("rawfree", 16), ("unmap", 16)])
def test_a_folio_that_loses_a_part_is_queued_and_not_split(program, how, partially_mapped):
    """What is discarded at once, or freed lazily where memory is short, is healed in the end, when the program reads that there are zeros."""
    got, _ = commands(program, ENGAGE + f"touch\nlose-{how} 32\n", "64K")
    assert_splits(got.stats, 0, 16, partially_mapped)


@pytest.mark.parametrize("how", ["dontneed", "unmap"])
def test_a_folio_that_goes_by_parts_is_never_split(program, how):
    got, _ = commands(program, ENGAGE + f"touch\nlose-{how} 32\nlose-{how} 64\n", "64K")
    assert_splits(got.stats, 0, 16, 0)


def test_what_a_folio_has_lost_joins_it_again(program):
    got, _ = commands(program, ENGAGE + "touch\nlose-dontneed 40\n" + "touch\nlose-dontneed 24\ntouch\n", "64K")
    assert_splits(got.stats, 0, 32, 0)
    # A part that is mapped anew where folios of this size may not be any more is none of it.
    got, _ = commands(program, ENGAGE + "touch\nlose-dontneed 40\nnohuge\ntouch\n", "64K")
    assert_splits(got.stats, 16, 16, 0)


@needs_huge
def test_a_huge_page_that_loses_a_part_stays_one_folio(program):
    got, huge = commands(program, ENGAGE + "touch\nsmaps\npart 0 1\nlose-dontneed 1024\nsmaps\ntouch\n", "2M")
    assert huge[0] - huge[1] == 2, "its pages are the system's"
    assert_splits(got.stats, 0, 1, 0, kib=2048)


@pytest.mark.parametrize("how", ["lose-dontneed 128", "lose-free 128", "lose-rawfree 128", "unmap", "pageout", "cold"])
def test_advice_for_whole_folios_splits_none(program, how):
    got, _ = commands(program, ENGAGE + f"touch\n{how}\n", "64K")
    assert_splits(got.stats, 0, 0, 0)


def test_reclaim_splits_what_is_left(program):
    got, _ = commands(program, ENGAGE + "touch\nlose-dontneed 32\n" + "map 48\ntouch\n" * 4, "64K")
    size = got.stats["hugepages-64kB"]
    assert (size["split_deferred"], size["nr_anon_partially_mapped"]) == (16, 0) and size["split"] >= 16, size
    assert got.stats["hugepages-32kB"]["swpout"] >= 16, "the largest folios that were left"


@pytest.mark.parametrize("sizes", ["16K,32K,64K", "2M"])
def test_an_allocator_that_purges(built, sizes, torture):
    size, limit = (24, "16M") if torture else (200, "110M")
    got = same_as_plain([built("purge.c"), size, 3], limit, torture, options=["--sizes", sizes])
    if not torture:  # There the little it touches may all be touched before it is managed.
        large = got.stats[f"hugepages-{2048 if sizes == '2M' else 64}kB"]
        assert large["split_deferred"] > 0, large


# ---- real huge pages ----

@needs_huge
@pytest.mark.parametrize("sizes, said", [("2M", ""), ("2M=madvise", "huge\n"), ("2M=inherit,enabled=madvise", "huge\n")])
def test_a_folio_of_2m_is_a_huge_page(program, sizes, said):
    got, huge = commands(program, ENGAGE + said + "touch\nsmaps\n", sizes)
    assert allocated(got.stats).get(2048, 0) >= 7, allocated(got.stats)
    assert huge[0] >= 14, huge


@needs_huge
def test_huge_pages_go_out_and_come_back(program):
    text = ENGAGE + "touch\nsmaps\n" + "".join("map 16\ntouch\n" for _ in range(8)) + "verify\nsmaps\n"
    got, huge = commands(program, text, "2M")
    assert huge[0] >= 14
    assert got.stats["hugepages-2048kB"]["swpout"] > 20 and got.stats["hugepages-2048kB"]["swpin"] > 20
    assert_swapped(got)


@needs_huge
def test_no_huge_page_where_it_is_not_asked_for(program):
    for sizes, said in (("64K", ""), ("2M=madvise", ""), ("2M", "nohuge\n"), ("2M", "disable 0\n")):
        _, huge = commands(program, ENGAGE + said + "smaps\ntouch\nsmaps\n", sizes)
        assert huge == [0, 0], (sizes, said)


@needs_huge
@alone  # It changes a setting of the whole machine, which the tests above need as it was.
def test_without_huge_pages_of_the_kernel_folios_of_2m_are_made_of_small_ones(program):
    if not os.access(THP / "hugepages-2048kB/enabled", os.W_OK):
        pytest.skip("needs root")
    with huge_page_setting("hugepages-2048kB/enabled", "never"):
        got, huge = commands(program, ENGAGE + "touch\nsmaps\n" + "map 16\ntouch\n" * 4 + "verify\n", "2M")
    assert allocated(got.stats).get(2048, 0) >= 7 and huge == [0]
    assert_swapped(got)


@needs_huge
@pytest.mark.parametrize("sizes", ["2M", "16K,64K,2M"])
def test_huge_pages_stay_inside_the_limit(built, sizes, torture):
    # The start of an interpreter whose every huge page goes out all the time takes a minute.
    argv, limit = ([built("fills.c"), 40, 2], 24) if torture else ([PYTHON, PROGRAMS / "big_array.py", 200], 64)
    assert sampled(argv, limit, torture, ["--sizes", sizes]).out == plain(argv).ok().out


@needs_huge
def test_a_huge_page_that_is_unmapped_in_part_goes_back(program):
    """What is left of it is pages of their own: the rest is not kept, which no process's smaps would show."""
    splits = lambda: int(re.search(r"thp_split_page (\d+)", Path("/proc/vmstat").read_text())[1])
    before = splits()
    text = ENGAGE + "touch\nsmaps\n" + "".join(f"part {mib} {mib + 1}\nunmap\n" for mib in range(0, 16, 2)) + "smaps\n"
    got, huge = commands(program, text, "2M")
    assert huge[0] >= 14 and huge[1] == 0, huge
    assert splits() - before >= 7


# ---- ctl ----

def end(running):
    os.kill(running.pid, signal.SIGTERM)
    running.finish(20)


def sizes_of(pid, *change, code=0):
    got = cli("ctl", pid, "sizes", *change)
    assert got.code == code, got.err
    return got.out.decode()


def test_ctl_shows_what_holds_as_the_kernel_does():
    running = start(["sh", "-c", "echo $$; sleep 30"], options=["--sizes", "16K,64K=madvise,2M=inherit"])
    pid = running.wait_output(b"\n").decode().strip()
    shown = sizes_of(pid)
    assert shown.splitlines()[0].split() == ["enabled", "always", "[madvise]", "never"]
    lines = dict(line.split(None, 1) for line in shown.splitlines())
    assert lines["16K"] == "[always] inherit madvise never"
    assert lines["64K"] == "always inherit [madvise] never"
    assert lines["2M"] == "always [inherit] madvise never"
    assert lines["8K"] == "always inherit madvise [never]"
    # The same by the supervisor's pid; what is not named stays, and it holds for all.
    assert sizes_of(running.pid, "64K=never,1M,enabled=always") == ""
    lines = dict(line.split(None, 1) for line in sizes_of(pid).splitlines())
    assert "[never]" in lines["64K"] and "[always]" in lines["1M"] and "[always]" in lines["16K"]
    assert lines["enabled"] == "[always] madvise never"
    sizes_of(pid, "none,32K")
    lines = dict(line.split(None, 1) for line in sizes_of(running.pid).splitlines())
    assert [size for size, line in lines.items() if "[always]" in line] == ["enabled", "32K"]
    end(running)


def test_ctl_changes_a_running_program(program):
    read, write = os.pipe()
    running = start([program], LIMIT, options=["--sizes", "none"], stdin=read)
    os.close(read)
    os.write(write, ENGAGE.encode() + b"touch\n")
    pid = int(re.search(rb"pid (\d+)", running.wait_output(b"ok\n" * 4))[1])
    sizes_of(pid, "256K")
    os.write(write, b"map 8\ntouch\n")
    running.wait_output(b"ok\n" * 6)
    sizes_of(pid, "256K=never,32K=madvise")
    os.write(write, b"map 8\nhuge\ntouch\nmap 8\ntouch\n")
    os.close(write)
    got = running.finish().ok()
    sizes = allocated(got.stats)
    # (With 2 MiB before the mapping.)
    assert 7 <= sizes[256] * 256 / 1024 <= 10 and 7 <= sizes[32] * 32 / 1024 <= 8 and sizes[4] >= 20 * 256, sizes


def test_ctl_of_what_is_no_run(tmp_path):
    other = subprocess.Popen(["sleep", "30"])
    gone = subprocess.Popen(["true"])
    gone.wait()
    # It has something of the segment's name open, and mapped.
    fake = ("import mmap, os, sys, time\nfd = os.memfd_create('foliomem-control')\nos.truncate(fd, 1 << 20)\n"
            "m = mmap.mmap(fd, 1 << 20)\nprint('ready', flush=True)\ntime.sleep(30)")
    liar = subprocess.Popen([PYTHON, "-c", fake], stdout=subprocess.PIPE)
    assert liar.stdout.readline() == b"ready\n"
    try:
        for pid, wanted in ((other.pid, "not part of a run"), (gone.pid, "no process"), (0, "no process"),
                            (liar.pid, "version"), (4194305, "no process")):
            for change in ([], ["64K"]):
                got = cli("ctl", pid, "sizes", *change)
                assert got.code == 125 and wanted in got.err, (pid, got.err)
                assert got.err.startswith("foliomem: ") and got.err.count("\n") == 1
        for wrong in ("-1", "x", "99999999999"):
            assert cli("ctl", wrong, "sizes").code == 2
    finally:
        for process in (other, liar):
            process.kill()
            process.wait()


def test_ctl_of_somebody_elses_run():
    if os.geteuid() != 0:
        pytest.skip("needs root")
    running = start(["sleep", "30"])
    time.sleep(0.5)
    got = subprocess.run([BIN, "ctl", str(running.pid), "sizes", "64K"], user=65534, group=65534, capture_output=True, text=True,
                         env=clean_env())
    assert got.returncode != 0 and got.stderr.count("\n") == 1, got
    end(running)


def test_ctl_with_a_wrong_list_changes_nothing():
    running = start(["sleep", "30"])
    time.sleep(0.5)
    before = sizes_of(running.pid)
    for wrong in ("64K=on", "16K,3M", "enabled=inherit", "", "4K=never"):
        got = cli("ctl", running.pid, "sizes", wrong)
        assert got.code == 125 and got.err.startswith("foliomem: sizes") and got.err.count("\n") == 1, got.err
    assert sizes_of(running.pid) == before
    end(running)


def test_ctl_of_many_at_once():
    running = start(["sleep", "30"], options=["--sizes", "none"])
    time.sleep(0.5)
    sizes = ["8K", "16K", "32K", "64K", "128K", "256K", "512K", "1M", "2M"]
    all_at_once = [subprocess.Popen([BIN, "ctl", str(running.pid), "sizes", size], env=clean_env()) for size in sizes]
    assert [process.wait() for process in all_at_once] == [0] * len(sizes)
    assert sizes_of(running.pid).count("[always]") == len(sizes)
    end(running)
