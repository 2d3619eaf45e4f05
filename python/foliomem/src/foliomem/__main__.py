"""`python -m foliomem`: the command `foliomem` of this installation, and `jupyter`, which needs Python."""
from __future__ import annotations

import os
import sys

from foliomem import _jupyter
from foliomem._command import FoliomemError, command

EXIT_FAILED = 125


def main() -> int:
    """Runs the command line."""
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["jupyter"]:
            _jupyter.main(arguments[1:])
            return 0
        os.execv(command(), ["foliomem", *arguments])
    except FoliomemError as error:
        print(f"foliomem: {error}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
