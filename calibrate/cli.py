"""The command `base-moe`: one table of subcommands, each in the module that does the work.

A command's module has `DESCRIPTION`, `add_arguments(parser)` and `run(args)`, and is imported only when asked for. Of
several named by backend, `--backend` chooses one, by default the first.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from importlib.metadata import version

COMMANDS: dict[str, tuple[str | dict[str, str], str]] = {
    "demo": ("calibrate.demo", "the embedded model on held-out prompts: dense against every budget and ranking"),
    "generate": ("calibrate.generate", "batched generation over a file of prompts under a budget"),
    "chat": ({"mlx": "backends.mlx.chat"}, "talk to a model on MLX, the budget adjustable while talking"),
    "serve": ({"mlx": "backends.mlx.server"}, "OpenAI-compatible server on MLX under a budget"),
    "bench": (
        {"torch": "backends.cuda.bench", "mlx": "backends.mlx.bench"},
        "decode speed of true-width layers by number of active experts",
    ),
    "calibrate": ("calibrate.calibrate", "fit a predictor for a model on text"),
    "eval": ("calibrate.evaluate", "quality against cost for every policy: tables, figures, a report"),
    "plan": ("calibrate.layer_plan", "share experts out over the layers by the damage that losing them does"),
    "inspect": ("calibrate.inspect", "print the card of a predictor"),
    "gpu-check": ("backends.cuda.gpu_check", "CUDA kernels against float64, races and layer times, on a GPU"),
}


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: base-moe COMMAND [options]",
            "",
            "Mixture-of-experts decoding under an expert budget (BASE, arXiv 2609.36222).",
            "",
            "commands:",
            *lines,
            "",
            "base-moe COMMAND --help shows a command's options; base-moe --version the version.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; returns its own exit status or 0: 2 is bad input, 130 Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"base-moe {version('base-moe')}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"base-moe: unknown command {argv[0]!r}: choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    name, backends = COMMANDS[argv[0]][0], argparse.ArgumentParser(prog=f"base-moe {argv[0]}", add_help=False)
    if isinstance(name, dict):
        backends.add_argument("--backend", choices=list(name), default=next(iter(name)), help="default: %(default)s")
        name = name[backends.parse_known_args(argv[1:])[0].backend]
    module = importlib.import_module(name)
    parser = argparse.ArgumentParser(prog=backends.prog, description=module.DESCRIPTION, parents=[backends])
    module.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    try:
        return module.run(args) or 0
    except (ValueError, OSError) as error:
        if os.environ.get("BASE_MOE_TRACEBACK"):
            raise
        print(f"base-moe {argv[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nbase-moe {argv[0]}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
