"""Looks at the run that this program is in, and changes it: by `foliomem ctl`."""
from __future__ import annotations

import enum
import json
import os
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

from foliomem._command import Size, command, ctl, outside_environment

# How far beyond the limit a run may be for a moment (1/32): reclaim needs a little memory to free more.
TOLERANCE = 1 + 1 / 32
# A run that is beyond that for longer than this has data that does not fit. Reclaim may be late for a shorter time.
LASTING_NS = 1_000_000_000
# The same for a run that is beyond it by a quarter.
FAR = 1.25
LASTING_FAR_NS = 300_000_000
# Where the data compresses well enough to fit, reclaim lacks CPUs: the run may be beyond its limit this many times as long.
PATIENCE = 5
# A level ends when its figure is this share below what began it.
HYSTERESIS = 0.95


def inside() -> bool:
    """Whether this program is inside a run of foliomem."""
    return b"/memfd:foliomem-control" in Path("/proc/self/maps").read_bytes()


def status() -> dict[str, Any]:
    """What the run takes now, and all that `foliomem run --stats` writes (docs/reference/stats.md)."""
    figures: dict[str, Any] = json.loads(ctl("status", "--json"))
    return figures


def reclaim(size: Size = "all", *, wait: bool = True) -> None:
    """Has this process swap out now what has been unused for longest: `size` of it, or all."""
    ctl("reclaim", str(size), *(["--wait"] if wait else []))


class Level(enum.IntEnum):
    """How short memory is."""

    NONE = 0
    #: The run needs more than its limit: what is unused gets compressed.
    COMPRESSING = 1
    #: The run takes more than its limit though everything is compressed: its data does not fit.
    OVER = 2


@dataclass(frozen=True)
class Pressure:
    """What a callback is told."""

    level: Level
    taken_bytes: int
    needed_bytes: int
    limit_bytes: int


class Gauge:
    """Tells the level from figures that come one after the other."""

    def __init__(self) -> None:
        self.level = Level.NONE
        # Since when the run is beyond the limit, and far beyond it.
        self._over_since_ns: int | None = None
        self._far_since_ns: int | None = None

    def look(self, figures: dict[str, Any]) -> Pressure:
        """The pressure according to these figures."""
        taken, needed, limit = (figures[name] for name in ("taken_bytes", "needed_bytes", "limit_bytes"))
        now = figures["elapsed_ns"]
        self._over_since_ns = _since(self._over_since_ns, now, taken > limit * TOLERANCE)
        self._far_since_ns = _since(self._far_since_ns, now, taken > limit * FAR)
        patience = PATIENCE if _compresses_into(limit, needed, figures["mm_stat"]) else 1
        has_lasted = self._over_since_ns is not None and now - self._over_since_ns >= LASTING_NS * patience
        has_lasted_far = self._far_since_ns is not None and now - self._far_since_ns >= LASTING_FAR_NS * patience
        was = self.level
        if has_lasted or has_lasted_far or was == Level.OVER and taken > limit:
            self.level = Level.OVER
        elif needed > limit * (HYSTERESIS if was > Level.NONE else 1):
            self.level = Level.COMPRESSING
        else:
            self.level = Level.NONE
        return Pressure(self.level, taken, needed, limit)


def _since(since_ns: int | None, now_ns: int, holds: bool) -> int | None:
    """Since when something holds."""
    if not holds:
        return None
    return now_ns if since_ns is None else since_ns


def _compresses_into(limit: int, needed: int, store: dict[str, int]) -> bool:
    """Whether all that the run needs would fit, if it compresses as what has been compressed so far."""
    return needed * store["compr_data_size"] <= limit * store["orig_data_size"]


class Watch:
    """Calls back until it is stopped, in a thread of its own."""

    def __init__(self, look: Callable[[dict[str, Any]], None], interval: float) -> None:
        argv = [command(), "ctl", str(os.getpid()), "status", "--json", "--every", str(interval)]
        status()  # Raises if there is no run.
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                         env=outside_environment(), start_new_session=True)
        self._look = look
        self._thread = threading.Thread(target=self._follow, name="foliomem-watch", daemon=True)
        self._thread.start()

    def _figures(self) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                yield json.loads(line)

    def _follow(self) -> None:
        try:
            for figures in self._figures():
                self._look(figures)
        finally:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Ends the watch."""
        self._process.kill()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def on_pressure(callback: Callable[[Pressure], None], *, interval: float = 0.1) -> Watch:
    """Has `callback` called, in another thread, each time that memory gets shorter: when the run begins to compress, and when
    its data does not fit. Looks every `interval` seconds."""
    gauge = Gauge()

    def look(figures: dict[str, Any]) -> None:
        before, pressure = gauge.level, gauge.look(figures)
        if pressure.level > before:
            callback(pressure)

    return Watch(look, interval)
