"""The Jupyter kernel inside a limit: `python -m foliomem.kernel -f FILE`, started by `foliomem run`.

It is ipykernel's, with a thread that looks at the run. A cell whose data does not fit into the limit is interrupted
(KeyboardInterrupt), and the kernel keeps its state. Code in C that does not return to Python is interrupted when it does.
"""
from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from foliomem._control import Gauge, Level, Watch, inside

INTERVAL = 0.1
# A run that is over its limit is interrupted again when it has grown by this share of it.
GROWTH = 1 / 32


def parent_of(pid: int) -> int | None:
    """The parent of a process; None if that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


class Guard:
    """Interrupts cells that cannot fit, and ends the run when Jupyter has ended."""

    def __init__(self, jupyter: int | None) -> None:
        self.jupyter, self.supervisor = jupyter, os.getppid()
        self.gauge = Gauge()
        self.interrupted_at = 0

    def look(self, figures: dict[str, Any]) -> None:
        if self.jupyter is not None and parent_of(self.supervisor) not in (self.jupyter, None):
            os.kill(self.supervisor, signal.SIGTERM)
        pressure = self.gauge.look(figures)
        if pressure.level < Level.OVER:
            self.interrupted_at = 0
        elif pressure.taken_bytes > self.interrupted_at + pressure.limit_bytes * GROWTH:
            self.interrupted_at = pressure.taken_bytes
            self.interrupt(pressure.limit_bytes)

    @staticmethod
    def interrupt(limit_bytes: int) -> None:
        """Interrupts the cell that runs; between cells the kernel ignores this."""
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            print(f"foliomem: this cell's data does not fit into the limit of {limit_bytes / 2**20:.0f} MiB: interrupted",
                  file=sys.stderr)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def main() -> None:
    """Starts the kernel."""
    from ipykernel.kernelapp import launch_new_instance

    if inside():
        # The kernel's parent is `foliomem run`, and Jupyter is that one's.
        jupyter = os.environ.get("JPY_PARENT_PID")
        os.environ["JPY_PARENT_PID"] = str(os.getppid())
        Watch(Guard(int(jupyter) if jupyter else None).look, INTERVAL)
    launch_new_instance()


if __name__ == "__main__":
    main()
