"""Selection in MLX operations, the twin of `base_core.select`: stays in the lazy graph, with static shapes."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from base_core.selection import (
    DECODE,
    ENERGY_RANKINGS,
    LOG_ENERGY_RANGE,
    PADDING,
    PREFILL,
    Denominator,
    Fill,
    Ranking,
)

SHARE_UNIT = 1 << 20
SMALLEST = float(np.finfo(np.float32).tiny)


class Predicted(NamedTuple):
    """Log-energies as the predictor's product left them, before the division by the rows' norms.

    Attributes:
        product: float [T, P]; columns first to first + E are x @ weight.T.
        first: where they begin, behind the router's logits or at 0.
        x: float [T, d], router inputs.
        bias: float32 [E].
    """

    product: mx.array
    first: int
    x: mx.array
    bias: mx.array

    def log_energy(self) -> mx.array:
        """float32 [T, E]."""
        raw = self.product[:, self.first : self.first + self.bias.size].astype(mx.float32)
        norm = mx.maximum(mx.linalg.norm(self.x.astype(mx.float32), axis=-1, keepdims=True), SMALLEST)
        return raw / norm + self.bias


LogEnergy: TypeAlias = "mx.array | Predicted | None"


class MlxSelection(NamedTuple):
    """What a layer executes: T rows, k slots, E experts.

    Attributes:
        ids: [T, k], dtype of the input. Only active experts; an empty slot repeats one with weight 0.
        weights: [T, k], dtype of the input.
        active: bool [E], the experts that are read.
        cost: float32 [E], the ranking's value of each expert.
        union: bool [E], what the rows chose natively; padding rows are left out.
        fell_back: bool [], a cost was not finite and the layer kept its native routing.
        counters: int64 [5] with this step in them, from a kernel that counts as it selects.
        lists: each active expert's rows, from a kernel that lists them (`backends.mlx.kernels.lists.RowLists`).
    """

    ids: mx.array
    weights: mx.array
    active: mx.array
    cost: mx.array
    union: mx.array
    fell_back: mx.array
    counters: mx.array | None = None
    lists: Any = None


def count_no_sync(selection: MlxSelection, counters: mx.array) -> mx.array:
    """Adds a step to counters int64 [5], unless it held padding alone.

    They are: steps, experts read, experts chosen natively, share of the cost kept in 1 / SHARE_UNIT, fallbacks.
    """
    total = selection.cost.sum()
    share = mx.where(selection.active, selection.cost, 0).sum() / total
    share = mx.where(mx.isfinite(total) & (total > 0), share, 1)
    counts = (selection.active.sum(), selection.union.sum(), mx.round(share * SHARE_UNIT), selection.fell_back)
    counted = (counts[1] > 0).astype(mx.int64)
    return counters + counted * mx.stack([mx.array(1), *(count.astype(mx.int64) for count in counts)])


def select_no_sync(
    scores: mx.array,
    ids: mx.array,
    weights: mx.array,
    log_energy: LogEnergy,
    limit: int | mx.array,
    *,
    tau: float | mx.array | None = None,
    floor: float | mx.array | None = None,
    preference: mx.array | None = None,
    rows: mx.array | None = None,
    counters: mx.array | None = None,
    ranking: Ranking = "removal_cost",
    fill: Fill = "backfill",
    denominator: Denominator = "native",
) -> MlxSelection:
    """One MoE layer, one step: see `base_core.select`, which it equals.

    Nothing is read back and no shape depends on a value: `async_eval` never waits and `mx.compile` may trace it. Pass
    `limit`, `tau` and `floor` as arrays there, for tracing freezes numbers. Inputs are not checked, except for their
    presence.

    Args:
        scores: float [T, E], positive router scores.
        ids: int [T, k], the router's native choice, distinct in each row.
        weights: float [T, k], native combine weights.
        log_energy: float [T, E], or [E] for all rows alike, or `Predicted`; the energy rankings need it.
        limit: most experts, an int or an int array [].
        tau: share of the cost to keep (an energy budget).
        floor: share of the cost that an expert needs for itself (a share budget); not beside `tau`.
        preference: float [T, E], what the router ranks by, -inf where a row may not go; `scores` when None.
        rows: int [T], 0 padding, 1 decode, 2 prefill; all decode when None.
        counters: int64 [5] that the step is added to, see `count_no_sync`.

    Raises:
        ValueError: an energy ranking without `log_energy`.
    """
    T, k = ids.shape
    if isinstance(log_energy, Predicted):
        log_energy = log_energy.log_energy()
    preference = scores if preference is None else preference
    rows = mx.full((T,), DECODE) if rows is None else rows
    real = (rows != PADDING)[:, None]

    cost = _ranking_cost(ranking, ids, weights, log_energy, preference, (rows == DECODE)[:, None])
    union = mx.put_along_axis(mx.zeros(scores.shape, mx.bool_), ids, mx.broadcast_to(real, ids.shape), axis=1).any(
        axis=0
    )
    fell_back = mx.logical_not(mx.isfinite(cost).all())
    untouched = fell_back | (rows == PREFILL).any()
    active = mx.where(untouched, union, _active_set(cost, union, limit, tau, floor))

    spare = mx.argmax(active.astype(mx.uint8))
    native = active[ids]
    if fill == "backfill":
        allowed = mx.where(active, preference, mx.array(-mx.inf, preference.dtype))
        chosen = mx.argsort(-allowed, axis=1)[:, :k].astype(ids.dtype)
        filled = (mx.take_along_axis(allowed, chosen, axis=1) > -mx.inf) & real
    else:
        chosen, filled = ids, native & real
    first = mx.argmax(filled.astype(mx.uint8), axis=1, keepdims=True)
    own = mx.take_along_axis(filled, first, axis=1)
    spare = mx.where(own, mx.take_along_axis(chosen, first, axis=1), spare.astype(ids.dtype))

    executed = mx.where(filled, mx.take_along_axis(scores, chosen, axis=1), 0).astype(mx.float32)
    base = executed if denominator == "renormalise" else mx.take_along_axis(scores, ids, axis=1).astype(mx.float32)
    mass = base.sum(axis=1, keepdims=True)
    share = mx.where(mass > 0, executed / mass, 0) * weights.astype(mx.float32).sum(axis=1, keepdims=True)

    keeps_native = real & native.all(axis=1, keepdims=True)
    selection = MlxSelection(
        mx.where(keeps_native, ids, mx.where(filled, chosen, spare)),
        mx.where(keeps_native, weights, share.astype(weights.dtype)),
        active,
        cost,
        union,
        fell_back,
    )
    return selection if counters is None else selection._replace(counters=count_no_sync(selection, counters))


def sum_by_expert(ids: mx.array, values: mx.array, voting: mx.array, E: int) -> mx.array:
    """float32 [E]: each expert's sum of values [T, k] in ids [T, k], where `voting`, [T, 1] or [T, k], is true."""
    # A table and its column sums: adding into [E] by index would add in no fixed order on a GPU.
    table = mx.zeros((ids.shape[0], E), mx.float32)
    return mx.put_along_axis(table, ids, mx.where(voting, values, 0).astype(mx.float32), axis=1).sum(axis=0)


def _ranking_cost(
    ranking: Ranking,
    ids: mx.array,
    weights: mx.array,
    log_energy: mx.array | None,
    preference: mx.array,
    voting: mx.array,
) -> mx.array:
    E = preference.shape[1]
    value = weights.astype(mx.float32)
    if ranking in ENERGY_RANKINGS:
        if log_energy is None:
            raise ValueError(f"ranking {ranking!r} needs log_energy, got None: pass the predictor's log-energies")
        routed = log_energy[ids] if log_energy.ndim == 1 else mx.take_along_axis(log_energy, ids, axis=1)
        value = mx.square(value) * mx.exp(mx.clip(routed.astype(mx.float32), *LOG_ENERGY_RANGE))
    elif ranking == "squared_weight":
        value = mx.square(value)
    elif ranking == "top1_union":
        routed = mx.take_along_axis(preference, ids, axis=1)
        first = mx.where(routed == routed.max(axis=1, keepdims=True), ids, E).min(axis=1, keepdims=True)
        value = mx.where(ids == first, value, 0)
    return sum_by_expert(ids, value, voting, E)


def _active_set(
    cost: mx.array,
    union: mx.array,
    limit: int | mx.array,
    tau: float | mx.array | None,
    floor: float | mx.array | None,
) -> mx.array:
    """bool [E]: what the budget keeps, largest cost first; MLX's sort is stable, so ties go to the lower index."""
    order = mx.argsort(-cost)
    ranked, chosen = cost[order], union[order]
    place = mx.arange(cost.size)
    keep = (place < limit) & (ranked > 0)
    if floor is not None:
        keep = keep & ((ranked >= floor * ranked.sum()) | (place == 0))
    elif tau is None:
        keep = keep | (chosen & (chosen.sum() <= limit))
    else:
        before = mx.cumsum(ranked, inclusive=False)
        keep = keep & ((before < tau * ranked.sum()) | (mx.array(tau) >= 1))
    return mx.put_along_axis(mx.zeros(cost.shape, mx.bool_), order, keep & chosen, axis=0)
