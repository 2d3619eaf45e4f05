"""`run --metrics`: OpenMetrics text in a file, over a Unix socket and at a port, checked with Prometheus' own parser."""
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest
from conftest import BIN, MIB, PYTHON, REPO, clean_env, cli, foliomem, foliomem_only, start

parser = pytest.importorskip("prometheus_client.openmetrics.parser")
pytestmark = foliomem_only
# Reads 128 MiB twice, says so, and waits for a line.
WORK = ("import os\nrows = [b'%012d' % number * 4096 for number in range(2700)]\n"
        "for _ in range(2): assert all(int(row[:12]) == number for number, row in enumerate(rows))\n"
        "print('ready', flush=True)\nos.read(0, 1)\n")


def parsed(text):
    """The samples by name, and labels apart from the run's."""
    samples = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation and family.name.startswith("foliomem_"), family
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("pid").isdigit() and labels.pop("program"), sample
            key = (sample.name.removeprefix("foliomem_"), *sorted(labels.items()))
            assert key not in samples, key
            samples[key] = sample.value
    return samples


def check(samples):
    assert samples["limit_bytes",] == 64 * MIB and 0 < samples["taken_bytes",] < 80 * MIB < samples["needed_bytes",]
    assert samples["taken_bytes",] == samples["resident_bytes",] + samples["stored_bytes",] and samples["processes",] == 1
    assert samples["vmstat_pswpout_total",] > 1000 and samples["limit_exceeded",] in (0, 1)
    assert samples["fault_seconds_count", ("kind", "swap_in")] > 100 and 0 < samples["fault_seconds_sum", ("kind", "swap_in")] < 100
    [process] = [value for key, value in samples.items() if key[0] == "process_taken_bytes"]
    # The process publishes what it takes from time to time: also between the two readings.
    assert process == pytest.approx(samples["taken_bytes",], rel=0.1)


def waiting(target):
    read, write = os.pipe()
    running = start([PYTHON, "-c", WORK], "64M", ["--metrics", target], stdin=read)
    os.close(read)
    running.wait_output(b"ready")
    return running, write


def finish(running, write):
    os.write(write, b"\n")
    os.close(write)
    return running.finish().ok()


def test_a_file_is_always_whole_and_has_the_end(tmp_path):
    file = tmp_path / "run.prom"
    running, write = waiting(file)
    end = time.monotonic() + 20
    while "foliomem_vmstat_pswpout" not in (text := file.read_text()) or parsed(text)["vmstat_pswpout_total",] < 1000:
        assert text.endswith("# EOF\n") and time.monotonic() < end, text
        time.sleep(0.01)
    check(parsed(text))
    got = finish(running, write)
    last = parsed(file.read_text())
    assert last["vmstat_pswpin_total",] == got.stats["vmstat"]["pswpin"] > 0 and last["processes",] == 0
    assert last["memory_stall_seconds_total",] == pytest.approx(got.stats["memory_stall_ns"] / 1e9, abs=0.1)
    assert os.listdir(tmp_path) == ["run.prom"]


def get(address, path="/metrics"):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_a_port_of_this_machine_answers_get():
    running, write = waiting("127.0.0.1:0")
    address = re.search(r"metrics are at http://(127\.0\.0\.1:\d+)/metrics\n", running.text(running.err).decode())[1]
    for path in ("/metrics", "/"):
        kind, text = get(address, path)
        assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        check(parsed(text))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(address, "/other")
    host, port = address.split(":")

    def raw(request):
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(request)
            return client.recv(1 << 16)

    assert raw(b"POST /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405 ")
    # Clients that say nothing, too much, or go away keep others waiting for no longer than two seconds.
    silent = socket.create_connection((host, int(port)))
    silent.sendall(b"GET /met")
    with socket.create_connection((host, int(port))) as gone:
        gone.sendall(b"GET / HTTP/1.1\r\n\r\n")
    check(parsed(get(address)[1]))
    silent.close()
    with pytest.raises(OSError):
        raw(b"x" * (1 << 20))
        raise ConnectionResetError
    check(parsed(get(address)[1]))
    finish(running, write)


def over(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(path))
        client.sendall(b"GET /metrics HTTP/1.0\r\nHost: x\r\n\r\n")
        text = b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()
    head, body = text.split("\r\n\r\n", 1)
    assert head.startswith("HTTP/1.1 200 OK\r\n") and f"Content-Length: {len(body.encode())}" in head
    return body


def test_a_socket_answers_and_is_removed_at_the_end(tmp_path):
    path = tmp_path / "run.sock"
    running, write = waiting(path)
    check(parsed(over(path)))
    got = cli("run", "--limit", "64M", "--metrics", path, "--", "true")
    assert got.code == 125 and f"cannot publish the metrics at {path}" in got.err and over(path), got.err
    finish(running, write)
    assert not path.exists()
    # One that a killed run has left is used again, and one of a program that does not start is removed.
    running, write = waiting(path)
    os.kill(running.pid, signal.SIGKILL)
    running.kill()
    running.proc.wait()
    os.close(write)
    assert path.exists()
    assert foliomem(["true"], options=["--metrics", path]).ok() and not path.exists()
    assert foliomem([tmp_path / "none"], options=["--metrics", path]).code == 127 and not path.exists()


def test_labels_are_bounded_and_escaped(tmp_path):
    file = tmp_path / "x.prom"
    name = 'a"b\\c\n' + "d" * 200
    program = tmp_path / name
    program.symlink_to("/bin/sh")
    children = "for i in $(seq 40); do sleep 3 & done; sleep 1"
    got = subprocess.Popen([BIN, "run", "--limit", "256M", "--metrics", "127.0.0.1:0", "--", program, "-c", children],
                           stderr=subprocess.PIPE, env=clean_env(), text=True)
    address = re.search(r"http://([0-9.:]+)/", got.stderr.readline())[1]
    end = time.monotonic() + 20
    while (samples := parsed(text := get(address)[1]))["processes",] < 30:
        assert time.monotonic() < end and got.poll() is None, text
    assert sum(key[0] == "process_taken_bytes" for key in samples) == 16
    programs = {sample.labels["program"] for family in parser.text_string_to_metric_families(text) for sample in family.samples}
    assert programs == {name[:64]}
    assert got.wait(30) == 0
    assert not file.exists()


def test_a_place_that_cannot_be_used_is_said_before_the_program_starts(tmp_path):
    taken = socket.create_server(("127.0.0.1", 0))
    for place, said in {
        "0.0.0.0:9400": "is no place for metrics", "/": "is no place for metrics",
        tmp_path / "none/x.prom": "cannot publish the metrics at", tmp_path / "none/x.sock": "cannot publish the metrics at",
        f"127.0.0.1:{taken.getsockname()[1]}": "cannot publish the metrics at",
    }.items():
        got = cli("run", "--limit", "64M", "--metrics", place, "--", "touch", tmp_path / "started")
        assert got.code == 125 and said in got.err and not (tmp_path / "started").exists(), (place, got.err)


def test_every_name_is_in_the_reference(tmp_path):
    file = tmp_path / "x.prom"
    cli("run", "--limit", "64M", "--metrics", file, "--", "true").ok()
    text = (REPO / "docs/reference/metrics.md").read_text()
    stats = json.loads(cli("run", "--limit", "64M", "--stats", "-", "--quiet", "--", "true").ok().err)
    names = {family.name for family in parser.text_string_to_metric_families(file.read_text())} - {"foliomem_process_taken_bytes"}
    for part in ("vmstat", "bd_stat"):
        kernel = {name for name in names if name.startswith(f"foliomem_{part}_")}
        assert kernel == {f"foliomem_{part}_{name}" for name in stats[part]} - {"foliomem_bd_stat_bd_count"}
        names -= kernel
    assert len(names) > 10 and not [name for name in sorted(names) if f"`{name}`" not in text]
