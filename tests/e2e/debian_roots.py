"""Debian systems for tests: each has a copy of its own, by an overlay, of the root that `scripts/setup test` makes once."""
import hashlib
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

DEBIAN = Path("/var/cache/foliomem/bookworm")
needs_root = pytest.mark.skipif(os.geteuid() != 0 or not (DEBIAN / "bin/udevadm").exists(),
                                reason="needs root, and a Debian root (scripts/setup test)")
DEVICE = Path("dev/userfaultfd")
# Needs more than twice its limit, and says whether it is managed.
PROGRAM = "rows = [b'x%07d' % i * 512 for i in range(16000)]\n" \
          "print(len(rows), '/memfd:foliomem-control' in open('/proc/self/maps').read())"
LIMITED = ["foliomem", "run", "--limit", "32M", "--", "python3", "-c", PROGRAM]
# Paths that package managers, group tools and udev change for themselves: comparisons ignore them.
OTHERS = ("/var/lib/dpkg", "/var/log", "/var/cache", "/tmp", "/var/lib/rpm", "/root", "/etc/group-", "/etc/gshadow-", "/run/",
          "/dev/char")


def entry(path):
    """The identity of a file for comparisons: mode, owner, group, device number and content."""
    found = path.lstat()
    content = os.readlink(path) if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    return found.st_mode, found.st_uid, found.st_gid, found.st_rdev, content


class Root:
    """A Debian system of its own."""

    def __init__(self, folder):
        self.upper, self.path = folder / "upper", folder / "root"
        self.path.mkdir(parents=True)
        self.upper.mkdir()
        self.mount("tmpfs", self.upper)
        (self.upper / "files").mkdir()
        (self.upper / "work").mkdir()
        self.mount("overlay", self.path, f"lowerdir={DEBIAN},upperdir={self.upper}/files,workdir={self.upper}/work")
        self.mount("proc", self.path / "proc")
        self.mount("sysfs", self.path / "sys", "ro")
        for name, number in {"null": (1, 3), "userfaultfd": None}.items():
            device = self.path / "dev" / name
            device.unlink(missing_ok=True)
            real = os.stat(f"/dev/{name}").st_rdev if number is None else os.makedev(*number)
            os.mknod(device, stat.S_IFCHR | 0o600, real)
            device.chmod(0o600 if number is None else 0o666)
        self.before = self.changes()

    @staticmethod
    def mount(kind, folder, options="defaults"):
        subprocess.run(["mount", "-t", kind, "-o", options, "foliomem-test", folder], check=True)

    def close(self):
        for path in (self.path / "sys", self.path / "proc", self.path, self.upper):
            subprocess.run(["umount", "-l", path])

    def run(self, *argv, user=()):
        """Runs a command in the root; its output."""
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8",
               "PYTHONDONTWRITEBYTECODE": "1"}
        argv = ["chroot", self.path, *user, *argv]
        done = subprocess.run([str(word) for word in argv], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{argv}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def copy(self, file, folder="tmp"):
        """Puts a file into a folder of the root."""
        shutil.copy(file, self.path / folder)
        return f"/{folder}/{file.name}"

    def changes(self):
        """All that differs from Debian's root: each path with what it is."""
        upper, changed = self.upper / "files", {}
        for path in upper.rglob("*"):
            name = path.relative_to(upper)
            before = DEBIAN / name
            is_same = os.path.lexists(before) and entry(before) == entry(path)
            if not is_same and not f"/{name}".startswith(OTHERS):
                changed[str(name)] = entry(path)
        return changed

    def device(self):
        """The group of the device, and its mode."""
        found = (self.path / DEVICE).stat()
        return found.st_gid, stat.S_IMODE(found.st_mode)

    def check_it_runs(self):
        assert self.run(*LIMITED) == "16000 True\n"
        assert "/lib/foliomem/libfoliomem_agent.so" in self.run("foliomem", "doctor")

    def check_the_group_may(self):
        """A member of the group may use foliomem, and no other."""
        gid = int(self.run("getent", "group", "foliomem").split(":")[2])
        assert self.device() == (gid, 0o660)
        assert self.run(*LIMITED, user=self.member(gid)) == "16000 True\n"
        with pytest.raises(AssertionError, match="do not let user 1234 open it"):
            self.run(*LIMITED, user=self.member(1234))

    @staticmethod
    def member(gid):
        """A command that runs what follows as an ordinary user of that group."""
        return ["setpriv", "--reuid=1234", f"--regid={gid}", "--clear-groups"]

    def check_nothing_is_left(self):
        now = self.changes()
        differs = {name: (self.before.get(name), now.get(name)) for name in now.keys() | self.before.keys()
                   if self.before.get(name) != now.get(name)}
        assert not differs, differs
