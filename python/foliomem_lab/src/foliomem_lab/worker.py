"""What is done on a worker: one combination of settings, by the binary and with the scenario that were sent along.

This module goes to the workers by value: it uses nothing but the standard library, and nothing needs to be installed there.
"""
from __future__ import annotations

import json
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any, TypedDict

Setting = tuple[str, str]
# A run as `foliomem lab run --json` writes it. Nothing here looks into it.
Run = dict[str, Any]


class Done(TypedDict):
    """What became of a combination: a run, or why there is none."""

    run: Run | None
    why: str


def named(settings: list[Setting]) -> str:
    """A combination as it stands in messages."""
    return " ".join(f"{key}={value}" for key, value in settings) or "the scenario as it is"


def run(binary: bytes, scenario: str, costs: str, settings: list[Setting]) -> Done:
    """Runs one combination. Nothing is left behind; what goes wrong is an answer, not an exception."""
    host = socket.gethostname()
    try:
        with tempfile.TemporaryDirectory(prefix="foliomem-lab-") as folder:
            program, file, table = (Path(folder, name) for name in ("foliomem-lab", "scenario.toml", "costs.toml"))
            program.write_bytes(binary)
            program.chmod(0o700)
            file.write_text(scenario, encoding="utf-8")
            table.write_text(costs, encoding="utf-8")
            vary = [part for key, value in settings for part in ("--vary", f"{key}={value}")]
            argv = [str(program), "run", str(file), *vary, "--costs", str(table), "--threads", "1", "--json", "-"]
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except OSError as error:
        return {"run": None, "why": f"{host} cannot run the foliomem that was sent there: {error}"}
    if done.returncode < 0:
        return {"run": None, "why": f"foliomem ended by signal {-done.returncode} on {host} (no memory left there?)"}
    if done.returncode != 0:
        why = done.stderr.strip().removeprefix("foliomem: ").replace(f"{folder}/", "")
        return {"run": None, "why": f"{why} (exit code {done.returncode} on {host})"}
    try:
        [only] = json.loads(done.stdout)
    except ValueError as error:
        return {"run": None, "why": f"foliomem on {host} printed something else than one run: {error}"}
    return {"run": only, "why": ""}
