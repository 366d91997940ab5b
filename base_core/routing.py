"""Router rules: what a model's own router computes from its logits, for every router kind the project supports.

A backend may read `ids` and `weights` straight from the model instead; the reference needs them from logits alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RouterRule:
    """How one model turns router logits into choices and combine weights.

    Attributes:
        k: routed experts per row.
        score: `softmax` over all experts, or an independent `sigmoid` for each.
        normalise: `none` keeps the raw scores; `selected` divides them by their sum over the k chosen experts;
            `softmax_selected` takes the softmax of the k chosen logits and ranks by logits (gpt-oss).
        scale: factor on the combine weights (`routed_scaling_factor`).
        num_groups: expert groups of the router; 1 means ungrouped.
        top_groups: groups a row may choose from.
        group_score: a group counts with its best expert (`max`) or the sum of its best two (`top2_sum`).
    """

    k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: Literal["none", "selected", "softmax_selected"] = "selected"
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"


@dataclass(frozen=True)
class Routing:
    """A router's result for T rows and E experts.

    Attributes:
        scores: float32 [T, E], positive.
        preference: float32 [T, E], what the router ranks by; -inf where a row may not go.
        ids: int64 [T, k], native choice, most preferred first, ties to the lower index.
        weights: float32 [T, k], native combine weights.
    """

    scores: NDArray[np.float32]
    preference: NDArray[np.float32]
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]


def softmax(logits: NDArray) -> NDArray[np.float32]:
    """Softmax over the last axis, float32."""
    logits = np.asarray(logits, np.float32)
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def sigmoid(logits: NDArray) -> NDArray[np.float32]:
    """Logistic function, float32, without overflow at either end."""
    logits = np.asarray(logits, np.float32)
    decay = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + decay), decay / (1 + decay)).astype(np.float32)


def at(table: NDArray, columns: NDArray) -> NDArray:
    """The entries of `table` [T, any] that every row names in `columns` [T, n]: [T, n]. `take_along_axis`, but fast."""
    return table[np.arange(len(columns))[:, None], columns]


def most_preferred(preference: NDArray, k: int) -> NDArray[np.int64]:
    """The k best columns of each row of `preference` [T, E], best first, ties to the lower index: int64 [T, k]."""
    return np.argsort(-preference, axis=-1, kind="stable")[..., :k]


def allowed_groups(preference: NDArray, rule: RouterRule) -> NDArray[np.bool_]:
    """bool [T, E]: the experts whose group is among the row's best `top_groups` of `num_groups`."""
    T, E = preference.shape
    if rule.num_groups == 1:
        return np.ones((T, E), bool)
    if E % rule.num_groups:
        raise ValueError(f"num_groups {rule.num_groups} does not divide the {E} experts: correct the router rule")
    members = preference.reshape(T, rule.num_groups, -1)
    best = -np.sort(-members, axis=-1)
    group_score = best[..., 0] if rule.group_score == "max" else best[..., :2].sum(-1)
    chosen = np.zeros((T, rule.num_groups), bool)
    np.put_along_axis(chosen, most_preferred(group_score, rule.top_groups), True, axis=1)
    return np.repeat(chosen, members.shape[-1], axis=1)


def route(logits: NDArray, rule: RouterRule, correction_bias: NDArray | None = None) -> Routing:
    """Runs a router rule.

    Args:
        logits: [T, E], any float dtype; computed in float32.
        rule: the model's rule.
        correction_bias: float [E], added to the scores for ranking only (DeepSeek-V3, GLM-4 `e_score_correction_bias`).
    """
    logits = np.asarray(logits, np.float32)
    if logits.ndim != 2 or not 1 <= rule.k <= logits.shape[1]:
        raise ValueError(f"logits of shape {logits.shape} do not suit k={rule.k}: expected [T, E] with E >= k")
    scores = softmax(logits) if rule.score == "softmax" else sigmoid(logits)
    preference = logits if rule.normalise == "softmax_selected" else scores
    if correction_bias is not None:
        preference = preference + np.asarray(correction_bias, np.float32)
    preference = np.where(allowed_groups(preference, rule), preference, np.float32(-np.inf))
    ids = most_preferred(preference, rule.k)
    chosen = at(scores, ids)
    if rule.normalise == "softmax_selected":
        weights = softmax(at(logits, ids))
    elif rule.normalise == "selected":
        weights = chosen / np.maximum(chosen.sum(-1, keepdims=True), np.finfo(np.float32).tiny)
    else:
        weights = chosen
    return Routing(scores, preference, ids, weights * np.float32(rule.scale))
