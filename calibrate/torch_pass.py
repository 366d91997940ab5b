"""The dense model over the calibration text, its routed pairs into the statistics.

The model runs through an experts implementation of its own, which hands out each expert's output before the routing
weight: every routed pair is computed once, and the forward pass stays the dense one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from backends.cuda.experts import experts_forward
from backends.cuda.families import FAMILIES, MoELayer, find_moe_layers, fingerprint
from calibrate.passes import MEMORY_SHARE, Batch, check_model_type, first_line, main_memory
from calibrate.statistics import LayerStatistics

CALIBRATION_EXPERTS = "base_calibration"


class _Finished(Exception):  # noqa: N818
    """The last layer wanted has been seen: the rest of the forward pass is not needed."""


def collecting_experts_forward(self: nn.Module, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The dense forward of an experts module, which also tells its `_base_sink` about every routed pair.

    Args:
        hidden_states: [T, d].
        ids: int [T, k].
        weights: [T, k].
    """
    T, k = ids.shape
    pairs = ids.reshape(-1, 1)
    alone = torch.ones(pairs.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    outputs = experts_forward(self, hidden_states.repeat_interleave(k, 0), pairs, alone).view(T, k, -1)
    sink = getattr(self, "_base_sink", None)
    if sink is not None:
        norm = torch.linalg.vector_norm(outputs, dim=-1, dtype=torch.float32)
        sink(hidden_states, ids, norm.square(), weights)
    return (outputs * weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _packed_mask(decoder: nn.Module, ids: Tensor, positions: Tensor) -> dict[str, Tensor] | None:
    """The attention mask that keeps packed documents apart.

    Without a mask and a cache transformers' decoders make it from the positions; only gpt_oss does not look at them.
    """
    if decoder.config.model_type != "gpt_oss":
        return None
    inputs = {
        "config": decoder.config,
        "inputs_embeds": decoder.get_input_embeddings()(ids),
        "attention_mask": None,
        "cache": None,
        "position_ids": positions,
    }
    return {
        "full_attention": create_causal_mask(**inputs),
        "sliding_attention": create_sliding_window_causal_mask(**inputs),
    }


@contextmanager
def collecting(
    model: PreTrainedModel, statistics: Mapping[int, LayerStatistics], *, eps: float, weighted: bool
) -> Iterator[Callable[[Batch], None]]:
    """Within it, the function it yields runs the model on a batch and adds to the statistics.

    On leaving, also by an exception, the model is as it was before.

    Args:
        statistics: by layer index; the forward pass ends behind the last of them.
        eps: added to the energies before the logarithm.
        weighted: a pair counts by its routing weight; otherwise every pair counts 1.
    """
    ExpertsInterface.register(CALIBRATION_EXPERTS, collecting_experts_forward)
    layers = [layer for layer in find_moe_layers(model) if layer.index in statistics]
    device = next(model.parameters()).device
    decoder = model.base_model
    rows = torch.zeros(0, dtype=torch.bool)

    def sink_for(index: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
        last = index == layers[-1].index

        def sink(z: Tensor, ids: Tensor, energy: Tensor, weights: Tensor) -> None:
            kept = rows.to(z.device)
            pair_weights = weights if weighted else torch.ones_like(weights)
            statistics[index].add(z[kept], ids[kept], energy[kept], pair_weights[kept], eps)
            if last:
                raise _Finished

        return sink

    def run(batch: Batch) -> None:
        nonlocal rows
        ids, positions, counted = (torch.from_numpy(array).to(device) for array in batch)
        rows = counted.flatten()
        try:
            with torch.inference_mode():
                mask = _packed_mask(decoder, ids, positions)
                decoder(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
        except _Finished:
            pass

    previous, trained = model.get_experts_implementation(), model.training
    try:
        model.eval()
        model.set_experts_implementation(CALIBRATION_EXPERTS)
        for layer in layers:
            layer.experts._base_sink = sink_for(layer.index)  # type: ignore[assignment]
        yield run
    finally:
        for layer in layers:
            if hasattr(layer.experts, "_base_sink"):
                del layer.experts._base_sink
        model.set_experts_implementation(previous)
        model.train(trained)


class TorchModel:
    """A transformers model of a family in `backends.cuda.families`, as `calibrate.passes.DenseModel`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._layers = {layer.index: layer for layer in find_moe_layers(model)}
        self.model_type = next(iter(self._layers.values())).family.model_type
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.device = next(model.parameters()).device.type

    def layers(self) -> list[MoELayer]:
        return list(self._layers.values())

    def fingerprint(self) -> dict[int, tuple[float, ...]]:
        return fingerprint(self.model)

    def free_memory(self) -> int:
        """Bytes for statistics: a share of what is free on the fullest device of the model."""
        devices = {layer.device for layer in self._layers.values()}
        if all(device.type == "cuda" for device in devices):
            return max(int(MEMORY_SHARE * min(torch.cuda.mem_get_info(device)[0] for device in devices)), 1)
        return main_memory(sum(p.numel() * p.element_size() for p in self.model.parameters()))

    def statistics_device(self, index: int) -> torch.device:
        return self._layers[index].device

    def collecting(
        self, statistics: Mapping[int, LayerStatistics], *, eps: float, weighted: bool
    ) -> AbstractContextManager[Callable[[Batch], None]]:
        return collecting(self.model, statistics, eps=eps, weighted=weighted)


@dataclass(frozen=True)
class TorchCheckpoint:
    """A transformers checkpoint that has not been loaded; see `open_checkpoint`."""

    reference: str
    revision: str | None
    config: Any
    dtype: str
    device: torch.device

    def layers(self) -> list[MoELayer]:
        with torch.device("meta"):
            return find_moe_layers(AutoModelForCausalLM.from_config(self.config))

    def load(self) -> TorchModel:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self.reference, revision=self.revision, dtype=self.dtype, use_safetensors=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"--model {self.reference!r} cannot be loaded: {first_line(error)}") from error
        return TorchModel(model.to(self.device))


def open_checkpoint(reference: str, revision: str | None, config: Any, *, dtype: str, device: str) -> TorchCheckpoint:
    """Checks what can be checked without the weights.

    Args:
        reference, revision: of a folder or on the hub.
        config: of transformers.
        dtype: of the weights, or auto.
        device: cpu, cuda, cuda:1, or auto.

    Raises:
        ValueError: a family or device that is not supported.
    """
    check_model_type(reference, config.model_type, [family.model_type for family in FAMILIES])
    return TorchCheckpoint(reference, revision, config, dtype, _device(device))


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
