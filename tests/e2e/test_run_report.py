"""`run --report`: the page of a real run, its figures against those of `--stats`, and as a browser shows it."""
import json
import os
import shutil
import signal
import struct
import time
import zlib
from html.parser import HTMLParser

import pytest
from conftest import MIB, PYTHON, cli, foliomem, foliomem_only, plain, start

pytestmark = foliomem_only
BROWSER = shutil.which("chromium")
MAX_BYTES = 500_000
HOSTILE = "</code><script>alert(1)</script>&\"'"
# Reads 128 MiB twice, says so, and waits for a line.
WORK = ("import os\nrows = [b'%012d' % number * 4096 for number in range(2700)]\n"
        "for _ in range(2): assert all(int(row[:12]) == number for number, row in enumerate(rows))\n"
        "print('ready', flush=True)\nos.read(0, 1)\n")
VOID = {"meta", "wbr"}


class Page(HTMLParser):
    """Checks that elements are closed where they were opened, and gathers what a test looks at."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.figures, self.texts, self.points = [], [], {}, [], {}
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "data":
            value = json.loads(attributes["value"])
            assert self.figures.setdefault(attributes["title"], value) == value
        if "points" in attributes:
            pairs = [tuple(map(float, pair.split(","))) for pair in attributes["points"].split()]
            self.points.setdefault(tag, []).append(pairs)
        for name in ("src", "href", "onload"):
            assert name not in attributes, attributes

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (self.open, tag)

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def read(file):
    text = file.read_text()
    assert len(text.encode()) < MAX_BYTES and "http://" not in text.replace("http://www.w3.org/", "") and "url(" not in text
    page = Page(text)
    # A run that ends before its first sample has no plots.
    assert "script" not in page.tags and {"table", "dl", "style"} <= set(page.tags)
    return page


def numbers(value, path=""):
    """The numbers of the statistics, by their paths."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from numbers(inner, f"{path}{key}.")
        elif isinstance(inner, (int, float)) and not isinstance(inner, bool):
            yield path + key, inner


def check_figures(page, stats):
    wanted = dict(numbers(stats))
    assert page.figures and {path: wanted.get(path) for path in page.figures} == page.figures
    shown = {path for path in wanted if path.split(".")[0] in ("vmstat", "mm_stat", "bd_stat", "faults")}
    assert len(shown) > 60 and shown <= set(page.figures)
    assert {"peak_bytes", "need_peak_bytes", "limit_bytes", "elapsed_ns", "memory_stall_percent"} <= set(page.figures)


def test_a_page_has_the_figures_of_the_run(tmp_path):
    read_end, write_end = os.pipe()
    file = tmp_path / "run.html"
    options = ["--report", file, "--swap", f"{tmp_path}/swap:64M"]
    running = start([PYTHON, "-c", WORK, HOSTILE], "64M", options, stdin=read_end)
    os.close(read_end)
    running.wait_output(b"ready", 60)
    assert file.read_text() == "", "written at the end"
    for limit in ("200M", "120M"):
        # Each limit must last until it is sampled.
        time.sleep(1.5)
        cli("ctl", str(running.pid), "limit", limit, timeout=60).ok()
    os.close(write_end)
    result = running.finish(120).ok()
    page = read(file)
    assert "svg" in page.tags
    check_figures(page, result.stats)
    assert HOSTILE in page.text and "foliomem: python" in page.text
    assert "need" in page.text and "swap_in" in page.text and "Advice" in page.text
    # Both changes, and steps on the way down are one.
    rows = page.text.split("Changes of the limit")[1].split("What took the time")[0]
    assert "64 MiB" in rows and rows.count("200 MiB") == 2 and "120 MiB" in rows
    # Resident and stored memory below each other, and a line of the limit.
    areas, lines = page.points["polygon"], page.points["polyline"]
    assert len(areas) == 3 and len(lines) >= 2 and len(areas[0]) == len(areas[1]) > 8
    assert len({y for _, y in lines[0]}) >= 2, "the limit changed"
    summary = next(line for line in result.err.splitlines() if line.startswith("foliomem: peak"))
    assert summary.removeprefix("foliomem: ") in page.text


def test_a_roomy_and_a_failing_run(tmp_path):
    file = tmp_path / "run.html"
    result = foliomem([PYTHON, "-c", "import sys, time; x = bytearray(30 << 20); time.sleep(0.5); sys.exit(7)"], "512M",
                      options=["--report", file, "--quiet"])
    assert result.code == 7
    page = read(file)
    check_figures(page, result.stats)
    assert page.figures["vmstat.pswpout"] == 0 and "Nothing was swapped out" in page.text and "exit code 7" in page.text
    assert page.figures["limit_bytes"] == 512 * MIB and "The limit did not change." in page.text


def test_thrashing_is_in_the_advice(built, tmp_path):
    file = tmp_path / "run.html"
    running = start([built("walk.c"), 192, 0, "random", 8], "64M", ["--report", file, "--codec", "zstd:3"])
    running.wait_output(b"thrashing: ", 120, running.err)
    running.proc.send_signal(signal.SIGTERM)
    result = running.finish()
    page = read(file)
    check_figures(page, result.stats)
    assert "Limit 64 MiB too small: " in page.text and "foliomem: thrashing: " in page.text and "exit code 143" in page.text


def test_a_program_that_ends_at_once(tmp_path):
    file = tmp_path / "run.html"
    result = foliomem(["true"], "64M", options=["--report", file]).ok()
    check_figures(read(file), result.stats)


@pytest.mark.parametrize("where", ["missing/run.html", ".", "/dev/full"])
def test_a_file_that_cannot_be_written(tmp_path, where):
    result = cli("run", "--limit", "64M", "--report", where, "--", "sh", "-c", "echo ran; exit 3", cwd=tmp_path)
    assert f"foliomem: cannot write the report to {where}: " in result.err
    # What can be opened is found out at the end, when the exit code of the program counts.
    assert (result.code, result.out) == ((3, b"ran\n") if where == "/dev/full" else (125, b""))


def pixels(png):
    """Width, height and rows of a PNG without interlacing, of 8 bits and 3 or 4 channels."""
    at, data = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at:at + 8])
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", png[at + 8:at + 18])
        if kind == b"IDAT":
            data += png[at + 8:at + 8 + length]
        at += 12 + length
    assert depth == 8
    channels = {2: 3, 6: 4}[colour]
    return width, height, channels, zlib.decompress(data)


@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed (scripts/setup test)")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_the_page(built, tmp_path, width):
    file, image = tmp_path / "run.html", tmp_path / "page.png"
    foliomem([built("walk.c"), 96, 1000, "forward", 2], "48M", options=["--report", file]).ok()
    # As wide as the window: nothing but tables scrolls.
    (tmp_path / "frame.html").write_text(
        f"<iframe id=page src=run.html style='width:{width}px;height:900px;border:0'></iframe><script>"
        "onload = () => { const root = page.contentDocument.documentElement; document.title = "
        "root.scrollWidth <= root.clientWidth && page.contentDocument.querySelectorAll('svg').length == 3 ? 'fits' : 'wide' }</script>")
    options = ["--headless", "--disable-gpu", "--no-sandbox", "--hide-scrollbars", "--allow-file-access-from-files"]
    env = {"HOME": tmp_path}
    dom = plain([BROWSER, *options, "--dump-dom", f"file://{tmp_path}/frame.html"], env=env, timeout=120)
    assert "<title>fits</title>" in dom.out.decode(), dom.out.decode()[:400]
    shot = [f"--screenshot={image}", f"--window-size={width},1600", f"file://{file}"]
    plain([BROWSER, *options, *shot], env=env, timeout=120)
    shown, height, channels, data = pixels(image.read_bytes())
    assert (shown, height) == (width, 1600) and len(data) == height * (1 + width * channels)
    assert len(set(data[i:i + 64] for i in range(0, len(data), 64))) > 500, "the page is empty"
