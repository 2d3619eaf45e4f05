"""The limit, seen from outside: memory of the tree sampled while it runs, and data that cannot be compressed."""
import ctypes
import threading
from pathlib import Path

import pytest
from conftest import MIB, PROGRAMS, PYTHON, alone, assert_swapped, foliomem, foliomem_only, plain, same_as_plain, soak_only, start

# A sample that is late, or counts moving pages twice, may be above the limit: these tests run alone.
pytestmark = [foliomem_only, alone]
LIBC = ctypes.CDLL(None)
# Shared memory counts too: it could hold what anonymous memory does not.
KINDS = ("Pss_Anon:", "Pss_Shmem:")
RESIDENT = ("RssAnon:", "RssShmem:")
RANDOM = ("import hashlib, os, sys\nparts = [os.urandom(1 << 20) for _ in range(int(sys.argv[1]))]\n"
          "sums = [hashlib.md5(p).digest() for p in parts]\n"
          "for turn in range(2): assert [hashlib.md5(p).digest() for p in parts] == sums\nprint('intact', len(parts))")


def comm(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def of_different_memories(pids):
    """One process of each memory: a companion that has just started still has the name of its program."""
    found = []
    for pid in pids:
        if not any(share_memory(pid, other) for other in found):
            found.append(pid)
    return found


def share_memory(one, other):
    kcmp, vm = 312, 1
    return LIBC.syscall(kcmp, one, other, vm, 0, 0) == 0


def tree(pid):
    """The process and all under it."""
    found, todo = [], [pid]
    while todo:
        # A companion and its guard share the memory of their program, where it is counted.
        if comm(todo[-1]) in ("foliomem", "foliomem-guard") and todo[-1] != pid:
            todo.pop()
            continue
        found.append(todo.pop())
        try:
            for task in Path(f"/proc/{found[-1]}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except OSError:
            pass
    return found


def kib(pid, file, names):
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(names))


def pss(pid):
    """Anonymous and shared memory of one process in bytes, None once it is gone.

    The kernel walks the page tables for it, for 0.1 s and more on a busy machine, and counts what is moved meanwhile twice:
    80 MiB were seen as 175. It cannot be more than the resident size, which the kernel knows at any time.
    """
    try:
        before = kib(pid, "status", RESIDENT)
        walked = kib(pid, "smaps_rollup", KINDS)
        return min(walked, max(before, kib(pid, "status", RESIDENT))) * 1024
    except OSError:
        return None


class Sampler(threading.Thread):
    """Every 10 ms: the sum over the tree against limit × 1.05 + 16 MiB per process, foliomem's own included in both."""

    def __init__(self, pid, limit):
        super().__init__(daemon=True)
        self.pid, self.limit, self.samples, self.done = pid, limit, [], threading.Event()

    def run(self):
        while not self.done.wait(0.01):
            sizes = [s for s in map(pss, of_different_memories(tree(self.pid))) if s is not None]
            if sizes:
                self.samples.append((sum(sizes), len(sizes)))

    def verdict(self):
        self.done.set()
        self.join()
        assert len(self.samples) > 5, f"only {len(self.samples)} samples"
        over = [(total / MIB, n) for total, n in self.samples if total > self.limit * 1.05 + 16 * MIB * n]
        worst = max(total for total, _ in self.samples) / MIB
        assert not over, f"{len(over)} of {len(self.samples)} samples over the limit {self.limit / MIB} MiB: {over[:5]}; worst {worst}"
        assert worst > 8, "the samples show no memory at all"


def sampled(argv, limit, torture, options=()):
    running = start(argv, f"{limit}M", options, torture)
    sampler = Sampler(running.pid, limit * MIB)
    sampler.start()
    try:
        got = running.finish(150 if torture else 60).ok()
    finally:
        sampler.done.set()
    sampler.verdict()
    assert_swapped(got)
    return got


def test_samples_of_one_process(torture):
    size, limit = (64, 48) if torture else (320, 80)
    argv = [PYTHON, PROGRAMS / "big_array.py", size]
    assert sampled(argv, limit, torture).out == plain(argv).ok().out


@pytest.mark.parametrize(("mode", "size", "limit"), [("pool", 256, 192), pytest.param("both", 512, 320, marks=soak_only)])
def test_samples_of_a_tree(mode, size, limit):
    """Each side copies what it shared at the speed of memory: without a brake, 1.6 to 2.4 times the limit at these sizes."""
    got = sampled([PYTHON, PROGRAMS / "forks.py", mode, size], limit, False)
    assert got.stats["faults"]["copy"]["count"] > 0


@pytest.mark.parametrize(("divisor", "program"), [
    (2, ["big_array.py", 200]), (3, ["big_array.py", 260]), (2, ["forks.py", "both", 256])], ids=["half", "third", "tree"])
def test_a_share_of_what_is_needed_grows_with_that(divisor, program):
    argv = [PYTHON, PROGRAMS / program[0], *program[1:]]
    got = same_as_plain(argv, f"need/{divisor}", False)
    # The peak is the largest need that anybody has seen, and the limit has followed each of them.
    need = got.stats["need_peak_bytes"]
    assert got.stats["limit_bytes"] == max(64 * MIB, need // divisor), got.stats
    # A child of the tree has up to its own copy of everything, and each process an interpreter.
    size, processes = program[-1] * MIB, 2 if program[0] == "forks.py" else 1
    assert size < need < processes * size * 1.3 + processes * 64 * MIB, got.stats


@pytest.mark.parametrize("mode", ["read", "change", "copy"])
def test_what_relatives_share_since_a_fork_is_needed_once(mode):
    """Swapped out, each of them has it in its own store; only what they have changed or made themselves counts for each."""
    argv = [PYTHON, PROGRAMS / "relatives.py", mode, 60, 3]
    roomy, tight = foliomem(argv, "2G").ok(), foliomem(argv, "64M").ok()
    assert roomy.out == tight.out == b"right\n"
    assert_swapped(tight)
    needed = [result.stats["need_peak_bytes"] / MIB for result in (roomy, tight)]
    # What is resident in one process and swapped out in another counts twice.
    assert needed[0] * 0.9 < needed[1] < needed[0] * 1.05 + 80, needed


def test_a_small_program_is_let_alone_where_its_limit_is_a_share():
    got = foliomem([PYTHON, "-c", "print(sum(bytearray(20 << 20)))"], "need/2").ok()
    assert got.stats["limit_bytes"] == 64 * MIB and got.stats["vmstat"]["pswpout"] == 0, got.stats


def test_idle_process_gives_way(tmp_path):
    """A sleeping process with much memory does not keep a busy one from working; both stay right."""
    hold = ("import subprocess, sys, numpy as np\na = np.repeat(np.arange(1 << 20), 12)\n"
            "r = subprocess.run([sys.executable, sys.argv[1], '128']); assert r.returncode == 0\n"
            "assert (a == np.repeat(np.arange(1 << 20), 12)).all(); print('both')")
    sampled([PYTHON, "-c", hold, PROGRAMS / "big_array.py"], 64, False)


def test_quiet_process_wakes_up():
    """The agent samples a quiet process less often. A sudden burst of new memory must still be noticed in time."""
    burst = ("import time\nheld = [bytes(range(256)) * 16 for _ in range(25600)]\n"
             "for turn in range(8):\n    time.sleep(0.4)\n    new = b'x' * (40 << 20)\n    del new\n"
             "assert held == [bytes(range(256)) * 16] * 25600; print('awake')")
    sampled([PYTHON, "-c", burst], 64, False)


def test_what_is_filled_at_once_is_managed_before_it_is_touched(built):
    """The machine is so busy that the agent gets a CPU late. Without allocation notices the run took 1.1 times the limit,
    as one run in twenty still does."""
    among_others = "for i in $(seq $((4 * $(nproc)))); do (while :; do :; done) & done; \"$@\"; code=$?; kill $(jobs -p); exit $code"
    peaks = []
    for _ in range(5):
        got = foliomem(["bash", "-c", among_others, "bash", built("fills.c"), 8, 40], "96M").ok()
        assert got.out == b"intact\n"
        assert_swapped(got)
        peaks.append(got.stats["peak_bytes"])
    assert sorted(peaks)[2] < 1.04 * 96 * MIB, peaks


@pytest.mark.parametrize("mode", ["plain", "reserve", "call", "guard"])
def test_small_mappings_come_and_go(built, mode):
    """Mappings change at every instant. Before a fix, a program of 240 MiB took up to 247 MiB under this limit."""
    assert sampled([built("bursts.c"), mode, 12, 240], 64, False).out == b"wrong 0\n"


def test_what_is_freed_lazily_waits_for_room_when_it_is_written_again(built, torture):
    """The kernel keeps pages after MADV_FREE, and a write to them causes no fault. Before a fix, 200 MiB took 202 MiB."""
    assert sampled([built("lazy_free.c"), 200, 4], 64, torture).out == b"right\n"


def test_what_the_kernel_is_to_fill_is_filled_later_where_memory_is_short(built):
    """mmap with MAP_POPULATE fills memory before it returns. Before a fix, 256 MiB took 278 MiB under this limit."""
    assert sampled([built("populate.c"), 256], 64, False).out == b"right\n"


@pytest.mark.parametrize("sizes", ["64K", "2M"])
def test_what_is_touched_here_and_there_is_mostly_zeros(built, sizes):
    """Single pages of 2000 MiB of folios are written. Before a fix, swap slots ran out and the run took 1055 MiB."""
    assert sampled([built("sparse.c"), 2000, 64], 64, False, ["--sizes", sizes]).out == b"wrong 0\n"


def test_what_may_not_be_written_is_not_looked_at_again_and_again(built):
    """Linux moves no pages of read-only mappings, so they stay resident. Reclaim must not retry them on each fault."""
    got = foliomem([built("read_only.c"), 200], "64M").ok()
    assert got.out == b"right\n"
    assert got.stats["vmstat"]["unevictable_pgs_culled"] > 16384 and "read-only" in got.err, got.err
    assert got.stats["vmstat"]["pswpout"] > 60 << 8, "what may be written again goes out again"


def test_what_is_above_a_guard_is_managed_unless_it_is_a_stack(built, torture):
    """Allocators put guards below their blocks, as stacks have. Before a fix, 200 MiB took 213 MiB under this limit."""
    assert sampled([built("guarded.c"), 200], 64, torture).out == b"wrong 0\n"


def test_what_cannot_be_managed_is_said(built, tmp_path):
    (tmp_path / "file").write_bytes(bytes(200 * MIB))
    got = foliomem([built("private_file.c"), tmp_path / "file"], "64M").ok()
    assert got.out == b"wrong 0\n"
    assert "private file mappings" in got.err, got.err


@pytest.mark.parametrize(("kind", "most"), [("as", 2048), ("data", 2048)])
def test_a_program_may_limit_itself(built, kind, most):
    """The agent's reserved address space counts against the program's limit. A reserve of 64 GiB left the program none."""
    assert sampled([built("limits.c"), kind, most, 200], 64, False).out == b"wrong 0\n"


def test_incompressible_data_goes_over_the_limit():
    wanted = plain([PYTHON, "-c", RANDOM, 128]).ok().out
    got = foliomem([PYTHON, "-c", RANDOM, 128], "64M").ok()
    assert got.out == wanted
    assert got.stats["limit_exceeded"] is True
    said = [line for line in got.err.splitlines() if "compress" in line.lower()]
    assert said and all(line.startswith("foliomem: ") for line in said), got.err


@pytest.mark.parametrize(("arguments", "arenas"), [
    (("heap", 1000, 40000, 1), 1),
    (("heap", 1000, 2000, 1), 1),
    (("heap", 1000, 40000, 1), 8),
    (("heap", 1000, 2000, 4), 8),
    (("heap", 1000, 40000, 16), 16),
    (("heap", 1000, 200000, 1), 1),
    (("above", 400, "libx.so"), 8),
], ids=["brk", "brk, small", "arena", "arenas, small", "many arenas", "mappings", "above a library"])
def test_growing_at_the_speed_of_memory(built, arguments, arenas, tmp_path):
    """New memory waits for room, wherever the C library or the kernel places it. With later notice, runs took 1.2 to 6 times
    the limit."""
    (tmp_path / "libx.so").write_bytes(bytes(4096))
    command, env = [built("grow.c"), *arguments], {"MALLOC_ARENA_MAX": str(arenas)}
    wanted = plain(command, env, tmp_path).ok().out

    def peak_mib():
        got = foliomem(command, "128M", env=env, cwd=tmp_path).ok()
        assert got.out == wanted
        assert got.stats["vmstat"]["pswpin"] > 0
        # foliomem's own peak covers every moment. Samples from outside have a tolerance of 5% and 16 MiB.
        return got.stats["peak_bytes"] / MIB

    # Sixteen threads sometimes outgrew the agent while it activated: 3 of 110 runs on one machine, none of 30 since
    # allocating threads are paused (docs/decisions/0012-pause-growing-threads.md).
    peaks = [peak_mib()]
    if peaks[0] >= 1.5 * 128:
        peaks += [peak_mib(), peak_mib()]
    assert sum(peak >= 1.5 * 128 for peak in peaks) <= len(peaks) // 3, peaks


HELD = ("import os, resource, sys\nmib, room = map(int, sys.argv[1:])\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "if room: resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (room << 30),) * 2)\n"
        "block = os.urandom(1 << 20)\nparts = [b'%08d' % i + block for i in range(mib)]\n"
        "assert all(part == b'%08d' % i + block for i, part in enumerate(parts))\nprint('intact', len(parts))")


def test_incompressible_data_goes_far_over_the_limit():
    """The data exceed the arena that compressible data would need under this limit. Few faults may reclaim in vain."""
    got = foliomem([PYTHON, "-c", HELD, 1100, 0], "16M").ok()
    assert got.out == b"intact 1100\n"
    vm = got.stats["vmstat"]
    assert vm["allocstall"] < vm["pgfault"] / 20, vm
    written = vm["pswpout"] * 4096
    # If every fault tried to reclaim, all data would be compressed in vain, twice.
    assert written < 1100 * MIB, f"{written / MIB} MiB were compressed in vain"


def test_a_full_arena_loses_nothing():
    """With little address space the arena has its minimum size, which suffices for compressible data: 1 GiB."""
    got = foliomem([PYTHON, "-c", HELD, 1300, 5], "64M").ok()
    assert got.out == b"intact 1300\n"
    assert got.stats["vmstat"]["unmanaged_arena_full"] > 0
    assert any("arena" in line and "--swap" in line for line in got.err.splitlines()), got.err


def test_incompressible_data_torture():
    got = foliomem([PYTHON, "-c", RANDOM, 32], "16M", torture=True).ok()
    assert got.out == b"intact 32\n" and got.stats["limit_exceeded"] is True


@pytest.mark.parametrize("options", [["--hard"], ["--hard", "--quiet"]], ids=["", "quiet"])
def test_hard_limit_stops_the_program(options):
    got = foliomem([PYTHON, "-c", RANDOM, 128], "64M", options=options)
    assert got.code == 137 and b"intact" not in got.out
    assert any(line.startswith("foliomem: ") and "limit" in line for line in got.err.splitlines()), got.err


def test_hard_limit_leaves_a_good_program_alone():
    assert_swapped(foliomem([PYTHON, PROGRAMS / "big_array.py", 128], "48M", options=["--hard"]).ok())
