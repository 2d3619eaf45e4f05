"""The docs: their shell blocks run, their options exist, their links lead somewhere, and nothing that users see is missing.

A block marked `sh` is run, line by line, in a directory of its page that has the files of PROGRAMS_OF_DOCS. A block marked
`sh not-run` needs more than a test has (root, a device, hours): only the options of foliomem in it are checked.
"""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BIN, REPO, clean_env, cli, foliomem_only

pytestmark = foliomem_only
PAGES = [REPO / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES += sorted((REPO / "docs").rglob("*.md"))
LANGUAGES = {"sh", "sh not-run", "text", "toml", "ini", "dockerfile", "sql", "python", "yaml"}
COMMANDS = {"run", "record", "ps", "ctl", "doctor", "setup", "bench", "lab"}
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.M | re.S)

# What the examples run, made small.
PROGRAMS_OF_DOCS = {
    "analyse.py": "rows = [b'%012d' % number * 4096 for number in range(3000)]\n"  # 140 MiB, more than some limits
                  "assert all(int(row[:12]) == number for number, row in enumerate(rows))\nprint(len(rows))\n",
    "simulate.py": "import os\nparts = [os.urandom(1 << 20) for _ in range(200)]\nprint(len(set(map(hash, parts))))\n",
    "server.js": "const parts = [];\nfor (let i = 0; i < 100; i++) parts.push(Buffer.alloc(1 << 20, `part ${i}`));\n"
                 "console.log(parts.length);\n",
    "App.java": "class App { public static void main(String[] a) { byte[] part = new byte[64 << 20]; "
                "System.out.println(part.length); } }\n",
    "Makefile": "all: 1.o 2.o 3.o 4.o\n.PHONY: all\n%.o:\n\ttouch $@\n",
}
# Programs that an example needs and a machine may lack.
NEEDED = {"node": "node", "java": "javac", "make": "make"}


def named(page):
    return str(page.relative_to(REPO))


def blocks(page):
    """Each block of a page: its language, and the lines of it, those that go on joined."""
    for language, text in FENCE.findall(page.read_text()):
        yield language.strip(), [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def foliomem_calls(line):
    """The arguments of each `foliomem` in a line, without those of the program that it runs."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    words = list(lexer)
    for at, word in enumerate(words[:-1]):
        is_command = words[at + 1] in COMMANDS or at == 0 or words[at - 1][0] in ";&|"
        if word == "foliomem" and is_command:
            arguments = []
            for argument in words[at + 1:]:
                if argument == "--" or argument[0] in ";&|()<>":
                    break
                arguments.append(argument)
            yield arguments


ALL_CALLS = [(named(page), language, arguments)
             for page in PAGES for language, lines in blocks(page) if language.startswith("sh")
             for line in lines for arguments in foliomem_calls(line)]


def test_every_block_says_what_it_is():
    unknown = [(named(page), language) for page in PAGES for language, _ in blocks(page) if language not in LANGUAGES]
    assert not unknown and len(ALL_CALLS) > 80


@pytest.mark.parametrize("page", [page for page in PAGES if any(language == "sh" for language, _ in blocks(page))], ids=named)
def test_commands_run(page, tmp_path):
    for name, text in PROGRAMS_OF_DOCS.items():
        (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(Path(BIN).resolve().parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = clean_env({"PATH": path, "HOME": tmp_path, "XDG_CONFIG_HOME": tmp_path})
    for language, lines in blocks(page):
        for line in lines if language == "sh" else []:
            if any(re.search(rf" {name} ", f" {line} ") and not shutil.which(tool) for name, tool in NEEDED.items()):
                continue
            done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, f"{named(page)}: {line}\n{done.stdout[-800:]}\n{done.stderr[-2000:]}"


def test_options_are_accepted(tmp_path):
    refused = []
    for page, _, arguments in ALL_CALLS:
        # Settings are checked, too, where they do not need a file that a reader has.
        is_checked = arguments[0] in ("run", "record") and not {"--config", "--print-config"} & set(arguments)
        check = "--print-config" if is_checked else "--help"
        modules = REPO / "python/foliomem/src"
        got = cli(*arguments, check, env={"HOME": tmp_path, "XDG_CONFIG_HOME": tmp_path, "PYTHONPATH": modules})
        if got.code != 0:
            refused.append(f"{page}: foliomem {shlex.join(arguments)}: {got.err.strip()}")
    assert not refused, "\n".join(refused)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("command", ["run", "record"])
def test_every_option_is_in_the_reference(command):
    options = set(re.findall(r"--[a-z-]+", cli(command, "--help").ok().out.decode())) - {"--help"}
    text = (REPO / "docs/reference/settings.md").read_text()
    assert len(options) > 8 and not [option for option in options if option not in text]


def test_every_counter_is_in_the_reference(tmp_path):
    cli("run", "--limit", "64M", "--stats", str(tmp_path / "s.json"), "--", "true").ok()
    stats = json.loads((tmp_path / "s.json").read_text())
    names = {key for key in stats if not key.startswith("hugepages-")}
    for key, value in stats.items():
        for name, inner in value.items() if isinstance(value, dict) else ():
            names |= {name} | (set(inner) if isinstance(inner, dict) else set())
    text = (REPO / "docs/reference/stats.md").read_text()
    assert len(names) > 70 and not [name for name in sorted(names) if f"`{name}`" not in text]


# Where messages for users are, and errors that one part of the code has for another.
PRINTING = ["crates/cli/src", "crates/command/src", "crates/lab/src", "crates/trace/src", "crates/bench/src",
            "crates/core/src/compaction/variant.rs", "crates/core/src/cluster/strategy.rs", "crates/types/src", "crates/sys/src",
            "crates/session/src", "crates/runtime/src"]
INTERNAL = {"MoveError", "CodecError"}
PRINTS = r'#\[error\(\s*|\b(?:notice|fail|tell|tell_last)\([^"]{0,60}format_args!\(\s*|eprintln!\(\s*|Excess::\w+ => (?:\{\s*)?'
MESSAGE = re.compile(rf'(?:{PRINTS})"((?:[^"\\]|\\.)*)"', re.S)


def last(pattern, text):
    """The last match of a pattern."""
    found = None
    for found in re.finditer(pattern, text):
        pass
    return found


def messages():
    """The longest fixed part of each message in the sources."""
    for place in PRINTING:
        root = REPO / place
        for file in sorted(root.rglob("*.rs")) if root.is_dir() else [root]:
            text = re.sub(r"\n#\[cfg\(test\)\]\nmod tests \{.*", "", file.read_text(), flags=re.S)
            for found in MESSAGE.finditer(text):
                kind = re.match(r"\)\]\s*pub struct (\w+)", text[found.end():]) or last(r"\benum (\w+)", text[:found.start()])
                if found[0].startswith("#[error") and kind[1] in INTERNAL:
                    continue
                message = re.sub(r"\\\n\s*", "", found[1]).replace('\\"', '"').replace("\\n", " ").removeprefix("foliomem: ")
                part = max(re.split(r"\{[^}]*\}", message), key=len).strip()
                if len(part) >= 12:
                    yield named(file), part


def test_every_message_is_in_troubleshooting():
    text = " ".join((REPO / "docs/guide/troubleshooting.md").read_text().split()).replace("'", "`")
    known = list(messages())
    missing = [f"{file}: {part}" for file, part in known if " ".join(part.split()).replace("'", "`") not in text]
    assert len(known) > 50 and not missing, "\n".join(missing)
