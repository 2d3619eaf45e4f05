"""Memory moves from processes that do not use it to one that needs it."""
import json
import os
import time

import pytest
from conftest import BIN, foliomem_only, plain, start

pytestmark = foliomem_only

MIB = 1 << 20
# Three processes fill 24 MiB each and sleep; then one uses all of its 48 MiB at random.
RUN = 'exec 3<&0; for n in 1 2 3; do "$0" 24 <&3 & done; sleep 1; "$1" 48 8 1; wait'


def sizes(run):
    """The name of the program of each process of the run, and its resident memory in bytes."""
    shown = [shown["living"] for shown in json.loads(plain([BIN, "top", "--json"]).ok().out) if shown["pid"] == run.pid]
    return [(one["program"].split()[0].rsplit("/")[-1], one["resident_bytes"]) for living in shown for one in living]


@pytest.mark.parametrize("turns", ["on", "off"])
def test_processes_that_sleep_give_their_memory_to_one_that_works(built, turns):
    """The limit has room for half of what all need. Before, the sleepers kept 10 to 20 MiB each, and the other had 7."""
    argv = ["sh", "-c", RUN, built("sleeps.c"), built("random.c")]
    reader, writer = os.pipe()
    run = start(argv, "64M", ("--turns", turns), stdin=os.fdopen(reader))
    deadline, seen = time.monotonic() + 30, []
    while time.monotonic() < deadline:
        seen = [size for name, size in sizes(run) if name.startswith("sleeps")]
        if len(seen) == 3 and max(seen) < 5 * MIB:
            break
        time.sleep(0.2)
    assert len(seen) == 3 and max(seen) < 5 * MIB, [size / MIB for size in seen]
    os.close(writer)
    got = run.finish(60).ok()
    assert got.out == b"right\n" * 4, got.err
