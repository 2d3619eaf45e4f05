"""Makes packages of foliomem: `scripts/dist`, which says more."""
from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from . import crates, deb, oci, rpm, tarball, wheel
from .contents import REPO, DistError

PARTS = {"wheel": wheel.build, "deb": deb.build, "tarball": tarball.build, "oci": oci.build, "rpm": rpm.build, "crates": crates.build}


def main(arguments: list[str]) -> int:
    """Makes the parts that are named, or all."""
    parser = argparse.ArgumentParser(prog="scripts/dist", description="Makes packages of what `make build` has built.")
    parser.add_argument("--out", type=Path, default=REPO / "target/dist", help="where they are to lie [default: target/dist]")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} [default: all]")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}: use {', '.join(PARTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.parts or PARTS:
        try:
            made = PARTS[name](args.out.resolve())
        except DistError as error:
            print(f"dist: {name}: {error}", file=sys.stderr)
            return 1
        except subprocess.CalledProcessError as error:
            print(f"dist: {name}: {error}\n{error.stderr or ''}", file=sys.stderr)
            return 1
        for path in made:
            print(path)
    return 0
