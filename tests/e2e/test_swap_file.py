"""The swap file: data that does not compress and is several times the limit, and everything that can happen to a file."""
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import MIB, PROGRAMS, PYTHON, cli, foliomem, foliomem_only, start

pytestmark = foliomem_only
RANDOM = ("import hashlib, os, sys\nparts = [os.urandom(1 << 20) for _ in range(int(sys.argv[1]))]\n"
          "sums = [hashlib.md5(p).digest() for p in parts]\n"
          "for turn in range(2): assert [hashlib.md5(p).digest() for p in parts] == sums\nprint('intact', len(parts))")
# Says "ready" when its data is there, and looks at it when it is told to.
WAITING = ("import hashlib, os, sys, time\nparts = [os.urandom(1 << 20) for _ in range(int(sys.argv[1]))]\n"
           "sums = [hashlib.md5(p).digest() for p in parts]\nprint('ready', flush=True)\n"
           "while not os.path.exists(sys.argv[2]): time.sleep(0.05)\n"
           "wrong = [n for n, p in enumerate(parts) if hashlib.md5(p).digest() != sums[n]]\nprint('WRONG' if wrong else 'intact', wrong)")


def swap_fd(pid):
    """The descriptor that the supervisor has of the swap file, as a path that others can open."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if " (deleted)" in os.readlink(fd) and "memfd:" not in os.readlink(fd) and os.stat(fd).st_size >= 2 * MIB:
            return fd
    pytest.fail(f"no swap file among {[os.readlink(f) for f in Path(f'/proc/{pid}/fd').iterdir()]}")


def said(result):
    return [line for line in result.err.splitlines() if "swap file" in line]


def test_what_does_not_compress_goes_to_the_file(tmp_path):
    got = foliomem([PYTHON, "-c", RANDOM, 400], "96M", options=["--swap", f"{tmp_path}/swap:1G"], timeout=150).ok()
    assert got.out == b"intact 400\n"
    bd = got.stats["bd_stat"]
    assert bd["bd_writes"] > 200 * 256 and bd["bd_reads"] > 200 * 256, bd
    assert bd["failed_reads"] == bd["failed_writes"] == bd["full"] == bd["bd_writes_uring"] == 0, bd
    assert got.stats["swap_bytes"] == 1 << 30
    assert got.stats["peak_bytes"] < 200 * MIB, "the data stays in memory"
    assert not said(got), got.err
    assert not list(tmp_path.iterdir())


def test_compressible_data_too(built, tmp_path):
    """Pieces of all sizes, packed, in all their orders; with everything going out and in all the time."""
    argv = [built("purge.c"), 24, 3]
    options = ["--swap", f"{tmp_path}/swap:1G", "--codec", "zstd", "--granule", "2M", "--sizes", "16K,64K,2M"]
    wanted = foliomem(argv, "1G").ok()
    got = foliomem(argv, "16M", torture=True, options=options).ok()
    assert got.out == wanted.out
    assert not got.stats or got.stats["bd_stat"]["bd_reads"] > 0, got.stats


def test_nothing_is_left_behind_by_a_kill(tmp_path):
    running = start([PYTHON, "-c", WAITING, 160, tmp_path / "go"], "48M", options=["--swap", f"{tmp_path}/swap:512M"])
    running.wait_output(b"ready", 60)
    assert not list(tmp_path.iterdir()), "the file has a name"
    file = swap_fd(running.pid)
    stat = os.stat(file)
    assert stat.st_nlink == 0 and stat.st_mode & 0o777 == 0o600
    assert stat.st_blocks * 512 > 32 * MIB, "not much of the data is there"
    running.stats_path = None  # Opened, and never written.
    os.kill(running.pid, signal.SIGKILL)
    assert running.finish(20).code == 128 + signal.SIGKILL
    assert not list(tmp_path.iterdir())


# Says what the swap file takes when it is full, when its data is gone, and when there is new data.
GIVING_BACK = ("import hashlib, mmap, os, sys, time\ndef wait(name):\n print(name, flush=True)\n"
               " while not os.path.exists(f'{sys.argv[1]}/{name}'): time.sleep(0.05)\n"
               "for turn in range(2):\n data = mmap.mmap(-1, 192 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
               " for part in range(192): data.write(os.urandom(1 << 20))\n sum = hashlib.md5(data).digest()\n wait(f'full{turn}')\n"
               " assert hashlib.md5(data).digest() == sum\n if turn and os.fork() == 0:\n  data.close()\n  os.kill(os.getpid(), 9)\n"
               " if turn: os.wait()\n data.close()\n wait(f'empty{turn}')\n")


def settled(taken_bytes, wanted):
    """What is taken when it is no more than `wanted`, or when nothing has been given back for half a minute."""
    least, changed = taken_bytes(), time.monotonic()
    while least > wanted and time.monotonic() < changed + 30:
        time.sleep(0.05)
        if (now := taken_bytes()) < least:
            least, changed = now, time.monotonic()
    return least


def giving_back(running, directory, taken_bytes):
    """Runs GIVING_BACK, and watches what the file takes."""
    for turn in range(2):
        running.wait_output(f"full{turn}".encode(), 60)
        taken = taken_bytes()
        assert taken > 100 * MIB, "not much of the data is there"
        (directory / f"full{turn}").touch()
        running.wait_output(f"empty{turn}".encode(), 60)
        # Clusters of 2 MiB that have a used slot stay: those of the interpreter's own pages, as they happen to lie.
        if (left := settled(taken_bytes, 24 * MIB)) > taken / 4:
            running.kill()
            pytest.fail(f"{left >> 20} of {taken >> 20} MiB are not given back")
        (directory / f"empty{turn}").touch()
    got = running.finish(30).ok()
    assert got.stats["bd_stat"]["bd_discards"] > 80 * 256, got.stats["bd_stat"]


def test_a_file_gives_its_room_back(tmp_path):
    options = ["--swap", f"{tmp_path}/swap:512M"]
    running = start([PYTHON, "-c", GIVING_BACK, tmp_path], "48M", options=options)
    giving_back(running, tmp_path, lambda: os.stat(swap_fd(running.pid)).st_blocks * 512)


def test_descriptors_are_not_the_programs(tmp_path):
    script = RANDOM + "\nprint(sorted(os.listdir('/proc/self/fd')))"
    argv = [PYTHON, "-c", script, 128]
    got = foliomem(argv, "48M", options=["--swap", f"{tmp_path}/swap:512M"], timeout=100).ok()
    assert got.stats["bd_stat"]["bd_writes"] > 0
    assert got.out.splitlines()[1] == b"['0', '1', '2', '3']"


def test_a_file_that_is_too_small_is_used_and_then_as_none(tmp_path):
    got = foliomem([PYTHON, "-c", RANDOM, 128], "48M", options=["--swap", f"{tmp_path}/swap:16M"]).ok()
    assert got.out == b"intact 128\n"
    assert got.stats["bd_stat"]["full"] > 0 and got.stats["limit_exceeded"] is True
    assert said(got) and all("full" in line for line in said(got)), got.err


def test_a_full_disk_is_as_none(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16M", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs")
    try:
        got = foliomem([PYTHON, "-c", RANDOM, 128], "48M", options=["--swap", f"{tmp_path}/swap:1G"]).ok()
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert got.out == b"intact 128\n"
    assert got.stats["bd_stat"]["failed_writes"] > 0
    assert any("no space left" in line for line in said(got)) and any("file system in memory" in line for line in said(got)), got.err


@pytest.mark.parametrize("how", ["changed", "cut off"])
def test_what_was_changed_is_never_handed_over(tmp_path, how):
    running = start([PYTHON, "-c", WAITING, 128, tmp_path / "go"], "48M", options=["--swap", f"{tmp_path}/swap:512M"])
    running.wait_output(b"ready", 60)
    file = os.open(swap_fd(running.pid), os.O_RDWR)
    if how == "cut off":
        os.ftruncate(file, 0)
    else:
        for offset in range(0, 128 * MIB, 8192):
            os.pwrite(file, b"changed", offset)
        os.fsync(file)
    os.close(file)
    (tmp_path / "go").touch()
    got = running.finish(60)
    assert got.code == 128 + signal.SIGBUS, (got.code, got.out, got.err)
    assert b"WRONG" not in got.out and b"intact" not in got.out
    assert any("cannot read the swap file" in line for line in said(got)), got.err
    assert any("is lost" in line for line in got.err.splitlines()), got.err
    assert got.stats["bd_stat"]["failed_reads"] > 0


def test_both_sides_of_forks_have_what_is_in_the_file(tmp_path, torture):
    size, limit = (10, "16M") if torture else (40, "28M")
    options = ["--swap", f"{tmp_path}/swap:1G"]
    got = foliomem([PYTHON, PROGRAMS / "swap_forks.py", size], limit, torture=torture, options=options, timeout=200).ok()
    assert got.out == b"intact on all sides\n"
    bd = got.stats["bd_stat"]
    assert bd["bd_writes"] > 0 and bd["failed_reads"] == bd["failed_writes"] == 0, bd


@pytest.fixture
def userfaultfd_for_all():
    """For programs that become another user."""
    setting = Path("/proc/sys/vm/unprivileged_userfaultfd")
    before = setting.read_text()
    try:
        setting.write_text("1")
    except OSError as error:
        pytest.skip(f"cannot let all users use userfaultfd: {error}")
    yield
    setting.write_text(before)


def test_children_of_a_parent_that_has_changed_its_user_reach_the_file(tmp_path, userfaultfd_for_all):
    """The file is another user's, and so is the supervisor. (Servers make themselves dumpable again.) Nor does the
    program see the descriptor that its children get, on either side."""
    if os.geteuid() or tuple(int(n) for n in os.uname().release.split(".")[:2]) < (6, 9):
        pytest.skip("needs root, to become somebody else, and Linux 6.9")
    script = ("import ctypes, hashlib, os\nparts = [os.urandom(1 << 20) for _ in range(128)]\n"
              "sums = [hashlib.md5(p).digest() for p in parts]\ntop = os.getpid()\n"
              "os.setgid(65534)\nos.setuid(65534)\nctypes.CDLL(None).prctl(4, 1, 0, 0, 0)\n"
              "before = sorted(os.listdir('/proc/self/fd'))\nfor depth in range(3):\n pid = os.fork()\n"
              " assert sorted(os.listdir('/proc/self/fd')) == before\n"
              " parts[depth] = os.urandom(1 << 20)\n sums[depth] = hashlib.md5(parts[depth]).digest()\n"
              " assert [hashlib.md5(p).digest() for p in parts] == sums\n"
              " if pid:\n  assert os.waitpid(pid, 0)[1] == 0\n  if os.getpid() == top: print('intact')\n  os._exit(0)\n")
    options = ["--swap", f"{tmp_path}/swap:768M"]
    got = foliomem([PYTHON, "-uc", script], "48M", options=options, timeout=100).ok()
    assert got.out == b"intact\n" and not said(got), (got.out, got.err)
    assert got.stats["bd_stat"]["bd_reads"] > 0 and got.stats["bd_stat"]["failed_reads"] == 0


def test_children_that_are_killed_leave_their_part_of_the_file(tmp_path):
    """Otherwise the file, four times the data, is full soon."""
    script = ("import hashlib, os, signal, sys\nparts = [os.urandom(1 << 20) for _ in range(40)]\nfor turn in range(10):\n"
              " pid = os.fork()\n if pid == 0:\n  parts = [os.urandom(1 << 20) for _ in range(40)]\n"
              "  os.kill(os.getpid(), signal.SIGKILL)\n os.waitpid(pid, 0)\n"
              " parts[:20] = [os.urandom(1 << 20) for _ in range(20)]\nprint('done')")
    got = foliomem([PYTHON, "-c", script], "32M", options=["--swap", f"{tmp_path}/swap:160M"], timeout=150).ok()
    assert got.out == b"done\n"
    assert got.stats["bd_stat"]["bd_writes"] > 160 * 256, got.stats["bd_stat"]
    assert not [line for line in said(got) if "cannot" in line], got.err


@pytest.fixture
def device(tmp_path):
    """A block device of 256 MiB."""
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 256 * MIB)
    made = subprocess.run(["losetup", "-f", "--show", image], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no loop device: {made.stderr}")
    yield made.stdout.strip()
    subprocess.run(["losetup", "-d", made.stdout.strip()], check=True)


def test_a_block_device(device, tmp_path):
    got = foliomem([PYTHON, "-c", RANDOM, 128], "48M", options=["--swap", device], timeout=100).ok()
    assert got.out == b"intact 128\n"
    assert got.stats["swap_bytes"] == 256 * MIB and got.stats["bd_stat"]["bd_writes"] > 0
    mount = tmp_path / "mount"
    mount.mkdir()
    subprocess.run(["mkfs.ext4", "-q", device], check=True)
    if subprocess.run(["mount", device, mount]).returncode:
        pytest.skip("cannot mount it")
    try:
        refused = cli("run", "--limit", "64M", "--swap", device, "--", "true")
    finally:
        subprocess.run(["umount", mount], check=True)
    assert refused.code == 125 and "in use" in refused.err, refused.err


def test_a_device_is_written_with_io_uring_whatever_the_program_filters(device):
    """A filter for all threads that kills its callers does not concern the companion."""
    got = foliomem([PYTHON, "-c", RANDOM, 128], "48M", options=["--swap", device], timeout=100).ok()
    bd = got.stats["bd_stat"]
    allowed = b"ok      io_uring" in cli("doctor").out
    assert bd["bd_writes"] > 0 and bd["bd_writes_uring"] == (bd["bd_writes"] if allowed else 0), bd
    script = ("import ctypes, hashlib, os, struct\nparts = [os.urandom(1 << 20) for _ in range(128)]\n"
              "kill = [(0x15, 0, 1, nr) for nr in (425, 426, 427)]\n"
              "code = [(0x20, 0, 0, 0)] + [i for k in kill for i in (k, (6, 0, 0, 0x80000000))] + [(6, 0, 0, 0x7fff0000)]\n"
              "code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *i) for i in code))\n"
              "filter = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', len(code) // 8, ctypes.addressof(code)))\n"
              "libc = ctypes.CDLL(None)\nassert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.syscall(317, 1, 1, filter) == 0\n"
              "parts += [os.urandom(1 << 20) for _ in range(64)]\nsums = [hashlib.md5(p).digest() for p in parts]\n"
              "for turn in range(2): assert [hashlib.md5(p).digest() for p in parts] == sums\nprint('intact')")
    got = foliomem([PYTHON, "-c", script], "48M", options=["--swap", device], timeout=100).ok()
    bd = got.stats["bd_stat"]
    assert got.out == b"intact\n" and bd["bd_writes"] > 140 * 256 and bd["failed_writes"] == 0, bd
    if allowed:
        assert bd["bd_writes_uring"] == bd["bd_writes"], bd


def test_a_block_device_gives_its_room_back(device, tmp_path):
    """A loop device passes discards on as holes."""
    running = start([PYTHON, "-c", GIVING_BACK, tmp_path], "48M", options=["--swap", device])
    giving_back(running, tmp_path, lambda: os.stat(tmp_path / "image").st_blocks * 512)


def test_what_cannot_be_a_swap_file_is_refused_in_one_line(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for swap, word in [(precious, "exists"), ("/dev/null", "neither"), (tmp_path, "neither"), ("/nonexistent/f", "no such"),
                       (f"{tmp_path}/f:1M", "less than"), (f"{tmp_path}/f:10Q", "size")]:
        got = cli("run", "--limit", "64M", "--swap", swap, "--", "true")
        assert got.code == 125 and word in got.err and got.err.count("\n") == 1, (swap, got.code, got.err)
    assert precious.read_text() == "precious"
    stale = tmp_path / "stale"
    os.close(os.open(stale, os.O_CREAT | os.O_WRONLY, 0o600))
    got = cli("run", "--limit", "64M", "--swap", stale, "--", "true").ok()
    assert "killed" in got.err and not stale.exists()


def test_it_is_a_setting_like_others(tmp_path):
    got = cli("run", "--print-config", env={"FOLIOMEM_SWAP": "/x/swap:2G"}).ok()
    assert b'swap = "/x/swap:2G"' in got.out and b"FOLIOMEM_SWAP" in got.out
    config = tmp_path / "config.toml"
    config.write_text(f'limit = "64M"\nswap = "{tmp_path}/swap:8M"\n')
    got = foliomem(["true"], options=["--config", config]).ok()
    assert got.stats["swap_bytes"] == 8 * MIB
