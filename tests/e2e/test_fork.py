"""Programs that fork, vfork and spawn: both sides of every fork change and check large arrays."""
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import LONG, MIB, PROGRAMS, PYTHON, assert_swapped, few_cases, foliomem, foliomem_only, plain, same_as_plain


@few_cases
@pytest.mark.parametrize("mode", ["both", "nested", "pool", "spawn"])
def test_python_forks(mode, torture):
    # The pool has twelve tasks, each of which changes a MiB of its own.
    if mode == "pool":
        size, limit = (12, "24M") if torture else (32, "48M")
    else:
        size, limit = (16, "24M") if torture else (96, "64M")
    same_as_plain([PYTHON, PROGRAMS / "forks.py", mode, size], limit, torture, timeout=150)


def test_c_vfork_spawn_exec(built, torture):
    size, limit = ("48", "24M") if torture else ("160", "48M")
    same_as_plain([built("vfork.c"), size], limit, torture, timeout=150)


def test_storm(built, torture):
    """Short children of a process at half its need, which takes its share of the limit whatever became of them."""
    size, children, limit = (48, 25, 24) if torture else (256, 100, 128)
    got = same_as_plain([built("storm.c"), size, children], f"{limit}M", torture)
    if got.stats:
        assert got.stats["peak_bytes"] <= limit * 1.05 * MIB + 32 * MIB, got.stats["peak_bytes"]
        assert torture or not got.stats["limit_exceeded"], got.err


@foliomem_only
def test_what_has_ended_takes_nothing():
    """One program after the other fits, though nobody has waited for those that have ended."""
    each = "import sys; b = bytes(range(256)) * (90 << 12); assert len(b) == 90 << 20; sys.stdout.close(); sys.exit(b[7] - 7)"
    zombies = ("import subprocess, sys\nended = []\nfor turn in range(6):\n"
               "    ended.append(subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE))\n"
               "    assert ended[-1].stdout.read() == b''\n"
               "    while open(f'/proc/{ended[-1].pid}/stat').read().split()[2] != 'Z': pass\n"
               "assert [child.wait() for child in ended] == [0] * 6")
    got = foliomem([PYTHON, "-c", zombies, each], limit="150M").ok()
    assert got.stats["vmstat"]["pswpout"] == 0 and got.stats["peak_bytes"] < 130 * MIB, got.stats


def test_threads_fork_on_stacks_that_are_out(built):
    """The agent's code around a fork touches no memory of the program, such as its stack: no handler could swap that in."""
    got = foliomem([built("own_stacks.c"), 10], torture=True).ok()
    assert got.out == b"wrong 0\n"


def test_threads_end_on_stacks_that_are_out(built):
    """An exiting thread cannot take userfaultfd faults, and the kernel writes its control block, so that stays resident."""
    env = {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}
    assert foliomem([built("thread_ends.c")], torture=True, env=env).ok().out == b"all have ended\n"


@pytest.mark.parametrize("mode", ["guard", "default", "filter"])
def test_many_threads_begin_at_once_on_stacks_that_may_go_out(built, mode):
    """Each new thread waits until the agent knows its control block, however many threads wait."""
    env = {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}
    got = foliomem([built("thread_crowd.c"), mode, 400], "32M", env=env).ok()
    assert got.out == b"all have ended\n"
    assert_swapped(got)


def test_many_children_at_once(built):
    """Each child has an agent, and most get no CPU. Once 200 children took minutes and kept all CPUs busy."""
    assert same_as_plain([built("crowd.c"), 100, 120 if LONG else 60], "64M", False, timeout=120).out == b"wrong 0\n"


def test_shell_pipeline(torture):
    """Many short processes, most of them not worth managing."""
    script = "for i in $(seq 40); do echo $i | tr 1 2 | sort | sed s/2/two/; done | sha256sum"
    assert foliomem(["sh", "-c", script], torture=torture).ok().out.endswith(b"  -\n")


def test_forks_right_after_being_managed():
    """Torture activates the agent at once, and these processes fork at once. A child must not inherit a held lock. Its
    parent must not wait for a page that only a stopped thread could map in. More processes run than there are CPUs."""
    script = 'for i in 1 2 3 4 5 6 7 8; do sh -c "(exit 3); true | true"; done; echo done'

    def run(_):
        return foliomem(["sh", "-c", script], torture=True, timeout=40).ok().out

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(run, range(120 if LONG else 24))) == {b"done\n"}


def test_a_child_does_not_look_asleep_before_fork_returns(built):
    argv = [built("fork_state.c"), 40]
    assert foliomem(argv, "64M").ok().out == plain(argv).ok().out == b"hardly any of the children slept inside fork\n"


def test_the_agents_processes_are_not_in_the_usage_of_children():
    script = ("import os, resource\nshow = lambda: print(*resource.getrusage(resource.RUSAGE_CHILDREN)[:10], flush=True)\n"
              "show()\nif not os.fork(): show(); os._exit(0)\nos.wait()")
    usages = foliomem([PYTHON, "-c", script], "64M").ok().out.split(b"\n")[:2]
    assert [set(map(float, usage.split())) for usage in usages] == [{0}, {0}]


def test_child_outlives_parent(tmp_path):
    """The memory of an orphan stays managed until it ends."""
    orphan = ("import os, sys, time\nif os.fork(): os._exit(3)\ntime.sleep(0.5)\n"
              "b = bytearray(b'abcdefgh' * (1 << 24))\nassert b == b'abcdefgh' * (1 << 24)\n"
              f"open({str(tmp_path / 'done')!r}, 'w').write(str(sum(b[::4096])))")
    running_code = foliomem(["sh", "-c", f'{PYTHON} -c "$0"; code=$?; while ! test -s {tmp_path}/done; do sleep 0.1; done; exit $code',
                             orphan], limit="64M")
    assert running_code.code == 3, running_code.err
    assert (tmp_path / "done").read_text() == str(ord("a") * (1 << 27) // 4096)
    assert_swapped(running_code)


def test_a_crowd_of_small_processes_keeps_the_limit(built):
    """To manage a process of 0.1 MiB would take more than it has."""
    got = foliomem([built("living_children.c"), 400], "64M", timeout=120).ok()
    assert not got.stats["limit_exceeded"] and got.stats["vmstat"]["pgfault"] == 0, got.err
    assert got.stats["peak_bytes"] <= 64 * MIB


def test_a_crowd_of_small_processes_beyond_the_limit_is_reported(built):
    got = foliomem([built("living_children.c"), 600], "24M", timeout=120).ok()
    assert "many small processes" in got.err, got.err
    assert got.stats["limit_exceeded"]


def test_small_processes_go_on_beside_one_that_is_swapped_out(tmp_path):
    large = "import sys\nheld = bytearray(range(256)) * (90 << 12)\nprint(flush=True)\nsys.stdin.read()\nassert held == bytearray(range(256)) * (90 << 12)"
    small = "i=0; while [ $i -lt 200 ]; do x=$(echo a); /bin/true; i=$((i + 1)); done; test $x = a"
    got = foliomem(["sh", "-c", f'mkfifo {tmp_path}/end; {PYTHON} -c "$0" < {tmp_path}/end > {tmp_path}/begun & large=$!\nexec 3> {tmp_path}/end\n'
                    f"while ! test -s {tmp_path}/begun; do sleep 0.1; done\n{small} && exec 3>&- && wait $large", large], "64M", timeout=120).ok()
    assert_swapped(got)
    assert got.stats["processes"] > 400


def test_a_program_that_changes_its_root(tmp_path):
    """The agent finds /proc after a chroot, too: in children, and when it activates."""
    grows = "held = [bytes([i % 251]) * (1 << 20) for i in range(150)]; assert all(b[7] == i % 251 for i, b in enumerate(held))"
    script = ("import os, sys\nos.chroot(sys.argv[1]); os.chdir('/')\n"
              "child = os.fork()\n"
              f"{grows}\n"
              "if child == 0: os._exit(7)\n"
              "assert os.waitpid(child, 0)[1] == 7 << 8\n"
              "child = os.fork() or os._exit(held[9][0])\n"
              "assert os.waitpid(child, 0)[1] == 9 << 8; print('as ever')")
    got = foliomem([PYTHON, "-c", script, tmp_path], "96M").ok()
    assert got.out == b"as ever\n"
    assert_swapped(got)


@pytest.mark.alone
def test_hundreds_of_children_live_at_once(built):
    """The monitors of the children once took all CPUs, and the 800th fork did not return within a minute."""
    got = foliomem([built("living_children.c"), 800], "2G", timeout=120).ok()
    assert got.out == b"right\n", got.out
