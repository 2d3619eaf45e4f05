"""`foliomem jupyter`: adds a kernel to Jupyter that runs inside a limit."""
from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

from foliomem._command import FoliomemError, command, options


def data_folder(is_for_all: bool, prefix: str | None) -> Path:
    """Where Jupyter looks for kernels."""
    if prefix is not None:
        return Path(prefix) / "share/jupyter"
    if is_for_all:
        return Path("/usr/local/share/jupyter")
    own = os.environ.get("JUPYTER_DATA_DIR")
    return Path(own) if own else Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share") / "jupyter"


def kernel_folder(args: argparse.Namespace) -> Path:
    """The folder of the kernel that the arguments name."""
    name = args.name or "foliomem"
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise FoliomemError(f"{name!r} is no name of a kernel: use letters, digits, '.', '_' and '-'")
    return data_folder(args.system, args.sys_prefix and sys.prefix or args.prefix) / "kernels" / name


def specification(args: argparse.Namespace) -> dict[str, object]:
    """What kernel.json says."""
    settings = {"swap": args.swap, "quiet": True}
    run = [command(), "run", *options(args.limit, settings), "--"]
    return {
        "argv": [*run, sys.executable, "-m", "foliomem.kernel", "-f", "{connection_file}"],
        "display_name": args.display_name or f"Python 3 ({args.limit})",
        "language": "python",
        "metadata": {"debugger": False},
    }


def install(args: argparse.Namespace) -> None:
    """Writes the kernel's specification."""
    if importlib.util.find_spec("ipykernel") is None:
        raise FoliomemError(f"{sys.executable} has no ipykernel: {sys.executable} -m pip install ipykernel")
    folder = kernel_folder(args)
    text = json.dumps(specification(args), indent=1) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.json").write_text(text)
    print(f"installed the kernel {folder.name} in {folder}")


def remove(args: argparse.Namespace) -> None:
    """Removes it."""
    folder = kernel_folder(args)
    if not (folder / "kernel.json").is_file():
        raise FoliomemError(f"there is no kernel {folder}")
    shutil.rmtree(folder)


def main(arguments: list[str]) -> None:
    """The command line of `foliomem jupyter`."""
    parser = argparse.ArgumentParser(prog="foliomem jupyter", description="Kernels of Jupyter inside a memory limit.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--name", help="the kernel's name [default: foliomem]")
    where.add_argument("--system", action="store_true", help="for all users [default: for this one]")
    where.add_argument("--sys-prefix", action="store_true", help="into this Python's environment")
    where.add_argument("--prefix", help="into the environment at PREFIX")
    add = commands.add_parser("install", parents=[where], help="add a kernel that runs inside a limit")
    add.add_argument("--limit", required=True, help="the limit of each kernel: 4G, 25%%, need/2")
    add.add_argument("--swap", metavar="FILE[:SIZE]", help="a swap file, as that of `foliomem run`")
    add.add_argument("--display-name", metavar="TEXT", help="what Jupyter shows [default: Python 3 (LIMIT)]")
    add.set_defaults(command=install)
    commands.add_parser("remove", parents=[where], help="remove such a kernel").set_defaults(command=remove)
    args = parser.parse_args(arguments)
    args.command(args)
