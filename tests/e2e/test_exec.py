"""Programs that a program executes with an environment of its own: they stay in the limit, and see what they were given."""
import re
import shutil
import subprocess

import pytest
from conftest import BIN, PYTHON, cli, foliomem, foliomem_only, plain

pytestmark = foliomem_only
AGENT = "libfoliomem_agent"
OTHER_LIBRARY = "/lib/x86_64-linux-gnu/libm.so.6"
WAYS = ["execve", "execle", "execvpe", "fexecve", "execveat", "syscall", "dlsym", "thread", "spawn", "spawnp", "spawn_missing", "vfork",
        "execv", "execvp", "execl", "execlp", "system", "popen", "missing", "again", "none", "null", "many", "preload"]
# Shows its environment, and that it has 120 MiB in the limit of 64.
HOLD = ("import os; held = [(b'%08d' % i) * 512 for i in range(30720)]; "
        "print(dict(os.environ), held == [(b'%08d' % i) * 512 for i in range(30720)])")


@pytest.mark.parametrize("way", WAYS)
def test_the_agent_goes_along_and_nobody_sees_it(built, way, torture):
    argv = [built("executes.c"), way, AGENT, OTHER_LIBRARY]
    wanted, got = plain(argv).ok(), foliomem(argv, "48M", torture=torture).ok()
    assert wanted.out.endswith(b"\n0 wrong pages\nnot loaded\n"), wanted.out
    assert got.out == wanted.out.replace(b"not loaded", b"loaded")
    assert got.stats["vmstat"]["pswpout"] > 40 << 8 and "without the agent" not in got.err, got.err


@pytest.mark.parametrize("how", ["env -i", "subprocess", "shell", "other library", "run in a run"])
def test_what_is_started_with_a_clean_environment_keeps_the_limit(how):
    started = {
        "env -i": ["env", "-i", PYTHON, "-c", HOLD],
        "subprocess": [PYTHON, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}], env={{'A': '1'}}, check=True)"],
        "shell": ["sh", "-c", 'unset LD_PRELOAD FOLIOMEM_CONTROL; exec "$0" -c "$1"', PYTHON, HOLD],
        "other library": ["sh", "-c", 'export LD_PRELOAD="$2"; exec "$0" -c "$1"', PYTHON, HOLD, OTHER_LIBRARY],
        "run in a run": ["env", "-i", BIN, "run", "--limit", "48M", "--", "env", "-i", PYTHON, "-c", HOLD],
    }
    argv = started[how]
    got = foliomem(argv).ok()
    seen = got.out.decode()
    assert seen.endswith("True\n") and "CARRIED" not in seen and AGENT not in seen and ("LD_PRELOAD" in seen) == (how == "other library"), seen
    assert "without the agent" not in got.err, got.err
    if how == "run in a run":
        assert re.search(r"peak \d+ MiB of 48 MiB, needed [12]\d\d MiB", got.err), got.err
    else:
        assert got.stats["vmstat"]["pswpout"] > 40 << 8, got.err


@pytest.mark.parametrize("environment", [["env"], ["env", "-i"]], ids=["given", "clean"])
def test_a_program_in_a_root_without_the_agent_hears_nothing_of_it(tmp_path, environment):
    """The loader would complain on the program's stderr."""
    program = shutil.which("ls")
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for path in [program, *re.findall(r"(/\S+)", listed)]:
        copy = tmp_path / path.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    got = cli("run", "--quiet", "--limit", "64M", "--", *environment, shutil.which("chroot"), tmp_path, program, program).ok()
    assert (got.out.decode(), got.err) == (f"{program}\n", ""), got
