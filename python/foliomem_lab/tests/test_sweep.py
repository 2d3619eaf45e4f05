"""What is made of the results, and what is said without Ray. Ray itself is tested by tests/e2e/test_sweep.py, with a cluster."""
import io
import json
import os
import socket
import sys

import pytest
from foliomem_lab import __main__ as main
from foliomem_lab import sweep, worker

COMBINATIONS = [[("seed", "1"), ("swap.strategy", "a")], [("seed", "2"), ("swap.strategy", "a")], []]


def test_runs_are_in_the_order_of_the_combinations():
    results = [{"run": {"number": number}, "why": ""} for number in range(3)]
    assert sweep.runs_of(COMBINATIONS, results) == [{"number": 0}, {"number": 1}, {"number": 2}]


def test_every_combination_that_failed_is_named_with_the_reason():
    results = [{"run": None, "why": "first"}, {"run": {}, "why": ""}, {"run": None, "why": "third"}]
    with pytest.raises(sweep.SweepError) as failed:
        sweep.runs_of(COMBINATIONS, results)
    lines = str(failed.value).splitlines()
    assert lines == ["2 of 3 runs failed:", "  seed=1 swap.strategy=a: first", "  the scenario as it is: third"]


@pytest.fixture(autouse=True)
def stdout():
    """Put back: main takes it away."""
    kept = os.dup(1)
    yield
    os.dup2(kept, 1)
    os.close(kept)


def start(monkeypatch, tmp_path, ran):
    """`python3 -m foliomem_lab`, with `ran` in the place of what runs on the cluster."""
    binary = tmp_path / "foliomem-lab"
    binary.write_bytes(b"binary")
    request = {"scenario": "text", "costs": "table", "combinations": [[["seed", "1"]], [["seed", "2"]]]}
    monkeypatch.setattr(sys, "argv", ["foliomem_lab", "head:1", str(binary)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setattr(main, "sweep", ran)
    return main.main()


def test_the_request_comes_by_stdin_and_the_runs_go_to_stdout(monkeypatch, tmp_path, capfd):
    def ran(address, binary, scenario, costs, combinations, progress):
        assert (address, binary, scenario, costs) == ("head:1", b"binary", "text", "table")
        os.write(1, b"what Ray says\n")
        for done in (0, 0, 1, 1, 2):
            progress(done, len(combinations))
        return [{"set": settings} for settings in combinations]

    assert start(monkeypatch, tmp_path, ran) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == [{"set": [["seed", "1"]]}, {"set": [["seed", "2"]]}]
    assert err == "what Ray says\nfoliomem: 1 of 2 runs done\nfoliomem: 2 of 2 runs done\n"


def test_an_error_is_a_line_and_an_exit_code(monkeypatch, tmp_path, capfd):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert start(monkeypatch, tmp_path, sweep.sweep) == 1
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("foliomem: Ray is missing: ") and "pip install ray" in err


def test_an_address_without_a_cluster_is_said_at_once():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        for form in (address, f"ray://{address}"):
            with pytest.raises(ConnectionRefusedError):
                sweep.connect(form)
        nobody.listen()
        sweep.connect(address)
    # Ray knows what that is.
    sweep.connect("auto")


def test_nothing_goes_on_for_nobody(monkeypatch, tmp_path, capfd):
    def ran(address, binary, scenario, costs, combinations, progress):
        progress(0, 2)
        monkeypatch.setattr(main.os, "getppid", lambda: 1)
        progress(0, 2)
        raise AssertionError("it went on")

    assert start(monkeypatch, tmp_path, ran) == 1
    assert "foliomem has ended" in capfd.readouterr().err


def test_a_combination_without_settings_has_a_name():
    assert worker.named([]) == "the scenario as it is"
