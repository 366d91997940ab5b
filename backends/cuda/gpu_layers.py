"""One MoE layer on a GPU: every stage of the kernels, timed for batches and budgets, beside torch's own experts.

Several layers of different weights take turns inside one CUDA graph, so that no cache holds what a step reads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from backends.cuda.bench import RoutedStack
from backends.cuda.graphs import capture, microseconds
from backends.cuda.kernels.experts import MAX_ROWS as EXPERTS_ROWS
from backends.cuda.kernels.experts import MAX_TILES, down, experts, gate_up
from backends.cuda.kernels.front import Front, FrontState, budget_value, front
from backends.cuda.kernels.module import experts_layout
from backends.cuda.shapes import SHAPES, Shape
from base_core import Budget
from base_core.report import report_row

BUDGETS = (4, 8, 10, 12, 16, 20, 24, 32)
BATCHES = (16, 1, 2, 4, 8, 32, 64, 128)  # the one that everything is compared at comes first
BATCHED_MM_ROWS = 16
"""Above this batch `batched_mm` is left out: it copies the weights of every row and slot."""
LAYERS = (4, 12)  # of different weights, at least and at most
SPARE_SECONDS = 5
DRY_SHAPES = (Shape("toy", "qwen3_moe", 64, 48, 12, 4), Shape("toy-gpt-oss", "gpt_oss", 72, 40, 8, 2))
DRY_BUDGETS, DRY_BATCHES = (3,), (2,)
STAGES = ("layer_us", "front_us", "gate_up_us", "down_us", "grouped_mm_us", "batched_mm_us")


@dataclass
class Layer:
    """One layer's weights on the device: `[router; predictor]`, intercepts and the experts module of transformers."""

    weight: Tensor
    energy_bias: Tensor
    router_bias: Tensor | None
    experts: Any

    @classmethod
    def random(cls, shape: Shape, device: torch.device, dtype: torch.dtype) -> Layer:
        """Random weights of the shape's size; logits and log-energies have a spread of about 1."""
        E, _, H, _ = shape.widths
        weight = torch.randn(2 * E, H, device=device)
        weight[:E] *= H**-0.5
        bias = torch.randn(E, device=device)
        router_bias = torch.randn(E, device=device).to(dtype) if shape.gpt_oss else None
        module = RoutedStack(shape, 1, dtype, device).layers[0].experts
        assert isinstance(module, nn.Module)
        for name, parameter in module.named_parameters():
            parameter.normal_(std=1.0 if "bias" in name else 0.02 if H > 1000 else 0.1)
        return cls(weight.to(dtype), bias, router_bias, module)

    def front(self, z: Tensor, rows: Tensor, budget: Tensor, state: FrontState, shape: Shape) -> Front:
        """The fused front on this layer."""
        return front(z, self.weight, self.energy_bias, rows, budget, state, shape.rule, router_bias=self.router_bias)

    @property
    def biases(self) -> dict[str, Any]:
        """The experts' biases, by the names of the kernels' arguments."""
        return {
            "gate_up_bias": getattr(self.experts, "gate_up_proj_bias", None),
            "down_bias": getattr(self.experts, "down_proj_bias", None),
        }


def one_layer(
    shape: Shape, layer: Layer, z: Tensor, rows: Tensor, budget: Tensor, state: FrontState
) -> Callable[[], Tensor]:
    """One MoE layer on our kernels: three launches up to 32 rows."""
    tickets = torch.zeros(MAX_TILES, dtype=torch.int32, device=z.device)
    e = layer.experts

    def step() -> Tensor:
        out = layer.front(z, rows, budget, state, shape)
        if len(z) > EXPERTS_ROWS:
            return ALL_EXPERTS_FUNCTIONS["grouped_mm"](e, z, out.ids, out.weights)
        args = (z, e.gate_up_proj, e.down_proj, out.active, out.count, out.combine, tickets, experts_layout(e))
        return experts(*args, **layer.biases)

    return step


@torch.no_grad()
def bench_layers(
    shapes: Sequence[Shape],
    batches: Sequence[int],
    budgets: Sequence[int],
    device: torch.device,
    roof: float | None,
    deadline: float,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Times a layer of each shape, dense and under every budget, for every batch.

    Args:
        roof: measured copy bandwidth, bytes a second. None is a dry run: everything runs once and no time is taken.
        deadline: of `time.monotonic`; what does not fit before it is left out.

    Returns:
        Rows, and what was left out.
    """
    rows, skipped = [], []
    for T in batches:
        for shape in shapes:
            if time.monotonic() > deadline - SPARE_SECONDS:
                skipped.append(f"{shape.name} at {T} rows")
                continue
            fitting = [budget for budget in budgets if budget < shape.num_experts]
            layers = [
                Layer.random(shape, device, torch.float32 if roof is None else torch.bfloat16)
                for _ in range(2 if roof is None else _layer_count(shape, min(fitting), device))
            ]
            dense_us = None
            for budget in (None, *fitting):
                if time.monotonic() > deadline - SPARE_SECONDS:
                    skipped.append(f"{shape.name} at {T} rows, M={budget or 'dense'} and on")
                    break
                row = _time_layer(shape, layers, T, budget, roof)
                dense_us = row["layer_us"] if budget is None else dense_us
                if dense_us:
                    row["ratio_to_dense"] = dense_us / row["layer_us"]
                rows.append(row)
            del layers
    return rows, skipped


def _layer_count(shape: Shape, least: int, device: torch.device) -> int:
    """Even the tightest budget's layers together must be several times larger than the cache."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = math.ceil(4 * cache / (least * shape.expert_bytes(torch.bfloat16)))
    return min(LAYERS[1], max(LAYERS[0], wanted))


def _time_layer(shape: Shape, layers: list[Layer], T: int, budget: int | None, roof: float | None) -> dict[str, Any]:
    device, dtype = layers[0].weight.device, layers[0].weight.dtype
    z = torch.randn(T, shape.hidden_size, device=device, dtype=dtype)
    rows = torch.ones(T, dtype=torch.int32, device=device)
    value = budget_value(Budget(experts=budget), shape.num_experts, device)
    state = FrontState.zeros(device)
    tickets = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
    routed = [layer.front(z, rows, value, state, shape) for layer in layers]
    active = sum(int(r.count) for r in routed) / len(layers)
    steps = [one_layer(shape, layer, z, rows, value, state) for layer in layers]
    everywhere = range(len(layers))
    weights = [r.weights.to(dtype) for r in routed]

    def stock(name: str) -> Callable[[int], Tensor]:
        return lambda i: ALL_EXPERTS_FUNCTIONS[name](layers[i].experts, z, routed[i].ids, weights[i])

    stages: dict[str, Callable[[int], Any]] = {
        "layer_us": lambda i: steps[i](),
        "front_us": lambda i: layers[i].front(z, rows, value, state, shape),
        "grouped_mm_us": stock("grouped_mm"),
    }
    if T <= BATCHED_MM_ROWS:
        stages["batched_mm_us"] = stock("batched_mm")
    if T <= EXPERTS_ROWS:

        def first(i: int) -> Tensor:
            r, e = routed[i], layers[i].experts
            bias = layers[i].biases["gate_up_bias"]
            return gate_up(z, e.gate_up_proj, r.active, r.count, r.combine, experts_layout(e), bias)

        hidden = [first(i) for i in everywhere]

        def second(i: int) -> Tensor:
            r, e = routed[i], layers[i].experts
            bias = layers[i].biases["down_bias"]
            return down(hidden[i], e.down_proj, r.active, r.count, r.combine, tickets, experts_layout(e), bias)

        stages |= {"gate_up_us": first, "down_us": second}

    found = report_row(
        model=shape.name,
        policy="dense" if budget is None else "base",
        budget=budget,
        batch=T,
        active_mean=active,
        layers=len(layers),
        **dict.fromkeys(STAGES),
        roof_us=None,
    )

    def all_layers(stage: Callable[[int], Any]) -> Callable[[], Any]:
        return lambda: [stage(i) for i in everywhere]

    works = {name: all_layers(stage) for name, stage in stages.items()}
    if roof is None:
        for work in works.values():
            work()
        return found
    graphs = {name: capture(work)[0].replay for name, work in works.items()}
    found |= {name: us / len(layers) for name, us in microseconds(graphs).items()}
    read = active * shape.expert_bytes(dtype)
    found["roof_us"] = read / roof * 1e6
    if T <= EXPERTS_ROWS:
        rate = read / (found["gate_up_us"] + found["down_us"]) * 1e6
        found |= {"gb_per_s": rate / 1e9, "roof_fraction": rate / roof}
    return found


def all_shapes(dry: bool) -> tuple[Shape, ...]:
    """What the layer table is about."""
    return DRY_SHAPES if dry else tuple(SHAPES.values())
