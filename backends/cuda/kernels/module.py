"""What transformers' router and experts modules call to run on the kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from backends.cuda.experts import keep_address
from backends.cuda.families import MoELayer, correction_bias, router_rule
from backends.cuda.kernels.collect import Collected, collect
from backends.cuda.kernels.experts import MAX_ROWS as EXPERTS_ROWS
from backends.cuda.kernels.experts import MAX_TILES, ExpertsLayout, experts
from backends.cuda.kernels.front import INTERPRETED, Front, FrontState, budget_value, front
from backends.cuda.kernels.front import MAX_ROWS as FRONT_ROWS
from base_core.budget import Budget
from base_core.predictor import LayerPredictor

DTYPES = (torch.bfloat16, torch.float16)


def runs_on_kernels(module: Any, hidden: Tensor) -> bool:
    """Whether the experts kernels compute what this experts module of transformers does for hidden states [T, d].

    The device is the caller's to check, see `triton_runs_on`.
    """
    if not module.has_gate or module.has_post_expert_norm or module._is_expert_parallel:
        return False
    weight = module.gate_up_proj
    silu = type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
    plain = silu and module._apply_gate.__name__ == "_default_apply_gate"
    trains = torch.is_grad_enabled() and (weight.requires_grad or hidden.requires_grad)
    return (
        not trains
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
    last = None if router is None else router.take()
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
        experts_layout(module),
        gate_up_bias=module.gate_up_proj_bias if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
    )


def experts_layout(module: Any) -> ExpertsLayout:
    """How this experts module of transformers stores its weights."""
    clamp = (float(module.alpha), float(module.limit)) if hasattr(module, "alpha") else None
    return ExpertsLayout(module.is_transposed, not module.is_concatenated, clamp)


@torch.compiler.assume_constant_result
def _tickets(device: torch.device) -> Tensor:
    return _make_tickets(device)


@lru_cache
def _make_tickets(device: torch.device) -> Tensor:
    # Made on the first step, before any capture. Layers of one stream follow each other and can share them.
    with torch.inference_mode(False):
        return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def _input_dtype(layer: MoELayer) -> torch.dtype:
    """What the front multiplies: the router's dtype, or the experts' where the router's values fit into it.

    Some families keep their router in float32, though its checkpoint is bfloat16.
    """
    weight: Any = layer.router.weight
    dtype = next(layer.experts.parameters()).dtype
    fits = dtype == weight.dtype or torch.equal(weight.to(dtype).to(weight.dtype), weight)
    return dtype if fits else weight.dtype


class FrontRouter:
    """One layer's router and selection in the fused front; `route` returns what the router's forward would.

    Attributes:
        state: tickets and counters of this layer.
        budget: float32 [2] on the device, see `budget_value`.
    """

    def __init__(self, layer: MoELayer, predictor: LayerPredictor, budget: Budget) -> None:
        router = layer.router
        weight: Any = router.weight
        # Families differ in the dtype of their combine weights; the router itself says which one is its own.
        with torch.no_grad():
            self.weight_dtype = router.forward(weight.new_zeros(1, layer.hidden_size))[1].dtype
        device, dtype = layer.device, _input_dtype(layer)
        self.layer, self.rule = layer, router_rule(layer)
        rows = torch.tensor(predictor.weight, device=device).to(dtype)
        self.weight = torch.cat([weight.detach().to(dtype), rows]).contiguous()
        self.energy_bias = torch.tensor(predictor.bias, device=device)
        self.router_bias = getattr(router, "bias", None) if layer.family.model_type == "gpt_oss" else None
        self.correction = correction_bias(layer)
        self.state = FrontState.zeros(device)
        self.budget = budget_value(budget, layer.num_experts, device)
        keep_address(self.weight, self.energy_bias, self.budget, *self.state)
        self._last: Front | None = None

    @staticmethod
    def takes(layer: MoELayer) -> bool:
        """Whether the front computes this layer's router. Waits for the device."""
        rule, dtype = router_rule(layer), _input_dtype(layer)
        # A forward that somebody else has put on the module, such as one that fetches its weights, has to be called.
        untouched = "forward" not in layer.router.__dict__
        return untouched and rule.top_groups >= rule.num_groups and (dtype in DTYPES or INTERPRETED)

    def takes_batch(self, z: Tensor) -> bool:
        """Whether the front takes the router input z [T, d]."""
        return 1 <= len(z) <= FRONT_ROWS and z.dtype == self.weight.dtype

    def route(self, z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the router returns for z [T, d] and row kinds int32 [T], under the budget.

        Returns:
            Logits float32 [T, E], weights [T, k] of the router's own dtype for them, ids int64 [T, k].
        """
        out = front(
            z.contiguous(),
            self.weight,
            self.energy_bias,
            rows,
            self.budget,
            self.state,
            self.rule,
            router_bias=self.router_bias,
            correction=self.correction,
            weight_dtype=self.weight_dtype,
        )
        if getattr(self.layer.experts, "_base_front", None) is self and len(z) <= EXPERTS_ROWS:
            self._last = out
        return out.logits, out.weights, out.ids

    def take(self) -> Front | None:
        """The result of the latest `route`, once: kept any longer it would be an output of every compiled graph."""
        last, self._last = self._last, None
        return last

    def set_budget(self, budget: Budget) -> None:
        """Overwrites the budget in place, so that a captured graph follows."""
        self.budget.copy_(budget_value(budget, self.layer.num_experts))

    def attach(self) -> None:
        """Lets this layer's experts take the active list from the latest `route`."""
        self.layer.experts._base_front = self  # type: ignore[assignment]

    def detach(self) -> None:
        """Undoes `attach`."""
        self._last = None
        if getattr(self.layer.experts, "_base_front", None) is self:
            del self.layer.experts._base_front
