"""Helpers and fixtures of the end-to-end tests: how foliomem is run, timed out and measured.

FOLIOMEM_BIN names the binary under test (default <repo>/target/release/foliomem).
FOLIOMEM_BIN=plain runs every program bare, to check the tests themselves; what only foliomem can pass is skipped.
FOLIOMEM_LONG=1 adds what `make soak` runs: the whole matrices, and long and many repetitions.

Tests run side by side (pytest-xdist), in workers that share the machine but no file and no program. Those that must not run
beside others have the marker `alone`: a second run of pytest has those (`make e2e`). Those that change the machine, but
disturb only each other, have the marker `in_turns`.
"""
import itertools
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
PROGRAMS = HERE / "programs"
STRESS_SOURCE = HERE.parent / "stress" / "stress.c"
MIB = 1 << 20
BIN = os.environ.get("FOLIOMEM_BIN") or str(REPO / "target/release/foliomem")
PLAIN = BIN == "plain"
LONG = os.environ.get("FOLIOMEM_LONG") == "1"
PYTHON = sys.executable
# Directory for the statistics of runs; it is removed when the tests end.
STATS = tempfile.TemporaryDirectory(prefix="foliomem-stats-")
RUNS = itertools.count()
DEVICE = Path("/dev/userfaultfd")
THP = Path("/sys/kernel/mm/transparent_hugepage")
# Prefix of a command that runs it as an ordinary user if the tests run as root.
ORDINARY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []

foliomem_only = pytest.mark.skipif(PLAIN, reason="needs foliomem itself")
# Marks tests that measure time or use all CPUs.
alone = pytest.mark.alone
# Marks tests that change who may use userfaultfd on the machine, or its cgroups: one worker runs all of them.
in_turns = pytest.mark.xdist_group("in turns")
# Marks a matrix of which an ordinary run has each value of each parameter once, and the first case under torture; all with
# FOLIOMEM_LONG=1.
few_cases = pytest.mark.few_cases
# Marks the cases of a test matrix that an ordinary run skips: it runs one representative.
soak_only = pytest.mark.skipif(not LONG, reason="one of many: FOLIOMEM_LONG=1")
# Modules and fixtures that change who may use userfaultfd.
WHO_MAY = {"test_chromium", "test_sandboxes", "device_open_to_all", "userfaultfd_for_all"}


def pytest_configure(config):
    config.addinivalue_line("markers", "alone: must not run beside other tests")
    config.addinivalue_line("markers", "few_cases: each value of a parameter runs once, and one case under torture")
    # A shell that starts the tests in the background, and nohup, ignore these signals. Programs that the tests start
    # would inherit that.
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not PLAIN and not os.access(BIN, os.X_OK):
        pytest.exit(f"no foliomem at {BIN}: build it with `cargo build --release` or set FOLIOMEM_BIN", 3)


def pytest_itemcollected(item):
    if any(name in WHO_MAY for name in [item.module.__name__, *item.fixturenames]):
        item.add_marker(in_turns)


def pytest_collection_modifyitems(items):
    seen = set()
    for item in items:
        if LONG or not item.get_closest_marker("few_cases"):
            continue
        values = dict(item.callspec.params)
        # Under torture only the first case counts, whatever its values.
        shown = {(item.function, "torture")} if values.pop("torture", False) else set()
        shown = shown or {(item.function, name, repr(value)) for name, value in values.items()}
        if shown <= seen:
            item.add_marker(pytest.mark.skip(reason="other cases have its values: FOLIOMEM_LONG=1"))
        seen |= shown


# ---- counters that have moved ----

# Names of statistics that were not zero after some run of this process. Each test process writes its names to MOVED_FOLDER.
MOVED = set()
MOVED_FOLDER = os.environ.get("FOLIOMEM_MOVED")


def counters(stats):
    """Yields names and values of all statistics: nested ones without the folio size, faults as a count for each kind."""
    for key, value in stats.items():
        if not isinstance(value, dict):
            yield key, value
        elif key == "faults":
            yield from ((kind, fault["count"]) for kind, fault in value.items())
        else:
            yield from value.items()


def note_moved(stats):
    MOVED.update(name for name, value in counters(stats) if value)


def pytest_sessionfinish():
    if MOVED_FOLDER:
        (Path(MOVED_FOLDER) / f"{os.getpid()}.json").write_text(json.dumps(sorted(MOVED)))


# ---- running a program -----------------------------------------------------------------------------------------

@dataclass
class Result:
    """What one finished program left behind."""
    code: int  # as a shell shows it: 128+n for signal n
    out: bytes
    err: str
    stats: dict = field(default_factory=dict)
    max_rss: int = 0  # bytes, of the largest process in the tree

    def ok(self):
        """This result, after a check that the program ended well."""
        assert self.code == 0, f"exit {self.code}\nstdout: {self.out[-1500:]!r}\nstderr: {self.err[-3000:]}"
        return self


def clean_env(extra=None):
    """The environment without any FOLIOMEM_* of the caller, plus `extra`."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("FOLIOMEM_")}
    env.pop("LD_PRELOAD", None)
    env.update({k: str(v) for k, v in (extra or {}).items()})
    return env


def read_text(path):
    """Returns the text of a file of /proc; "" if the process has ended."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def backtraces(pid):
    """Returns the threads' backtraces by gdb, if installed. A timeout kills a gdb that blocks on swapped-out memory."""
    if not shutil.which("gdb"):
        return []
    argv = ["timeout", "-s", "KILL", "20", "gdb", "-p", pid, "-batch", "-ex", "thread apply all bt 16"]
    gdb = subprocess.run(argv, capture_output=True, errors="replace")
    return [f"    {line[:160]}" for line in gdb.stdout.splitlines() if line.startswith(("#", "Thread"))]


def where_it_hangs(pid):
    """Lists each thread of a process group with the system call and the kernel stack in which it waits."""
    lines = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        fields = read_text(stat).rpartition(")")[2].split()
        if len(fields) < 3 or fields[2] != str(pid):
            continue
        lines.append(f"{stat.parent.name}: {read_text(stat.parent / 'cmdline').replace(chr(0), ' ')[:120]}")
        for task in sorted((stat.parent / "task").iterdir()):
            state = read_text(task / "stat").rpartition(")")[2][1:2]
            stack = " < ".join(line.split()[-1].split("+")[0] for line in read_text(task / "stack").splitlines()[:6])
            lines.append(f"  {task.name} {read_text(task / 'comm')} {state} syscall {read_text(task / 'syscall')[:60]} in {stack}")
        lines += backtraces(stat.parent.name)
    return "\n".join(lines)


def kill_group(pid):
    """Ends a process group that this test started."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


class Running:
    """A program in a process group of its own, its output going to files so that no pipe can block it."""

    def __init__(self, argv, env=None, cwd=None, stdin=None, stats=None):
        self.argv, self.stats_path = [str(a) for a in argv], stats
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        source = stdin if stdin is not None else subprocess.DEVNULL
        if isinstance(source, bytes):
            source = tempfile.TemporaryFile()
            source.write(stdin)
            source.seek(0)
        self.proc = subprocess.Popen(self.argv, stdin=source, stdout=self.out, stderr=self.err, cwd=cwd, env=env,
                                     start_new_session=True)
        self.pid = self.proc.pid
        self.max_rss, self.hangs = 0, ""

    def _wait(self, timeout):
        """Waits with wait4, for the resource use; the group dies at the timeout."""
        timed_out = threading.Event()

        def expire():
            timed_out.set()
            try:
                self.hangs = where_it_hangs(self.pid)
            except OSError as error:
                self.hangs = f"(cannot tell where: {error})"
            finally:
                kill_group(self.pid)

        timer = threading.Timer(timeout, expire)
        timer.start()
        try:
            _, status, usage = os.wait4(self.pid, 0)
        finally:
            timer.cancel()
        self.max_rss = usage.ru_maxrss * 1024
        self.proc.returncode = os.waitstatus_to_exitcode(status)
        return timed_out.is_set()

    def finish(self, timeout=60):
        """The Result, once the program has ended; fails the test at the timeout."""
        timed_out = self._wait(timeout)
        kill_group(self.pid)
        code = self.proc.returncode
        code = 128 - code if code < 0 else code
        result = Result(code, self.text(self.out), self.text(self.err).decode(errors="replace"), max_rss=self.max_rss)
        if timed_out:
            pytest.fail(f"no end after {timeout} s: {' '.join(self.argv)}\nstdout: {result.out[-800:]!r}\n"
                        f"stderr: {result.err[-2000:]}\n{self.hangs}")
        # The file is empty if the run has failed before its end.
        if self.stats_path and (text := read_text(self.stats_path)):
            result.stats = json.loads(text)
            note_moved(result.stats)
        return result

    @staticmethod
    def text(file):
        """What the program has written so far."""
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)

    def wait_output(self, wanted, timeout=20, file=None):
        """Waits until `wanted` is on the program's stdout, or in another file of it, and gives all of that."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if wanted in (text := self.text(file or self.out)):
                return text
            time.sleep(0.02)
        self.kill()
        pytest.fail(f"{wanted!r} did not come; stderr: {self.text(self.err)[-2000:]!r}")

    def kill(self):
        """Ends the whole group, for clean-up."""
        kill_group(self.pid)


def plain(argv, env=None, cwd=None, stdin=None, timeout=60):
    """Runs a program without foliomem: the reference result."""
    return Running(argv, clean_env(env), cwd, stdin).finish(timeout)


def start(argv, limit="64M", options=(), torture=False, env=None, cwd=None, stdin=None):
    """Starts a program under foliomem (bare with FOLIOMEM_BIN=plain)."""
    env = dict(env or {})
    if PLAIN:
        return Running(argv, clean_env(env), cwd, stdin)
    if torture:
        env["FOLIOMEM_TORTURE"] = 1
    stats = os.path.join(STATS.name, f"{next(RUNS)}.json")
    head = [BIN, "run", "--limit", limit, "--stats", stats, *options, "--"]
    return Running(head + list(argv), clean_env(env), cwd, stdin, stats)


def foliomem(argv, limit="64M", timeout=60, **how):
    """Runs a program under foliomem to its end; see `start`."""
    result = start(argv, limit, **how).finish(timeout)
    return result


def cli(*args, env=None, cwd=None, timeout=20):
    """Runs foliomem with exactly these arguments."""
    return Running([BIN, *args], clean_env(env), cwd).finish(timeout)


def make_packages(*args):
    """Runs scripts/dist with these arguments, on the programs under test."""
    env = {"FOLIOMEM_BUILT": Path(BIN).resolve().parent, "FOLIOMEM_DIST_LEVEL": 1}
    return plain([PYTHON, REPO / "scripts/dist", *args], env=env, timeout=120)


# ---- what every run must show ----------------------------------------------------------------------------------

def assert_swapped(result):
    """The run was under real pressure, and stayed inside its limit."""
    if PLAIN:
        return
    stats = result.stats
    assert stats, f"no stats file; stderr: {result.err[-2000:]}"
    assert stats["vmstat"]["pswpout"] > 0 and stats["vmstat"]["pswpin"] > 0, stats["vmstat"]
    # Other tests may take the CPU from the agent while a program grows. Only tests marked `alone` check limits strictly.
    slack = 48 * MIB if os.environ.get("PYTEST_XDIST_WORKER") else 16 * MIB
    allowed = stats["limit_bytes"] * 1.05 + slack * max(1, stats["processes"])
    assert stats["peak_bytes"] <= allowed, {k: stats[k] for k in ("limit_bytes", "peak_bytes", "need_peak_bytes", "processes")}
    assert sum(line.startswith("foliomem: ") for line in result.err.splitlines()) >= 1, "no summary on stderr"


def same_as_plain(argv, limit, torture, timeout=None, **how):
    """Runs bare and under foliomem, compares stdout, and checks that memory really went out."""
    timeout = timeout or (150 if torture else 60)
    wanted = plain(argv, how.get("env"), how.get("cwd"), timeout=timeout).ok()
    got = foliomem(argv, limit, timeout=timeout, torture=torture, **how).ok()
    assert got.out == wanted.out
    assert wanted.out, "the program printed nothing to compare"
    assert_swapped(got)
    return got


@contextmanager
def huge_page_setting(name, value):
    """A setting of the kernel for huge pages, with this value for a while."""
    file = THP / name
    text = file.read_text()
    before = found[1] if (found := re.search(r"\[(\w+)\]", text)) else text.strip()
    file.write_text(value)
    try:
        yield
    finally:
        file.write_text(before)


# ---- fixtures --------------------------------------------------------------------------------------------------

@pytest.fixture(params=[False, True], ids=["normal", "torture"])
def torture(request):
    """Each heavy test runs twice; with FOLIOMEM_TORTURE=1 it takes a smaller size."""
    return request.param


def build(target, argv, timeout=120):
    """Compiles something once per session."""
    plain(argv, timeout=timeout).ok()
    return target


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """compile(name, *flags): a program of programs/NAME.c as a binary."""
    folder, cache = tmp_path_factory.mktemp("bin"), {}

    def compile_c(source, *flags):
        source = Path(source) if Path(source).is_absolute() else PROGRAMS / source
        key = (source, flags)
        if key not in cache:
            target = folder / f"{source.stem}-{len(cache)}"
            cache[key] = build(target, ["gcc", "-O2", "-Wall", "-pthread", "-o", target, source, *flags])
        return cache[key]

    return compile_c


class Public:
    """foliomem in a folder that all users may read and write: pytest's are for one user only."""

    def __init__(self, folder):
        self.folder, self.runs = folder, itertools.count()
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
        for file in [] if PLAIN else [Path(BIN), Path(BIN).with_name("libfoliomem_agent.so")]:
            shutil.copy(file, folder)

    def run(self, argv, limit=None, torture=False, user=(), env=None, timeout=150):
        """Runs a program to its end, under foliomem if there is a limit, both by the command `user`."""
        stats = self.folder / f"{next(self.runs)}.json"
        head = [] if limit is None or PLAIN else [self.folder / "foliomem", "run", "--limit", limit, "--stats", stats, "--"]
        env = {"HOME": self.folder, "FOLIOMEM_TORTURE": int(torture), **(env or {})}
        result = plain([*user, *head, *argv], env=env, timeout=timeout)
        result.stats = json.loads(stats.read_text()) if stats.exists() else {}
        note_moved(result.stats)
        return result


@pytest.fixture
def public():
    """A `Public`."""
    folder = Path(tempfile.gettempdir()) / f"foliomem-public-{os.getpid()}-{next(RUNS)}"
    yield Public(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def device_open_to_all():
    """An ordinary user may use userfaultfd."""
    before = stat.S_IMODE(DEVICE.stat().st_mode)
    if os.geteuid() == 0:
        DEVICE.chmod(0o666)
    yield
    if os.geteuid() == 0:
        DEVICE.chmod(before)


@pytest.fixture(scope="session")
def stress(built):
    """The compiled stress program."""
    return built(STRESS_SOURCE)
