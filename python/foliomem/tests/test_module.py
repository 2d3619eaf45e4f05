"""What the module decides by itself, without a run."""
from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from foliomem import FoliomemError, Level
from foliomem._command import options, outside_environment
from foliomem._control import Gauge
from foliomem._jupyter import kernel_folder
from foliomem.kernel import Guard, Interrupt, is_in_cell

MIB = 1 << 20
SECOND = 1_000_000_000


def figures(taken: float, needed: float, now: float, ratio: float) -> dict[str, Any]:
    store = {"orig_data_size": int(10 * ratio * MIB), "compr_data_size": 10 * MIB}
    return {"taken_bytes": taken * MIB, "needed_bytes": needed * MIB, "limit_bytes": 100 * MIB, "elapsed_ns": int(now * SECOND),
            "mm_stat": store}


def levels(*looks: tuple[float, float, float], ratio: float = 1.5) -> list[Level]:
    gauge = Gauge()
    return [gauge.look(figures(*look, ratio)).level for look in looks]


def test_a_run_that_needs_more_than_its_limit_compresses() -> None:
    seen = levels((90, 90, 0), (99, 101, 1), (98, 96, 2), (94, 94, 3), (94, 99, 4))
    assert seen == [Level.NONE, Level.COMPRESSING, Level.COMPRESSING, Level.NONE, Level.NONE]


def test_a_run_is_over_its_limit_if_that_lasts() -> None:
    assert levels((110, 200, 0), (110, 200, 0.9), (100, 200, 1.0), (110, 200, 1.1), (110, 200, 2.0))[-1] == Level.COMPRESSING
    assert levels((110, 200, 0), (110, 200, 1.0)) == [Level.COMPRESSING, Level.OVER]
    assert levels((102, 200, 0), (102, 200, 9)) == [Level.COMPRESSING] * 2
    # As long as it takes more than the limit.
    assert levels((110, 200, 0), (110, 200, 1.0), (101, 200, 1.1), (100, 200, 1.2))[2:] == [Level.OVER, Level.COMPRESSING]


def test_a_run_that_is_far_over_its_limit_is_so_sooner() -> None:
    assert levels((130, 200, 0), (130, 200, 0.3)) == [Level.COMPRESSING, Level.OVER]


def test_a_run_whose_data_compresses_into_its_limit_gets_time_for_that() -> None:
    looks = ((110.0, 200.0, 0.0), (110.0, 200.0, 4.9), (110.0, 200.0, 5.0))
    assert levels(*looks, ratio=2) == [Level.COMPRESSING, Level.COMPRESSING, Level.OVER]
    assert levels((130, 200, 0), (130, 200, 1.4), (130, 200, 1.5), ratio=2)[1:] == [Level.COMPRESSING, Level.OVER]


class Kernel:
    """A guard at a time that the test sets, and how often it has interrupted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.guard, self.now, self.interrupts = Guard(None), 0.0, 0
        monkeypatch.setattr("time.monotonic_ns", lambda: int(self.now * SECOND))
        monkeypatch.setattr(self.guard, "interrupt", self.count)

    def count(self, number: int, limit_bytes: int) -> None:
        self.interrupts += 1

    def cell(self, *taken_mib: float) -> int:
        """A cell in a limit of 100 MiB: what the run takes every half second, from its begin. Returns the interrupts."""
        before = self.interrupts
        self.guard.begin()
        for taken in taken_mib:
            self.guard.look(figures(taken, 300, self.now, 1.5))
            self.now += 0.5
        return self.interrupts - before


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    handler = signal.getsignal(signal.SIGINT)
    yield Kernel(monkeypatch)
    signal.signal(signal.SIGINT, handler)


def test_a_cell_that_does_not_fit_is_interrupted_and_again_as_it_grows(kernel: Kernel) -> None:
    assert kernel.cell(90, 99) == 0
    assert kernel.cell(99, 120, 130, 140, 142, 150) == 2
    assert kernel.cell(150, 152, 152, 155) == 1


def test_a_cell_that_takes_nothing_is_not_interrupted_for_an_earlier_one(kernel: Kernel) -> None:
    # The earlier one ends before it would be interrupted; then one that was.
    assert kernel.cell(90, 130) == 0
    assert kernel.cell(131, 131, 131, 133) == 0
    assert kernel.cell(133, 140) == 1
    assert kernel.cell(149, 149, 149) == 0


def test_an_interrupt_that_comes_too_late_is_not_for_the_next_cell(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.setattr("foliomem.kernel.is_in_cell", lambda frame: True)
    guard = kernel.guard
    guard.begin()
    guard.pending = Interrupt(guard.message_number, "too much")
    with pytest.raises(KeyboardInterrupt):
        guard.handle_interrupt(signal.SIGINT, None)
    late = Interrupt(guard.message_number, "too much")
    guard.pending = late
    guard.begin()
    # As if it had been decided before, and sent now.
    guard.pending = late
    guard.handle_interrupt(signal.SIGINT, None)
    # One of Jupyter's.
    with pytest.raises(KeyboardInterrupt):
        guard.handle_interrupt(signal.SIGINT, None)


def test_settings_are_options() -> None:
    assert options("1G", {"hard": True, "quiet": False, "swap": None, "reclaimers": 2}) == \
        ["--limit", "1G", "--hard", "--reclaimers", "2"]
    assert options(1 << 30, None) == ["--limit", "1073741824"]


def test_a_command_outside_of_the_run_is_not_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/a/libfoliomem_agent.so:/b/other.so")
    monkeypatch.setenv("FOLIOMEM_CONTROL", "/proc/1/fd/3")
    environment = outside_environment()
    assert environment["LD_PRELOAD"] == "/b/other.so" and "FOLIOMEM_CONTROL" not in environment


def test_a_kernel_has_a_name_that_is_a_folder() -> None:
    args = argparse.Namespace(name="../../evil", system=False, sys_prefix=False, prefix="/tmp")
    with pytest.raises(FoliomemError, match="no name of a kernel"):
        kernel_folder(args)
    args.name = "big-4G"
    assert str(kernel_folder(args)) == "/tmp/share/jupyter/kernels/big-4G"


def test_cells_are_interrupted_but_not_the_kernel() -> None:
    seen: dict[str, bool] = {}

    def module(name: str, source: str, **names: Any) -> dict[str, Any]:
        space: dict[str, Any] = {"__name__": name, "look": lambda place: seen.update({place: is_in_cell(sys._getframe(1))}), **names}
        exec(source, space)
        return space

    library = module("numpy.random", "def call(place): look(place)")
    stream = module("ipykernel.iostream", "def write(place): look(place)")
    shell = module("IPython.core.interactiveshell", "def run_code(cell, space):\n    look('shell')\n    exec(cell, space)\n"
                                                    "    show('traceback')\ndef show(place): look(place)")
    cell = module("__main__", "", call=library["call"], write=stream["write"])
    module("ipykernel.kernelbase", "def serve(run_code, *cell):\n    look('message')\n    run_code(*cell)")["serve"](
        shell["run_code"], "look('cell')\ncall('library')\nwrite('print')", cell)
    assert seen == {"message": False, "shell": False, "cell": True, "library": True, "print": False, "traceback": False}
