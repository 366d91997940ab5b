"""What transformers' router and experts modules call to run on the kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from backends.cuda.families import MoELayer, correction_bias, router_rule
from backends.cuda.kernels.collect import Collected, collect
from backends.cuda.kernels.experts import MAX_ROWS as EXPERTS_ROWS
from backends.cuda.kernels.experts import MAX_TILES, ExpertsLayout, experts
from backends.cuda.kernels.front import INTERPRETED, Front, FrontState, budget_value, front
from backends.cuda.kernels.front import MAX_ROWS as FRONT_ROWS
from base_core.budget import Budget
from base_core.predictor import LayerPredictor

DTYPES = (torch.bfloat16, torch.float16)


def on_kernel_device(tensor: Tensor) -> bool:
    """A GPU, or anything at all in the Triton interpreter."""
    return tensor.is_cuda or INTERPRETED


def runs_on_kernels(module: Any, hidden: Tensor) -> bool:
    """Whether the experts kernels compute what this experts module of transformers does for hidden states [T, d]."""
    if not module.has_gate or getattr(module, "has_post_expert_norm", False) or module._is_expert_parallel:
        return False
    weight = module.gate_up_proj
    silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    plain = silu and module._apply_gate.__name__ == "_default_apply_gate"
    trains = torch.is_grad_enabled() and (weight.requires_grad or hidden.requires_grad)
    return (
        on_kernel_device(weight)
        and not trains
        and 1 <= len(hidden) <= EXPERTS_ROWS
        and hidden.dtype == weight.dtype
        and (weight.dtype in DTYPES or INTERPRETED)
        and (plain or type(module).__name__ == "GptOssExperts")
    )


def run_experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The experts module's output [T, d] for a router's ids and weights [T, k], see `runs_on_kernels`.

    Takes the front's own list of active experts when `ids` come from it, and collects one otherwise.
    """
    router: FrontRouter | None = getattr(module, "_base_front", None)
    last = None if router is None else router.last
    routed: Front | Collected
    routed = last if last is not None and last.ids is ids else collect(ids, weights, len(module.gate_up_proj))
    return experts(
        hidden.contiguous(),
        module.gate_up_proj,
        module.down_proj,
        routed.active,
        routed.count,
        routed.combine,
        _tickets(hidden.device),
        _layout(module),
        gate_up_bias=module.gate_up_proj_bias if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
    )


def _layout(module: Any) -> ExpertsLayout:
    clamp = (float(module.alpha), float(module.limit)) if hasattr(module, "alpha") else None
    return ExpertsLayout(module.is_transposed, not module.is_concatenated, clamp)


@lru_cache
def _tickets(device: torch.device) -> Tensor:
    # Made on the first eager step, before any capture. Layers of one stream follow each other and can share them.
    with torch.inference_mode(False):
        return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


class FrontRouter:
    """One layer's router and selection in the fused front; `route` returns what the router's forward would.

    Attributes:
        state: tickets and counters of this layer.
        budget: float32 [2] on the device; `budget_value` makes another one to copy into it.
        last: the latest result. The experts of this layer read their active list from it.
    """

    def __init__(self, layer: MoELayer, predictor: LayerPredictor, budget: Budget) -> None:
        router = layer.router
        weight: Any = router.weight
        device, dtype = layer.device, weight.dtype
        self.layer, self.rule = layer, router_rule(layer)
        rows = torch.tensor(predictor.weight, device=device).to(dtype)
        self.weight = torch.cat([weight.detach(), rows]).contiguous()
        self.energy_bias = torch.tensor(predictor.bias, device=device)
        self.router_bias = getattr(router, "bias", None) if layer.family.model_type == "gpt_oss" else None
        self.correction = correction_bias(layer)
        self.state = FrontState.zeros(device)
        self.budget = budget_value(budget, layer.num_experts, device)
        self.last: Front | None = None

    @staticmethod
    def takes(layer: MoELayer) -> bool:
        """Whether the front computes this layer's router."""
        weight: Any = layer.router.weight
        rule = router_rule(layer)
        return (
            on_kernel_device(weight) and rule.top_groups >= rule.num_groups and (weight.dtype in DTYPES or INTERPRETED)
        )

    def takes_batch(self, z: Tensor) -> bool:
        """Whether the front takes the router input z [T, d]."""
        return 1 <= len(z) <= FRONT_ROWS and z.dtype == self.weight.dtype

    def route(self, z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the router returns for z [T, d] and row kinds int32 [T], under the budget.

        Returns:
            Logits float32 [T, E], weights [T, k] of z's dtype, ids int64 [T, k].
        """
        self.last = front(
            z.contiguous(),
            self.weight,
            self.energy_bias,
            rows,
            self.budget,
            self.state,
            self.rule,
            router_bias=self.router_bias,
            correction=self.correction,
            weight_dtype=z.dtype,
        )
        return self.last.logits, self.last.weights, self.last.ids

    def attach(self) -> None:
        """Lets this layer's experts read the active list from `last`."""
        self.layer.experts._base_front = self  # type: ignore[assignment]

    def detach(self) -> None:
        """Undoes `attach`."""
        if getattr(self.layer.experts, "_base_front", None) is self:
            del self.layer.experts._base_front
