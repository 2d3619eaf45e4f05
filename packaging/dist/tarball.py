"""The archive with an installer, for systems without packages."""
from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

from .contents import LEVEL, NAME, REPO, VERSION, Tree, epoch, whole


def tar_of(tree: Tree, prefix: str) -> bytes:
    """An archive of a tree below `prefix`, all of root."""
    archive = io.BytesIO()
    folders = {str(parent) for path in tree.files for parent in Path(prefix, path).parents} - {"."}
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted([*folders, *(f"{prefix}/{path}" for path in tree.files)]):
            member = tarfile.TarInfo(path)
            member.mtime = epoch()
            member.uname = member.gname = "root"
            if path in folders:
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(member)
            else:
                inner = path.removeprefix(f"{prefix}/")
                member.size, member.mode = len(tree.files[inner]), tree.modes[inner]
                tar.addfile(member, io.BytesIO(tree.files[inner]))
    return archive.getvalue()


def build(out: Path) -> list[Path]:
    """Writes the archive."""
    tree = whole(zsh="site-functions")
    for name in ("LICENSE-APACHE", "LICENSE-MIT", "README.md", "CHANGELOG.md"):
        tree.add(f"share/doc/{NAME}/{name}", REPO / name)
    tree.add("install.sh", REPO / "packaging/install.sh", 0o755)
    name = f"{NAME}-{VERSION}-linux-x86_64"
    target = out / f"{name}.tar.gz"
    target.write_bytes(gzip.compress(tar_of(tree, name), LEVEL, mtime=0))
    return [target]
