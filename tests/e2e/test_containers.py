"""Containers with the filters of system calls that podman and docker ship: programs keep the limit there, or the cause is said."""
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from conftest import BIN, foliomem_only, in_turns, soak_only
from containers import DEVICE, PROFILES, Container

pytestmark = [
    foliomem_only,
    in_turns,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not DEVICE.exists(), reason="no userfaultfd device"),
]
# One case of each kind in each run, all in `make soak`.
ROOT, USER = pytest.param(0, id="root"), pytest.param(1000, id="user")
MORE_ROOT, MORE_USER = (pytest.param(*user.values, id=user.id, marks=soak_only) for user in (ROOT, USER))
# Calls that sandboxes often forbid.
CALLS = ["pidfd_getfd", "pidfd_open", "kcmp",
         *(pytest.param(name, marks=soak_only) for name in ("io_uring_setup", "clone3", "process_vm_readv", "futex_waitv"))]
FORKS = """
import os
data = bytearray(os.urandom(1 << 20) * 100)
wanted = sum(data[::4096])
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if sum(data[::4096]) == wanted else 1)
    assert os.waitpid(child, 0)[1] == 0
assert sum(data[::4096]) == wanted
print("OK")
"""
CTL = """
import os, subprocess
data = bytearray(100 << 20)
print(subprocess.run(["/foliomem/foliomem", "ctl", str(os.getpid()), "sizes"], capture_output=True, text=True).stdout)
"""


def containers(*always):
    """Each runtime with each filter: some in each run, the rest in `make soak`."""
    names = [f"{runtime}-{profile}" for runtime in ("crun", "runc") for profile in PROFILES]
    return [name if name in always else pytest.param(name, marks=soak_only) for name in names]


@pytest.fixture(params=containers("crun-podman"))
def container(request):
    runtime, profile = request.param.split("-")
    if not shutil.which(runtime) or not PROFILES[profile].exists():
        pytest.skip(f"no {runtime}, or no filter of {profile} (scripts/setup test)")
    # Users of the container must reach it; pytest's folders are for one user only.
    folder = Path(tempfile.mkdtemp(prefix="foliomem-container-"))
    yield Container(folder, runtime, profile)
    shutil.rmtree(folder)


def run(container, *argv, user=0, **how):
    """Runs foliomem in a container."""
    public = container.folder / "bin"
    if not public.exists():
        public.mkdir()
        for name in ("foliomem", "libfoliomem_agent.so"):
            shutil.copy(Path(BIN).with_name(name), public)
    return container.run(["/foliomem/foliomem", *argv], binds=[(public, "/foliomem", "ro")], user=user, **how)


def python(container, code, *options, **how):
    return run(container, "run", "--limit", "64M", *options, "--", "/usr/bin/python3", "-c", code, **how)


def lines(result):
    """What `doctor` says, by the name of each check: its state and the rest of the line."""
    text = result.out.decode()
    return {line[8:22].strip(): (line[:8].strip(), line[22:]) for line in text.splitlines()}


@pytest.mark.parametrize("container", containers("crun-podman", "runc-docker"), indirect=True)
@pytest.mark.parametrize("user", [ROOT, USER])
def test_a_forking_program_keeps_its_memory(container, user):
    got = python(container, FORKS, user=user).ok()
    assert got.out == b"OK\n" and "from swap" in got.err, got.err


@pytest.mark.parametrize("user", [MORE_ROOT, USER])
def test_a_swap_file_works(container, user):
    got = python(container, FORKS, "--swap", "/tmp/swap:256M", user=user).ok()
    assert got.out == b"OK\n", got.err


@pytest.mark.parametrize("user", [MORE_ROOT, USER])
def test_ctl_finds_the_run(container, user):
    got = python(container, CTL, user=user).ok()
    assert b"enabled" in got.out and b"2M" in got.out, (got.out, got.err)


@pytest.mark.parametrize("user", [ROOT, MORE_USER])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_is_forbidden_is_named_and_done_without(container, user, call):
    # Where clone3 does not exist, as with filters of today, the C library does without; nothing of foliomem calls process_vm_readv.
    forbidden = () if call == "clone3" else (call,)
    said = lines(run(container, "doctor", user=user, forbidden=forbidden))
    named = [name for name, (state, text) in said.items() if state == "note" and call in text]
    assert bool(named) == (call not in ("process_vm_readv", "clone3")), said
    got = python(container, FORKS, user=user, forbidden=forbidden).ok()
    assert got.out == b"OK\n", got.err


@pytest.mark.parametrize("call", ["pidfd_open", *(pytest.param(name, marks=soak_only) for name in ("pidfd_getfd", "kcmp", "futex_waitv"))])
def test_a_call_that_kills_is_named_before_the_program_starts(container, call):
    got = python(container, FORKS, forbidden=(call,), action="SCMP_ACT_KILL_PROCESS")
    assert got.code == 125 and f"a filter (seccomp) kills callers of {call}" in got.err, got.err


@pytest.mark.parametrize("user", [ROOT, USER])
def test_calls_that_are_allowed_are_not_noted(container, user):
    got = run(container, "doctor", user=user, allowed=("io_uring_setup", "io_uring_enter", "futex_waitv", "kcmp")).ok()
    said = lines(got)
    assert said["system calls"][0] == said["kcmp"][0] == said["userfaultfd"][0] == "ok", got.out


CAUSES = {
    "absent": ({"device": "absent"}, 0, "there is no /dev/userfaultfd, although the kernel has it; a filter (seccomp) refuses"),
    "rules": ({"device": "refused"}, 0, "the cgroup's device rules refuse /dev/userfaultfd"),
    "mode": ({"device_mode": 0o600}, 1000, "has mode 0600, user 0 and group 0, which do not let user 1000 open it"),
    "call": ({"device": "absent", "allowed": ("userfaultfd",)}, 0, "userfaultfd(2) needs CAP_SYS_PTRACE"),
    "deadly": ({"device": "absent", "forbidden": ("userfaultfd",), "action": "SCMP_ACT_KILL_PROCESS"}, 0, "kills callers of"),
    "memfd": ({"forbidden": ("memfd_create",)}, 0, "a filter (seccomp) refuses memfd_create"),
    "pids": ({"pids": 8}, 0, "(pids.max of the cgroup) -> docker run --pids-limit -1"),
}


@pytest.mark.parametrize("how, user, part", CAUSES.values(), ids=CAUSES)
def test_what_a_run_lacks_is_said_with_the_line_that_mends_it(container, how, user, part):
    doctor = run(container, "doctor", user=user, **how)
    missing = [rest for state, rest in lines(doctor).values() if state == "MISSING"]
    assert doctor.code == 1 and len(missing) == 1 and part in missing[0] and " -> " in missing[0], doctor.out.decode()
    got = run(container, "run", "--limit", "64M", "--", "/bin/true", user=user, **how)
    assert got.code == 125 and part in got.err and "6.8" not in got.err, got.err


def test_the_line_is_that_of_the_place(container):
    for place, part in [("docker", "docker run --device /dev/userfaultfd"), ("podman", "podman run --device /dev/userfaultfd"),
                        ("kubernetes", "device plugin"), ("systemd", "PrivateDevices=no"), ("host", "mknod")]:
        got = run(container, "doctor", "--on", place, device="absent")
        assert part in lines(got)["userfaultfd"][1], got.out.decode()
    kubernetes = run(container, "doctor", device="absent", env={"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert "device plugin" in lines(kubernetes)["userfaultfd"][1]


def test_the_test_has_a_filter(container):
    """The container's filter is there: else nothing here is tested."""
    got = container.run(["/bin/sh", "-c", "grep Seccomp: /proc/self/status"]).ok()
    assert got.out.split() == [b"Seccomp:", b"2"], got
