"""`base-moe calibrate`: fits a predictor for a model on text (paper section 6.3).

Every pass runs the dense model over the text and fits the layers whose statistics fit into memory at once. What has
been gathered is kept in OUT.partial every few minutes, so that an interrupted calibration goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from backends.cuda.families import FAMILIES, MoELayer, find_moe_layers, fingerprint
from base_core import Card, LayerPredictor, Predictor, save_predictor
from base_core.embedded import model_path
from base_core.report import installed_versions
from base_core.rivals import save_rivals
from calibrate.inspect import describe
from calibrate.ridge import MIN_PAIRS, LayerFit, fit_layer
from calibrate.rivals import DEFAULT_RIVAL_TOKENS, calibrate_rivals
from calibrate.statistics import LayerStatistics, read_state, read_tensors, statistics_bytes, write_checkpoint
from calibrate.text import Sequences, describe_source, read_sequences
from calibrate.torch_pass import Batch, collecting

DEFAULT_TOKENS = 2_500_000
DEFAULT_LENGTH = 2048
DEFAULT_BATCH_TOKENS = 8192
DEFAULT_CHECKPOINT_MINUTES = 5.0
MEMORY_SHARE = 0.7
"""Of the memory that the model leaves free, what statistics take without --memory."""
CHECKPOINT_SHARE = 20
"""Checkpoints are written so seldom that they take at most one part in this many of the time."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
DESCRIPTION = "Fits a predictor for a model on text and writes it to a file that every backend loads."


@dataclass(frozen=True)
class Settings:
    """How a calibration is done.

    Attributes:
        memory: bytes for statistics, or None for a share of what is free. Changes the number of passes, no result.
        batch_tokens: tokens of one forward pass.
        weighted: a pair counts in the regression by its routing weight, as it does in the removal cost; otherwise every
            pair counts alike, as in the paper.
        eps: added to the squared norm before the logarithm.
        min_pairs: an expert with fewer pairs uses its layer's pooled predictor.
        checkpoint_minutes: between two checkpoints.
    """

    memory: int | None = None
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    weighted: bool = True
    eps: float = 1e-12
    min_pairs: int = MIN_PAIRS
    checkpoint_minutes: float = DEFAULT_CHECKPOINT_MINUTES


@dataclass(frozen=True)
class Origin:
    """Names for the card: of the model, and of the text."""

    model_id: str = ""
    model_revision: str | None = None
    source: str = ""


def plan_passes(layers: Sequence[int], layer_bytes: int, memory: int) -> list[tuple[int, ...]]:
    """Groups of layers whose statistics are gathered in one pass.

    A pass ends behind its last layer, so the smaller group comes first.

    Raises:
        ValueError: not even one layer fits.
    """
    size = memory // layer_bytes
    if size < 1:
        raise ValueError(
            f"--memory {memory / 1e9:.3g} GB: the statistics of one layer take {layer_bytes / 1e9:.3g} GB, give more"
        )
    first = len(layers) % size
    bounds = [0, *range(first or size, len(layers) + 1, size)]
    return [tuple(layers[a:b]) for a, b in pairwise(bounds)]


def calibrate_model(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    settings: Settings | None = None,
    origin: Origin | None = None,
    partial: Path | None = None,
    progress: bool = False,
) -> Predictor:
    """Fits a predictor for every MoE layer of `model`.

    The model runs dense, without its head, and is unchanged afterwards, also after an exception.

    Args:
        model: of a family in `backends.cuda.families`, on its device.
        sequences: see `calibrate.text`.
        partial: file for checkpoints. If it exists the calibration goes on from it and gives what an uninterrupted one
            would have given, bit for bit with the same number of threads. The caller removes it in the end.
        progress: shows a bar with tokens/s and the time left.

    Raises:
        ValueError: a model of no supported family, too little text or memory, activations that are not finite, or a
            checkpoint that belongs to another calibration.
    """
    settings, origin = settings or Settings(), origin or Origin()
    layers = find_moe_layers(model)
    check_amount(sequences, layers[0], settings)
    work = _Work(model, layers, sequences, settings, origin, partial)
    if partial is not None and partial.exists():
        work.resume()
    if progress:
        print(work.describe_plan(), file=sys.stderr)
    with tqdm(
        total=len(work.passes) * sequences.tokens,
        initial=work.tokens_done(),
        unit="tok",
        unit_scale=True,
        disable=not progress,
        dynamic_ncols=True,
    ) as bar:
        while work.number < len(work.passes):
            bar.set_description(f"pass {work.number + 1}/{len(work.passes)}")
            work.run_pass(bar)
    return work.predictor()


def check_amount(sequences: Sequences, layer: MoELayer, settings: Settings) -> None:
    """Refuses text that leaves most experts with too few pairs.

    Raises:
        ValueError: saying how many tokens it takes.
    """
    counted, share = int(sequences.counted.sum()), layer.experts_per_token / layer.num_experts
    if counted * share < settings.min_pairs:
        raise ValueError(
            f"too little text: {counted} of {sequences.tokens} tokens count, about {counted * share:.1f} pairs an "
            f"expert; give at least {int(np.ceil(settings.min_pairs / share))} (several thousand make a good fit)"
        )


class _Work:
    """One calibration under way: the passes, where it is, and what has been fitted."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[MoELayer],
        sequences: Sequences,
        settings: Settings,
        origin: Origin,
        partial: Path | None,
    ) -> None:
        self.model, self.sequences, self.settings, self.origin, self.partial = (
            model,
            sequences,
            settings,
            origin,
            partial,
        )
        self.layers = {layer.index: layer for layer in layers}
        first = layers[0]
        self.layer_bytes = statistics_bytes(first.num_experts, first.hidden_size)
        memory = settings.memory or _free_memory(model, layers)
        self.passes = plan_passes(list(self.layers), self.layer_bytes, memory)
        self.number, self.batch = 0, 0
        self.fits: dict[int, LayerFit] = {}
        self.fingerprint = fingerprint(model)
        self.rows = max(1, settings.batch_tokens // sequences.ids.shape[1])
        self.batches = -(-len(sequences.ids) // self.rows)
        self._last_write, self._write_seconds = time.monotonic(), 0.0

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        return {
            "model": self.origin.model_id,
            "revision": self.origin.model_revision,
            "model dtype": str(self.model.dtype).removeprefix("torch."),
            "device": next(self.model.parameters()).device.type,
            **data_identity(self.sequences, self.origin, self.settings),
            "routers": [list(self.fingerprint[i]) for i in self.layers],
        }

    def resume(self) -> None:
        """Goes to where the checkpoint is, with its passes."""
        assert self.partial is not None
        state = read_state(self.partial)
        check_identity(self.partial, state, self.identity())
        self.passes = [tuple(group) for group in state["passes"]]
        self.number, self.batch = state["pass"], state["batch"]
        self.fits = {
            int(i): _read_fit(read_tensors(self.partial, f"fits.{i}."), quality)
            for i, quality in state["fitted"].items()
        }

    def describe_plan(self) -> str:
        E, d = next((layer.num_experts, layer.hidden_size) for layer in self.layers.values())
        largest = max(map(len, self.passes)) * self.layer_bytes
        text = (
            f"{len(self.layers)} MoE layers of {E} experts, width {d}; {int(self.sequences.counted.sum()):,} of "
            f"{self.sequences.tokens:,} tokens count; passes: {len(self.passes)}, with {largest / 1e9:.3g} GB of "
            f"statistics"
        )
        if self.number or self.batch:
            text += f"; going on in pass {self.number + 1}, batch {self.batch + 1} of {self.batches}"
        return text

    def tokens_done(self) -> int:
        return self.number * self.sequences.tokens + self._tokens_before(self.batch)

    def run_pass(self, bar: tqdm) -> None:
        group = self.passes[self.number]
        statistics = {}
        for i in group:
            layer = self.layers[i]
            statistics[i] = LayerStatistics(layer.num_experts, layer.hidden_size, layer.device)
            if self.batch:
                assert self.partial is not None
                statistics[i].load(read_tensors(self.partial, f"statistics.{i}."))
        settings = self.settings
        with collecting(self.model, statistics, eps=settings.eps, weighted=settings.weighted) as run:
            while self.batch < self.batches:
                run(self._rows_of(self.batch))
                bar.update(self._tokens_before(self.batch + 1) - self._tokens_before(self.batch))
                self.batch += 1
                wait = max(60 * settings.checkpoint_minutes, CHECKPOINT_SHARE * self._write_seconds)
                if self.batch < self.batches and time.monotonic() - self._last_write >= wait:
                    self._write(statistics)
        for i in group:
            bar.set_postfix_str(f"fitting layer {i}")
            try:
                # Popped, so that a layer's statistics are freed once it is fitted.
                self.fits[i] = fit_layer(statistics.pop(i), settings.min_pairs)
            except ValueError as error:
                raise ValueError(f"layer {i}: {error}") from error
        bar.set_postfix_str("")
        self.number, self.batch = self.number + 1, 0
        self._write({})

    def predictor(self) -> Predictor:
        first = next(iter(self.layers.values()))
        card = Card(
            model_id=self.origin.model_id,
            model_revision=self.origin.model_revision,
            model_type=first.family.model_type,
            layers=tuple(self.layers),
            num_experts=first.num_experts,
            experts_per_token=first.experts_per_token,
            hidden_size=first.hidden_size,
            fingerprint=self.fingerprint,
            source=self.origin.source,
            tokens=self.sequences.tokens,
            eps=self.settings.eps,
            pairs={i: tuple(fit.pairs.tolist()) for i, fit in self.fits.items()},
            ridge={i: tuple(fit.ridge.tolist()) for i, fit in self.fits.items()},
            fit={i: fit.quality for i, fit in self.fits.items()},
            fallback={i: tuple(fit.fallback.nonzero()[0].tolist()) for i, fit in self.fits.items()},
            versions=installed_versions(),
        )
        return Predictor(card, {i: fit.predictor for i, fit in self.fits.items()})

    def _rows_of(self, batch: int) -> Batch:
        rows = slice(batch * self.rows, (batch + 1) * self.rows)
        return self.sequences.ids[rows], self.sequences.positions[rows], self.sequences.counted[rows]

    def _tokens_before(self, batch: int) -> int:
        return min(batch * self.rows * self.sequences.ids.shape[1], self.sequences.tokens)

    def _write(self, statistics: Mapping[int, LayerStatistics]) -> None:
        if self.partial is None:
            return
        started = time.monotonic()
        tensors = {}
        for i, fit in self.fits.items():
            tensors.update({f"fits.{i}.{name}": tensor for name, tensor in _fit_tensors(fit).items()})
        for i, layer in statistics.items():
            tensors.update({f"statistics.{i}.{name}": tensor for name, tensor in layer.tensors().items()})
        state = {
            "settings": self.identity(),
            "passes": self.passes,
            "pass": self.number,
            "batch": self.batch,
            "fitted": {str(i): fit.quality for i, fit in self.fits.items()},
        }
        try:
            write_checkpoint(self.partial, state, tensors)
        except OSError as error:
            # A full disk costs the way back, not the work.
            tqdm.write(f"no checkpoint: {error.strerror or error}; going on without", file=sys.stderr)
        self._last_write = time.monotonic()
        self._write_seconds = self._last_write - started


def data_identity(sequences: Sequences, origin: Origin, settings: Settings) -> dict[str, Any]:
    """The part of a checkpoint's identity that is known before the model is loaded."""
    kept = {name: value for name, value in asdict(settings).items() if name not in ("memory", "checkpoint_minutes")}
    return {
        "source": origin.source,
        "tokens": sequences.tokens,
        "length": sequences.ids.shape[1],
        **{name.replace("_", " "): value for name, value in kept.items()},
        "token ids": sequences.digest(),
    }


def check_identity(partial: Path, state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of another calibration.

    Raises:
        ValueError: naming the first setting that differs, and both values.
    """
    found = state.get("settings", {})
    for name, value in expected.items():
        if found.get(name) != value:
            values = "" if isinstance(value, list) else f" ({found.get(name)!r} there, {value!r} now)"
            raise ValueError(
                f"{str(partial)!r} belongs to another calibration: its {name} differs{values}; "
                f"calibrate as it was begun, or remove it"
            )


def _fit_tensors(fit: LayerFit) -> dict[str, torch.Tensor]:
    arrays = {
        **asdict(fit.predictor),
        "pairs": fit.pairs,
        "ridge": fit.ridge,
        "fallback": fit.fallback.astype(np.int64),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _read_fit(tensors: Mapping[str, torch.Tensor], quality: dict[str, float]) -> LayerFit:
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    predictor = LayerPredictor(arrays["weight"], arrays["bias"], arrays["mean_energy"])
    return LayerFit(predictor, arrays["pairs"], arrays["ridge"], arrays["fallback"].astype(bool), quality)


def _free_memory(model: PreTrainedModel, layers: Sequence[MoELayer]) -> int:
    """Bytes for statistics: a share of what is free on the fullest device of the model."""
    devices = {layer.device for layer in layers}
    if all(device.type == "cuda" for device in devices):
        free = min(torch.cuda.mem_get_info(device)[0] for device in devices)
    else:
        weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - weights
    return max(int(MEMORY_SHARE * free), 1)


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
        help=(f"for statistics; less means more passes, the same result (default: {MEMORY_SHARE * 100:.0f}%% of free)"),
    )
    parser.add_argument("--batch-tokens", type=int, default=DEFAULT_BATCH_TOKENS, metavar="N", help="of a forward pass")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    parser.add_argument(
        "--model-dtype", choices=DTYPES, default="auto", help="of the weights; auto is the checkpoint's"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the predictor's file")
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
        _check_file("--rivals", args.rivals)
    partial = None if args.out is None else _check_out(args.out, args.resume)
    device = _device(args.device)
    files = describe_source(args.data)
    reference = str(args.model or model_path())
    config, tokenizer = _load_config(reference, args.revision), _load_tokenizer(reference, args.revision)
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
    with torch.device("meta"):
        skeleton = find_moe_layers(AutoModelForCausalLM.from_config(config))
    if partial is not None:
        check_amount(sequences, skeleton[0], settings)
    if settings.memory is not None:
        size = statistics_bytes(skeleton[0].num_experts, skeleton[0].hidden_size)
        plan_passes([layer.index for layer in skeleton], size, settings.memory)
    if partial is not None and partial.exists():
        check_identity(partial, read_state(partial), data_identity(sequences, origin, settings))
    model = _load_model(reference, args.revision, args.model_dtype).to(device)
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
        rivals = calibrate_rivals(
            model,
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


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name!r} is unknown: give cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name!r} lacks float64 or is not supported: give cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _row_length(asked: int | None, config: Any) -> int:
    most = getattr(config, "max_position_embeddings", None) or DEFAULT_LENGTH
    if asked is not None and asked > most:
        raise ValueError(f"--length {asked} is above the model's {most} positions")
    return asked or min(DEFAULT_LENGTH, most)


def _model_id(model: str | None) -> str:
    """Name for the card: a hub id as it is, of a folder its last part."""
    if model is None:
        return f"embedded/{model_path().name}"
    return Path(model).resolve().name if Path(model).is_dir() else model


def _load_config(reference: str, revision: str | None) -> Any:
    try:
        config = AutoConfig.from_pretrained(reference, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {reference!r} cannot be loaded: {_first_line(error)}") from error
    supported = [family.model_type for family in FAMILIES]
    if config.model_type not in supported:
        raise ValueError(
            f"--model {reference!r} has model_type {config.model_type!r}: supported are {', '.join(supported)}"
        )
    return config


def _load_tokenizer(reference: str, revision: str | None) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(reference, revision=revision)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ValueError(f"--model {reference!r} has no usable tokenizer: {_first_line(error)}") from error
    # Without tokenizer files transformers builds an empty one.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(f"--model {reference!r} has no tokenizer: put its tokenizer files beside config.json")
    return tokenizer


def _load_model(reference: str, revision: str | None, dtype: str) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(
            reference, revision=revision, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {reference!r} cannot be loaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
