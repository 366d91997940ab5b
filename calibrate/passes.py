"""The passes of a calibration over a dense model of either backend (paper section 6.3).

Every pass runs the model over the text and fits the layers whose statistics fit into memory at once. What has been
gathered is kept in a checkpoint every few minutes, so that an interrupted calibration goes on where it was.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from base_core import Card, LayerPredictor, Predictor
from base_core.report import installed_versions
from calibrate.ridge import MIN_PAIRS, LayerFit, fit_layer
from calibrate.statistics import LayerStatistics, read_state, read_tensors, statistics_bytes, write_checkpoint
from calibrate.text import Sequences

DEFAULT_BATCH_TOKENS = 8192
DEFAULT_CHECKPOINT_MINUTES = 5.0
MEMORY_SHARE = 0.7
"""Of the memory that the model leaves free, what statistics take unless told."""
CHECKPOINT_SHARE = 20
"""Checkpoints are written so seldom that they take at most one part in this many of the time."""

Batch = tuple[NDArray, NDArray, NDArray]
"""ids, positions and counted of some rows, see `Sequences`."""


class LayerShape(Protocol):
    """What both backends say of an MoE layer."""

    @property
    def index(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def experts_per_token(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...


class DenseModel(Protocol):
    """A loaded model without a budget.

    Attributes:
        model_type: its family.
        dtype, device: their names, for the checkpoint's identity.
    """

    model_type: str
    dtype: str
    device: str

    def layers(self) -> Sequence[LayerShape]:
        """Its MoE layers, in order."""

    def fingerprint(self) -> dict[int, tuple[float, ...]]:
        """See `base_core.fingerprint`."""

    def free_memory(self) -> int:
        """Bytes for statistics."""

    def statistics_device(self, index: int) -> torch.device:
        """Where a layer's statistics are gathered."""

    def collecting(
        self, statistics: Mapping[int, LayerStatistics], *, eps: float, weighted: bool
    ) -> AbstractContextManager[Callable[[Batch], None]]:
        """Within it, the function it yields runs the model on a batch and adds to the statistics.

        On leaving, also by an exception, the model is as it was before.

        Args:
            statistics: by layer index; the forward pass ends behind the last of them.
            eps: added to the energies before the logarithm.
            weighted: a pair counts by its routing weight; otherwise every pair counts 1.
        """


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
    model: DenseModel,
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
        model: on its device.
        sequences: see `calibrate.text`.
        partial: file for checkpoints. If it exists the calibration goes on from it and gives what an uninterrupted one
            would have given, bit for bit with the same number of threads. The caller removes it in the end.
        progress: shows a bar with tokens/s and the time left.

    Raises:
        ValueError: a model of no supported family, too little text or memory, activations that are not finite, or a
            checkpoint that belongs to another calibration.
    """
    settings, origin = settings or Settings(), origin or Origin()
    check_amount(sequences, model.layers()[0], settings)
    work = _Work(model, sequences, settings, origin, partial)
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


def check_amount(sequences: Sequences, layer: LayerShape, settings: Settings) -> None:
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
        model: DenseModel,
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
        self.layers = {layer.index: layer for layer in model.layers()}
        first = next(iter(self.layers.values()))
        self.layer_bytes = statistics_bytes(first.num_experts, first.hidden_size)
        memory = settings.memory or model.free_memory()
        self.passes = plan_passes(list(self.layers), self.layer_bytes, memory)
        self.number, self.batch = 0, 0
        self.fits: dict[int, LayerFit] = {}
        self.fingerprint = model.fingerprint()
        self.rows = max(1, settings.batch_tokens // sequences.ids.shape[1])
        self.batches = -(-len(sequences.ids) // self.rows)
        self._last_write, self._write_seconds = time.monotonic(), 0.0

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with."""
        return {
            "model": self.origin.model_id,
            "revision": self.origin.model_revision,
            "model dtype": self.model.dtype,
            "device": self.model.device,
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
            statistics[i] = LayerStatistics(layer.num_experts, layer.hidden_size, self.model.statistics_device(i))
            if self.batch:
                assert self.partial is not None
                statistics[i].load(read_tensors(self.partial, f"statistics.{i}."))
        settings = self.settings
        with self.model.collecting(statistics, eps=settings.eps, weighted=settings.weighted) as run:
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
            model_type=self.model.model_type,
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


def check_model_type(reference: str, model_type: str, supported: Sequence[str]) -> None:
    """Refuses a checkpoint of a family that the backend does not know.

    Raises:
        ValueError: saying which it knows.
    """
    if model_type not in supported:
        raise ValueError(f"--model {reference!r} has model_type {model_type!r}: supported are {', '.join(supported)}")


def first_line(error: Exception) -> str:
    """An error's message, short enough to stand behind one's own."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def main_memory(weight_bytes: int) -> int:
    """Bytes for statistics beside a model in main memory."""
    return max(int(MEMORY_SHARE * (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") - weight_bytes)), 1)
