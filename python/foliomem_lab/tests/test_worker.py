"""One combination on a worker, by scripts in the place of foliomem. (Foliomem itself, and Ray: tests/e2e/test_sweep.py.)"""
import json
import tempfile

import pytest
from foliomem_lab import worker


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Where the worker puts things."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def script(text):
    return f"#!/bin/sh\n{text}\n".encode()


def test_the_binary_gets_the_scenario_and_the_settings_as_they_are():
    # A run that shows what came.
    show = """python3 - "$@" <<'END'
import json, sys
at = sys.argv.index("--costs") + 1
files = [open(sys.argv[place]).read() for place in (2, at)]
print(json.dumps([{"argv": sys.argv[1:2] + sys.argv[3:at] + sys.argv[at + 1:], "files": files}]))
END"""
    settings = [("swap.strategy", "one-fragment"), ("machine.sizes_kib", ""), ("about", "a b='c' \u00e9")]
    done = worker.run(script(show), 'about = "\u00e9"\n', "costs", settings)
    assert done["why"] == ""
    vary = ["--vary", "swap.strategy=one-fragment", "--vary", "machine.sizes_kib=", "--vary", "about=a b='c' \u00e9"]
    argv = ["run", *vary, "--costs", "--threads", "1", "--json", "-"]
    assert done["run"] == {"argv": argv, "files": ['about = "\u00e9"\n', "costs"]}


@pytest.mark.parametrize("binary, whys", [
    (script("echo 'foliomem: out of memory after 3 faults' >&2; exit 125"), ["out of memory after 3 faults (exit code 125 on "]),
    (script('echo "foliomem: $2:2: bad" >&2; exit 125'), ["scenario.toml:2: bad (exit code"]),
    (script("kill -9 $$"), ["signal 9", "memory"]),
    (script("echo nothing"), ["something else than one run"]),
    (script("echo '[1, 2]'"), ["something else than one run"]),
    (b"\x7fELF of another machine", ["cannot run the foliomem that was sent there", "Exec format error"]),
])
def test_what_goes_wrong_is_said(binary, whys):
    done = worker.run(binary, "", "", [])
    assert done["run"] is None and all(why in done["why"] for why in whys), done
    assert not done["why"].startswith("foliomem: ") and "/scenario.toml" not in done["why"], done


def test_floats_come_back_as_they_were():
    exact = [0.1 + 0.2, 1e-7, 94.24778761061947, 2.0**60]
    done = worker.run(script(f"echo '{json.dumps([exact])}'"), "", "", [])
    assert done["run"] == exact
