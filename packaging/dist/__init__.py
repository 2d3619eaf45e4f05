"""Makes packages of foliomem: `scripts/dist`, which says more."""
from __future__ import annotations

import subprocess
import sys

from . import crates, deb, oci, rpm, tarball, wheel
from .contents import DistError

PARTS = {"wheel": wheel.build, "deb": deb.build, "tarball": tarball.build, "oci": oci.build, "rpm": rpm.build, "crates": crates.build}


def main(arguments: list[str]) -> int:
    """Makes the parts that are named, or all."""
    unknown = [name for name in arguments if name not in PARTS]
    if unknown:
        print(f"dist: no part {', '.join(unknown)}: use {', '.join(PARTS)}", file=sys.stderr)
        return 2
    for name in arguments or PARTS:
        try:
            made = PARTS[name]()
        except DistError as error:
            print(f"dist: {name}: {error}", file=sys.stderr)
            return 1
        except subprocess.CalledProcessError as error:
            print(f"dist: {name}: {error}\n{error.stderr or ''}", file=sys.stderr)
            return 1
        for path in made:
            print(path)
    return 0
