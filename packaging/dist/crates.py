"""The crates, as `cargo publish` would send them. Those with `publish = false` are not among them."""
from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from .contents import REPO, VERSION, DistError, fresh, run

# What a registry and its readers need.
WANTED = ("description", "license", "readme", "rust_version")


def published() -> list[str]:
    """The names of the crates that are published."""
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--offline"]
    packages = json.loads(subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout)["packages"]
    chosen = [package for package in packages if package["publish"] != []]
    for package in chosen:
        missing = [key for key in WANTED if not package.get(key)]
        missing += [key for key in ("keywords", "categories") if not package[key]]
        own = [dependency for dependency in package["dependencies"] if dependency.get("path") and dependency["kind"] is None]
        missing += [f"a version of {dependency['name']}" for dependency in own if dependency["req"] != f"={VERSION}"]
        if missing:
            raise DistError(f"{package['name']}: Cargo.toml lacks {', '.join(missing)}")
    return [package["name"] for package in chosen]


def build(out: Path) -> list[Path]:
    """Writes the crates."""
    target = fresh(out / "crates")
    work = out / "cargo"
    names = [word for name in published() for word in ("--package", name)]
    command = ["cargo", "package", "--allow-dirty", "--no-verify", "--target-dir", work, *names]
    run(command)
    for file in sorted((work / "package").glob("*.crate")):
        shutil.copy(file, target)
    shutil.rmtree(work)
    return [target]
