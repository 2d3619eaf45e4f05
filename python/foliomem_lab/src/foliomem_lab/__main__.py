"""`python3 -m foliomem_lab ADDRESS BINARY`, started by `foliomem lab sweep`: a request comes on standard input, the runs
go to standard output, both as JSON. Exit code 1 and a message on standard error if there are none.
"""
from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from .sweep import SweepError, sweep


class Progress:
    """Says how many runs are done. Ends it all when the foliomem that has started this is gone: nobody wants the runs."""

    def __init__(self) -> None:
        self.parent, self.done = os.getppid(), 0

    def __call__(self, done: int, of: int) -> None:
        if os.getppid() != self.parent:
            raise SweepError("foliomem has ended")
        if done > self.done:
            print(f"foliomem: {done} of {of} runs done", file=sys.stderr, flush=True)
        self.done = done


def main() -> int:
    address, binary = sys.argv[1:]
    # Ray prints what it has to say of lost machines to stdout, which is for the runs alone.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    combinations = [[(key, value) for key, value in settings] for settings in request["combinations"]]
    try:
        runs = sweep(address, Path(binary).read_bytes(), request["scenario"], request["costs"], combinations, Progress())
    except SweepError as error:
        print(f"foliomem: {error}", file=sys.stderr)
        return 1
    with answer:
        json.dump(runs, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
