"""The campaign of growing programs in memory control groups (`foliomem bench limit`): a few runs here, 1,000 in `make soak`."""
import json
import os
from pathlib import Path

import pytest
from conftest import PYTHON, alone, cli, foliomem_only

GROUPS = [Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/cgroup.subtree_control")]
has_groups = os.geteuid() == 0 and any(path.exists() for path in GROUPS)
pytestmark = [foliomem_only, alone, pytest.mark.skipif(not has_groups, reason="needs root and memory control groups")]


def campaign(programs, runs, margin=50):
    """The rows of the campaign by program."""
    argv = ["bench", "limit", "--json", "--groups", "128,256", "--margin", str(margin), "--runs", str(runs)]
    argv += ["--only", ",".join(programs)]
    rows = json.loads(cli(*argv, env={"FOLIOMEM_PYTHON": PYTHON}, timeout=300).ok().out)
    return {row["program"]: row for row in rows}


def test_the_campaign_counts_its_runs():
    """The goal is 2% over the limit at most. Today a busy machine shows much more, so that is not asserted yet."""
    rows = campaign(["array", "lazy"], 4)
    assert sorted(rows) == ["array", "lazy"], rows
    for row in rows.values():
        assert row["runs"] == 4 and row["margin_percent"] == 50 and row["seconds"] > 0, row
        assert row["killed"] <= 4 and row["peak_over_limit_percent_max"] >= 0, row


def test_a_program_without_a_margin_is_killed_at_the_groups_limit():
    """What the campaign counts: a group has more than anonymous memory, so a limit as large as the group's is too large."""
    rows = campaign(["forks"], 2, margin=0)
    assert rows["forks"]["killed"] > 0, rows
