"""`doctor`, and what `run` checks before it starts a program: each cause is made, and said."""
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from conftest import BIN, DEVICE, ORDINARY, cli, foliomem_only, plain

pytestmark = foliomem_only
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
TRUE = shutil.which("true")


def lines(result):
    """What `doctor` says, by the name of each check: its state and the rest of the line."""
    text = result.out.decode()
    return {line[8:22].strip(): (line[:8].strip(), line[22:]) for line in text.splitlines()}


@pytest.fixture
def everywhere(public):
    """everywhere(prefix, check, part): behind `prefix`, `doctor` and `run` say `part` of `check`, and `run` does not start."""
    def check(prefix, name, part, program=(TRUE,)):
        environment = {"HOME": public.folder}
        doctor = plain([*prefix, public.folder / "foliomem", "doctor", "--on", "host"], env=environment)
        state, text = lines(doctor).get(name, ("", ""))
        assert doctor.code == 1 and state == "MISSING" and part in text and " -> " in text, (doctor.out.decode(), doctor.err)
        got = plain([*prefix, public.folder / "foliomem", "run", "--limit", "64M", "--", *program], env=environment)
        assert got.code == 125 and got.err.startswith("foliomem: ") and part.split(" -> ")[0] in got.err, got.err
        return text

    return check


def in_namespace(script):
    """A command that runs what follows in mounts of its own, after a script."""
    return ["unshare", "--mount", "sh", "-c", f'{script}; exec "$@"', "sh"]


def test_all_is_well_here():
    got = cli("doctor")
    said = lines(got)
    assert got.code == 0 and "UFFDIO_MOVE" in said and "ok" == said["userfaultfd"][0], got
    assert {"kernel", "/proc", "processes", "open files", "address space", "pidfd_getfd", "kcmp", "agent"} <= set(said)


@AS_ROOT
@pytest.mark.skipif(not DEVICE.exists(), reason="no device")
class TestDevice:
    def test_it_is_absent(self, everywhere):
        hidden = in_namespace("mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3")
        everywhere([*hidden, *ORDINARY], "userfaultfd", "there is no /dev/userfaultfd, although the kernel has it")

    def test_its_mode_forbids_it(self, everywhere, tmp_path):
        number = os.stat(DEVICE).st_rdev
        node = tmp_path / "node"
        os.mknod(node, stat.S_IFCHR | 0o600, number)
        os.chmod(node, 0o640)
        mounted = in_namespace(f"mount --bind {node} {DEVICE}")
        text = everywhere([*mounted, *ORDINARY], "userfaultfd", "has mode 0640, user 0 and group 0, which do not let user 65534 open it")
        assert "foliomem setup" in text

    def test_it_lies_on_nodev(self, everywhere):
        number = os.stat(DEVICE).st_rdev
        script = (f"mount -t tmpfs -o nodev tmpfs /dev && mknod -m 666 {DEVICE} c {os.major(number)} {os.minor(number)}"
                  " && mknod -m 666 /dev/null c 1 3")
        everywhere([*in_namespace(script), *ORDINARY], "userfaultfd", "mounted with nodev")

    def test_it_is_another_file(self, everywhere):
        everywhere([*in_namespace(f"mount --bind /dev/null {DEVICE}"), *ORDINARY], "userfaultfd", "is something else")

    def test_a_nested_user_namespace_has_no_capability_that_counts(self, everywhere):
        hidden = in_namespace("mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3")
        nested = [*hidden, "unshare", "--user", "--map-root-user"]
        if plain([*nested, "true"]).code:
            pytest.skip("no user namespaces here")
        everywhere(nested, "userfaultfd", "outside of this user namespace, whose own does not count")


@AS_ROOT
def test_proc_is_not_mounted(everywhere):
    everywhere(in_namespace("mount -t tmpfs tmpfs /proc"), "/proc", "is not mounted, or is another file system")


@AS_ROOT
def test_proc_shows_processes_only_but_that_is_enough(public):
    only_pids = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", 'mount -t proc -o subset=pid proc /proc; exec "$@"', "sh"]
    got = plain([*only_pids, public.folder / "foliomem", "doctor"], env={"HOME": public.folder})
    assert lines(got)["/proc"][0] == "ok", got.out


LIMITS = {
    "n": (["prlimit", "--nofile=10:10"], "open files", "too many open files (ulimit -n) -> ulimit -n 1024"),
    "v": (["prlimit", f"--as={500 << 20}"], "address space", "limited to 500 MiB (ulimit -v) -> ulimit -v unlimited"),
    "d": (["prlimit", f"--data={50 << 20}"], "address space", "limited to 50 MiB (ulimit -d) -> ulimit -d unlimited"),
}


@pytest.mark.parametrize("prefix, name, part", LIMITS.values(), ids=LIMITS)
def test_a_limit_of_the_process_is_too_low(everywhere, prefix, name, part):
    everywhere(prefix, name, part)


@AS_ROOT
def test_a_user_has_too_few_processes(everywhere, device_open_to_all):
    # A user of no other process.
    user = ["setpriv", "--reuid=64321", "--regid=64321", "--clear-groups", "prlimit", "--nproc=6:6"]
    everywhere(user, "processes", "(ulimit -u) -> ulimit -u unlimited")


@pytest.mark.skipif(not shutil.which("strace"), reason="no strace")
def test_a_run_forks_once_and_once_more_where_a_filter_may_kill_it(tmp_path):
    """Each run pays for its checks. The supervisor forks for the program; threads and the agent's processes share memory."""
    trace = tmp_path / "trace"
    calls = "--trace=fork,vfork,clone,clone3"
    plain(["strace", "--follow-forks", calls, "--output", trace, BIN, "run", "--limit", "64M", "--", TRUE]).ok()
    text = trace.read_text()
    forks = re.findall(r"^[0-9]+ +v?fork\(|^[0-9]+ +clone\((?!.*CLONE_VM)", text, re.MULTILINE)
    is_filtered = "Seccomp:\t0" not in Path("/proc/self/status").read_text()
    assert len(forks) == 1 + is_filtered, text
