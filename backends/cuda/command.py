"""Runs a command's module in a process of its own, where it needs another environment than this one.

python -m backends.cuda.command backends.cuda.gpu_check --dry
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys

from backends.cuda.experts import HAS_TRITON

INTERPRETER = {"TRITON_INTERPRET": "1"}
"""Triton reads this when it is imported, so that a process which has imported it cannot switch."""


def command_line(module: str, args: argparse.Namespace) -> list[str]:
    """The command that runs `module` with the same arguments; flags are named as their destinations."""
    command = [sys.executable, "-m", "backends.cuda.command", module]
    for name, value in vars(args).items():
        if name == "backend" or value is None or value is False:  # the backend has chosen the module
            continue
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [flag, str(value)]
    return command


def run_interpreted(module: str, args: argparse.Namespace) -> int:
    """Runs `module` with the same arguments in the Triton interpreter; returns its exit status."""
    return subprocess.run(command_line(module, args), env={**os.environ, **INTERPRETER}, check=False).returncode


def require_triton() -> None:
    """Raises a ValueError where Triton is not installed."""
    if not HAS_TRITON:
        raise ValueError("Triton is not installed: pip install triton (Linux only), or measure with --device cpu")


def main(argv: list[str] | None = None) -> int:
    """Runs the module named first; 2 for bad input."""
    name, *rest = sys.argv[1:] if argv is None else argv
    module = importlib.import_module(name)
    parser = argparse.ArgumentParser(prog=name, description=module.DESCRIPTION)
    module.add_arguments(parser)
    args = parser.parse_args(rest)
    try:
        return module.run(args) or 0
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
