"""The Python module, from its wheel, in a virtual environment of its own; and a real Jupyter kernel inside a limit."""
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import BIN, LONG, MIB, clean_env, foliomem_only, make_packages, plain

pytestmark = foliomem_only
VERSIONS = ["3.9", "3.10", "3.11", "3.12", "3.13"]
# What reads memory that does not fit into 64 MiB, and compresses.
ROWS = "rows = [b'x%07d' % i * 512 for i in range(40000)]"


def interpreter(version):
    """A Python of this version, if the machine has one."""
    # Not what pyenv puts into PATH: that works for one version only.
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    return pyenv[0] if pyenv else shutil.which(f"python{version}")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of the binaries under test."""
    made = make_packages("--out", tmp_path_factory.mktemp("dist"), "wheel").ok()
    return Path(made.out.decode().split()[-1])


def environment_of(folder, python, wheel):
    """A virtual environment with the wheel, without a network; the path of its Python."""
    plain([python, "-m", "venv", "--without-pip", folder], timeout=60).ok()
    pip(folder, "install", "--no-index", "--no-compile", wheel)
    return folder / "bin/python"


def pip(folder, *words):
    """Has the pip of the tests change another environment: a pip of its own takes long to make."""
    plain([sys.executable, "-m", "pip", "--python", folder / "bin/python", *words, "-q"], timeout=60).ok()


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The Python that runs the tests, in an environment of its own with the wheel."""
    return environment_of(tmp_path_factory.mktemp("venv"), sys.executable, wheel)


def write(path, *lines):
    path.write_text("import foliomem\n" + "\n".join(textwrap.dedent(line) for line in lines) + "\n")
    return path


@pytest.mark.parametrize("version", VERSIONS if LONG else [VERSIONS[0], VERSIONS[-1]])
def test_the_wheel_installs_runs_and_leaves_nothing(version, wheel, tmp_path):
    if (found := interpreter(version)) is None:
        pytest.skip(f"no Python {version} here")
    folder = tmp_path / "venv"
    own = environment_of(folder, found, wheel)
    before = {path for path in folder.rglob("*foliomem*")}
    assert {"bin/foliomem", "lib/foliomem/libfoliomem_agent.so"} <= {str(path.relative_to(folder)) for path in before}
    program = write(tmp_path / "program.py", ROWS, "print(foliomem.inside(), len(rows), foliomem.status()['limit_bytes'])")
    got = plain([folder / "bin/foliomem", "run", "--limit", "64M", "--", own, program]).ok()
    assert got.out == f"True 40000 {64 * MIB}\n".encode() and "needed" in got.err
    # With its own import system, and twice.
    write(program, "foliomem.limit('64M', settings={'quiet': True}); foliomem.limit('1G')", ROWS,
          "print(foliomem.inside(), foliomem.status()['limit_bytes'])")
    assert plain([own, program]).ok().out == f"True {64 * MIB}\n".encode()
    pip(folder, "uninstall", "-y", "foliomem")
    assert not [path for path in folder.rglob("*foliomem*")]


def test_the_wheel_names_the_glibc_that_its_binaries_need(wheel):
    symbols = [plain(["objdump", "-T", Path(BIN).with_name(name)]).ok().out.decode() for name in ("foliomem", "libfoliomem_agent.so")]
    versions = [tuple(map(int, found.split("."))) for text in symbols for found in re.findall(r"GLIBC_([\d.]+)", text)]
    oldest = "_".join(map(str, max(versions, default=(2, 17))))
    assert f"-py3-none-manylinux_{oldest}_x86_64" in wheel.name
    # What needs no C library in particular runs with musl, too.
    assert ("musllinux" in wheel.name) == (not versions)


def test_a_program_keeps_its_arguments_and_input_when_it_limits_itself(python, tmp_path):
    program = write(tmp_path / "own.py", """
        import os, sys
        foliomem.limit("64M", settings={"quiet": True})
        print(foliomem.inside(), sys.argv[1:], __name__, sys.flags.optimize, sorted(n for n in os.environ if "LIMITED" in n))
    """)
    text = program.read_text()

    def lines(*argv, stdin=None):
        return plain([python, *argv], cwd=tmp_path, stdin=stdin).ok().out.decode()

    wanted = "True ['a', 'b c'] __main__ 0 []\n"
    assert lines("own.py", "a", "b c") == wanted
    assert lines("-O", "own.py", "a", "b c") == wanted.replace(" 0 ", " 1 ")
    assert lines("-m", "own", "a", "b c") == wanted
    assert lines("-c", text, "a", "b c") == wanted
    assert lines("-", "a", "b c", stdin=text.encode()) == wanted
    reads = "import foliomem; foliomem.limit('64M', settings={'quiet': True}); print(input())"
    assert lines("-c", reads, stdin=b"one\ntwo\n") == "one\n"


def test_what_cannot_limit_itself_is_told(python, tmp_path):
    piped = subprocess.run([python, "-"], input=b"import foliomem; foliomem.limit('64M')", capture_output=True, env=clean_env())
    assert piped.returncode == 1 and b"foliomem run --limit ... -- python3 -" in piped.stderr
    wrong = plain([python, "-c", "import foliomem; foliomem.limit('64Q')"])
    assert wrong.code == 125 and "64Q" in wrong.err
    outside = plain([python, "-c", "import foliomem; foliomem.status()"])
    assert outside.code == 1 and "is not part of a run" in outside.err
    shell = plain([python, "-c", "import foliomem; foliomem.run('ls', shell=True)"])
    assert shell.code == 1 and "give the shell" in shell.err


def test_jupyter_needs_the_module():
    got = plain([BIN, "jupyter", "install", "--limit", "1G"])
    assert got.code == 125 and "python3 has no module foliomem: python3 -m pip install foliomem" in got.err
    none = plain([BIN, "jupyter", "install", "--limit", "1G"], env={"PATH": "/nowhere"})
    assert none.code == 125 and "cannot start python3" in none.err


def test_exit_codes_and_signals_pass_through_a_program_that_limits_itself(python):
    head = "import foliomem, os; foliomem.limit('64M', settings={'quiet': True}); "
    assert plain([python, "-c", head + "raise SystemExit(7)"]).code == 7
    assert plain([python, "-c", head + "os.kill(os.getpid(), 15)"]).code == 128 + 15


def test_run_is_as_that_of_subprocess(python, tmp_path):
    program = write(tmp_path / "run.py", f"""
        import subprocess, sys
        done = foliomem.run([sys.executable, "-c", {ROWS + "; print(input(), len(rows)); raise SystemExit(3)"!r}], limit=64 << 20,
                            settings={{"quiet": True, "codec": "zstd"}}, input="text", capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (3, "text 40000\\n"), done
        # On a busy machine the limit may be exceeded for a moment, which a line says.
        said = [line for line in done.stderr.splitlines() if "the program grows faster than" not in line]
        assert not said, done
        assert done.stats["limit_bytes"] == 64 << 20 and done.stats["vmstat"]["pswpout"] > 0
        try:
            foliomem.run(["false"], limit="64M", check=True, settings={{"quiet": True}})
        except subprocess.CalledProcessError as error:
            assert error.returncode == 1
        else:
            raise AssertionError("check")
        missing = foliomem.run(["/nowhere"], limit="64M", capture_output=True, text=True)
        assert missing.returncode == 127 and missing.stats == {{}}, missing
    """)
    plain([python, program]).ok()


def test_a_program_sees_its_pressure_and_reclaims(python, tmp_path):
    program = write(tmp_path / "pressure.py", f"""
        import os, time
        foliomem.limit("64M", settings={{"quiet": True}})
        seen = []

        def until(condition):
            end = time.monotonic() + 15
            while not condition() and time.monotonic() < end:
                time.sleep(0.02)
            assert condition(), (seen, foliomem.status())

        with foliomem.on_pressure(lambda pressure: seen.append(pressure.level.name), interval=0.02):
            {ROWS}
            until(lambda: seen[:1] == ["COMPRESSING"])
            before = foliomem.status()
            assert before["needed_bytes"] > 2 * before["limit_bytes"] and before["peak_bytes"] >= before["taken_bytes"] * 0.9
            foliomem.reclaim("10M")
            foliomem.reclaim()
            after = foliomem.status()
            assert after["taken_bytes"] < before["taken_bytes"] / 2, (before["taken_bytes"], after["taken_bytes"])
            assert after["living"][0]["pid"] == os.getpid() and after["living"][0]["swapped_out_bytes"] > 100 << 20
            assert all(int(row[1:8]) == i for i, row in enumerate(rows))
            noise = [os.urandom(1 << 20) for _ in range(90)]
            until(lambda: "OVER" in seen)
            noise = None
            until(lambda: foliomem.status()["taken_bytes"] < before["limit_bytes"])
        print(seen)
    """)
    assert b"OVER" in plain([python, program], timeout=90).ok().out


# ---- Jupyter ----

@pytest.fixture
def kernel(python, tmp_path):
    """Starts a kernel inside a limit, as Jupyter does; `start(limit)` gives a client of it, and its manager."""
    client_module = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    kernels = tmp_path / "share/jupyter/kernels"
    started = []
    # The environment has the packages of the one that runs the tests, too.
    packages = Path(pytest.__file__).parents[1]
    inner = Path(plain([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).out.decode().strip())
    (inner / "tests.pth").write_text(f"{packages}\n")

    def start(limit):
        foliomem = python.parent / "foliomem"
        got = plain([foliomem, "jupyter", "install", "--limit", limit, "--name", "small", "--prefix", tmp_path], timeout=60).ok()
        assert f"installed the kernel small in {kernels}/small" in got.out.decode()
        manager = client_module.KernelManager(kernel_name="small")
        manager.kernel_spec_manager.kernel_dirs = [str(kernels)]
        manager.start_kernel(env={**clean_env(), "IPYTHONDIR": str(tmp_path)})
        started.append(manager)
        client = manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        return manager, client

    yield start
    for manager in started:
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)


def cell(client, code, timeout=60):
    """Runs a cell: its error's name or '', and what it printed."""
    printed = []

    def output(message):
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = client.execute_interactive(textwrap.dedent(code), timeout=timeout, output_hook=output, allow_stdin=False)
    return reply["content"].get("ename", ""), "".join(printed)


def await_output(client, text):
    """Waits until the kernel has printed a text. It may come in parts: ipykernel sends what there is every 0.2 s, even
    between a line and its end."""
    messages = []
    while "".join(it["content"]["text"] for it in messages if it["content"].get("name") == "stdout") != text:
        try:
            messages.append(client.get_iopub_msg(timeout=30))
        except queue.Empty:
            pytest.fail(f"the kernel has not printed {text!r}: {[(it['msg_type'], it['content']) for it in messages]}")


def test_a_cell_that_cannot_fit_is_interrupted_and_the_kernel_keeps_its_state(kernel):
    manager, client = kernel("160M")
    assert cell(client, "import os, numpy, foliomem\nkept = list(range(1000)); foliomem.status()['limit_bytes'] >> 20") == ("", "")
    assert cell(client, "print(foliomem.inside(), os.getppid())") == ("", f"True {manager.provisioner.pid}\n")
    # What compresses fits: no cell is interrupted for it.
    error, out = cell(client, "rows = [b'x%07d' % i * 512 for i in range(60000)]\nprint(len(rows))")
    assert (error, out) == ("", "60000\n")
    error, out = cell(client, """
        del rows
        noise = []
        while len(noise) < 20000:
            noise.append(os.urandom(1 << 20))
    """)
    assert error == "KeyboardInterrupt" and "does not fit into the limit of 160 MiB" in out, (error, out)
    # State is kept, the next cell runs, and there is room again once what was too much is gone.
    assert cell(client, "print(len(kept), 0 < len(noise) < 2000)") == ("", "1000 True\n")
    assert cell(client, "noise.clear()")[0] == ""
    error, out = cell(client, """
        import time
        a = numpy.arange(8 << 20)
        print(int(a.sum()))
        # Reclaim that did not pay for the noise takes a moment to find out that it pays again.
        while foliomem.status()['taken_bytes'] > 170 << 20:
            time.sleep(0.05)
    """)
    assert (error, out) == ("", f"{sum(range(8 << 20))}\n")
    # Jupyter's own interrupt works, too.
    client.execute("import time\nprint('sleeps')\ntime.sleep(60)")
    await_output(client, "sleeps\n")
    manager.interrupt_kernel()
    assert client.get_shell_msg(timeout=30)["content"].get("ename") == "KeyboardInterrupt"
    assert cell(client, "print('on')") == ("", "on\n")


def test_a_kernel_ends_with_jupyter_and_can_be_removed(kernel, python, tmp_path):
    _, client = kernel("160M")
    _, pid = cell(client, "import os; print(os.getpid())")
    # Who starts kernels is gone: here a process between.
    client.shutdown()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(pid)}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(pid)}").exists()
    foliomem = python.parent / "foliomem"
    plain([foliomem, "jupyter", "remove", "--name", "small", "--prefix", tmp_path]).ok()
    assert not list((tmp_path / "share/jupyter/kernels").iterdir())
    again = plain([foliomem, "jupyter", "remove", "--name", "small", "--prefix", tmp_path])
    assert again.code == 125 and "there is no kernel" in again.err


def test_an_abandoned_kernel_ends(kernel, python, tmp_path):
    kernel("160M")
    spec = json.loads((tmp_path / "share/jupyter/kernels/small/kernel.json").read_text())
    connection = tmp_path / "connection.json"
    argv = [word.replace("{connection_file}", str(connection)) for word in spec["argv"]]
    # A server that starts a kernel and is killed.
    server = f"import os, subprocess, time; os.environ['JPY_PARENT_PID'] = str(os.getpid()); " \
             f"print(subprocess.Popen({argv!r}).pid, flush=True); time.sleep(60)"
    running = subprocess.Popen([python, "-c", server], stdout=subprocess.PIPE, text=True,
                               env={**clean_env(), "IPYTHONDIR": str(tmp_path)})
    supervisor = int(running.stdout.readline())
    deadline = time.monotonic() + 30
    while not connection.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    assert Path(f"/proc/{supervisor}").exists()
    running.kill()
    running.wait()
    while Path(f"/proc/{supervisor}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{supervisor}").exists(), os.popen(f"ps -fp {supervisor}").read()
