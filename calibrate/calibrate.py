"""`base-moe calibrate`: fits a predictor for a model on text, on either backend (paper section 6.3)."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoConfig, AutoTokenizer

from base_core import save_predictor
from base_core.artifact import DTYPES as PREDICTOR_DTYPES
from base_core.embedded import PREFIX, resolve_model
from base_core.rivals import DEFAULT_RIVAL_TOKENS, save_rivals
from calibrate.inspect import describe
from calibrate.passes import (
    DEFAULT_BATCH_TOKENS,
    DEFAULT_CHECKPOINT_MINUTES,
    DenseModel,
    LayerShape,
    Origin,
    Settings,
    calibrate_model,
    check_amount,
    check_identity,
    data_identity,
    first_line,
    plan_passes,
)
from calibrate.statistics import read_state, statistics_bytes
from calibrate.text import describe_source, read_sequences

BACKENDS = {"torch": "calibrate.torch_pass", "mlx": "calibrate.mlx_pass"}
DEFAULT_TOKENS = 2_500_000
DEFAULT_LENGTH = 2048
DTYPES = ("auto", "float32", "bfloat16", "float16")
DESCRIPTION = "Fits a predictor for a model on text and writes it to a file that every backend loads."


class Checkpoint(Protocol):
    """A model whose weights are not loaded yet."""

    def layers(self) -> Sequence[LayerShape]:
        """Its MoE layers, in order."""

    def load(self) -> DenseModel:
        """Loads the weights."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        type=Path,
        metavar="FILE",
        help=("plain text, or JSONL with a text, or with a prompt and an answer, a line"),
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="for instance predictor.safetensors")
    parser.add_argument(
        "--rivals",
        type=Path,
        metavar="FILE",
        help="also, or instead, what base-moe eval needs for sere and exfold, calibrated on the same text",
    )
    parser.add_argument(
        "--rival-tokens",
        type=int,
        default=DEFAULT_RIVAL_TOKENS,
        metavar="N",
        help=f"for --rivals, at most this many tokens that count (default: {DEFAULT_RIVAL_TOKENS:,})",
    )
    parser.add_argument("--model", metavar="PATH_OR_ID", help="checkpoint (default: the embedded model)")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub checkpoint")
    parser.add_argument(
        "--tokens",
        type=int,
        default=DEFAULT_TOKENS,
        metavar="N",
        help=(f"at most this many tokens of the text (default: {DEFAULT_TOKENS:,})"),
    )
    parser.add_argument(
        "--length",
        type=int,
        metavar="N",
        help=(f"tokens of a packed row (default: {DEFAULT_LENGTH}, or what the model can take)"),
    )
    parser.add_argument(
        "--positions",
        choices=("answer", "all"),
        default="answer",
        help=("of a prompt with its answer, what counts: the answer, which decoding reads (default), or all"),
    )
    parser.add_argument(
        "--unweighted",
        action="store_true",
        help=(
            "every routed pair counts alike, as in the paper (default: by its routing weight, which keeps more energy)"
        ),
    )
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GB",
        help=("for statistics; less means more passes, the same result (default: 70%% of free)"),
    )
    parser.add_argument("--batch-tokens", type=int, default=DEFAULT_BATCH_TOKENS, metavar="N", help="of a forward pass")
    parser.add_argument("--backend", choices=list(BACKENDS), default="torch", help="mlx: on a Mac, quantised or not")
    parser.add_argument("--device", default="auto", help="torch: cpu, cuda, cuda:1 (default: cuda where there is one)")
    parser.add_argument(
        "--model-dtype", choices=DTYPES, default="auto", help="of the weights; auto is the checkpoint's"
    )
    parser.add_argument("--dtype", choices=PREDICTOR_DTYPES, default="float32", help="of the predictor's file")
    parser.add_argument("--resume", action="store_true", help="go on from OUT.partial, if it is there")
    parser.add_argument(
        "--checkpoint-minutes",
        type=float,
        default=DEFAULT_CHECKPOINT_MINUTES,
        metavar="M",
        help=(f"between two checkpoints (default: {DEFAULT_CHECKPOINT_MINUTES:g})"),
    )


def run(args: argparse.Namespace) -> None:
    """Writes a predictor and prints its card, or the rivals' calibration, or both.

    Raises:
        ValueError: options, text, model, checkpoint or output file that cannot be used; before the model is loaded
            where that is possible.
    """
    for name in ("tokens", "length", "memory", "batch_tokens", "rival_tokens"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be above 0")
    if args.checkpoint_minutes < 0:
        raise ValueError(f"--checkpoint-minutes {args.checkpoint_minutes:g} must not be negative")
    if args.out is None and args.rivals is None:
        raise ValueError(
            "nothing to calibrate: give --out for a predictor, --rivals for the rivals' calibration, or both"
        )
    if args.rivals is not None:
        if args.backend != "torch":
            raise ValueError(f"--rivals is calibrated through torch: leave out --backend {args.backend}")
        _check_file("--rivals", args.rivals)
    partial = None if args.out is None else _check_out(args.out, args.resume)
    files = describe_source(args.data)
    reference = resolve_model(args.model)[0]
    config = _load_config(reference, args.revision)
    checkpoint = _backend(args.backend)(reference, args.revision, config, dtype=args.model_dtype, device=args.device)
    tokenizer = _load_tokenizer(reference, args.revision)
    sequences = read_sequences(
        args.data, tokenizer, length=_row_length(args.length, config), tokens=args.tokens, positions=args.positions
    )
    if int(sequences.ids.max()) >= config.vocab_size:
        raise ValueError(
            f"--model {reference!r}: its tokenizer gives id {sequences.ids.max()}, its vocabulary ends at "
            f"{config.vocab_size}: they do not belong together"
        )
    settings = Settings(
        memory=None if args.memory is None else int(args.memory * 1e9),
        batch_tokens=args.batch_tokens,
        weighted=not args.unweighted,
        checkpoint_minutes=args.checkpoint_minutes,
    )
    origin = Origin(
        model_id=_model_id(args.model),
        model_revision=getattr(config, "_commit_hash", None),
        source=f"{files}; {args.positions} positions; pairs {'alike' if args.unweighted else 'by routing weight'}",
    )
    layers = checkpoint.layers()
    if partial is not None:
        check_amount(sequences, layers[0], settings)
    if settings.memory is not None:
        size = statistics_bytes(layers[0].num_experts, layers[0].hidden_size)
        plan_passes([layer.index for layer in layers], size, settings.memory)
    if partial is not None and partial.exists():
        check_identity(partial, read_state(partial), data_identity(sequences, origin, settings))
    model = checkpoint.load()
    if partial is not None:
        try:
            predictor = calibrate_model(
                model, sequences, settings=settings, origin=origin, partial=partial, progress=True
            )
        except KeyboardInterrupt:
            if partial.exists():
                print(f"\nkept in {partial}: the same command with --resume goes on from there", file=sys.stderr)
            raise
        save_predictor(args.out, predictor, args.dtype)
        partial.unlink(missing_ok=True)
        print(describe(predictor))
        print(f"written to {args.out}")
    if args.rivals is not None:
        from calibrate.rivals import calibrate_rivals

        rivals = calibrate_rivals(
            model.model,  # type: ignore[attr-defined]
            sequences,
            tokens=args.rival_tokens,
            batch_tokens=args.batch_tokens,
            model_id=origin.model_id,
            model_revision=origin.model_revision,
            source=files,
            progress=True,
        )
        save_rivals(args.rivals, rivals)
        print(f"rivals' calibration on {rivals.card.tokens:,} tokens written to {args.rivals}")


def _backend(name: str) -> Callable[..., Checkpoint]:
    try:
        return importlib.import_module(BACKENDS[name]).open_checkpoint
    except ImportError as error:
        raise ValueError(f"--backend {name} is not installed here ({error}): choose the other one") from error


def _check_out(out: Path, resume: bool) -> Path:
    """The checkpoint's path, when both files can be written."""
    _check_file("--out", out)
    partial = out.with_name(f"{out.name}.partial")
    if partial.exists() and not resume:
        raise ValueError(f"{str(partial)!r} is an unfinished calibration: add --resume to go on with it, or remove it")
    return partial


def _check_file(flag: str, path: Path) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{flag} {str(path)!r}: its folder does not exist, create it first")
    if path.is_dir():
        example = path / f"{'predictor' if flag == '--out' else 'rivals'}.safetensors"
        raise ValueError(f"{flag} {str(path)!r} is a folder: give a file, for instance {example}")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{flag} {str(path)!r}: its folder cannot be written to")


def _row_length(asked: int | None, config: Any) -> int:
    most = getattr(config, "max_position_embeddings", None) or DEFAULT_LENGTH
    if asked is not None and asked > most:
        raise ValueError(f"--length {asked} is above the model's {most} positions")
    return asked or min(DEFAULT_LENGTH, most)


def _model_id(model: str | None) -> str:
    """Name for the card: a hub id as it is, of a folder its last part."""
    if model is None or model.startswith(PREFIX):
        return PREFIX + Path(resolve_model(model)[0]).name
    return Path(model).resolve().name if Path(model).is_dir() else model


def _load_config(reference: str, revision: str | None) -> Any:
    try:
        config = AutoConfig.from_pretrained(reference, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {reference!r} cannot be loaded: {first_line(error)}") from error
    return config


def _load_tokenizer(reference: str, revision: str | None) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(reference, revision=revision)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ValueError(f"--model {reference!r} has no usable tokenizer: {first_line(error)}") from error
    # Without tokenizer files transformers builds an empty one.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(f"--model {reference!r} has no tokenizer: put its tokenizer files beside config.json")
    return tokenizer
