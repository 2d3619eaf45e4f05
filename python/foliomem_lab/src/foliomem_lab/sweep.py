"""A task for each combination of settings, and their runs in the order of the combinations."""
from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any

from . import worker
from .worker import Done, Run, Setting


# How long who waits for the runs may be gone before that is noticed.
POLL_SECONDS = 2.0


# Ray itself tries for minutes.
CONNECT_SECONDS = 10.0


class SweepError(Exception):
    """Why there are no runs; what failed is in the message, a line for each combination."""


def sweep(
    address: str,
    binary: bytes,
    scenario: str,
    costs: str,
    combinations: list[list[Setting]],
    progress: Callable[[int, int], None],
) -> list[Run]:
    """Runs every combination on the cluster at `address`, each on one CPU of it. All are tried, also after one has failed;
    `progress` is told now and then how many are done, of how many, and may raise an error to end it."""
    try:
        import ray
        from ray import cloudpickle
    except ImportError as error:
        raise SweepError(f"Ray is missing: {error}. Install it with `pip install ray`, of the cluster's version") from error
    try:
        connect(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise SweepError(f"no Ray cluster answers at {address}: {error}") from error
    try:
        cloudpickle.register_pickle_by_value(worker)
        run = ray.remote(num_cpus=1)(worker.run)
        # Sent once to each machine, not with each task.
        sent = ray.put(binary)
        tasks = [run.remote(sent, scenario, costs, settings) for settings in combinations]
        waiting = tasks
        while waiting:
            _, waiting = ray.wait(waiting, timeout=POLL_SECONDS)
            progress(len(tasks) - len(waiting), len(tasks))
        return runs_of(combinations, [result_of(ray, task) for task in tasks])
    finally:
        ray.shutdown()


def connect(address: str) -> None:
    """Raises an OSError where nobody listens at an address with a port."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def result_of(ray: Any, task: Any) -> Done:
    """What became of a task that has ended."""
    try:
        done: Done = ray.get(task)
    except ray.exceptions.RayError as error:
        return {"run": None, "why": f"Ray: {' '.join(str(error).split())}"}
    return done


def runs_of(combinations: list[list[Setting]], results: list[Done]) -> list[Run]:
    """The runs, if there is one of each."""
    runs, failed = [], []
    for settings, result in zip(combinations, results, strict=True):
        if result["run"] is None:
            failed.append(f"{worker.named(settings)}: {result['why']}")
        else:
            runs.append(result["run"])
    if failed:
        raise SweepError(f"{len(failed)} of {len(results)} runs failed:\n  " + "\n  ".join(failed))
    return runs
