"""Selection: which experts one MoE layer reads in one decode step, and what each row executes instead of the others.

The normative reference. Every backend reproduces `select`; the paper's section is named beside each part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from base_core.budget import Budget
from base_core.routing import at, most_preferred

PADDING, DECODE, PREFILL = 0, 1, 2

LOG_ENERGY_RANGE = (-50.0, 50.0)
"""Predicted log-energies are clamped to this range, so that float32 sums of their exponentials stay finite."""

Ranking = Literal["removal_cost", "weight_sum", "squared_weight", "static_energy", "oracle", "top1_union"]
Fill = Literal["backfill", "drop"]
Denominator = Literal["native", "renormalise"]
ENERGY_RANKINGS = ("removal_cost", "static_energy", "oracle")


@dataclass(frozen=True)
class Selection:
    """What a layer executes: T rows, k slots, E experts.

    Attributes:
        ids: [T, k], dtype of the input. Only active experts; an empty slot repeats one with weight 0.
        weights: [T, k], dtype of the input.
        active: bool [E], the experts that are read.
        cost: float32 [E], the ranking's value of each expert (removal cost D_e for the energy rankings).
    """

    ids: NDArray
    weights: NDArray
    active: NDArray[np.bool_]
    cost: NDArray[np.float32]

    @property
    def fell_back(self) -> bool:
        """True when a cost was not finite, so that the layer kept its native routing for this step."""
        return not bool(np.isfinite(self.cost).all())


def removal_cost(
    ids: NDArray, weights: NDArray, log_energy: NDArray | None, voting: NDArray[np.bool_], num_experts: int
) -> NDArray[np.float32]:
    """D_e, the predicted squared error of removing expert e from this batch (paper section 6.1).

    D_e = sum over voting rows t with e in ids_t of weights[t, e]^2 * exp(log_energy[t, e]), float32, rows added in
    order. Without `log_energy` every expert counts as equally energetic, which leaves the sum of squared weights.

    Args:
        ids: int [T, k], distinct in each row.
        weights: float [T, k].
        log_energy: float [T, E], natural log of the squared output norm.
        voting: bool [T].
    """
    contribution = np.square(weights, dtype=np.float32)
    if log_energy is not None:
        routed = at(log_energy, ids).astype(np.float32)
        contribution = contribution * np.exp(np.clip(routed, *LOG_ENERGY_RANGE))
    return _sum_by_expert(ids, contribution, voting, num_experts)


def _sum_by_expert(ids, values, voting, num_experts) -> NDArray[np.float32]:
    table = np.zeros((len(ids), num_experts), np.float32)
    table[np.arange(len(ids))[:, None], ids] = np.where(voting[:, None], values, 0)
    return table.sum(axis=0)


def named(ids: NDArray, num_experts: int) -> NDArray[np.bool_]:
    """The experts that occur in `ids`, of any shape: bool [E]."""
    return np.bincount(ids.ravel(), minlength=num_experts) > 0


def ranking_cost(
    ranking: Ranking,
    ids: NDArray,
    weights: NDArray,
    log_energy: NDArray | None,
    preference: NDArray,
    voting: NDArray[np.bool_],
) -> NDArray[np.float32]:
    """What `ranking` holds each expert to be worth, float32 [E] (paper table 2 compares these).

    `removal_cost`, `static_energy` and `oracle` are one formula with another `log_energy`: the predictor's, the log of
    the calibration mean, and the true one. `squared_weight` drops the energy, `weight_sum` also the square.
    `top1_union` gives weight only to each row's favourite, so that the active set is the union of favourites.
    """
    num_experts = preference.shape[1]
    if ranking in ENERGY_RANKINGS:
        if log_energy is None:
            raise ValueError(
                f"ranking {ranking!r} needs log_energy [T, E], got None: pass the predictor's log-energies"
            )
        return removal_cost(ids, weights, log_energy, voting, num_experts)
    if ranking == "squared_weight":
        return removal_cost(ids, weights, None, voting, num_experts)
    if ranking == "weight_sum":
        return _sum_by_expert(ids, weights, voting, num_experts)
    routed = at(preference, ids)
    first = np.where(routed == routed.max(1, keepdims=True), ids, num_experts).min(1)
    return _sum_by_expert(ids, np.where(ids == first[:, None], weights, 0), voting, num_experts)


def active_set(
    cost: NDArray[np.float32], union: NDArray[np.bool_], budget: Budget, groups: NDArray | None = None
) -> NDArray[np.bool_]:
    """The experts that `budget` keeps, bool [E]: largest cost first, ties to the lower index (paper section 6.1).

    Args:
        cost: [E], finite and non-negative.
        union: bool [E], the experts that voting rows chose; nothing else is ever kept.
        budget: of this layer.
        groups: int [E], the rank that holds each expert; the budget then holds for each rank. None means one rank.
    """
    E = len(cost)
    groups = np.zeros(E, np.int64) if groups is None else np.unique(groups, return_inverse=True)[1]
    size = np.bincount(groups)
    limits = np.array([budget.limit(int(n)) if budget.percent else min(budget.limit(E), n) for n in size])
    order = np.lexsort((np.arange(E), -cost, groups))
    group = groups[order]
    start = np.searchsorted(group, group)
    keep = (np.arange(E) - start < limits[group]) & (cost[order] > 0)
    total = np.bincount(groups, weights=cost)
    share = cost[order] / np.maximum(total, np.finfo(np.float64).tiny)[group]
    if budget.floor is not None:
        keep &= (share >= budget.floor) | (np.arange(E) == start)
    if budget.tau is not None and budget.tau < 1:
        running = np.concatenate([[0.0], np.cumsum(share)])
        keep &= running[:-1] - running[start] < budget.tau
    active = np.zeros(E, bool)
    active[order] = keep
    if not budget.follows_cost:
        fits = np.bincount(groups, weights=union, minlength=len(size)) <= limits
        active |= union & fits[groups]
    return active & union


def fill_slots(
    fill: Fill,
    denominator: Denominator,
    scores: NDArray,
    ids: NDArray,
    weights: NDArray,
    active: NDArray[np.bool_],
    preference: NDArray,
) -> tuple[NDArray, NDArray[np.float32]]:
    """What every row would execute if all of them were restricted to `active`: ids [T, k] and weights float32 [T, k].

    `backfill` runs each row's k most preferred active experts, `drop` only its native ones (paper table 3). The
    `native` denominator weighs any expert by c_t * scores[t, e] with c_t = sum weights_t / sum scores[t, ids_t], as
    the row's own top-k would have; `renormalise` shares the row's native total out over what it executes.
    """
    k = ids.shape[1]
    if fill == "backfill":
        allowed = np.where(active, preference, -np.inf)
        chosen = most_preferred(allowed, k)
        filled = at(allowed, chosen) > -np.inf
    else:
        chosen, filled = ids, active[ids]
    total = weights.astype(np.float32).sum(1, keepdims=True)
    executed = np.where(filled, at(scores, chosen), 0).astype(np.float32)
    base = executed if denominator == "renormalise" else at(scores, ids).astype(np.float32)
    mass = base.sum(1, keepdims=True)
    share = np.divide(executed, mass, out=np.zeros_like(executed), where=mass > 0)
    spare = np.where(filled.any(1), at(chosen, filled.argmax(1)[:, None])[:, 0], active.argmax())
    return np.where(filled, chosen, spare[:, None]), share * total


def select(
    scores: ArrayLike,
    ids: ArrayLike,
    weights: ArrayLike,
    log_energy: ArrayLike | None,
    budget: Budget | str | int,
    *,
    preference: ArrayLike | None = None,
    rows: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    ranking: Ranking = "removal_cost",
    fill: Fill = "backfill",
    denominator: Denominator = "native",
) -> Selection:
    """One MoE layer, one step: restricts T rows to a shared active set of experts (paper section 6.2).

    Args:
        scores: float [T, E], positive router scores.
        ids: int [T, k], the router's native choice, distinct in each row.
        weights: float [T, k], native combine weights.
        log_energy: float [T, E] (or [E], the same for every row), estimates of log ||E_e(z_t)||^2, natural log. The
            energy rankings need it: predicted for `removal_cost`, the log of the calibration mean for `static_energy`,
            the true one for `oracle`. The others ignore it.
        budget: of this layer; text and numbers are parsed.
        preference: float [T, E], what the router ranks by, -inf where a row may not go; `scores` when None.
        rows: int [T], 0 padding, 1 decode, 2 prefill; all decode when None. Only decode rows vote and are restricted.
            With a prefill row in the batch all routing is left alone. Padding rows add no expert: weight 0 on an
            active one.
        groups: int [E], the expert-parallel rank of each expert; the budget then holds for each rank.

    Returns:
        Selection. With the budget off everything is returned as given. Rows whose native experts are all active keep
        ids and weights bit for bit. In a batch of padding alone nothing is active and expert 0, weight 0, stands in.

    Raises:
        ValueError: shapes or dtypes that do not fit, ids out of range or repeated, an unknown name, a bad budget.
    """
    scores, ids, weights = np.asarray(scores), np.asarray(ids), np.asarray(weights)
    preference = scores if preference is None else np.asarray(preference)
    kinds = np.full(len(scores), DECODE) if rows is None else np.asarray(rows)
    energy = None if log_energy is None else np.asarray(log_energy)
    if energy is not None and energy.ndim == 1:
        energy = np.broadcast_to(energy, (len(scores), *energy.shape))
    _check(scores, ids, weights, energy, preference, kinds, None if groups is None else np.asarray(groups))
    for name, value, known in (
        ("ranking", ranking, get_args(Ranking)),
        ("fill", fill, get_args(Fill)),
        ("denominator", denominator, get_args(Denominator)),
    ):
        if value not in known:
            raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(known)}")

    E = scores.shape[1]
    budget = Budget.parse(budget)
    budget.limit(E)
    with np.errstate(invalid="ignore", over="ignore"):
        return _select(scores, ids, weights, energy, budget, preference, kinds, groups, ranking, fill, denominator)


def _select(scores, ids, weights, energy, budget, preference, kinds, groups, ranking, fill, denominator) -> Selection:
    E = scores.shape[1]
    voting = kinds == DECODE
    cost = (
        np.zeros(E, np.float32)
        if energy is None and ranking in ENERGY_RANKINGS and budget.is_off
        else ranking_cost(ranking, ids, weights, energy, preference, voting)
    )
    if budget.is_off:
        return Selection(ids, weights, named(ids, E), cost)

    real = kinds != PADDING
    union = named(ids[real], E)
    untouched = bool((kinds == PREFILL).any()) or not np.isfinite(cost).all()
    active = union if untouched else active_set(cost, union, budget, None if groups is None else np.asarray(groups))
    keeps_native = real & active[ids].all(1)
    filled_ids, filled_weights = fill_slots(fill, denominator, scores, ids, weights, active, preference)
    filled_weights = np.where(real[:, None], filled_weights, 0)
    filled_ids = np.where(real[:, None], filled_ids, active.argmax())
    return Selection(
        np.where(keeps_native[:, None], ids, filled_ids).astype(ids.dtype),
        np.where(keeps_native[:, None], weights, filled_weights.astype(weights.dtype)),
        active,
        cost,
    )


def _check(scores, ids, weights, energy, preference, kinds, groups) -> None:
    if scores.ndim != 2 or scores.shape[1] == 0:
        raise ValueError(f"scores has shape {scores.shape}: expected [T, E], rows by experts")
    T, E = scores.shape
    if ids.ndim != 2 or ids.shape[0] != T or not 1 <= ids.shape[1] <= E:
        raise ValueError(f"ids has shape {ids.shape}: expected [{T}, k] with k in 1..{E}")
    expected = {
        "weights": (weights, ids.shape),
        "preference": (preference, (T, E)),
        "rows": (kinds, (T,)),
        "log_energy": (energy, (T, E)),
        "groups": (groups, (E,)),
    }
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} has shape {array.shape}: expected {list(shape)} beside scores {list(scores.shape)}"
            )
    for name, array in (("ids", ids), ("rows", kinds), ("groups", groups)):
        if array is not None and array.dtype.kind not in "iu":
            raise ValueError(f"{name} has dtype {array.dtype}: expected integers")
    if ids.size and not 0 <= ids.min() <= ids.max() < E:
        raise ValueError(f"ids run from {ids.min()} to {ids.max()}: expected 0..{E - 1}")
    if (np.diff(np.sort(ids, axis=1), axis=1) == 0).any():
        raise ValueError("ids repeats an expert within a row: pass the router's own distinct top-k")
    if ((kinds < PADDING) | (kinds > PREFILL)).any():
        raise ValueError(
            f"rows holds {sorted(set(kinds.tolist()))}: only 0 (padding), 1 (decode) and 2 (prefill) are known"
        )
