"""A worker extension that looks inside a running engine: at what each layer's operator emits and its experts get."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from backends.cuda.vllm.worker import find_blocks


def distinct(ids: Tensor) -> list[int]:
    """The experts that a kernel reads for these ids; vLLM's own padding id is none."""
    return sorted(set(ids[ids >= 0].tolist()))


class Recorder:
    """Stands for a layer's budget and keeps one record per call."""

    def __init__(self, layer: Any, index: int, records: list[dict]) -> None:
        self.layer, self.index, self.records = layer, index, records

    def __call__(self, z: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        new_weights, new_ids = self.layer(z, logits, weights, ids)
        kinds = self.layer._rows.first(len(ids))
        self.records.append(
            {
                "layer": self.index,
                "decode": int((~kinds.silent).sum()),
                "padding": int((~kinds.real).sum()),
                "counted": bool(self.layer._rows.counted),
                "native": distinct(ids[kinds.real.squeeze(1)]),
                "emitted": distinct(new_ids),
                "same": torch.equal(weights, new_weights) and torch.equal(ids, new_ids),
                "digest": hashlib.sha256(new_ids.to(torch.int64).numpy().tobytes()).hexdigest(),
            }
        )
        return new_weights, new_ids


class Watch:
    """Methods that vLLM adds to its workers; `collective_rpc` calls them."""

    def watch(self, experts: bool) -> None:
        """Begins to record; with `experts` also what the expert kernels get, which only an eager engine shows."""
        self.records: list[dict] = []
        self.calls: list[dict] = []
        for block in find_blocks(self.get_model()):
            router = block.runner.router
            router.layer = Recorder(router.layer, block.index, self.records)
            if experts:
                self._watch_experts(block.runner.routed_experts, block.index)

    def _watch_experts(self, module: Any, index: int) -> None:
        forward = module.forward_modular

        def forward_modular(*, topk_ids: Tensor, **arguments: Any) -> Any:
            self.calls.append({"layer": index, "read": distinct(topk_ids)})
            return forward(topk_ids=topk_ids, **arguments)

        module.forward_modular = forward_modular

    def records_so_far(self) -> dict[str, list[dict]]:
        return {"records": self.records, "calls": self.calls}
