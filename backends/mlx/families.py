"""The supported mlx-lm families: where each keeps its experts, and how its router turns logits into choices.

mlx-lm's blocks compute routing inline, so each rule is stated here once more, operation for operation: ids and weights
are bit-equal to the stock block's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.glm4_moe import group_expert_select
from numpy.typing import NDArray

from base_core.fingerprint import router_fingerprint


class Routing(NamedTuple):
    """A router's result for rows [...] of E experts.

    Attributes:
        scores: [..., E], positive.
        preference: [..., E], what the router ranks by; -inf where a row may not go.
        ids: uint32 [..., k], native choice in the stock block's own order.
        weights: [..., k], native combine weights.
    """

    scores: mx.array
    preference: mx.array
    ids: mx.array
    weights: mx.array


@dataclass(frozen=True)
class Family:
    """One block class of mlx-lm.

    Attributes:
        route: `(block, logits [..., E]) -> Routing`.
        router, experts: names of the block's router and expert modules.
        shared: `(block, x) -> [..., d]`, what is added to the routed experts, or None.
        keeps_dtype: the weighted sum is cast back to the experts' dtype.
        chooses_itself: the router module returns ids and weights; its logits are `x @ weight.T`.
    """

    route: Callable[[Any, mx.array], Routing]
    router: str = "gate"
    experts: str = "switch_mlp"
    shared: Callable[[Any, mx.array], mx.array | None] = lambda block, x: None
    keeps_dtype: bool = False
    chooses_itself: bool = False


@dataclass(frozen=True)
class MoELayer:
    """A mixture-of-experts layer found in a model; `index` numbers decoder layers as the model does."""

    index: int
    block: nn.Module
    family: Family
    num_experts: int
    experts_per_token: int
    hidden_size: int

    @property
    def router(self) -> nn.Module:
        return self.block[self.family.router]

    @property
    def router_weight(self) -> NDArray[np.float32]:
        """float32 [E, d], dequantised."""
        router = self.router
        weight = router.weight
        if isinstance(router, nn.QuantizedLinear):
            weight = mx.dequantize(
                weight, router.scales, router.get("biases"), router.group_size, router.bits, mode=router.mode
            )
        return np.array(weight.astype(mx.float32))


def top_k(block: Any) -> int:
    """k, the experts a row executes."""
    return block.top_k if hasattr(block, "top_k") else block.num_experts_per_tok


def _highest(values: mx.array, k: int) -> mx.array:
    return mx.argpartition(values, kth=-k, axis=-1)[..., -k:]


def _lowest_negated(values: mx.array, k: int) -> mx.array:
    return mx.argpartition(-values, kth=k - 1, axis=-1)[..., :k]


def _softmax_then_top_k(choose: Callable[[mx.array, int], mx.array]) -> Callable[[Any, mx.array], Routing]:
    """Softmax over all experts, top k of it, divided by its sum where the block has `norm_topk_prob`."""

    def route(block: Any, logits: mx.array) -> Routing:
        scores = mx.softmax(logits, axis=-1, precise=True)
        ids = choose(scores, block.top_k)
        weights = mx.take_along_axis(scores, ids, axis=-1)
        if getattr(block, "norm_topk_prob", False):
            weights = weights / mx.sum(weights, axis=-1, keepdims=True)
        return Routing(scores, scores, ids, weights)

    return route


def _top_k_then_softmax(choose: Callable[[mx.array, int], mx.array]) -> Callable[[Any, mx.array], Routing]:
    """Top k of the logits, softmax over those k."""

    def route(block: Any, logits: mx.array) -> Routing:
        ids = choose(logits, block.num_experts_per_tok)
        weights = mx.softmax(mx.take_along_axis(logits, ids, axis=-1), axis=-1, precise=True)
        return Routing(mx.softmax(logits, axis=-1, precise=True), logits, ids, weights)

    return route


def _deepseek_v2(block: Any, logits: mx.array) -> Routing:
    gate = block.gate
    scores = mx.softmax(logits, axis=-1, precise=True)
    ranked, preference = scores, scores
    if gate.topk_method == "group_limited_greedy":
        forbidden = gate.n_group - gate.topk_group
        grouped = mx.unflatten(scores, -1, (gate.n_group, -1))
        group_scores = grouped.max(axis=-1, keepdims=True)
        worst = mx.argpartition(group_scores, kth=forbidden - 1, axis=-2)[..., :forbidden, :]
        ranked, preference = (
            mx.put_along_axis(grouped, worst, mx.array(value, scores.dtype), axis=-2).flatten(-2)
            for value in (0.0, -mx.inf)
        )
    ids = _lowest_negated(ranked, gate.top_k)
    weights = mx.take_along_axis(ranked, ids, axis=-1) * gate.routed_scaling_factor
    return Routing(scores, preference, ids, weights)


def _glm4_moe(block: Any, logits: mx.array) -> Routing:
    gate = block.gate
    ids, weights = group_expert_select(
        logits,
        gate.e_score_correction_bias,
        gate.top_k,
        gate.n_group,
        gate.topk_group,
        gate.routed_scaling_factor,
        gate.norm_topk_prob,
    )
    scores = mx.sigmoid(logits.astype(mx.float32))
    preference = scores + gate.e_score_correction_bias
    if gate.n_group > 1:
        forbidden = gate.n_group - gate.topk_group
        grouped = mx.unflatten(preference, -1, (gate.n_group, -1))
        group_scores = mx.topk(grouped, 2, axis=-1).sum(axis=-1, keepdims=True)
        worst = mx.argpartition(group_scores, kth=forbidden - 1, axis=-2)[..., :forbidden, :]
        preference = mx.put_along_axis(grouped, worst, mx.array(-mx.inf), axis=-2).flatten(-2)
    return Routing(scores, preference, ids, weights)


def _gated_shared_expert(block: Any, x: mx.array) -> mx.array:
    return mx.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)


def _shared_experts(block: Any, x: mx.array) -> mx.array | None:
    return None if block.config.n_shared_experts is None else block.shared_experts(x)


FAMILIES: dict[tuple[str, str], Family] = {
    ("qwen3_moe", "Qwen3MoeSparseMoeBlock"): Family(_softmax_then_top_k(_highest), keeps_dtype=True),
    ("qwen3_next", "Qwen3NextSparseMoeBlock"): Family(_softmax_then_top_k(_highest), shared=_gated_shared_expert),
    ("qwen2_moe", "Qwen2MoeSparseMoeBlock"): Family(_softmax_then_top_k(_lowest_negated), shared=_gated_shared_expert),
    ("olmoe", "OlmoeSparseMoeBlock"): Family(_softmax_then_top_k(_lowest_negated)),
    ("mixtral", "MixtralSparseMoeBlock"): Family(_top_k_then_softmax(_lowest_negated)),
    ("gpt_oss", "MLPBlock"): Family(_top_k_then_softmax(_highest), router="router", experts="experts"),
    ("deepseek_v2", "DeepseekV2MoE"): Family(_deepseek_v2, shared=_shared_experts, chooses_itself=True),
    ("glm4_moe", "MoE"): Family(_glm4_moe, shared=_shared_experts, keeps_dtype=True, chooses_itself=True),
}
"""By module under `mlx_lm.models` and class name of the block, so that the table imports none of them."""


def _family(block: Any) -> Family | None:
    """The table's entry for a block or for the stock class it was derived from."""
    for cls in type(block).__mro__:
        package, _, module = cls.__module__.rpartition(".")
        if package == "mlx_lm.models" and (module, cls.__name__) in FAMILIES:
            return FAMILIES[module, cls.__name__]
    return None


def _holds_experts(module: nn.Module) -> bool:
    return any(type(child).__name__ in ("SwitchGLU", "SwitchMLP") for child in module.children().values())


def find_moe_layers(model: nn.Module) -> list[MoELayer]:
    """The model's mixture-of-experts layers, in order.

    Raises:
        ValueError: none there, or one of a class that is not supported; the message lists what is.
    """
    supported = ", ".join(module for module, _ in FAMILIES)
    found = []
    for index, layer in enumerate(model.layers):
        for block in layer.children().values():
            if not isinstance(block, nn.Module):
                continue
            family = _family(block)
            if family is None:
                if _holds_experts(block):
                    name = f"{type(block).__module__}.{type(block).__name__}"
                    raise ValueError(f"block {name} in layer {index} is not supported; supported families: {supported}")
                continue
            experts = block[family.experts].gate_proj
            found.append(MoELayer(index, block, family, experts.num_experts, top_k(block), experts.input_dims))
    if not found:
        name = f"{type(model).__module__}.{type(model).__name__}"
        raise ValueError(f"model {name} has no mixture-of-experts layer; supported families: {supported}")
    return found


def describe(model: nn.Module) -> dict[str, Any]:
    """What `Predictor.check_model` compares: model_type, layers, E, k, d and the routers' fingerprint."""
    layers = find_moe_layers(model)
    return {
        "model_type": model.model_type,
        "layers": tuple(layer.index for layer in layers),
        "num_experts": layers[0].num_experts,
        "experts_per_token": layers[0].experts_per_token,
        "hidden_size": layers[0].hidden_size,
        "fingerprint": fingerprint(model),
    }


def fingerprint(model: nn.Module) -> dict[int, tuple[float, ...]]:
    """16 numbers per layer, see `base_core.fingerprint`; nearly the same for every quantisation of one model."""
    return {layer.index: tuple(router_fingerprint(layer.router_weight)) for layer in find_moe_layers(model)}
