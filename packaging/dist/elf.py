"""What a binary needs of the system, read by readelf."""
from __future__ import annotations

import re
import subprocess
from pathlib import Path

Version = "tuple[int, ...]"


def _readelf(path: Path, *options: str) -> str:
    return subprocess.run(["readelf", "-W", *options, path], check=True, capture_output=True, text=True).stdout


def is_static(path: Path) -> bool:
    """Whether a program needs no loader."""
    return "INTERP" not in _readelf(path, "-l")


def glibc_version(path: Path) -> Version | None:
    """The oldest glibc that has all symbols that a binary needs; None for one that needs no glibc."""
    found = {tuple(map(int, version.split("."))) for version in re.findall(r"Name: GLIBC_([0-9.]+)", _readelf(path, "-V"))}
    return max(found, default=None)


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", _readelf(library, "-d"))


def _is_musl(name: str) -> bool:
    return name.startswith("libc.musl") or name == "libc.so"


def is_for_musl(library: Path) -> bool:
    """Whether programs of musl can load a library: it needs musl, or nothing."""
    return glibc_version(library) is None and all(_is_musl(name) for name in _needed(library))


def is_for_glibc(library: Path) -> bool:
    """Whether programs of glibc can load a library: it needs glibc, or nothing."""
    return not any(_is_musl(name) for name in _needed(library))
