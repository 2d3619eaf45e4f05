"""The companion and its guard: they end with the last user of the memory, leave nothing behind, and whoever kills them, no
program reads zeros."""
import os
import random
import select
import signal
import time
from pathlib import Path

import pytest
from conftest import LONG, MIB, alone, foliomem, foliomem_only, plain, read_text, soak_only, start

pytestmark = foliomem_only

CHILDREN = 10_000 if LONG else 2_000
MAX_LAG = 0.05
# On a busy machine a process may have to wait for a CPU.
TRIES = 6
KILLS = 40 if LONG else 6
MESSAGE = "was killed: stopped, because"


# ---- who there is ----

def stat(pid):
    """State and parent of a process; nothing where there is none."""
    fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], int(fields[1])) if fields else None


def started(pid):
    """When a process was started; nothing where there is none."""
    fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


def is_running(pid, program):
    """Whether a process runs this program, and not only did."""
    try:
        return os.readlink(f"/proc/{pid}/exe") == str(program)
    except OSError:
        return False


def who_runs(program):
    """The processes that use the memory of `program`, and those of the agent."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*") if is_running(path.name, program)]
    agents = [pid for pid in pids if read_text(f"/proc/{pid}/comm").startswith("foliomem")]
    return [pid for pid in pids if pid not in agents], agents


def pairs(program):
    """Companions with their guards."""
    parents = {pid: there[1] for pid in who_runs(program)[1] if (there := stat(pid))}
    return [(parent, pid) for pid, parent in parents.items() if parent in parents]


def zombies(parent):
    """Children of a process that nobody has reaped."""
    pids = [path.name for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if stat(pid) == ("Z", parent)]


def until(condition, seconds=5.0):
    """Waits until the condition is true. Returns whether it became true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def kill(pid):
    """Kills a process, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


# ---- the end ----

class Piped:
    """A program under foliomem that goes on when it is told so."""

    def __init__(self, argv, limit):
        read, write = os.pipe()
        self.write_end = os.fdopen(write, "wb", buffering=0)
        with os.fdopen(read) as source:
            self.run = start(argv, limit, stdin=source)

    def go_on(self):
        self.write_end.write(b"x")


class Watch:
    """Tells when processes end or execute another program."""

    def __init__(self, program):
        self.program, self.fds, self.poll = program, {}, select.poll()

    def add(self, pids):
        for pid in pids:
            fd = os.pidfd_open(pid)
            self.fds[fd] = pid
            self.poll.register(fd, select.POLLIN)

    def ends(self, seconds=20):
        """The time of each end, in order, once there are all."""
        ends, end = {}, time.monotonic() + seconds
        while len(ends) < len(self.fds) and time.monotonic() < end:
            for fd, _ in self.poll.poll(1):
                ends.setdefault(self.fds[fd], time.monotonic())
                self.poll.unregister(fd)
            for pid in set(self.fds.values()) - set(ends):
                if not is_running(pid, self.program) and (now := stat(pid)) and now[0] != "Z":
                    ends.setdefault(pid, time.monotonic())
        for fd in self.fds:
            os.close(fd)
        return ends


def lag_of_end(program, how, mib, limit):
    """How long the companion lives on when the last user of the memory has left."""
    piped = Piped([program, how, mib], limit)
    piped.run.wait_output(b"ready\n")
    users, agents = who_runs(program)
    assert len(users) == 1 and agents, (users, agents)
    watch = Watch(program)
    watch.add(users + agents)
    piped.go_on()
    if how == "vfork":
        assert until(lambda: len(who_runs(program)[0]) == 2), "no vfork"
        parent, = users
        child, = set(who_runs(program)[0]) - {parent}
        watch.add([child])
        users.append(child)
        kill(parent)
    ends = watch.ends()
    assert set(ends) == {*users, *agents}, f"of {users} and the agent's {agents} only {sorted(ends)} have ended"
    got = piped.run.finish()
    codes = {"killed": 137, "aborted": 134, "vfork": 137}
    texts = {"main-gone": b"ready\nOK\n", "vfork": b"ready\ny"}
    assert (got.code, got.out) == (codes.get(how, 0), texts.get(how, b"ready\n")), got.err
    # Processes that end between two polls may be seen in another order: the lag may be negative.
    return max(ends[pid] for pid in agents) - max(ends[pid] for pid in users)


WAYS = ["main", "exit", "raw", "killed", "aborted", "executes", "main-gone", "raw-main-gone", "vfork"]


def test_the_companion_stays_while_the_size_of_the_memory_changes(built, torture):
    program = built("map_over.c")
    for _ in range(1 if torture else 2):
        assert foliomem([program, 24 if torture else 64], "20M" if torture else "40M", torture=torture).ok().out == b"OK\n"



@alone
@pytest.mark.parametrize("mib, limit", [(24, "48M"), (1, "64M")], ids=["swapping", "idle"])
@pytest.mark.parametrize("how", WAYS)
def test_the_companion_ends_with_the_last_user_of_the_memory(built, how, mib, limit):
    lags = []
    while len(lags) < TRIES and (not lags or min(lags) > MAX_LAG):
        lags.append(lag_of_end(built("ends.c"), how, mib, limit))
        assert until(lambda: who_runs(built("ends.c")) == ([], [])), "processes are left"
    assert min(lags) <= MAX_LAG, lags


# ---- leftovers ----

def traces(run, program):
    """What a run holds: descriptors of its processes, and KiB of address space and of the supervisor."""
    users, agents = who_runs(program)
    pids = [run.pid, *users, *agents]
    status = {pid: dict(line.split(":", 1) for line in read_text(f"/proc/{pid}/status").splitlines()) for pid in pids}
    kib = [int(status[users[0]]["VmSize"].split()[0]), int(status[run.pid]["VmRSS"].split()[0])]
    return sorted(pids), [len(os.listdir(f"/proc/{pid}/fd")) for pid in sorted(pids)], kib


@pytest.mark.parametrize("how", ["exit", pytest.param("raw", marks=soak_only), "killed"])
def test_ended_children_leave_nothing_behind(built, how):
    program = built("many.c")
    count = CHILDREN if how != "killed" else CHILDREN // 10
    piped = Piped([program, how, count, 6], "16M")
    held = {}
    for where in (b"ready\n", b"done\n"):
        piped.run.wait_output(where, 600 if LONG else 100)
        assert until(lambda: len(who_runs(program)[0]) == 1 and len(who_runs(program)[1]) == 2), who_runs(program)
        assert until(lambda: not zombies(piped.run.pid)), zombies(piped.run.pid)
        held[where] = traces(piped.run, program)
        # The companion has a file open for a moment, now and then.
        first = held[b"ready\n"]
        until(lambda: held.update({where: traces(piped.run, program)}) or held[where][:2] == first[:2])
        piped.go_on()
    got = piped.run.finish().ok()
    assert got.out.endswith(b"OK\n")
    before, after = held.values()
    assert before[:2] == after[:2], "processes or descriptors are left"
    grown = [now - then for then, now in zip(before[2], after[2])]
    assert max(grown) < MIB >> 10, f"{grown} KiB are left"


# ---- kill -9 ----

def kill_companion(companion, guard, pause):
    kill(companion)


def kill_guard(companion, guard, pause):
    kill(guard)


def kill_both(companion, guard, pause):
    kill(companion)
    kill(guard)


def kill_both_guard_first(companion, guard, pause):
    kill(guard)
    kill(companion)


def kill_both_one_later(companion, guard, pause):
    kill(guard)
    time.sleep(pause)
    kill(companion)


def wrong(got):
    """The faults that the stress program reports, except for children that were killed with the run."""
    return [line for line in got.out.splitlines() if b"WRONG" in line and not line.endswith(b" ended with 0x9")]


ORDERS_OF_BOTH = [kill_both, kill_both_guard_first, kill_both_one_later]


@pytest.mark.parametrize("order", [kill_companion, kill_guard, *ORDERS_OF_BOTH], ids=lambda order: order.__name__)
def test_nobody_reads_zeros_when_the_agents_processes_are_killed(stress, order):
    stopped = 0
    for seed in range(KILLS):
        chance = random.Random(f"{order.__name__} {seed}")
        run = start([stress, "-t", 2, "-n", 3, "-m", 96, "-s", seed], "32M")
        assert until(lambda: pairs(stress) or run.proc.poll() is not None, 20)
        time.sleep(chance.uniform(0, 1))
        there = pairs(stress)
        if there:
            order(*chance.choice(there), chance.uniform(0, 0.03))
        got = run.finish()
        assert not wrong(got), f"seed {seed}: {got.out!r}"
        if got.code:
            assert got.code == 125 and MESSAGE in got.err, f"seed {seed}: exit {got.code}, {got.out!r}, {got.err}"
            stopped += 1
        else:
            assert got.out.endswith(b"ok\n")
        assert until(lambda: who_runs(stress) == ([], [])), f"seed {seed}: {who_runs(stress)} are left"
    if order is not kill_guard:
        assert stopped, "no run was stopped: the kills came to nothing"


def children(pid):
    """The children of a process's first thread."""
    return [int(child) for child in read_text(f"/proc/{pid}/task/{pid}/children").split()]


@pytest.mark.parametrize("order", ORDERS_OF_BOTH, ids=lambda order: order.__name__)
def test_nobody_reads_zeros_when_both_are_killed_at_activation(stress, order):
    stopped = 0
    for seed in range(KILLS * 3):
        chance = random.Random(f"{order.__name__} {seed}")
        run = start([stress, "-t", 2, "-n", 2, "-m", 96, "-s", seed], "32M")
        assert until(lambda: who_runs(stress)[1] or run.proc.poll() is not None, 20)
        for companion in who_runs(stress)[1][:1]:
            # The guard is the companion's only child, and starts before anything is swapped out.
            while not (guards := children(companion)) and stat(companion):
                pass
            time.sleep(chance.uniform(0, 0.012))
            if guards:
                order(companion, guards[0], chance.uniform(0, 0.002))
        got = run.finish()
        assert not wrong(got), f"seed {seed}: {got.out!r}"
        if got.code:
            assert got.code == 125 and MESSAGE in got.err, f"seed {seed}: exit {got.code}, {got.out!r}, {got.err}"
            stopped += 1
        assert until(lambda: who_runs(stress) == ([], [])), f"seed {seed}: {who_runs(stress)} are left"
    assert stopped, "no run was stopped: the kills came to nothing"


@pytest.mark.parametrize("mib, limit", [(4, "256M"), (16, "32M")], ids=["idle", "swapping"])
@pytest.mark.parametrize("victim", ["companion", "both", "program"])
def test_no_fork_and_no_companion_waits_for_a_killed_process(built, victim, mib, limit):
    program = built("forks.c")

    def first(which, parent):
        """The oldest child of `parent` among `which`, or 0. Younger children come from forks of the program."""
        found = [(started(pid), pid) for pid in which if (stat(pid) or (0, 0))[1] == parent]
        return min((when, pid) for when, pid in [*found, (float("inf"), 0)] if when is not None)[1]

    for seed in range(KILLS * 2):
        chance = random.Random(f"{victim} {mib} {seed}")
        # The program forks until it is killed. If the run goes on or hangs, `finish` fails.
        run = start([program, mib, 1000], limit)
        run.wait_output(b"ready\n", 60)
        assert until(lambda: first(who_runs(program)[0], run.pid) and first(who_runs(program)[1], run.pid), 20)
        users, agents = who_runs(program)
        parent, companion = first(users, run.pid), first(agents, run.pid)
        guard = first(agents, companion)
        time.sleep(chance.uniform(0, 0.05))
        for pid in {"companion": [companion], "both": [companion, guard], "program": [parent]}[victim]:
            if pid:
                kill(pid)
        got = run.finish(60)
        assert not wrong(got), f"seed {seed}: {got.out!r}"
        is_right = got.code == 137 if victim == "program" else got.code == 125 and MESSAGE in got.err
        assert is_right, f"seed {seed}: exit {got.code}, {got.out!r}, {got.err}"
        assert until(lambda: who_runs(program) == ([], []), 20), f"seed {seed}: {who_runs(program)} are left"


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_process_that_is_killed_while_it_starts_is_no_failure(built, how, torture):
    """Builds and shells kill children that have just begun: the run goes on, and says nothing of them."""
    got = foliomem([built("killed_at_start.c"), how, 300], limit="24M", torture=torture, timeout=120).ok()
    assert got.out == b"OK\n"
    said = [line for line in got.err.splitlines() if "cannot" in line or "without the limit" in line]
    assert not said, said


@pytest.mark.parametrize("how", ["fork", "exec", "spawn"])
@pytest.mark.parametrize("by", [[], ["unshare", "--user", "--map-root-user", "--pid", "--fork"]], ids=["subreaper", "process-1"])
def test_a_subreaper_adopts_no_companion(built, how, by, torture):
    """A program that adopts orphans counts its children and their signals. Before a fix it got the companions, too, and the
    companion of a process 1's child that executed a program at once sometimes took its own guard for the program."""
    if by and plain([*by, "true"]).code != 0:
        pytest.skip("this machine allows no such namespaces")
    got = foliomem([*by, built("subreaper.c"), 24, 20 if torture else 60, how], limit="16M", torture=torture, timeout=120).ok()
    assert got.out == b"right\n", got.err


@pytest.mark.parametrize("where", ["child", "session", "alone"])
def test_the_tree_ends_when_the_supervisor_is_killed(built, where):
    program = built("held.c")
    # A shell gives background commands /dev/null as stdin, so they read descriptor 3 instead.
    script = {"child": '"$@" <&3 & "$@" <&3 & "$@"', "session": 'setsid "$@" <&3 & "$@"', "alone": 'exec "$@"'}[where]
    piped = Piped(["sh", "-c", f"exec 3<&0; {script}; true", "sh", program, "wait", 8], "32M")
    count = {"child": 3, "session": 2, "alone": 1}[where]
    assert until(lambda: piped.run.text(piped.run.out).count(b"ready\n") == count, 20), piped.run.text(piped.run.err)
    users, agents = who_runs(program)
    assert len(users) == count and len(agents) >= count
    kill(piped.run.pid)
    assert until(lambda: who_runs(program) == ([], []), 2), who_runs(program)
    piped.run.stats_path = None  # nobody has written any
    piped.run.finish()


def classes(pid):
    """The scheduling class of each thread of a process, as sched(7) numbers them. The main thread comes first."""
    tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))
    return [int(read_text(path / "stat").rpartition(")")[2].split()[38]) for path in tasks]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("limit", [[], ["--rttime=100000"]], ids=["", "time limit"])
def test_the_monitor_runs_before_others(built, limit):
    """A session has one share of a CPU. A monitor that had only a nice value waited for up to half a second beside busy programs."""
    program = built("ends.c")
    piped = Piped([*(["prlimit", *limit] if limit else []), program, "exit", 24], "48M")
    piped.run.wait_output(b"ready\n")
    guard, (monitor, *workers) = sorted(map(classes, who_runs(program)[1]), key=len)
    piped.go_on()
    piped.run.finish()
    # The kernel would kill a companion whose real-time threads run for longer than such a limit.
    assert monitor == (os.SCHED_OTHER if limit else os.SCHED_RR)
    assert guard == [os.SCHED_OTHER] and set(workers) <= {os.SCHED_OTHER, os.SCHED_IDLE}, (guard, workers)


# Under torture one of a hundred children ends before its companion: docs/guide/limitations.md.
@pytest.mark.parametrize("torture", [False, pytest.param(True, marks=soak_only)], ids=["normal", "torture"])
def test_nothing_of_an_ended_process_is_busy(built, tmp_path, torture):
    program, mib = built("leaves.c"), 4 if torture else 8
    assert plain([program, mib, 4], cwd=tmp_path).out == b"OK\n"
    assert foliomem([program, mib, 10], "16M", torture=torture, cwd=tmp_path).ok().out == b"OK\n"


@pytest.mark.parametrize("torture", [False, True], ids=["normal", "torture"])
def test_a_process_that_unmaps_everything_ends_alone(built, torture):
    program, mib = built("destroys.c"), 4 if torture else 8
    assert plain([program, mib, "all"]).out == b"OK\n"
    assert foliomem([program, mib, "all"], "16M", torture=torture).ok().out == b"OK\n"
    # The guard must end, too. A guard whose stack was unmapped once looped for ever.
    assert until(lambda: who_runs(program) == ([], []), 20), who_runs(program)


@pytest.mark.parametrize("how", ["discard", "end", "move"])
def test_a_process_that_destroys_agent_memory_ends_alone(built, how):
    program = built("destroys.c")
    assert plain([program, 16, how]).out == b"OK\n"
    run = foliomem([program, 16, how], "16M").ok()
    assert run.out == b"OK\n" and "has unmapped or discarded the agent's memory: stopped by SIGSEGV" in run.err
    assert until(lambda: who_runs(program) == ([], []), 20), who_runs(program)
