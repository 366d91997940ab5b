"""A factor for each layer that brings the output under a budget closest to the dense output, by least squares.

A row that loses experts executes others with weights that no longer are what its router meant. One factor a layer on
the weights of such rows is the least correction that calibration can make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from backends.cuda.families import MoELayer
from base_core.policies import Step
from base_core.selection import Selection


def scale_restricted(selection: Selection, step: Step, factor: float) -> Selection:
    """`selection` with the weights of every row that is not left native multiplied by `factor`."""
    native = step.routing
    changed = ((selection.ids != native.ids) | (selection.weights != native.weights)).any(1, keepdims=True)
    weights = np.where(changed, selection.weights * factor, selection.weights)
    return replace(selection, weights=weights.astype(selection.weights.dtype))


def write_scales(scales: Mapping[int, float]) -> str:
    """Factors by layer as `0:1.0312 1:0.9875`."""
    return " ".join(f"{layer}:{factor:.4f}" for layer, factor in sorted(scales.items()))


def read_scales(text: str) -> dict[int, float]:
    """The factors that `write_scales` wrote."""
    return {int(layer): float(factor) for layer, factor in (pair.split(":") for pair in text.split())}


class _ScaleFit:
    """Hooks on one layer: adds up what the least-squares factor is made of.

    Over rows whose routing was changed, with b the routed output as executed and y the dense one at the same input, the
    factor is sum <b, y> / sum <b, b>. A padding row executes nothing and adds nothing.
    """

    def __init__(self, layer: MoELayer) -> None:
        self.layer = layer
        self.along = self.square = 0.0
        self._native: tuple[Tensor, Tensor] | None = None

    def open(self) -> list[Any]:
        """Installs the hooks; the router's has to come before the one that restricts."""
        return [
            self.layer.router.register_forward_hook(self._keep),
            self.layer.experts.register_forward_hook(self._compare),
        ]

    @property
    def factor(self) -> float:
        """1 where no row was changed."""
        return self.along / self.square if self.square > 0 else 1.0

    def _keep(self, router: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._native = output[2], output[1]

    def _compare(self, experts: nn.Module, args: tuple, output: Tensor) -> None:
        assert self._native is not None
        native_ids, native_weights = self._native
        z, ids, weights = args
        dense: Tensor = experts.forward(z, native_ids, native_weights)  # not a call, which would come here again
        changed = ((ids != native_ids) | (weights != native_weights)).any(1)
        executed, wanted = output[changed].double(), dense[changed].double()
        self.along += float((executed * wanted).sum())
        self.square += float(executed.square().sum())


@torch.inference_mode()
def fit_scales(layers: Sequence[MoELayer], decode: Callable[[], Any]) -> dict[int, float]:
    """The factor of every layer, from what `decode` runs under the budget in question.

    Args:
        layers: of the model, without hooks that change their routing.
        decode: runs the model on calibration prompts; it may install such hooks for itself.
    """
    fits = [_ScaleFit(layer) for layer in layers]
    handles = [handle for fit in fits for handle in fit.open()]
    try:
        decode()
    finally:
        for handle in handles:
            handle.remove()
    return {fit.layer.index: fit.factor for fit in fits}
