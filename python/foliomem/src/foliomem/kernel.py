"""The Jupyter kernel inside a limit: `python -m foliomem.kernel -f FILE`, started by `foliomem run`.

It is ipykernel's, with a thread that looks at the run. A cell whose data does not fit into the limit is interrupted
(KeyboardInterrupt), and the kernel keeps its state. Code in C that does not return to Python is interrupted when it does.
A cell that only runs while the run is over its limit, and takes nothing, is not interrupted.
"""
from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from foliomem._control import Gauge, Level, Watch, inside

INTERVAL = 0.1
# A cell is interrupted when the run is over its limit and has grown by this share of it since the cell began, or since it
# was interrupted last.
GROWTH = 1 / 32
# So long after a cell has begun, figures may still show what earlier ones took.
LATE_NS = 300_000_000
# An exception in these would cost a message to or from Jupyter.
KERNEL_PACKAGES = {"ipykernel", "jupyter_client", "zmq", "IPython"}


def parent_of(pid: int) -> int | None:
    """The parent of a process; None if that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


class Interrupt(NamedTuple):
    """An interrupt on its way to a cell."""

    message_number: int
    reason: str


class Guard:
    """Interrupts cells that cannot fit, and ends the run when Jupyter has ended."""

    def __init__(self, jupyter: int | None) -> None:
        self.jupyter, self.supervisor = jupyter, os.getppid()
        self.gauge = Gauge()
        # What the run took when the cell began, or was interrupted last.
        self.base_bytes = 0
        # The messages from Jupyter that the kernel has begun to serve, of which cells are some.
        self.message_number = 0
        self.began_ns = 0
        # From the signal to its handler.
        self.pending: Interrupt | None = None

    def begin(self) -> None:
        """The kernel begins to serve a message."""
        self.began_ns = time.monotonic_ns()
        self.message_number += 1
        # One that was sent after the last cell had ended has been ignored.
        self.pending = None
        signal.signal(signal.SIGINT, self.handle_interrupt)

    def look(self, figures: dict[str, Any]) -> None:
        if self.jupyter is not None and parent_of(self.supervisor) not in (self.jupyter, None):
            os.kill(self.supervisor, signal.SIGTERM)
        # First: if another cell begins while this looks, the interrupt is not for that one.
        number = self.message_number
        pressure = self.gauge.look(figures)
        if time.monotonic_ns() - self.began_ns < LATE_NS:
            self.base_bytes = pressure.taken_bytes
        elif pressure.level == Level.OVER and pressure.taken_bytes > self.base_bytes + pressure.limit_bytes * GROWTH:
            self.base_bytes = pressure.taken_bytes
            self.interrupt(number, pressure.limit_bytes)

    def interrupt(self, number: int, limit_bytes: int) -> None:
        """Interrupts the cell that runs; between cells the kernel ignores this."""
        handler = signal.getsignal(signal.SIGINT)
        if handler is signal.SIG_IGN:
            return
        reason = f"foliomem: this cell's data does not fit into the limit of {limit_bytes / 2**20:.0f} MiB: interrupted"
        if handler == self.handle_interrupt:
            self.pending = Interrupt(number, reason)
        else:
            # The cell, or ipykernel for an asynchronous one, has a handler of its own.
            print(reason, file=sys.stderr)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def handle_interrupt(self, number: int, frame: FrameType | None) -> None:
        """The handler while the kernel serves a message. Raises in a cell only: anywhere else the kernel would lose the
        message, or never look at another one."""
        pending, self.pending = self.pending, None
        if pending is None:
            # Jupyter interrupts.
            signal.default_int_handler(number, frame)
        elif pending.message_number != self.message_number:
            # The cell has ended meanwhile.
            return
        elif is_in_cell(frame):
            print(pending.reason, file=sys.stderr)
            signal.default_int_handler(number, frame)
        else:
            # If a cell has called the kernel, the next look interrupts it.
            self.base_bytes = 0


def is_in_cell(frame: FrameType | None) -> bool:
    """Whether a cell executes, and nothing of the kernel that the cell has called, as print does."""
    if package_of(frame) in KERNEL_PACKAGES:
        return False
    while frame is not None:
        caller = frame.f_back
        if caller is not None and caller.f_code.co_name == "run_code" and package_of(caller) == "IPython":
            return package_of(frame) != "IPython"
        frame = caller
    return False


def package_of(frame: FrameType | None) -> str:
    """The package whose code a frame executes; '' if it has none."""
    name = frame.f_globals.get("__name__") if frame is not None else None
    return name.partition(".")[0] if isinstance(name, str) else ""


def main() -> None:
    """Starts the kernel."""
    from ipykernel.kernelapp import IPKernelApp

    if inside():
        # The kernel's parent is `foliomem run`, and Jupyter is that one's.
        jupyter = os.environ.get("JPY_PARENT_PID")
        os.environ["JPY_PARENT_PID"] = str(os.getppid())
        guard = Guard(int(jupyter) if jupyter else None)
        Watch(guard.look, INTERVAL)
        IPKernelApp.launch_instance(kernel_class=kernel_class(guard))
    else:
        IPKernelApp.launch_instance()


def kernel_class(guard: Guard) -> type[Any]:
    """ipykernel's kernel, whose handler of SIGINT is the guard's while it serves a message."""
    from ipykernel.ipkernel import IPythonKernel

    class GuardedKernel(IPythonKernel):
        def pre_handler_hook(self) -> None:
            super().pre_handler_hook()  # type: ignore[no-untyped-call]
            guard.begin()

    return GuardedKernel


if __name__ == "__main__":
    main()
