"""The router that vLLM's MoE layers get: the model's own, followed by selection in one opaque operator.

Opaque, because a compiler or a graph capture must not look inside: what it saw there once would hold for ever. The
operator runs on router logits that vLLM computed, so the fused front kernel of `backends.cuda.kernels` has no place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.utils.torch_utils import direct_register_custom_op

from backends.cuda.families import routing_terms
from backends.cuda.selection import native_union, predicted_log_energy, select_no_sync
from backends.cuda.vllm.rows import RowBuffer
from base_core import Budget, LayerPredictor
from base_core.routing import RouterRule

COUNTERS = ("steps", "active", "union", "fallbacks", "most")
"""What each layer counts over decode steps: their number, experts read, experts that the rows chose, native fallbacks,
and the most experts read in one step."""


class LayerBudget:
    """One MoE layer's budget, with all that selection needs on the layer's device.

    Args:
        rule: what the layer's router computes from its logits.
        correction: float [E], what it adds to its scores for ranking, or None.
        budget: of this layer, not off.
        groups: int [E], the expert parallel rank of each expert, or None for one rank.
        counters: int64 [5], see `COUNTERS`; added to in place.
    """

    def __init__(
        self,
        rule: RouterRule,
        correction: Tensor | None,
        budget: Budget,
        predictor: LayerPredictor,
        rows: RowBuffer,
        counters: Tensor,
        groups: np.ndarray | None,
    ) -> None:
        device = counters.device
        E = len(predictor.bias)
        self._rule, self._correction, self._rows, self._counters = rule, correction, rows, counters
        self._tau, self._floor = budget.tau, budget.floor
        self._limit: int | Tensor = budget.limit(E)
        self._groups: Tensor | None = None
        with torch.inference_mode(False):
            self._weight = torch.tensor(predictor.weight.T.copy(), device=device)
            self._offset = torch.tensor(predictor.bias, device=device)
            if groups is not None:
                self._groups = torch.tensor(groups, device=device)
                self._limit = torch.tensor(rank_limits(budget, groups), device=device)

    def __call__(self, z: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids [T, k] of what runs, from the router's input [T, >= d], logits [T, E], weights and ids.

        A row that vLLM itself marked as padding, by ids of -1, keeps them.
        """
        d, E = self._weight.shape
        known = ids >= 0
        chosen = ids.clamp_min(0)
        terms = routing_terms(logits[:, :E], self._rule, self._correction)
        out = select_no_sync(
            terms.scores,
            chosen,
            weights,
            predicted_log_energy(z[:, :d], self._weight, self._offset),
            self._limit,
            tau=self._tau,
            floor=self._floor,
            preference=terms.preference,
            rows=self._rows.first(len(ids)),
            groups=self._groups,
        )
        self._count(native_union(out.ids.long(), known, E).sum(), out.union.sum(), out.fell_back)
        return torch.where(known, out.weights, weights), torch.where(known, out.ids, ids)

    def _count(self, read: Tensor, union: Tensor, fell_back: Tensor) -> None:
        counted = self._rows.counted
        self._counters[:4] += counted * torch.stack((torch.ones_like(read), read, union, fell_back.to(read.dtype)))
        self._counters[4].copy_(torch.maximum(self._counters[4], counted * read))


def rank_limits(budget: Budget, groups: np.ndarray) -> np.ndarray:
    """The most experts of each expert's rank, int64 [E]; a percentage is one of the rank's experts."""
    size = np.bincount(groups)
    limits = [budget.limit(int(n)) if budget.percent else min(budget.limit(len(groups)), int(n)) for n in size]
    return np.array(limits)[groups]


class BudgetRouter(BaseRouter):
    """A router of vLLM under a budget. Whatever vLLM does to routed ids afterwards, it does to the restricted ones.

    Attributes:
        inner: the model's own router.
        settings: the arguments that it was made with.
        layer: set once the model is loaded; without it, as in a speculator's own layers, nothing changes.
        name: the layer's name in the engine, by which the operator finds it again.
    """

    def __init__(self, inner: BaseRouter, settings: dict[str, Any]) -> None:
        super().__init__(inner.top_k, inner.global_num_experts, inner.eplb_state)
        self.inner, self.settings = inner, settings
        self.layer: LayerBudget | None = None
        self.name = ""

    @property
    def routing_method_type(self) -> Any:
        return self.inner.routing_method_type

    def rule(self) -> RouterRule:
        """What the inner router computes, for `routing_terms`."""
        get = self.settings.get
        grouped = bool(get("use_grouped_topk"))
        return RouterRule(
            k=self.top_k,
            score=get("scoring_func", "softmax"),
            normalise="selected" if get("renormalize", True) else "none",
            num_groups=int(get("num_expert_group") or 1) if grouped else 1,
            top_groups=int(get("topk_group") or 1) if grouped else 1,
            group_score="max" if self.correction is None else "top2_sum",
        )

    @property
    def correction(self) -> Tensor | None:
        """What the inner router adds to its scores for ranking only, float [E]."""
        return self.settings.get("e_score_correction_bias")

    def _compute_routing(
        self, hidden_states: Tensor, router_logits: Tensor, indices_type: Any, *, input_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        weights, ids = self.inner._compute_routing(hidden_states, router_logits, indices_type, input_ids=input_ids)
        if self.layer is None:
            return weights, ids
        return torch.ops.base_moe.select_experts(hidden_states, router_logits, weights, ids, self.name)


UNSUPPORTED_ROUTING = (
    "custom_routing_function",
    "zero_expert_type",
    "hash_indices_table",
    "num_fused_shared_experts",
    "bias_vl",
)
"""Arguments of vLLM's router factory, one of which set means a routing that `routing_terms` does not know."""


def wrap_factory(create: Callable[..., BaseRouter]) -> Callable[..., BaseRouter]:
    """vLLM's `create_fused_moe_router`, for layers under a budget.

    Raises:
        ValueError: on a call for a routing that is not supported.
    """

    def create_router(**settings: Any) -> BaseRouter:
        for name in UNSUPPORTED_ROUTING:
            if settings.get(name):
                raise ValueError(f"BASE cannot run on this model: its routing uses {name}, which is not supported")
        return BudgetRouter(create(**settings), settings)

    return create_router


def _select_experts(
    hidden_states: Tensor, router_logits: Tensor, weights: Tensor, ids: Tensor, layer_name: str
) -> tuple[Tensor, Tensor]:
    # Found through the running engine, so that several engines of one process stay apart.
    layer = get_forward_context().no_compile_layers[layer_name].router.layer
    return layer(hidden_states, router_logits, weights, ids)


def _select_experts_fake(
    hidden_states: Tensor, router_logits: Tensor, weights: Tensor, ids: Tensor, layer_name: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weights), torch.empty_like(ids)


LIBRARY = torch.library.Library("base_moe", "FRAGMENT")
direct_register_custom_op("select_experts", _select_experts, fake_impl=_select_experts_fake, target_lib=LIBRARY)
