"""Cgroups of version 1 for tests, which are removed when their processes have ended."""
import os
import time
from contextlib import contextmanager

from conftest import RUNS, Running, clean_env


class Group:
    """A cgroup, and commands that run in it."""

    def __init__(self, path):
        self.path = path
        path.mkdir(parents=True)

    def inner(self, name="inner"):
        return type(self)(self.path / name)

    def start(self, argv, env=None, stdin=None):
        enter = 'echo $$ > "$0"; exec "$@"'
        return Running(["sh", "-c", enter, self.path / "cgroup.procs", *argv], clean_env(env), stdin=stdin)

    def read(self, file):
        return int((self.path / file).read_text())

    def remove(self):
        """Removes the group and those in it. A group with a process that still ends is tried again, for ten seconds."""
        inner_first = [*sorted((path for path in self.path.rglob("*") if path.is_dir()), reverse=True), self.path]
        end = time.monotonic() + 10
        for folder in inner_first:
            while folder.exists() and time.monotonic() < end:
                try:
                    folder.rmdir()
                except OSError:
                    time.sleep(0.05)


def can_make_groups(controller):
    """Whether this user may make groups below the folder of a controller."""
    probe = controller / f"foliomem-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


@contextmanager
def new_group(controller, kind=Group):
    group = kind(controller / f"foliomem-test-{os.getpid()}-{next(RUNS)}")
    try:
        yield group
    finally:
        group.remove()
