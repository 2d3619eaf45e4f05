"""Containers for tests: bundles of crun or runc with the filter of system calls (seccomp) that podman or docker ships.

A container has the machine's /usr, read only, and folders of its own. Its capabilities, masks and device rules are those of
`podman run` without options.
"""
import errno
import itertools
import json
import os
import re
import shutil
from pathlib import Path

from conftest import Running, clean_env

# The filters that containers have by default. scripts/setup takes docker's out of the package of its source.
PROFILES = {"podman": Path("/usr/share/containers/seccomp.json"), "docker": Path("/var/cache/foliomem/docker-seccomp.json")}
CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID",
                "SYS_CHROOT"]
# The device cgroup of podman: these may be read and written, everything may be made.
ALLOWED_DEVICES = [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)]
DEVICE = Path("/dev/userfaultfd")
NUMBERS = itertools.count()
# crun refuses a system with cgroups of both versions, so version 2 is unmounted for crun.
PURE_GROUPS = ["unshare", "--mount", "sh", "-c", 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"', "sh"]
LINKS = ("bin", "sbin", "lib", "lib64")


def seccomp(profile, capabilities, allowed=(), forbidden=(), action="SCMP_ACT_ERRNO"):
    """A filter in crun's format, with some calls allowed and some forbidden. `action` applies to forbidden calls."""
    profile = json.loads(PROFILES[profile].read_text())
    calls = []
    for rule in profile["syscalls"]:
        includes, excludes = rule.get("includes", {}), rule.get("excludes", {})
        has = {f"CAP_{name}" for name in capabilities}
        if not set(includes.get("caps", [])) <= has or set(excludes.get("caps", [])) & has:
            continue
        if "arches" in includes and "amd64" not in includes["arches"] or "amd64" in excludes.get("arches", []):
            continue
        names = [name for name in rule["names"] if name not in (*allowed, *forbidden)]
        if names:
            calls.append({key: rule[key] for key in ("action", "errnoRet", "args") if rule.get(key) is not None} | {"names": names})
    if allowed:
        calls.append({"names": list(allowed), "action": "SCMP_ACT_ALLOW"})
    if forbidden:
        calls.append({"names": list(forbidden), "action": action, **({"errnoRet": 1} if action == "SCMP_ACT_ERRNO" else {})})
    return {"defaultAction": profile["defaultAction"], "defaultErrnoRet": profile.get("defaultErrnoRet", errno.EPERM),
            "architectures": ["SCMP_ARCH_X86_64"], "syscalls": calls}


class Container:
    """A container in `folder`, which begins one program at a time by `run`, inside the filter of `profile`."""

    def __init__(self, folder, runtime="crun", profile="podman"):
        self.folder, self.profile = Path(folder), profile
        self.command = [*PURE_GROUPS, runtime, *(["--cgroup-manager=cgroupfs"] if runtime == "crun" else [])]
        root = self.folder / "rootfs"
        for name in ("usr", "proc", "sys", "dev", "tmp", "run", "etc", "work"):
            (root / name).mkdir(parents=True)
        (root / "tmp").chmod(0o1777)
        self.folder.chmod(0o755)
        for name in LINKS:
            (root / name).symlink_to(f"usr/{name}")
        for name in ("passwd", "group", "ld.so.cache"):
            shutil.copy(f"/etc/{name}", root / "etc")

    def config(self, argv, binds, user, device, device_mode, capabilities, filtered, env, pids):
        kept = [f"CAP_{name}" for name in capabilities]
        effective = kept if user == 0 else []
        bind = [{"source": str(source), "destination": str(target), "type": "bind", "options": ["rbind", mode]}
                for source, target, mode in [("/usr", "/usr", "ro"), *binds]]
        number = os.stat(DEVICE).st_rdev
        rules = [{"allow": False, "access": "rwm"}, {"allow": True, "type": "c", "access": "m"}]
        allowed = [*ALLOWED_DEVICES, *([(os.major(number), os.minor(number))] if device == "given" else [])]
        rules += [{"allow": True, "type": "c", "major": major, "minor": minor, "access": "rwm"} for major, minor in allowed]
        node = {"path": str(DEVICE), "type": "c", "major": os.major(number), "minor": os.minor(number), "fileMode": device_mode,
                "uid": 0, "gid": 0}
        sets = {name: effective for name in ("effective", "permitted")}
        return {
            "ociVersion": "1.0.0", "hostname": "container", "root": {"path": "rootfs", "readonly": False},
            "process": {
                "terminal": False, "user": {"uid": user, "gid": user}, "args": [str(word) for word in argv], "cwd": "/",
                "env": ["PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/tmp", "container=oci",
                        *(f"{key}={value}" for key, value in env.items())],
                "capabilities": {"bounding": kept, "inheritable": [], "ambient": [], **sets}, "noNewPrivileges": False,
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]},
                {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev", "mode=1777"]},
                {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["nosuid", "noexec", "nodev", "ro"]},
                *bind,
            ],
            "linux": {
                "resources": {"devices": rules, "pids": {"limit": pids}},
                "devices": [node] if device in ("given", "refused") else [],
                "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
                "maskedPaths": ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
                "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
                **({"seccomp": filtered} if filtered else {}),
            },
        }

    def run(self, argv, binds=(), user=0, device="given", device_mode=0o666, capabilities=CAPABILITIES, allowed=(), forbidden=(),
            action="SCMP_ACT_ERRNO", env=None, pids=2048, timeout=60):
        """Runs a program to its end. `device`: "given", "absent", or "refused" (a node, but not by the cgroup)."""
        filtered = seccomp(self.profile, capabilities, allowed, forbidden, action)
        config = self.config(argv, binds, user, device, device_mode, capabilities, filtered, env or {}, pids)
        (self.folder / "config.json").write_text(json.dumps(config))
        name = f"foliomem-test-{os.getpid()}-{next(NUMBERS)}"
        for _ in range(3):
            try:
                got = Running([*self.command, "run", "--bundle", self.folder, name], clean_env(), self.folder).finish(timeout)
            finally:
                Running([*self.command, "delete", "--force", name], clean_env()).finish(20)
            # A new group may have no CPUs yet.
            if "cgroup.procs`: No space left on device" not in got.err:
                break
        return got
