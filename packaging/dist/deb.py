"""The package for Debian and its relatives, made by dpkg-deb."""
from __future__ import annotations

import email.utils
import hashlib
import re
import textwrap
from pathlib import Path

from .contents import DESCRIPTION, LEVEL, NAME, REPO, SUMMARY, VERSION, Tree, epoch, fresh, glibc, python_module, run, whole

MAINTAINER = "The foliomem authors <foliomem@invalid.invalid>"
MODULES = "lib/python3/dist-packages/"
# A revision of its own, as that of a distribution has.
REVISION = f"{VERSION}-1"
COPYRIGHT = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: foliomem

Files: *
Copyright: {holders}
License: MIT or Apache-2.0

License: Apache-2.0
 The full text is in /usr/share/common-licenses/Apache-2.0.

License: MIT
"""
# Names of functions stay, for backtraces; the agent takes all of the C library from its program.
OVERRIDES = """\
foliomem: unstripped-binary-or-object *
foliomem: library-not-linked-against-libc *
"""
# What the group may use, it may no more when the package is gone.
SCRIPTS = {
    "postinst": """\
#!/bin/sh
set -e
if [ "$1" = configure ]; then
    /usr/bin/foliomem setup
fi
""",
    "prerm": """\
#!/bin/sh
set -e
rm -rf /usr/lib/python3/dist-packages/foliomem/__pycache__
if [ "$1" = remove ]; then
    if [ -e /var/lib/foliomem/setup/machine.json ]; then /usr/bin/foliomem setup --undo; fi
fi
""",
}


def copyright_file() -> bytes:
    text = (REPO / "LICENSE-MIT").read_text()
    holders = re.search(r"^Copyright (?:\(c\) )?(.*)$", text, re.M)
    lines = "".join(f" {line or '.'}\n" for line in text.strip().splitlines())
    return (COPYRIGHT.format(holders=holders[1] if holders else "The foliomem authors") + lines).encode()


def changelog() -> bytes:
    when = email.utils.formatdate(epoch())
    return f"{NAME} ({REVISION}) unstable; urgency=medium\n\n  * See changelog.gz.\n\n -- {MAINTAINER}  {when}\n".encode()


def contents() -> Tree:
    """All files below /usr."""
    tree = whole(zsh="vendor-completions")
    for path, content in python_module(MODULES).files.items():
        tree.add(path, content)
    doc = f"share/doc/{NAME}"
    tree.add(f"{doc}/copyright", copyright_file())
    tree.add(f"{doc}/README.md", REPO / "README.md")
    tree.add_compressed(f"{doc}/changelog.gz", (REPO / "CHANGELOG.md").read_bytes())
    tree.add_compressed(f"{doc}/changelog.Debian.gz", changelog())
    tree.add(f"share/lintian/overrides/{NAME}", OVERRIDES.encode())
    return tree


def control(tree: Tree) -> str:
    kib = sum(-(-len(content) // 1024) for content in tree.files.values())
    description = textwrap.indent(textwrap.fill(DESCRIPTION, 76), " ")
    return f"""\
Package: {NAME}
Version: {REVISION}
Architecture: amd64
Maintainer: {MAINTAINER}
Installed-Size: {kib}
Depends: libc6 (>= {glibc()}), passwd
Suggests: python3
Section: utils
Priority: optional
Description: {SUMMARY[0].lower() + SUMMARY[1:]}
{description}
"""


def build(out: Path) -> list[Path]:
    """Writes the package."""
    tree = contents()
    root = fresh(out / "deb")
    tree.write(root / "usr")
    scripts = root / "DEBIAN"
    scripts.mkdir()
    (scripts / "control").write_text(control(tree))
    sums = (f"{hashlib.md5(content).hexdigest()}  usr/{path}\n" for path, content in sorted(tree.files.items()))
    (scripts / "md5sums").write_text("".join(sums))
    for name, text in SCRIPTS.items():
        (scripts / name).write_text(text)
        (scripts / name).chmod(0o755)
    target = out / f"{NAME}_{REVISION}_amd64.deb"
    run(["dpkg-deb", "--root-owner-group", "-Zxz", f"-z{min(LEVEL, 6)}", "--build", root, target])
    return [target]
