"""Selection in PyTorch, the twin of `base_core.select`, without host synchronisation: a CUDA graph can capture it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

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


class TorchSelection(NamedTuple):
    """What a layer executes: T rows, k slots, E experts.

    Attributes:
        ids: [T, k], dtype of the input. Only active experts; an empty slot repeats one with weight 0.
        weights: [T, k], dtype of the input.
        active: bool [E], the experts that are read.
        cost: float32 [E], the ranking's value of each expert.
        union: bool [E], what the rows chose natively; padding rows are left out.
        fell_back: bool [], a cost was not finite and the layer kept its native routing.
    """

    ids: Tensor
    weights: Tensor
    active: Tensor
    cost: Tensor
    union: Tensor
    fell_back: Tensor


class RowKinds(NamedTuple):
    """What selection reads of the row kinds; the same for all layers of a step, so derived once.

    Attributes:
        silent: bool [T, 1], all but decode rows: they have no vote.
        real: bool [T, 1], all but padding.
        mixed: bool [], a prefill row is among them and routing is left alone.
    """

    silent: Tensor
    real: Tensor
    mixed: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> RowKinds:
        """From int [T]: 0 padding, 1 decode, 2 prefill."""
        column = rows.unsqueeze(1)
        return cls(column != DECODE, column != PADDING, (rows == PREFILL).any())


def native_union(ids: Tensor, real: Tensor, E: int) -> Tensor:
    """bool [E]: the experts in ids int64 [T, k] of the rows that `real` [T, 1] marks."""
    table = torch.zeros(len(ids), E, dtype=torch.bool, device=ids.device)
    return table.scatter_(1, ids, real.expand_as(ids)).any(0)


def predicted_log_energy(z: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
    """The predictor's log-energies, float32 [T, E], as `LayerPredictor.log_energy` has them.

    Args:
        z: float [T, d], router inputs.
        weight: float32 [d, E]. Transposed: on a CPU a product with [d, E] runs at twice the speed of one with [E, d].
        offset: float32 [E].
    """
    z = z.float()
    norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.addcdiv(offset, z @ weight, norm)


def removal_cost_no_sync(ids: Tensor, weights: Tensor, log_energy: Tensor | None, silent: Tensor, E: int) -> Tensor:
    """D_e as `base_core.removal_cost` has it, float32 [E].

    Args:
        ids: int64 [T, k].
        weights: float [T, k].
        log_energy: float [T, k] of the routed pairs, or None for the sum of squared weights.
        silent: bool [T, 1], the rows without a vote.
    """
    contribution = weights.float().square()
    if log_energy is not None:
        contribution = contribution * log_energy.float().clamp(*LOG_ENERGY_RANGE).exp()
    return _sum_by_expert(ids, contribution, silent, E)


def select_no_sync(
    scores: Tensor,
    ids: Tensor,
    weights: Tensor,
    log_energy: Tensor | None,
    limit: int | Tensor,
    *,
    tau: float | Tensor | None = None,
    floor: float | Tensor | None = None,
    preference: Tensor | None = None,
    rows: Tensor | RowKinds | None = None,
    groups: Tensor | None = None,
    ranking: Ranking = "removal_cost",
    fill: Fill = "backfill",
    denominator: Denominator = "native",
) -> TorchSelection:
    """One MoE layer, one step, on any device: see `base_core.select`, which it equals.

    Nothing here depends on a tensor's value but tensors. Inputs are therefore not checked, except for their presence.

    Args:
        scores: float [T, E], positive router scores.
        ids: int [T, k], the router's native choice, distinct in each row.
        weights: float [T, k], native combine weights.
        log_energy: float [T, E], or [E] for all rows alike; the energy rankings need it.
        limit: most experts: an int, an int tensor [], or with groups also int [E], the limit of each expert's group.
        tau: share of the cost to keep (an energy budget), a float or a float64 tensor [].
        floor: share of the cost that an expert needs for itself (a share budget), likewise; not beside `tau`.
        preference: float [T, E], what the router ranks by, -inf where a row may not go; `scores` when None.
        rows: int [T], 0 padding, 1 decode, 2 prefill; all decode when None. `RowKinds.of(rows)` serves all layers.
        groups: int [E], the expert-parallel rank of each expert; the budget then holds for each rank.

    Raises:
        ValueError: an energy ranking without `log_energy`.
    """
    T, E = scores.shape
    index = ids.long()
    preference = scores if preference is None else preference
    if rows is None:
        rows = torch.full((T,), DECODE, device=scores.device)
    silent, real, mixed = rows if isinstance(rows, RowKinds) else RowKinds.of(rows)

    cost = _ranking_cost(ranking, index, weights, log_energy, preference, silent)
    union = native_union(index, real, E)
    fell_back = (cost - cost).any()  # of an infinite or undefined cost this is NaN, which counts as true
    active = _active_set(cost, union, limit, tau, floor, groups, mixed | fell_back)

    ids, weights = fill_no_sync(scores, ids, weights, active, preference, real, fill, denominator)
    return TorchSelection(ids, weights, active, cost, union, fell_back)


def fill_no_sync(
    scores: Tensor,
    ids: Tensor,
    weights: Tensor,
    active: Tensor,
    preference: Tensor,
    real: Tensor,
    fill: Fill,
    denominator: Denominator,
) -> tuple[Tensor, Tensor]:
    """Ids and weights [T, k] that the rows execute inside `active`, bool [E]; `real`, bool [T, 1], is no padding.

    The other arguments are those of `select_no_sync`. Rows whose native experts are all active keep them bit for bit.
    """
    k, index = ids.shape[1], ids.long()
    is_active = active.take(index)
    spare = active.byte().argmax()
    if fill == "backfill":
        allowed, order = torch.where(active, preference, -torch.inf).sort(dim=1, descending=True, stable=True)
        chosen = order[:, :k]
        filled = (allowed[:, :k] != -torch.inf) & real
        spare = torch.where(filled[:, :1], chosen[:, :1], spare)
    else:
        chosen = index
        filled = is_active & real
        first = filled.byte().argmax(1, keepdim=True)
        spare = torch.where(filled.gather(1, first), chosen.gather(1, first), spare)
    executed = scores.gather(1, chosen).float() * filled
    mass = (executed if denominator == "renormalise" else scores.gather(1, index).float()).sum(1, keepdim=True)
    share = torch.where(mass > 0, executed / mass, 0.0)

    keeps_native = is_active.all(1, keepdim=True) & real
    return (
        torch.where(keeps_native, ids, torch.where(filled, chosen, spare).to(ids.dtype)),
        torch.where(keeps_native, weights, (share * weights.float().sum(1, keepdim=True)).to(weights.dtype)),
    )


def _sum_by_expert(ids: Tensor, values: Tensor, silent: Tensor, E: int) -> Tensor:
    # A table and its column sums, not scatter_add: on CUDA the latter adds in no fixed order.
    table = torch.zeros(len(ids), E, device=ids.device)
    return table.scatter_(1, ids, values).masked_fill_(silent, 0).sum(0)


def _ranking_cost(
    ranking: Ranking, ids: Tensor, weights: Tensor, log_energy: Tensor | None, preference: Tensor, silent: Tensor
) -> Tensor:
    E = preference.shape[1]
    if ranking in ENERGY_RANKINGS:
        if log_energy is None:
            raise ValueError(f"ranking {ranking!r} needs log_energy, got None: pass the predictor's log-energies")
        routed = log_energy[ids] if log_energy.ndim == 1 else log_energy.gather(1, ids)
        return removal_cost_no_sync(ids, weights, routed, silent, E)
    if ranking == "squared_weight":
        return removal_cost_no_sync(ids, weights, None, silent, E)
    weights = weights.float()
    if ranking == "top1_union":
        routed = preference.gather(1, ids)
        first = torch.where(routed == routed.amax(1, keepdim=True), ids, E).amin(1, keepdim=True)
        weights = torch.where(ids == first, weights, 0)
    return _sum_by_expert(ids, weights, silent, E)


def _active_set(
    cost: Tensor,
    union: Tensor,
    limit: int | Tensor,
    tau: float | Tensor | None,
    floor: float | Tensor | None,
    groups: Tensor | None,
    untouched: Tensor,
) -> Tensor:
    """bool [E]: what the budget keeps, largest cost first, ties to the lower index; the union where `untouched`."""
    E = len(cost)
    ranked, order = cost.sort(descending=True, stable=True)
    if groups is None and tau is None and floor is None and isinstance(limit, int):
        # The common case, with the fewest launches.
        kept = torch.zeros_like(union).scatter_(0, order[:limit], ranked[:limit] > 0)
        return torch.where(untouched | (union.sum() <= limit), union, kept)

    place = torch.arange(E, device=cost.device)
    start: int | Tensor = 0
    end: int | Tensor = E
    if groups is not None:
        group, regrouped = groups[order].sort(stable=True)
        ranked, order = ranked[regrouped], order[regrouped]
        start, end = torch.searchsorted(group, group), torch.searchsorted(group, group, right=True)
        if isinstance(limit, Tensor) and limit.ndim == 1:
            limit = limit[order]
    keep = (place - start < limit) & (ranked > 0)
    if tau is None and floor is None:
        chosen = union[order]
        running = pad(chosen.cumsum(0), (1, 0))
        keep |= chosen & (running[end] - running[start] <= limit)
    else:
        ranked = ranked.double()
        total = ranked.sum() if groups is None else torch.where(group.unsqueeze(1) == group, ranked, 0.0).sum(1)
        share = ranked / total.clamp_min(torch.finfo(torch.float64).tiny)
        if tau is None:
            keep &= (share >= floor) | (place == start)
        else:
            running = pad(share.cumsum(0), (1, 0))
            keep &= (running[place] - running[start] < tau) | (tau >= 1)
    return torch.where(untouched, union, torch.zeros_like(union).scatter_(0, order, keep))
