"""Forks by every path into the C library, on little stack, from handlers, and of programs that use SIGSYS themselves."""
import pytest
from conftest import PYTHON, few_cases, foliomem, plain

# System calls that an agent might make around a fork.
ERRNO_CALLS = {13: "rt_sigaction", 14: "rt_sigprocmask", 39: "getpid", 157: "prctl", 186: "gettid", 131: "sigaltstack",
               140: "getpriority", 141: "setpriority", 310: "process_vm_readv"}
TRAP_CALLS = {13: "rt_sigaction", 14: "rt_sigprocmask", 131: "sigaltstack", 310: "process_vm_readv"}
CTYPES = ("import ctypes, os, sys\nlibc = ctypes.CDLL('libc.so.6')\nname = sys.argv[1]\n"
          "data = [bytes([i % 251]) * 65536 for i in range(1500)]\n"
          "child = getattr(libc, name)(*map(int, sys.argv[2:]))\n"
          "right = all(b[0] == b[-1] == i % 251 for i, b in enumerate(data))\n"
          "if child == 0: os._exit(not right)\n"
          "print('wrong', os.waitpid(child, 0)[1] + (not right))")


def check(argv, torture):
    """The program finds its memory right under foliomem, with most of it swapped out."""
    got = foliomem(argv, "24M" if torture else "48M", torture=torture, timeout=150).ok()
    assert got.out == b"wrong 0\n", got.err
    assert not got.stats or got.stats["vmstat"]["pswpin"] > 0, got.stats["vmstat"]


def mib(torture):
    return 32 if torture else 120


@pytest.fixture(scope="session")
def library(built):
    return built("fork_library.c", "-shared", "-fPIC")


@pytest.mark.parametrize("how", ["linked", "handle", "deepbind", "namespace"])
def test_a_child_has_its_memory_whatever_the_path_of_the_fork(built, library, how, torture):
    check([built("fork_paths.c"), mib(torture), how, *([library] if how in ("deepbind", "namespace") else [])], torture)


@few_cases
@pytest.mark.parametrize("call", [("fork",), ("_Fork",), ("syscall", 57), ("syscall", 56, 17, 0, 0, 0, 0)], ids=lambda call: "-".join(map(str, call[:2])))
def test_a_fork_by_ctypes_has_its_memory(call, torture):
    check([PYTHON, "-c", CTYPES, *call], torture)


@few_cases
@pytest.mark.parametrize("what", ["thread", "program", "fork", "all"])
def test_atfork_handlers_may_start_threads_and_programs_and_fork(built, what, torture):
    check([built("fork_handlers.c"), mib(torture), what], torture)


def test_a_fork_needs_no_more_stack_than_without_foliomem(built, torture):
    """Each path works with as little as it does plain."""
    program = built("fork_stack.c", "-Wl,-z,now")
    least = next(left for left in range(256, 4096, 64) if plain([program, 2, left]).code == 0)
    check([program, mib(torture), least], torture)


@few_cases
@pytest.mark.parametrize("how", ["handler", "blocked", "ignored", "threads", "dispatch", "dispatched"])
def test_sigsys_stays_the_programs_over_forks(built, how, torture):
    check([built("fork_sigsys.c"), mib(torture), how], torture)


@pytest.mark.parametrize("answer, number", [("errno", number) for number in ERRNO_CALLS] + [("trap", number) for number in TRAP_CALLS],
                         ids=[f"errno-{name}" for name in ERRNO_CALLS.values()] + [f"trap-{name}" for name in TRAP_CALLS.values()])
def test_filters_of_the_program_leave_its_forks_alone(built, answer, number):
    check([built("fork_sigsys.c"), mib(False), answer, number], False)
