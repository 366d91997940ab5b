"""`base-moe generate`: answers a file of prompts in batches under a budget, on either backend."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from base_core import Budget
from base_core.artifact import FILE_NAME
from base_core.audit import add_audit_arguments, audit_table
from base_core.embedded import resolve_model
from base_core.report import write_report

DEFAULT_BATCH = 16
DEFAULT_MAX_TOKENS = 128
BACKENDS = {"torch": "backends.cuda.generate", "mlx": "backends.mlx.generate"}
DTYPES = ("auto", "float32", "bfloat16")
DESCRIPTION = "Generates from a file of prompts in batches, every decode step under the expert budget."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", required=True, metavar="FILE", help="one prompt a line, or JSONL; - is stdin")
    parser.add_argument(
        "--budget", default="off", help="16, 12.5%%, energy:0.98, share:0.01, plan:FILE or off (default: off)"
    )
    parser.add_argument("--model", metavar="PATH_OR_ID", help="checkpoint (default: the embedded model)")
    parser.add_argument(
        "--predictor", metavar="PATH_OR_ID", help=f"default: the embedded one, or {FILE_NAME} in the model's folder"
    )
    parser.add_argument("--backend", choices=list(BACKENDS), default="torch")
    parser.add_argument("--batch", type=int, default=DEFAULT_BATCH, metavar="N", help="rows that decode together")
    parser.add_argument("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help="per prompt")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of sampling")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights; auto is the checkpoint's")
    add_audit_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="writes prompts, texts, settings and statistics")


def run(args: argparse.Namespace) -> None:
    """Prints every prompt with its text.

    Raises:
        ValueError: unusable prompts, budget, model, predictor or output file.
    """
    if args.batch < 1 or args.max_tokens < 1:
        raise ValueError(f"--batch {args.batch} and --max-tokens {args.max_tokens} must be at least 1")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise ValueError(f"--json {args.json!r}: its folder does not exist")
    budget = Budget.parse(args.budget)
    policy = _policy(args)
    prompts = read_prompts(args.prompts)
    model, predictor = resolve_model(args.model, args.predictor)
    generated = _backend(args.backend).generate_texts(
        model,
        _find_predictor(model, predictor, budget),
        budget,
        prompts,
        batch=args.batch,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        dtype=None if args.dtype == "auto" else args.dtype,
        progress=True,
        policy=policy,
    )
    for prompt, text in zip(prompts, generated.texts, strict=True):
        print(f"> {prompt}\n{text}")
    tokens, stats = sum(generated.token_counts), asdict(generated.stats)
    speed = tokens / generated.seconds
    print(f"{len(prompts)} prompts, {tokens} tokens, {speed:.1f} tokens/s{_experts(stats)}", file=sys.stderr)
    if stats.get("audit") is not None:
        print(audit_table(stats["audit"]), file=sys.stderr)
    if args.json:
        rows = [
            {"prompt": prompt, "text": text, "tokens": count}
            for prompt, text, count in zip(prompts, generated.texts, generated.token_counts, strict=True)
        ]
        settings = {**vars(args), "model": str(model), "budget": str(budget)}
        write_report(args.json, rows, settings, stats={**stats, "seconds": generated.seconds, "tokens_per_s": speed})


def read_prompts(path: str) -> list[str]:
    """The prompts of a text file (one a line, blank lines skipped) or a JSONL file of `{"prompt": ...}`.

    A file is JSONL when its name says so or its first line is a JSON object.

    Args:
        path: a file, or - for stdin.

    Raises:
        ValueError: no such file, no prompt in it, or a bad line, by number.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"prompts file {path!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts file {path!r} is not UTF-8 text: {error}") from error
    lines = [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ValueError(f"prompts file {path!r} holds no prompt: write one a line")
    if path.endswith(".jsonl") or _is_object(lines[0][1]):
        return [_prompt_of(line, f"{path}, line {i}") for i, line in lines]
    return [line for _, line in lines]


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _prompt_of(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'{where} has no prompt: expected {{"prompt": "some text"}}')
    return prompt


def _find_predictor(model: str, predictor: str | None, budget: Budget) -> str | Path | None:
    if predictor is not None or budget.is_off:
        return predictor
    beside = Path(model) / FILE_NAME
    if not beside.is_file():
        raise ValueError(
            f"--budget {budget} needs a predictor for {model!r}: calibrate one (base-moe calibrate) and pass it with "
            f"--predictor"
        )
    return beside


def _backend(name: str) -> Any:
    try:
        return importlib.import_module(BACKENDS[name])
    except ImportError as error:
        raise ValueError(f"backend {name!r} is not installed here ({error}): choose the other one") from error


def _policy(args: argparse.Namespace) -> Any:
    """The backend's policy with the audit asked for, or None for the backend's own."""
    if not args.audit and not args.audit_correct:
        return None
    counting = {"count_all": True} if args.backend == "mlx" else {}
    return _backend(args.backend).Policy(audit=args.audit, audit_correct=args.audit_correct, **counting)


def _experts(stats: dict[str, Any]) -> str:
    if stats.get("active_mean") is None:
        return ""
    return f", {stats['active_mean']:.1f} of {stats['union_mean']:.1f} experts a layer"
