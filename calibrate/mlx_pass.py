"""The dense mlx-lm model over the calibration text, its routed pairs into the statistics (torch's, on the CPU)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import torch
from mlx import nn
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from backends.mlx.collector import collecting
from backends.mlx.families import FAMILIES, MoELayer, find_moe_layers, fingerprint
from backends.mlx.generate import fit_to_device
from calibrate.passes import Batch, check_model_type, first_line, main_memory
from calibrate.statistics import LayerStatistics


class MlxModel:
    """An mlx-lm model of a family in `backends.mlx.families`, quantised or not, as `calibrate.passes.DenseModel`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.model_type = model.model_type
        weights = [array for _, array in tree_flatten(model.parameters())]
        self._weight_bytes = sum(array.nbytes for array in weights)
        self.dtype = ", ".join(sorted({str(array.dtype).removeprefix("mlx.core.") for array in weights}))
        self.device = f"mlx {mx.default_device().type}".replace("DeviceType.", "")

    def layers(self) -> list[MoELayer]:
        return find_moe_layers(self.model)

    def fingerprint(self) -> dict[int, tuple[float, ...]]:
        return fingerprint(self.model)

    def free_memory(self) -> int:
        """Bytes for statistics; on Apple silicon the model lies in main memory too."""
        return main_memory(self._weight_bytes)

    def statistics_device(self, index: int) -> torch.device:
        return torch.device("cpu")

    @contextmanager
    def collecting(
        self, statistics: Mapping[int, LayerStatistics], *, eps: float, weighted: bool
    ) -> Iterator[Callable[[Batch], None]]:
        def sink_for(layer: LayerStatistics) -> Callable[..., None]:
            def sink(z: NDArray, ids: NDArray, energy: NDArray, weights: NDArray) -> None:
                layer.add(z, ids.astype(np.int64), energy, weights if weighted else np.ones_like(weights), eps)

            return sink

        with collecting(self.model, {i: sink_for(layer) for i, layer in statistics.items()}) as run:
            yield lambda batch: run(*batch)


@dataclass(frozen=True)
class MlxCheckpoint:
    """An mlx-lm checkpoint; its weights are mapped and read when they are first used. See `open_checkpoint`."""

    reference: str
    revision: str | None
    dtype: str | None

    @cached_property
    def _model(self) -> nn.Module:
        try:
            return mlx_lm.load(self.reference, lazy=True, revision=self.revision)[0]
        except (OSError, ValueError) as error:
            raise ValueError(f"--model {self.reference!r} cannot be loaded: {first_line(error)}") from error

    def layers(self) -> list[MoELayer]:
        return find_moe_layers(self._model)

    def load(self) -> MlxModel:
        fit_to_device(self._model, self.dtype)
        return MlxModel(self._model)


def open_checkpoint(reference: str, revision: str | None, config: Any, *, dtype: str, device: str) -> MlxCheckpoint:
    """Checks what can be checked without the weights.

    Args:
        reference, revision: of a folder or on the hub.
        config: of transformers.
        dtype: of the weights, or auto.
        device: auto; MLX chooses it.

    Raises:
        ValueError: a family that is not supported, or a device.
    """
    check_model_type(reference, config.model_type, [module for module, _ in FAMILIES])
    if device != "auto":
        raise ValueError(f"--device {device!r} is for --backend torch: leave it out, MLX runs on the Mac's GPU")
    return MlxCheckpoint(reference, revision, None if dtype == "auto" else dtype)
