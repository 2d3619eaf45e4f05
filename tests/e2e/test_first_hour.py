"""What people try in their first hour with foliomem, and what they are told."""
import os
import re
import resource
import subprocess

import pytest
from conftest import BIN, PYTHON, Running, clean_env, cli, foliomem_only

pytestmark = foliomem_only
TRUE = ["--", "true"]


@pytest.mark.parametrize(("options", "said"), [
    (["--limit", "512"], "512 is 512 bytes, too small for a limit: at least 16 MiB are needed: did you mean 512M?"),
    (["--limit", "-5M"], '"-5M" is not a size: sizes have no sign; did you mean 5M?'),
    (["--limit=-64M"], "did you mean 64M?"),
    (["--limit", "1M"], "1M is 1048576 bytes, too small for a limit: at least 16 MiB are needed"),
])
def test_a_limit_that_cannot_be_comes_with_a_suggestion(options, said):
    got = cli("run", *options, *TRUE)
    assert got.code == 125 and got.err.startswith("foliomem: limit (from command line): ") and said in got.err, got.err


@pytest.mark.parametrize(("arguments", "said"), [
    (["run", "--limt", "64M", *TRUE], "'--limt' found: did you mean --limit?"),
    (["recrod", "-o", "x", *TRUE], "did you mean record?"),
    (["lab", "replya"], "did you mean replay?"),
    (["bench", "swap", "--jsn"], "did you mean --json?"),
])
def test_a_typing_error_comes_with_what_was_meant(arguments, said):
    got = cli(*arguments)
    assert got.code == 2 and said in got.err and len(got.err.splitlines()) == 1, got.err


def test_options_without_a_command_are_those_of_run():
    got = cli("--limit", "64M", "true", "-x")
    said = "foliomem: the command is missing: did you mean foliomem run --limit 64M true -x? (see foliomem --help)"
    assert got.code == 2 and got.err == f"{said}\n"


@pytest.mark.parametrize(("text", "said"), [
    ('limit = "64M"\nlimt = "1G"\n', ':2: there is no setting "limt": did you mean limit?'),
    ("limit = 512\n", ':1: limit = 512 has no unit: write a text, such as limit = "512M"'),
    ('\n\nlimit = "64Q"\n', ':3): "64Q" is not a size'),
    ('codec = "lz4"\nlimit =\n', ":2: "),
])
def test_an_error_of_the_file_names_its_line_and_key(tmp_path, text, said):
    config = tmp_path / "c.toml"
    config.write_text(text)
    got = cli("run", "--config", str(config), *TRUE)
    assert got.code == 125 and f"{config}{said}" in got.err, got.err


@pytest.mark.parametrize("word", ["yes", "on", "true", "1"])
def test_a_switch_reads_as_one_in_the_file_and_in_a_variable(tmp_path, word):
    config = tmp_path / "c.toml"
    config.write_text(f'hard = "{word}"\n')
    by_file = cli("run", "--config", str(config), "--print-config").ok().out.decode()
    by_variable = cli("run", "--print-config", env={"FOLIOMEM_HARD": word, "HOME": tmp_path}).ok().out.decode()
    assert "hard = true" in by_file and f"{config}:1" in by_file, by_file
    assert "hard = true" in by_variable and "FOLIOMEM_HARD" in by_variable, by_variable


def test_statistics_that_cannot_be_written_at_the_end_do_not_change_the_exit_code():
    for program, code in (["true"], 0), (["sh", "-c", "exit 7"], 7):
        got = cli("run", "--limit", "64M", "--stats", "/dev/full", "--", *program)
        assert got.code == code and "cannot write the statistics to /dev/full: " in got.err, got.err


def test_a_short_program_has_a_peak_or_is_said_to_have_none():
    """The kernel counts pages of a process in batches, so the smallest programs have taken nothing when they end."""
    short = [PYTHON, "-S", "-c", "b = b'x' * (8 << 20)"]
    for _ in range(10):
        for program in ["true"], short:
            got = cli("run", "--limit", "64M", "--", *program).ok()
            assert re.search(r"peak [0-9.]+ MiB of 64 MiB|ended before its memory was measured, limit 64 MiB", got.err), got.err
            assert "peak 0.0" not in got.err and "(0.0x)" not in got.err, got.err


def test_sizes_in_messages_have_one_unit(tmp_path):
    """Mebibytes. Options take 512M, as people write them."""
    for options in (["--limit", "1M"], ["--limit", "64M"]):
        got = cli("run", *options, *TRUE)
        assert re.search(r"\b[0-9]+ MiB\b", got.err) and not re.search(r"[0-9] ?(MB|KB|GB|GiB)\b", got.err), got.err


def test_ctl_of_a_process_outside_says_so():
    got = cli("ctl", "1", "sizes")
    wanted = "process 1 is not part of a run of foliomem|process 1 cannot be inspected"
    assert got.code == 125 and re.search(wanted, got.err), got.err
    if os.geteuid() == 0:
        assert "or root" not in got.err, got.err


def test_a_swap_file_that_is_too_small_says_what_is_missing(tmp_path):
    got = cli("run", "--limit", "64M", "--swap", f"{tmp_path}/swap:1500K", *TRUE)
    said = f"the swap file {tmp_path}/swap would have 1500 KiB, 548 KiB less than the smallest of 2 MiB: name a larger size"
    assert got.code == 125 and said in got.err, got.err


GROW = "parts = [bytes(range(256)) * 4096 for _ in range(160)]; print(len(parts))"


@pytest.mark.parametrize(("limit", "value", "causes"), [
    (resource.RLIMIT_NOFILE, 6, "ulimit -n"),
    (resource.RLIMIT_DATA, 96 << 20, "ulimit -v, ulimit -d|MemoryError"),
])
def test_a_limit_of_the_process_is_named_as_the_cause(limit, value, causes):
    """Where the program itself cannot go on, it says so; what foliomem says names the right limit."""
    command = f"import os, resource; resource.setrlimit({limit}, ({value}, {value})); " \
              f"os.execv({str(PYTHON)!r}, [{str(PYTHON)!r}, '-c', {GROW!r}])"
    got = Running([BIN, "run", "--limit", "64M", "--", PYTHON, "-c", command], clean_env()).finish(60)
    assert got.code == 0 or re.search(causes, got.err), got.err
    assert "no permission to use userfaultfd" not in got.err and "/proc mounted" not in got.err, got.err


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone may become another user, whose processes are counted")
def test_a_limit_on_processes_is_named_as_the_cause():
    """Root's processes are not counted."""
    command = f"ulimit -u 1; exec {BIN} run --limit 64M -- {PYTHON} -c '{GROW}'"
    got = subprocess.run(["sh", "-c", command], env=clean_env(), capture_output=True, text=True, timeout=60,
                         preexec_fn=lambda: os.setresuid(54321, 54321, 54321))
    if "permission" in got.stderr.lower():
        pytest.skip("another user may not use foliomem here")
    assert got.returncode == 0 or "ulimit -u" in got.stderr, got.stderr
