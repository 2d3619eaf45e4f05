"""Finds the command `foliomem`, and starts it so that it is no part of the run that the caller is in."""
from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Iterator, Mapping, Union

Size = Union[str, int]
Settings = Mapping[str, object]

# What a run passes to its programs.
OF_A_RUN = ("LD_PRELOAD", "FOLIOMEM_CONTROL")
AGENT = "libfoliomem_agent.so"


class FoliomemError(Exception):
    """What foliomem says when it cannot do what it was asked for."""


def _candidates() -> Iterator[Path]:
    """Where the command of this installation may be."""
    try:
        for file in importlib.metadata.files("foliomem") or []:
            if file.name == "foliomem" and file.parent.name == "bin":
                yield Path(str(file.locate())).resolve()
    except importlib.metadata.PackageNotFoundError:
        pass
    yield Path(sysconfig.get_path("scripts")) / "foliomem"


@functools.lru_cache(maxsize=None)
def command() -> str:
    """The path of the command `foliomem`: the one that came with this module, else that of PATH."""
    for path in _candidates():
        if os.access(path, os.X_OK):
            return str(path)
    found = shutil.which("foliomem")
    if found is None:
        raise FoliomemError("the command foliomem is neither beside this Python nor in PATH: pip install foliomem")
    return found


def options(limit: Size | None, settings: Settings | None) -> list[str]:
    """The options of `foliomem run` for these settings: {"swap": "f:4G", "hard": True}."""
    words = [] if limit is None else ["--limit", str(limit)]
    for name, value in (settings or {}).items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not False and value is not None:
            words += [option, str(value)]
    return words


def outside_environment() -> dict[str, str]:
    """The environment of a program that does not belong to the run of the caller."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_RUN}
    preloaded = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path and not path.endswith(AGENT)]
    if preloaded:
        environment["LD_PRELOAD"] = ":".join(preloaded)
    return environment


def ctl(*words: str) -> str:
    """What `foliomem ctl` prints about the run of this process."""
    argv = [command(), "ctl", str(os.getpid()), *words]
    done = subprocess.run(argv, capture_output=True, text=True, env=outside_environment(), stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [line[len("foliomem: "):] for line in done.stderr.splitlines() if line.startswith("foliomem: ")]
        raise FoliomemError("; ".join(lines) or f"{' '.join(argv)} ended with exit code {done.returncode}")
    return done.stdout
