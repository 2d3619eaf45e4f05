"""Chromium: a browser, a zygote, and renderers in sandboxes."""
import shutil

import pytest
from conftest import LONG, ORDINARY, PLAIN, plain

BROWSER = shutil.which("chromium")
OPTIONS = ["--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
           "--disable-component-update", "--disable-sync", "--timeout=120000"]
# Arrays, objects, elements and canvases, each checked after all have been made: the title says how many were wrong.
HEAVY = """<!doctype html><html><head><title>loading</title></head><body style="background:#fff">
<div id=result style="font:20px monospace"></div><canvas id=out width=256 height=128></canvas><div id=dom></div>
<script>
const PARTS = 72, WORDS = 1 << 18, arrays = [], objects = [], canvases = [];
function fill(seed) {
  const words = new Uint32Array(WORDS);
  let x = (seed * 2654435761) >>> 0 || 1;
  for (let i = 0; i < WORDS; i++) {
    if (i % 8 == 0) { x ^= x << 13; x >>>= 0; x ^= x >>> 17; x ^= x << 5; x >>>= 0; }
    words[i] = i % 8 ? i : x;
  }
  return words;
}
function sum(words) { let s = 0; for (let i = 0; i < WORDS; i++) s = (s + words[i] * (i % 16 + 1)) >>> 0; return s; }
for (let part = 0; part < PARTS; part++) arrays.push(fill(part + 1));
const sums = arrays.map(sum), dom = document.getElementById('dom');
for (let i = 0; i < 6000; i++) {
  const node = document.createElement('span');
  node.textContent = 'node ' + i * 7 + ' '; node.dataset.k = i; dom.appendChild(node);
}
for (let c = 0; c < 8; c++) {
  const canvas = document.createElement('canvas'); canvas.width = 1024; canvas.height = 512;
  const context = canvas.getContext('2d', {willReadFrequently: true});
  for (let y = 0; y < 512; y += 16) {
    context.fillStyle = 'rgb(' + c * 20 + ',' + y / 2 + ',' + (c * y & 255) + ')'; context.fillRect(0, y, 1024, 16);
  }
  canvases.push(context);
}
for (let i = 0; i < 120000; i++) objects.push({id: i, name: 'o' + i, last: i ? objects[i - 1] : null});
let wrong = 0;
for (let round = 0; round < 2; round++) arrays.forEach((words, part) => { if (sum(words) !== sums[part]) wrong++; });
canvases.forEach((context, c) => {
  const data = context.getImageData(0, 0, 1024, 512).data;
  for (let y = 0; y < 512; y += 8) {
    const at = (y * 1024 + 500) * 4, band = y & ~15;
    if (data[at] !== c * 20 || data[at + 1] !== band / 2 || data[at + 2] !== (c * band & 255)) wrong++;
  }
});
objects.forEach((o, i) => { if (o.name !== 'o' + i || (i && o.last.id !== i - 1)) wrong++; });
for (const node of dom.children) if (node.textContent !== 'node ' + node.dataset.k * 7 + ' ') wrong++;
const said = 'wrong ' + wrong + ' of ' + PARTS + ' total ' + sums.reduce((a, b) => (a + b) >>> 0, 0);
document.getElementById('result').textContent = said;
const out = document.getElementById('out').getContext('2d');
out.fillStyle = wrong ? '#f00' : '#080'; out.fillRect(8, 8, 240, 112);
dom.remove(); document.title = said;
</script></body></html>"""
LIGHT = "<!doctype html><title>light</title><h1>A page</h1><script>document.write(6 * 7)</script>"

pytestmark = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed (scripts/setup test)")


@pytest.fixture(params=["sandbox", "no-sandbox"])
def browse(request, public, device_open_to_all):
    """browse(page, limit): the screenshot and the result; with the browser's sandbox as an ordinary user."""
    sandboxed = request.param == "sandbox"
    user = ORDINARY if sandboxed else []
    can_sandbox = plain([*ORDINARY, "unshare", "--user", "true"]).code == 0
    if sandboxed and not can_sandbox:
        pytest.skip("an ordinary user may not make user namespaces here")
    if "heavy" in request.node.name and not sandboxed and can_sandbox and not LONG:
        pytest.skip("the same page, in a sandbox, is heavy as well: FOLIOMEM_LONG=1")
    runs = iter(range(100))

    def run(text, limit=None):
        number = next(runs)
        page, home = public.folder / "page.html", public.folder / f"home-{number}"
        page.write_text(text)
        picture = public.folder / f"{number}.png"
        argv = [BROWSER, *OPTIONS, *([] if sandboxed else ["--no-sandbox"]), f"--user-data-dir={home}",
                f"--screenshot={picture}", page.as_uri()]
        result = public.run(argv, limit, user=user)
        assert result.code == 0 and picture.exists(), result.err[-3000:]
        return picture.read_bytes(), result

    return run


def test_a_page_looks_as_it_does_without_foliomem(browse):
    wanted, _ = browse(LIGHT)
    got, result = browse(LIGHT, "400M")
    assert got == wanted
    assert "without the limit" not in result.err and "without the agent" not in result.err


def test_a_heavy_page_renders_at_half_of_its_need(browse):
    wanted, _ = browse(HEAVY)
    got, free = browse(HEAVY, "4G")
    assert got == wanted
    if PLAIN:
        return
    need = free.stats["need_peak_bytes"]
    got, pressed = browse(HEAVY, f"{need // 2 >> 20}M")
    assert got == wanted, pressed.err[-2000:]
    assert pressed.stats["vmstat"]["pswpin"] > 0
    assert pressed.stats["need_peak_bytes"] > need * 0.8, "all of its processes are managed"
    assert "without the limit" not in pressed.err and "without the agent" not in pressed.err
