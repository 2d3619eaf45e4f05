"""`run` starts a program inside a limit; `limit` starts this program again inside one."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Sequence

from foliomem._command import FoliomemError, Settings, Size, command, options
from foliomem._control import inside

# Tells the second start of a program that it is the second.
MARK = "FOLIOMEM_PYTHON_LIMITED"


class CompletedRun(subprocess.CompletedProcess):  # type: ignore[type-arg]
    """A program that has ended, and the statistics of its run (docs/reference/stats.md); {} where it did not start."""

    stats: dict[str, Any]


def run(args: Sequence[Any], *, limit: Size | None = None, settings: Settings | None = None, check: bool = False,
        **how: Any) -> CompletedRun:
    """Runs a program inside a limit, and waits for it.

    `limit` is as for `foliomem run --limit`, or bytes. `settings` has other options of `foliomem run` by name, such as
    {"swap": "/var/tmp/swap:4G", "hard": True, "quiet": True}. All others are those of `subprocess.run`.
    """
    if how.get("shell"):
        raise ValueError("give the shell and its arguments as a list: ['sh', '-c', ...]")
    with tempfile.TemporaryDirectory(prefix="foliomem-") as folder:
        stats = Path((settings or {}).get("stats") or f"{folder}/stats.json")  # type: ignore[arg-type]
        given = {**(settings or {}), "stats": stats}
        argv = [command(), "run", *options(limit, given), "--", *map(os.fspath, args)]
        done = subprocess.run(argv, **how)
        completed = CompletedRun(done.args, done.returncode, done.stdout, done.stderr)
        text = stats.read_text() if stats.is_file() else ""
        completed.stats = json.loads(text) if text else {}
    if check:
        completed.check_returncode()
    return completed


def limit(size: Size, *, settings: Settings | None = None) -> None:
    """Puts this program, and all its children, inside a limit: to be called at its start.

    The first call executes the interpreter again, with the same arguments, under `foliomem run`, so whatever the program did
    before is done twice. In the second program, and in one that is inside a run already, it does nothing.
    """
    if inside():
        os.environ.pop(MARK, None)
        return
    if MARK in os.environ:
        raise FoliomemError("this Python has not loaded foliomem's agent: it runs without a limit")
    words = options(size, settings)
    arguments = _own_arguments()
    executable = sys.executable or os.readlink("/proc/self/exe")
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.environ[MARK] = "1"
    path = command()
    try:
        os.execv(path, [path, "run", *words, "--", executable, *arguments])
    except OSError as error:
        del os.environ[MARK]
        raise FoliomemError(f"cannot start {path}: {error}") from error


def _own_arguments() -> list[str]:
    """The arguments of this interpreter: -c, -m and options of Python are not in sys.argv."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        raise FoliomemError("an interactive Python cannot start itself again: use `foliomem run --limit ... -- python3`")
    words = Path("/proc/self/cmdline").read_bytes().split(b"\0")[1:-1]
    if sys.argv[0] in ("", "-"):
        _rewind_script()
    return [os.fsdecode(word) for word in words]


def _rewind_script() -> None:
    """The program has come from stdin, which has been read to its end."""
    try:
        os.lseek(0, 0, os.SEEK_SET)
    except OSError:
        raise FoliomemError("a program that Python reads from a pipe cannot be read again: "
                            "use `foliomem run --limit ... -- python3 -`, or a file") from None
