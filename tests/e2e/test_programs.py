"""Real programs whose data is several times the limit: each must give exactly the result of a run without foliomem."""
import os
import shutil

import pytest
from conftest import LONG, MIB, PROGRAMS, PYTHON, assert_swapped, build, clean_env, foliomem, foliomem_only, plain, same_as_plain

needs = {name: pytest.mark.skipif(not shutil.which(name), reason=f"{name} is not installed")
         for name in ("g++", "node", "java", "javac", "go")}


def test_numpy_four_times_the_limit(torture):
    if torture and not LONG:
        pytest.skip("takes most of a minute, and is sampled under torture, with its result, for the limit: FOLIOMEM_LONG=1")
    limit = 32 if torture else 64
    same_as_plain([PYTHON, PROGRAMS / "big_array.py", limit * 4], f"{limit}M", torture)


@pytest.mark.parametrize("codec", ["zstd", "zstd:9"])
def test_numpy_zstd(codec):
    same_as_plain([PYTHON, PROGRAMS / "big_array.py", 128], "32M", False, options=["--codec", codec])


@pytest.mark.parametrize("options", [["--sizes", "none"], ["--sizes", "2M"], ["--sizes", "16K,64K,256K,1M"],
                                     ["--granule", "4K"], ["--granule", "2M", "--sizes", "2M"]], ids=" ".join)
def test_numpy_sizes_and_granules(options):
    same_as_plain([PYTHON, PROGRAMS / "big_array.py", 96], "32M", False, options=options)


def test_sqlite(torture):
    size, limit = ("10", "16M") if torture else ("150", "64M")
    got = same_as_plain([PYTHON, PROGRAMS / "database.py", size], limit, torture)
    assert got.out.startswith(b"ok\n") and got.out.endswith(b"wrong 0\n")


@needs["g++"]
def test_compile_is_bit_identical(torture, tmp_path):
    if torture and not LONG:
        pytest.skip("a compiler whose every page goes out all the time takes minutes: FOLIOMEM_LONG=1")
    source = PROGRAMS / "template.cpp"
    if torture:  # every page of the compiler's goes out all the time: one without templates
        source = tmp_path / "plain.cpp"
        source.write_text("".join(f"int f{i}(int x) {{ int a[{i % 50 + 1}]; a[0] = x * {i}; return a[0] + x; }}\n" for i in range(300)))
    command = ["g++", "-O2", "-std=c++17", "-DTABLES=6", "-c", source, "-o", "out.o"]
    bare = plain(command, cwd=tmp_path).ok()
    wanted = (tmp_path / "out.o").read_bytes()
    (tmp_path / "out.o").unlink()
    anonymous = bare.max_rss - 30 * MIB  # cc1plus maps about so much of itself
    limit = max(16, anonymous * (3 if torture else 2) // 4 // MIB)
    got = foliomem(command, f"{limit}M", torture=torture, cwd=tmp_path, timeout=600 if torture else 90).ok()
    assert (tmp_path / "out.o").read_bytes() == wanted
    assert_swapped(got)
    assert not got.stats or got.stats["processes"] >= 2, "cc1plus, a child, was not counted"


@needs["node"]
def test_node_heap(torture):
    objects, limit = ("16", "48M") if torture else ("160", "72M")
    same_as_plain(["node", "--max-old-space-size=1024", PROGRAMS / "heap.js", objects], limit, torture)


@pytest.fixture(scope="session")
def java_classes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("java")
    return build(folder, ["javac", "-d", folder, PROGRAMS / "Heap.java"])


@needs["java"]
@needs["javac"]
@pytest.mark.parametrize("collector", ["Serial", "G1"])
def test_java_heap(torture, java_classes, collector):
    if torture and not (LONG and collector == "Serial"):
        pytest.skip("a JVM whose every page goes out all the time takes a minute, as G1 minutes: FOLIOMEM_LONG=1")
    objects, limit = ("15", "48M") if torture else ("200", "96M")
    same_as_plain(["java", "-Xmx256m", "-Xms256m", f"-XX:+Use{collector}GC", "-cp", java_classes, "Heap", objects], limit, torture)


def go_build(source, target, cgo):
    """A Go program, with or without libc."""
    env = clean_env({"CGO_ENABLED": cgo, "GOFLAGS": "-mod=mod", "GO111MODULE": "off"})
    done = plain(["go", "build", "-o", target, source], env=env, timeout=180)
    if done.code and cgo:
        pytest.skip("go cannot build with cgo here: " + done.err[-300:])
    return done.ok() and target


@pytest.fixture(scope="session")
def go_program(tmp_path_factory):
    return go_build(PROGRAMS / "goheap.go", tmp_path_factory.mktemp("go") / "goheap", 1)


@needs["go"]
def test_go_with_cgo(torture, go_program):
    size, limit = ("64", "24M") if torture else ("192", "64M")
    same_as_plain([go_program, size], limit, torture)


@needs["go"]
@foliomem_only
def test_go_without_cgo_is_refused(tmp_path):
    (tmp_path / "pure.go").write_text('package main\n\nfunc main() { println("it ran") }\n')
    got = foliomem([go_build(tmp_path / "pure.go", tmp_path / "pure", 0)])
    assert got.code == 125 and "it ran" not in got.err
    assert len(got.err.strip().splitlines()) == 1, got.err


def test_script_with_interpreter(tmp_path):
    script = tmp_path / "script"
    script.write_text(f"#!{PYTHON}\nimport sys\nprint(sum(bytes(range(256)) * 200000), sys.argv[1])\n")
    os.chmod(script, 0o755)
    assert foliomem([script, "word"]).ok().out == b"6528000000 word\n"
