"""What a program or its runtime puts in the C library's place does not run inside the agent: own functions, sanitizers, valgrind."""
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import BIN, few_cases, foliomem, foliomem_only, plain

AGENT = Path(BIN).with_name("libfoliomem_agent.so")
# What the agent may import, and why.
START = "weak, of the start files; called at start and exit of the process only"
IMPORTS = {
    "_r_debug": "weak, data of glibc's dynamic loader: the list of objects in which the agent looks functions up",
    "_dl_debug_addr": "weak, the same of musl's",
    "__cxa_finalize": START,
    "__gmon_start__": START,
    "_ITM_deregisterTMCloneTable": START,
    "_ITM_registerTMCloneTable": START,
}
SANITIZERS = ["address", "leak", "thread", "undefined"]
OWN = ["-fno-builtin", "-rdynamic", "-Wno-builtin-declaration-mismatch", "-Wno-nonnull-compare"]


def names(*options):
    """The symbols `nm -D` lists."""
    lines = subprocess.run(["nm", "-D", *options, AGENT], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].split("@")[0] for line in lines.splitlines()}


@foliomem_only
def test_the_agent_imports_no_function_that_its_threads_call():
    assert names("--undefined-only") - set(IMPORTS) == set()


@foliomem_only
def test_the_agent_needs_no_library_and_no_version_of_one():
    """So it loads beside each C library: glibc of any age, and musl."""
    lines = subprocess.run(["readelf", "-dVW", AGENT], capture_output=True, text=True, check=True).stdout
    assert "(NEEDED)" not in lines and "Version needs" not in lines, lines


@foliomem_only
def test_no_hook_of_the_agent_is_called_by_its_name():
    lines = subprocess.run(["readelf", "-rW", AGENT], capture_output=True, text=True, check=True).stdout
    bound = {word.split("@")[0] for line in lines.splitlines() if "_GLOB_DAT" in line or "_JUMP_SLO" in line for word in line.split()[4:5]}
    assert bound & names("--defined-only") == set()


@few_cases
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("own", ["MEMORY", "CALLS", "LOCKS", "MALLOC"])
def test_a_program_with_functions_of_its_own_runs_as_plain(built, own, codec, torture):
    program = built("own_functions.c", f"-DOWN_{own}", *OWN)
    result = foliomem([program], torture=torture, timeout=120, env={"FOLIOMEM_CODEC": codec}).ok()
    assert result.out == b"OK\n"


def test_a_program_with_much_thread_local_storage_runs_as_plain(built, torture):
    program = built("own_functions.c", "-DTHREAD_LOCAL_MIB=3")
    assert foliomem([program], torture=torture, timeout=120).ok().out == b"OK\n"


@pytest.fixture(params=["gcc", "clang"])
def compiler(request):
    """Compilers whose sanitizers are a library (gcc) or part of the program (clang)."""
    found = shutil.which(request.param) or pytest.skip(f"no {request.param}")
    # Debian's clang comes without them.
    runtime = "libclang_rt.asan_static-x86_64.a" if request.param == "clang" else "libasan.so"
    path = plain([found, f"-print-file-name={runtime}"]).ok().out.decode().strip()
    return found if os.path.isabs(path) and os.path.exists(path) else pytest.skip(f"no sanitizers for {request.param}")


@pytest.fixture
def sanitized(compiler, tmp_path):
    """compile(kind): a program with that sanitizer, by the compiler of the test."""
    def compile_c(kind):
        source = Path(__file__).parent / "programs/sanitized.c"
        plain([compiler, "-O1", "-g", f"-fsanitize={kind}", source, "-o", tmp_path / kind]).ok()
        return tmp_path / kind

    return compile_c


@few_cases
@pytest.mark.parametrize("kind", SANITIZERS)
def test_a_sanitized_program_runs_as_plain(sanitized, kind, torture):
    options = {"ASAN_OPTIONS": "detect_leaks=0", "LSAN_OPTIONS": "detect_leaks=0"}
    result = foliomem([sanitized(kind), 64], "400M", torture=torture, timeout=120, env=options).ok()
    assert result.out == b"OK\n"


def test_a_sanitized_program_is_swapped_out(sanitized, torture):
    options = {"ASAN_OPTIONS": "detect_leaks=0"}
    result = foliomem([sanitized("address"), 200], "128M", torture=torture, timeout=120, env=options).ok()
    assert result.out == b"OK\n"
    assert not result.stats or result.stats["vmstat"]["pswpin"] > 0


def test_a_sanitized_program_runs_in_a_shell(sanitized, torture):
    # The shell gives it the agent, and options of its own.
    command = f"ASAN_OPTIONS=detect_leaks=0 exec {sanitized('address')} 32"
    assert foliomem(["sh", "-c", command], "256M", torture=torture).ok().out == b"OK\n"


def test_a_sanitized_program_runs_with_a_library_preloaded_by_the_user(sanitized):
    library = subprocess.run(["gcc", "-print-file-name=libm.so.6"], capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(library):
        pytest.skip("no libm found")
    env = {"ASAN_OPTIONS": "detect_leaks=0", "LD_PRELOAD": library}
    assert foliomem([sanitized("undefined"), 32], "256M", env=env).ok().out == b"OK\n"


@pytest.mark.skipif(not shutil.which("valgrind"), reason="no valgrind")
def test_a_program_inside_valgrind_runs_unmanaged_and_that_is_said(built):
    program = built("sanitized.c", "-g")
    result = foliomem(["valgrind", "--error-exitcode=9", "--leak-check=full", program, 4], "256M", timeout=120).ok()
    assert result.out == b"OK\n"
    assert "ERROR SUMMARY: 0 errors" in result.err
    assert "inside valgrind" in result.err or os.environ.get("FOLIOMEM_BIN") == "plain"
