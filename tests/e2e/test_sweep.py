"""`foliomem lab sweep` on a Ray cluster of this machine: the same runs as without one."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BIN, LONG, PYTHON, REPO, Running, clean_env, cli, foliomem_only, read_text

pytestmark = foliomem_only

PACKAGE = REPO / "python/foliomem_lab/src"
RAY = Path(sys.executable).parent / "ray"
ENV = {"FOLIOMEM_PYTHON": PYTHON, "PYTHONPATH": PACKAGE}
VARY = ["--vary", "workload.swap-allocator.rounds=4,8", "--vary", "swap.strategy=cluster-lists,nonfull-first"]


def machine(*args):
    """Starts a machine of a cluster, which lacks the package: nothing need be installed there."""
    argv = [RAY, "start", "--block", "--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats", *args]
    ray = Running(argv, clean_env({"RAY_USAGE_STATS_ENABLED": 0}))
    return ray, ray.wait_output(b"--block", timeout=60).decode()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The address of a cluster of one machine."""
    folder = tmp_path_factory.mktemp("ray")
    ray, said = machine("--head", "--port=0", "--include-dashboard=false", f"--temp-dir={folder}")
    yield re.search(r"--address='([^']+)'", said)[1]
    os.kill(ray.pid, signal.SIGTERM)
    ray.finish(60)


def sweep(address, *args, timeout=120):
    return cli("lab", "sweep", "--ray", address, "swap-allocator", *args, env=ENV, timeout=timeout)


def test_a_cluster_gives_the_same_runs_in_the_same_order(cluster, tmp_path):
    def files(name):
        kinds = ["json", "html", "parquet"]
        return [tmp_path / f"{name}.{kind}" for kind in kinds], [f"--{kind}={tmp_path / name}.{kind}" for kind in kinds]
    (here, to_here), (there, to_there) = files("here"), files("there")
    cli("lab", "run", "swap-allocator", *VARY, *to_here).ok()
    got = sweep(cluster, *VARY, *to_there).ok()
    runs = json.loads(there[0].read_text())
    assert [dict(run["set"])["swap.strategy"] for run in runs] == ["cluster-lists", "nonfull-first"] * 2
    assert len({run["outcome"]["digest"] for run in runs}) == 4
    for a, b in zip(here, there, strict=True):
        assert a.read_bytes() == b.read_bytes(), a
    assert all(run["outcome"]["digest"].encode() in got.out for run in runs)
    assert "foliomem: 4 of 4 runs done\n" in got.err


def test_combinations_that_fail_are_named(cluster):
    got = sweep(cluster, "--vary", "workload.swap-allocator.rounds=1", "--vary", "machine.limit_mib=128,16", "--vary",
                "swap.size_mib=64,2")
    assert got.code == 125 and "1 of 4 runs failed" in got.err, got.err
    which = "workload.swap-allocator.rounds=1 machine.limit_mib=16 swap.size_mib=2: out of memory after "
    assert which in got.err and cluster in got.err.splitlines()[-1], got.err


def test_a_bad_setting_is_refused_before_anything_starts():
    got = sweep("127.0.0.1:1", "--vary", "swap.strategy=best")
    assert got.code == 125 and "--vary swap.strategy=best: unknown swap strategy" in got.err, got.err


def test_without_a_cluster_or_python_it_says_so():
    got = sweep("127.0.0.1:1")
    assert got.code == 125 and "no Ray cluster answers at 127.0.0.1:1: " in got.err, got.err
    for env, why in [({**ENV, "FOLIOMEM_PYTHON": "/nowhere/python"}, "cannot start /nowhere/python"),
                     ({"FOLIOMEM_PYTHON": PYTHON}, "No module named foliomem_lab")]:
        got = cli("lab", "sweep", "--ray", "auto", "swap-allocator", env=env)
        assert got.code == 125 and why in got.err, got.err


def test_what_runs_on_a_worker_needs_no_package_there():
    dump = "import sys; from ray import cloudpickle; from foliomem_lab import worker; " \
           "cloudpickle.register_pickle_by_value(worker); sys.stdout.buffer.write(cloudpickle.dumps(worker.run))"
    pickled = subprocess.run([PYTHON, "-c", dump], env=clean_env(ENV), capture_output=True, check=True).stdout
    load = "import sys; from ray import cloudpickle; run = cloudpickle.load(sys.stdin.buffer); print(run(b'', '', '', [])['why'])"
    done = subprocess.run([PYTHON, "-I", "-c", load], input=pickled, capture_output=True, check=True, cwd="/")
    assert b"cannot run the foliomem that was sent there" in done.stdout


def simulating():
    """Processes of runs on workers."""
    commands = {path.parent.name: read_text(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
    return [pid for pid, command in commands.items() if "foliomem-lab-" in command.split("\0")[0]]


def wait_until(what, timeout=30):
    end = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.1)


def test_nothing_goes_on_when_foliomem_is_killed(cluster):
    rounds = ["--vary", "workload.swap-allocator.rounds=100000"]
    running = Running([BIN, "lab", "sweep", "--ray",
                       cluster, "swap-allocator", *rounds], clean_env(ENV))
    wait_until(simulating, timeout=60)
    os.kill(running.pid, signal.SIGKILL)
    running.proc.wait()
    wait_until(lambda: not simulating())
    running.kill()


@pytest.mark.skipif(not LONG, reason="Ray needs half a minute to notice: FOLIOMEM_LONG=1")
def test_a_machine_that_is_lost_costs_no_run(cluster):
    rounds = ["--vary", "workload.swap-allocator.rounds=1500", "--vary", "machine.limit_mib=100,110,120,130"]
    lost, _ = machine(f"--address={cluster}")
    running = Running([BIN, "lab", "sweep", "--ray", cluster, "swap-allocator", *rounds, "--json", "-"], clean_env(ENV))
    try:
        # The first machine has two CPUs.
        wait_until(lambda: len(simulating()) > 2, timeout=60)
    finally:
        lost.kill()
        lost.proc.wait()
    got = running.finish(300).ok()
    assert "will be retried" in got.err, got.err
    assert [run["set"][1][1] for run in json.loads(got.out)] == ["100", "110", "120", "130"]
