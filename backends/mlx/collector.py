"""What calibration needs from an mlx-lm model: router inputs and expert output energies of the dense forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from backends.mlx.audit import output_energy
from backends.mlx.families import MoELayer, find_moe_layers
from backends.mlx.integration import session_of, weighted_sum

Sink = Callable[[NDArray, NDArray, NDArray, NDArray], None]
"""Takes router inputs z float32 [n, d], ids int [n, k], energies ||E_e(z)||^2 and weights, both float32 [n, k]."""

Run = Callable[[NDArray, NDArray, NDArray], None]
"""Takes ids, positions and counted of packed rows, all [R, L]: positions are 0 where a document begins."""


class _Finished(Exception):  # noqa: N818
    """The last layer wanted has been seen: the rest of the forward pass is not needed."""


@contextmanager
def collecting(model: nn.Module, sinks: Mapping[int, Sink]) -> Iterator[Run]:
    """Within it, the function it yields runs the dense model on packed rows and feeds each layer's sink.

    Every routed pair is computed once, and only counted tokens reach a sink. On leaving the model is as it was before.

    Args:
        sinks: by layer index; the forward pass ends behind the last of them.

    Raises:
        ValueError: a model under a budget, or without a layer that a sink is for.
    """
    if session_of(model) is not None:
        raise ValueError("the model has a budget in force: restore it before calibrating")
    layers = [layer for layer in find_moe_layers(model) if layer.index in sinks]
    if len(layers) != len(sinks) or not layers:
        raise ValueError(f"sinks are for layers {sorted(sinks)}, of which the model has {[n.index for n in layers]}")
    decoder = getattr(model, "model", model)
    counted = mx.zeros((0,), mx.int32)

    def collect(layer: MoELayer, x: mx.array) -> mx.array:
        block, family = layer.block, layer.family
        logits = x @ layer.router.weight.T if family.chooses_itself else layer.router(x)
        routing = family.route(block, logits)
        outputs = block[family.experts](x, routing.ids)
        pairs = (x.astype(mx.float32), routing.ids, output_energy(outputs), routing.weights.astype(mx.float32))
        sinks[layer.index](*(np.array(a.reshape(-1, a.shape[-1])[counted]) for a in pairs))
        if layer is layers[-1]:
            raise _Finished
        y = weighted_sum(outputs, routing.weights, family.keeps_dtype)
        shared = family.shared(block, x)
        return y if shared is None else y + shared

    def run(ids: NDArray, positions: NDArray, counted_tokens: NDArray) -> None:
        nonlocal counted
        for tokens, wanted in documents(ids, positions, counted_tokens):
            counted = mx.array(np.flatnonzero(wanted))
            if counted.size:
                with suppress(_Finished):
                    decoder(mx.array(tokens))

    stock = [type(layer.block) for layer in layers]
    try:
        for layer, cls in zip(layers, stock, strict=True):
            layer.block.__class__ = _collecting(cls, collect, layer)
        yield run
    finally:
        for layer, cls in zip(layers, stock, strict=True):
            layer.block.__class__ = cls


def _collecting(stock: Any, collect: Callable[[MoELayer, mx.array], mx.array], layer: MoELayer) -> Any:
    def __call__(self: Any, x: mx.array) -> mx.array:  # noqa: N807
        return collect(layer, x)

    return type(stock.__name__, (stock,), {"__call__": __call__, "__module__": __name__})


def documents(ids: NDArray, positions: NDArray, counted: NDArray) -> Iterator[tuple[NDArray, NDArray]]:
    """Packed rows as batches of whole documents, padded on the right, where causal attention never looks.

    mlx-lm's models take no positions, so a document needs a sequence of its own.

    Args:
        ids, positions, counted: [R, L].

    Yields:
        ids and counted, both [D, N], of documents of similar length, no batch larger than R * L.
    """
    flat = positions.ravel()
    bounds = [*np.flatnonzero((flat == 0) | (np.arange(flat.size) % positions.shape[1] == 0)), flat.size]
    spans = sorted(pairwise(bounds), key=lambda span: span[0] - span[1])
    while spans:
        length = spans[0][1] - spans[0][0]
        group, spans = spans[: flat.size // length], spans[flat.size // length :]
        batch, wanted = np.zeros((len(group), length), np.int32), np.zeros((len(group), length), bool)
        for row, (first, last) in enumerate(group):
            batch[row, : last - first] = ids.ravel()[first:last]
            wanted[row, : last - first] = counted.ravel()[first:last]
        yield batch, wanted
