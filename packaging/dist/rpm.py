"""The package for Fedora, openSUSE and their relatives, made by rpmbuild."""
from __future__ import annotations

import shutil
from pathlib import Path

from .contents import DESCRIPTION, LICENSE, NAME, REPO, SUMMARY, VERSION, DistError, fresh, glibc, run, whole

# The files are as they are to be: nothing is stripped, compressed or looked through for what it needs.
SPECIFICATION = """\
%global debug_package %{{nil}}
%global __os_install_post %{{nil}}
%global _build_id_links none

Name: {name}
Version: {version}
Release: 1
Summary: {summary}
License: {license}
AutoReqProv: no
Requires: glibc >= {glibc}
Requires(post): shadow-utils
BuildArch: x86_64

%description
{description}

%install
cp -a {root}/. %{{buildroot}}/

%post
/usr/bin/foliomem setup

%preun
if [ "$1" = 0 ]; then
    if [ -e /var/lib/foliomem/setup/machine.json ]; then /usr/bin/foliomem setup --undo; fi
fi

%files
{files}
"""


def build(out: Path) -> list[Path]:
    """Writes the package."""
    if shutil.which("rpmbuild") is None:
        raise DistError("rpmbuild is missing: scripts/setup dist")
    tree = whole(zsh="site-functions")
    doc = f"share/doc/{NAME}"
    for name in ("LICENSE-APACHE", "LICENSE-MIT", "README.md", "CHANGELOG.md"):
        tree.add(f"{doc}/{name}", REPO / name)
    work = fresh(out / "rpm")
    tree.write(work / "root/usr")
    kinds = {"share/man/": "%doc ", "share/doc/": "%doc "}
    # A system may have no shell that owns the folders of its completions: several packages may own a folder.
    shells = [part for path in tree.files if "completion" in path or "site-functions" in path for part in Path(path).parents]
    owned = {doc, "lib/foliomem", *(str(folder) for folder in shells if len(folder.parts) > 1)}
    lines = [f"%dir /usr/{folder}" for folder in sorted(owned)]
    for path in sorted(tree.files):
        kind = next((mark for start, mark in kinds.items() if path.startswith(start)), "")
        lines.append(f"{kind}%attr({tree.modes[path]:o}, root, root) /usr/{path}")
    text = SPECIFICATION.format(name=NAME, version=VERSION, summary=SUMMARY, license=LICENSE, glibc=glibc(),
                                description=DESCRIPTION, root=work / "root", files="\n".join(lines))
    specification = work / f"{NAME}.spec"
    specification.write_text(text)
    # A system that is not RPM's has no database of it.
    command = ["rpmbuild", "-bb", "--quiet", "--target", "x86_64", "--define", f"_topdir {work}", "--define", f"_dbpath {work}/db",
               "--define", "_binary_payload w9.xzdio", "--define", "_buildhost localhost",
               "--define", "use_source_date_epoch_as_buildtime 1", "--define", "clamp_mtime_to_source_date_epoch 1", specification]
    run(command)
    made = next((work / "RPMS/x86_64").glob("*.rpm"))
    target = out / made.name
    shutil.move(made, target)
    return [target]
