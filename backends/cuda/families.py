"""The seven supported transformers families: where each keeps its router and experts, and what its router computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from base_core.fingerprint import router_fingerprint
from base_core.routing import RouterRule


@dataclass(frozen=True)
class Family:
    """One model family. All routers return `(logits, weights, ids)` and all experts take `(hidden, ids, weights)`.

    Attributes:
        model_type: as in the checkpoint's config.json.
        router, experts: class names of the two modules; they are children of one block.
        score: what a logit becomes.
        normalise: as in `RouterRule`, or `by_config` where the router's own `norm_topk_prob` decides.
        scaled: the router multiplies its weights by `routed_scaling_factor`.
        correction_bias: the router ranks by score plus `e_score_correction_bias`.
        grouped: `never`; `always`, by the router's `num_group` and `topk_group`; or `by_config`, only where its
            `topk_method` is group_limited_greedy.
        group_score: how a group is ranked.
    """

    model_type: str
    router: str
    experts: str
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: Literal["none", "selected", "softmax_selected", "by_config"] = "by_config"
    scaled: bool = False
    correction_bias: bool = False
    grouped: Literal["never", "always", "by_config"] = "never"
    group_score: Literal["max", "top2_sum"] = "max"


FAMILIES = (
    Family("qwen3_moe", "Qwen3MoeTopKRouter", "Qwen3MoeExperts"),
    Family("qwen2_moe", "Qwen2MoeTopKRouter", "Qwen2MoeExperts"),
    Family("olmoe", "OlmoeTopKRouter", "OlmoeExperts"),
    Family("mixtral", "MixtralTopKRouter", "MixtralExperts", normalise="selected"),
    Family("gpt_oss", "GptOssTopKRouter", "GptOssExperts", normalise="softmax_selected"),
    Family(
        "deepseek_v2", "DeepseekV2TopkRouter", "DeepseekV2Experts", normalise="none", scaled=True, grouped="by_config"
    ),
    Family(
        "glm4_moe",
        "Glm4MoeTopkRouter",
        "Glm4MoeExperts",
        score="sigmoid",
        scaled=True,
        correction_bias=True,
        grouped="always",
        group_score="top2_sum",
    ),
)


@dataclass(frozen=True, eq=False)
class MoELayer:
    """One MoE layer of a model.

    Attributes:
        index: of the decoder layer, as the model numbers them.
        router: returns `(logits [T, E], weights [T, k], ids [T, k])` for hidden states [..., d].
        experts: returns [T, d] for `(hidden [T, d], ids [T, k], weights [T, k])`; shared experts are not among them.
        family: the family it belongs to.
    """

    index: int
    router: nn.Module
    experts: nn.Module
    family: Family

    @property
    def _weight(self) -> Tensor:
        weight = self.router.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def num_experts(self) -> int:
        """E."""
        return self._weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """d."""
        return self._weight.shape[1]

    @property
    def experts_per_token(self) -> int:
        """k."""
        return int(self.router.top_k)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        """Where the router runs."""
        return self._weight.device

    def router_weight(self) -> NDArray[np.float32]:
        """A copy of the router matrix, float32 [E, d]."""
        return self._weight.detach().to("cpu", torch.float32, copy=True).numpy()

    def fingerprint(self) -> tuple[float, ...]:
        """Sketch of the router matrix, see `base_core.fingerprint`."""
        return tuple(router_fingerprint(self.router_weight()))


class RoutingTerms(NamedTuple):
    """What selection needs beside a router's own output: scores and preference, float32 [T, E]."""

    scores: Tensor
    preference: Tensor


def find_moe_layers(model: nn.Module) -> list[MoELayer]:
    """The MoE layers of `model`, by ascending index.

    The index is the last number in the block's module path (`model.layers.3.mlp` is 3); a lone block without one is 0.

    Raises:
        ValueError: no MoE layer of a supported family in it, or two of one index.
    """
    by_router = {family.router: family for family in FAMILIES}
    layers: dict[int, MoELayer] = {}
    for path, block in model.named_modules():
        children = {type(child).__name__: child for child in block.children()}
        for family in (by_router[name] for name in children if name in by_router):
            if family.experts not in children:
                continue
            index = next((int(part) for part in reversed(path.split(".")) if part.isdigit()), 0)
            if index in layers:
                raise ValueError(
                    f"{type(model).__name__} has two MoE blocks of index {index}: pass the decoder that holds one"
                )
            layers[index] = MoELayer(index, children[family.router], children[family.experts], family)
    if not layers:
        supported = ", ".join(family.model_type for family in FAMILIES)
        raise ValueError(f"{type(model).__name__} has no MoE layer of a supported family: use one of {supported}")
    return [layers[i] for i in sorted(layers)]


def fingerprint(model: nn.Module) -> dict[int, tuple[float, ...]]:
    """Sketch of every MoE layer's router weights, for `Predictor.check_model`."""
    return {layer.index: layer.fingerprint() for layer in find_moe_layers(model)}


def router_rule(layer: MoELayer) -> RouterRule:
    """The rule that this layer's router follows; its correction bias, where it has one, is `correction_bias(layer)`."""
    family, router = layer.family, layer.router
    normalise = family.normalise
    if normalise == "by_config":
        normalise = "selected" if router.norm_topk_prob else "none"
    grouped = family.grouped == "always" or (
        family.grouped == "by_config" and router.topk_method == "group_limited_greedy"
    )
    return RouterRule(
        k=layer.experts_per_token,
        score=family.score,
        normalise=normalise,
        scale=float(router.routed_scaling_factor) if family.scaled else 1.0,  # type: ignore[arg-type]
        num_groups=int(router.num_group) if grouped else 1,  # type: ignore[arg-type]
        top_groups=int(router.topk_group) if grouped else 1,  # type: ignore[arg-type]
        group_score=family.group_score,
    )


def correction_bias(layer: MoELayer) -> Tensor | None:
    """What the router adds to its scores for ranking only, float32 [E], or None."""
    return layer.router.e_score_correction_bias if layer.family.correction_bias else None  # type: ignore[return-value]


def routing_terms(logits: Tensor, rule: RouterRule, bias: Tensor | None = None) -> RoutingTerms:
    """Scores and preference from a router's logits, as `base_core.route` has them, without host synchronisation.

    Args:
        logits: [T, E], any float dtype.
        rule, bias: of the layer, see `router_rule` and `correction_bias`.
    """
    logits = logits.float()
    scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()
    preference = logits if rule.normalise == "softmax_selected" else scores
    if bias is not None:
        preference = preference + bias
    if rule.top_groups < rule.num_groups:
        members = preference.unflatten(-1, (rule.num_groups, -1))
        best = members.topk(1 if rule.group_score == "max" else 2, dim=-1).values.sum(-1)
        chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
        preference = members.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
    return RoutingTerms(scores, preference)
