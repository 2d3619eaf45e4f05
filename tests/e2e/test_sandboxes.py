"""Trees of sandboxes: namespaces, empty root directories, credentials, filters, as browsers and bubblewrap make them."""
import os
import shutil

import pytest
from conftest import ORDINARY, PLAIN, few_cases, foliomem, plain

UNSHARE = ["unshare", "--fork", "--pid", "--user", "--map-root-user"]
BWRAP = ["bwrap", "--unshare-all", "--die-with-parent"]
SANDBOXES = {
    "unshare": UNSHARE,
    "unshare-proc": [*UNSHARE, "--mount-proc"],
    "unshare-user": ["unshare", "--user", "--map-root-user"],
    "bwrap": [*BWRAP, "--dev-bind", "/", "/"],
    "bwrap-proc": [*BWRAP, "--bind", "/", "/", "--proc", "/proc"],
    "bwrap-dev": [*BWRAP, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"],
}


def works(sandbox):
    return shutil.which(sandbox[0]) is not None and plain([*sandbox, "true"]).code == 0


def size(torture):
    return 24 if torture else 64


def check(argv, torture, lines=1, run=None):
    """Every process finds its memory right and itself alone, and most of that memory was swapped out."""
    run = run or foliomem
    got = run(argv, "20M" if torture else "32M", torture=torture, timeout=150).ok()
    assert got.out == b"wrong 0\n" * lines, got.err
    assert "without the limit" not in got.err and "without the agent" not in got.err
    if not PLAIN:
        assert got.stats["vmstat"]["pswpin"] > 0, got.stats["vmstat"]
    return got


@few_cases
@pytest.mark.parametrize("how, lines", [("zygote", 1), ("unshare", 1), ("root", 1), ("subreaper", 1), ("again", 2)])
def test_a_sandboxed_process_has_its_memory_and_sees_no_companion(built, how, lines, torture):
    program = built("sandboxed.c")
    if plain([program, 1, how]).code != 0:
        pytest.skip("this machine allows no such namespaces")
    check([program, size(torture), how], torture, lines)


@few_cases
@pytest.mark.parametrize("sandbox", SANDBOXES.values(), ids=SANDBOXES)
def test_a_program_in_a_sandbox_keeps_the_limit(built, sandbox, torture):
    if not works(sandbox):
        pytest.skip(f"{sandbox[0]} is not to be had here")
    check([*sandbox, built("sandboxed.c"), size(torture), "check"], torture)


@pytest.mark.parametrize("how, lines", [("refused", 1), ("alone", 1)])
def test_a_program_that_may_not_use_userfaultfd_goes_on_without_the_limit_which_is_said_once(built, how, lines, torture):
    """A filter of the program's refuses the calls, before anything is managed or in the child of a fork."""
    got = foliomem([built("sandboxed.c"), size(torture), how], "24M", torture=torture, timeout=150).ok()
    assert got.out == b"wrong 0\n" * lines, got.err
    if not PLAIN:
        assert got.err.count("goes on without the limit") == 1, got.err


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@AS_ROOT
@few_cases
@pytest.mark.parametrize("how", ["user", "early-user"])
def test_children_of_a_program_that_has_changed_its_user_keep_the_limit(built, how, torture):
    """The kernel opens neither the userfaultfd device nor the files of its own memory for such a child."""
    check([built("sandboxed.c"), size(torture), how], torture)


@AS_ROOT
def test_a_program_that_another_user_has_started_keeps_the_limit(built, public, torture):
    program = shutil.copy(built("sandboxed.c"), public.folder)
    check([*ORDINARY, program, size(torture), "check"], torture, run=public.run)


def test_a_program_that_is_not_to_be_dumped_keeps_the_limit_and_a_child_its_memory(built, public, device_open_to_all, torture):
    """An ordinary user's child that is not to be dumped cannot be managed, which is said."""
    program = shutil.copy(built("sandboxed.c"), public.folder)
    got = public.run([program, size(torture), "early-undumped"], "20M" if torture else "32M", torture, ORDINARY).ok()
    assert got.out == b"wrong 0\n", got.err
    if not PLAIN:
        assert got.stats["vmstat"]["pswpin"] > 0, got.stats["vmstat"]
        assert got.err.count("goes on without the limit") == 1 and "without the agent" not in got.err, got.err
