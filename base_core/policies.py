"""Named policies: BASE, its controls, and the published rivals, each a combination of the same parts.

| policy | ranking | active set | lost slot | denominator | calibration |
|---|---|---|---|---|---|
| base | removal cost, predicted | budget | backfill | native | predictor |
| oracle | removal cost, true energy | budget | backfill | native | none, but every expert runs |
| static_energy | removal cost, mean energy | budget | backfill | native | predictor file |
| squared_weight, weight_sum, top1_union | router weights | budget | backfill | native | none |
| top_k | router weights | union of each row's first k | drop | renormalise | none |
| oea | none | union of each row's first k0 | backfill | renormalise | none |
| sere | none | union of each row's first S, and what resembles none of it | substitute | native | similarity |
| lynx | votes by affinity bin | union of each row's anchor, then perhaps the budget | backfill | renormalise | none |
| exfold | weight x mean norm | budget | fold | scaled | norms, scalars, losses |
| xshare | score sum | first k0 of each row, then the budget | backfill | renormalise | none |

Only decode rows vote and are restricted, whatever the policy; a batch that holds a prefill row is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from base_core.budget import Budget
from base_core.routing import Routing, at, most_preferred
from base_core.selection import DECODE, PADDING, PREFILL, Denominator, Selection, fill_slots, named, select


@dataclass(frozen=True)
class RivalCalibration:
    """What SERE and ExFold calibrate for one layer; each policy reads only its own fields.

    Attributes:
        similarity: float [E, E], symmetric, diagonal 1 (SERE).
        norm: float [E], mean ||E_e(z)|| over routed tokens (ExFold).
        fold_scalar: float [E, E], factor c(source -> target) (ExFold).
        fold_loss: float [E, E], relative loss of folding source onto target, finite; above any other where the pair was
            never seen together, and on the diagonal (ExFold).
    """

    similarity: NDArray | None = None
    norm: NDArray | None = None
    fold_scalar: NDArray | None = None
    fold_loss: NDArray | None = None

    def require(self, policy: str, *names: str) -> tuple[NDArray, ...]:
        """The named fields, or a ValueError that says which one `policy` lacks."""
        for name in names:
            if getattr(self, name) is None:
                raise ValueError(f"policy {policy!r} needs the calibration field {name!r}, which is missing")
        return tuple(getattr(self, name) for name in names)


@dataclass(frozen=True)
class Step:
    """One layer's router output in one step, and what the policies may read beside it.

    Attributes:
        routing: scores, preference [T, E], ids, weights [T, k].
        rows: int [T], 0 padding, 1 decode, 2 prefill.
        log_energy: float [T, E] or [E]; which one depends on the ranking, see `base_core.select`.
        logits: float [T, E], read by Lynx and XShare; the log of the scores when None, which is as good for softmax.
        calibration: of the rivals.
    """

    routing: Routing
    rows: NDArray
    log_energy: NDArray | None = None
    logits: NDArray | None = None
    calibration: RivalCalibration = RivalCalibration()

    @property
    def k(self) -> int:
        return self.routing.ids.shape[1]

    @property
    def num_experts(self) -> int:
        return self.routing.scores.shape[1]

    @property
    def router_logits(self) -> NDArray:
        if self.logits is not None:
            return self.logits
        return np.log(np.maximum(self.routing.scores, np.finfo(np.float32).tiny))

    @property
    def ranked_ids(self) -> NDArray[np.int64]:
        """Native choice [T, k], most preferred first."""
        native = at(self.routing.preference, self.routing.ids)
        by_id = np.argsort(self.routing.ids, axis=1)
        order = at(by_id, most_preferred(at(native, by_id), self.k))
        return at(self.routing.ids, order)

    def members(self, ids: NDArray) -> NDArray:
        """bool [E]: the experts that decode rows name in `ids` [T, any]."""
        return named(ids[self.rows == DECODE], self.num_experts)


@dataclass(frozen=True)
class Oea:
    """Opportunistic Expert Activation, simplified form (2511.02237): `k0` experts of each row are sure to run.

    The authors renormalise over what a row executes; models with raw weights are not among theirs, so the `denominator`
    is a switch.
    """

    k0: int = 4
    denominator: Denominator = "renormalise"

    def __call__(self, step: Step, budget: Budget) -> Selection:
        _in_range("oea", "k0", self.k0, 1, step.k)
        active = step.members(step.ranked_ids[:, : self.k0])
        return _restrict(step, active, self.denominator, np.zeros(step.num_experts, np.float32))


@dataclass(frozen=True)
class Sere:
    """Similarity-based re-routing (2602.07616): the first `primary` experts stay, the others go to the likest of them.

    An expert less similar than `threshold` to every primary one is critical and stays loaded; 0 protects none. Weights
    never change and two slots of a row may name one expert, whose weights then add up.
    """

    primary: int = 2
    threshold: float = 0.0

    def __call__(self, step: Step, budget: Budget) -> Selection:
        _in_range("sere", "primary", self.primary, 1, step.k)
        (similarity,) = step.calibration.require("sere", "similarity")
        primaries = step.members(step.ranked_ids[:, : self.primary])
        return _substitute(step, primaries, similarity, self.threshold, np.zeros(step.num_experts, np.float32))


@dataclass(frozen=True)
class Lynx:
    """AffinityBinning (2411.08982 v2, v3), in the reading that its description admits.

    A routed expert's bin is how far its logit lies below the row's best in steps of 1 / `alpha`, `beta` at most; its
    score sums (rows of the batch) ** -bin over the rows that routed to it. Each row anchors the best-scored expert of
    its top bin. With `fill_up` the best-scored others are added up to the budget, which the authors do not have.
    """

    alpha: float = 1.0
    beta: int = 1
    fill_up: bool = False

    def __call__(self, step: Step, budget: Budget) -> Selection:
        if self.alpha <= 0 or self.beta < 1:
            raise ValueError(f"policy 'lynx': alpha {self.alpha} must be positive and beta {self.beta} at least 1")
        ids = step.ranked_ids
        logits = at(step.router_logits, ids)
        bins = np.minimum(self.beta, np.floor(self.alpha * (logits.max(1, keepdims=True) - logits)))
        voting = step.rows == DECODE
        votes = np.zeros((len(ids), step.num_experts), np.float32)
        np.put_along_axis(votes, ids, np.power(float(max(1, voting.sum())), -bins).astype(np.float32), axis=1)
        score = votes[voting].sum(0)
        best = np.where(bins == 0, score[ids], -np.inf).argmax(1)
        anchors = at(ids, best[:, None])
        active = step.members(anchors)
        if self.fill_up:
            active = _fill_up(active, np.where(score > 0, score, -np.inf), budget)
        return _restrict(step, active, "renormalise", score)


@dataclass(frozen=True)
class ExFold:
    """Expert folding, decode rule (2608.24938): keep the most important experts, fold each lost route onto another.

    Importance is the sum of weight x mean norm. A lost route goes to the kept expert with the least calibrated loss
    and its weight is multiplied by the calibrated scalar, which may be negative. All experts are eligible, routed or
    not.
    """

    def __call__(self, step: Step, budget: Budget) -> Selection:
        norm, scalar, loss = step.calibration.require("exfold", "norm", "fold_scalar", "fold_loss")
        E, ids = step.num_experts, step.routing.ids
        limit = budget.limit(E)
        if limit == E:
            return _untouched(step)
        table = np.zeros((len(ids), E), np.float32)
        np.put_along_axis(table, ids, step.routing.weights * norm[ids], axis=1)
        importance = table[step.rows == DECODE].sum(0).astype(np.float32)
        kept = np.zeros(E, bool)
        kept[most_preferred(importance[None], limit)[0]] = True
        target = np.where(kept, loss, np.inf).argmin(1)
        lost = ~kept[ids]
        moved = np.where(lost, target[ids], ids)
        weights = np.where(lost, step.routing.weights * scalar[ids, target[ids]], step.routing.weights)
        return _executed(step, moved, weights.astype(np.float32), importance)


@dataclass(frozen=True)
class XShare:
    """XShare (2602.07265): the first `k0` experts of each row, then the largest score sums up to the budget.

    With `raw_logits` it is what the vLLM pull request 35551 codes instead: raw logits are summed, so that one row's
    very negative logit can veto an expert; a row's first `k0` are kept for that row alone, so that the active set may
    exceed the budget and others do not share them; and a budget below the native top-k leaves every row its own top-k.
    """

    k0: int = 1
    raw_logits: bool = False

    def __call__(self, step: Step, budget: Budget) -> Selection:
        _in_range("xshare", "k0", self.k0, 0, step.k)
        scores, rows, ids = step.routing.scores, step.rows == DECODE, step.ranked_ids
        total = (step.router_logits if self.raw_logits else scores)[rows].sum(0).astype(np.float32)
        if self.raw_logits:
            limit = budget.limit(step.num_experts)
            allowed = np.zeros(scores.shape, bool)
            allowed[:, most_preferred(total[None], limit)[0]] = True
            np.put_along_axis(allowed, ids if limit < step.k else ids[:, : self.k0], True, axis=1)
            return _restrict(step, allowed, "renormalise", total)
        warm = step.members(ids[:, : self.k0])
        return _restrict(step, _fill_up(warm, total, budget), "renormalise", total)


@dataclass(frozen=True)
class Ranked:
    """A ranking under the budget, with backfill and the native denominator: BASE and its controls.

    The fill may also be `drop`, or `substitute`: a lost route goes to the likest active expert, as SERE has it, and
    keeps its weight (paper table 3).
    """

    ranking: str
    fill: str = "backfill"
    denominator: str = "native"

    def __call__(self, step: Step, budget: Budget) -> Selection:
        routing = step.routing
        substitutes = self.fill == "substitute"
        selection = select(
            routing.scores,
            routing.ids,
            routing.weights,
            step.log_energy,
            budget,
            preference=routing.preference,
            rows=step.rows,
            ranking=self.ranking,  # type: ignore[arg-type]
            fill="drop" if substitutes else self.fill,  # type: ignore[arg-type]
            denominator=self.denominator,  # type: ignore[arg-type]
        )
        if not substitutes:
            return selection
        (similarity,) = step.calibration.require("fill substitute", "similarity")
        return _substitute(step, selection.active, similarity, 0, selection.cost)


@dataclass(frozen=True)
class TopK:
    """Fewer experts a row: its `k` most preferred ones only, weighted as a model of that top-k would.

    Such a model gives them the whole weight if it normalises, and leaves their raw weights alone if it does not: then
    the `denominator` is `native`.
    """

    k: int = 1
    denominator: Denominator = "renormalise"

    def __call__(self, step: Step, budget: Budget) -> Selection:
        _in_range("top_k", "k", self.k, 1, step.k)
        if self.k == step.k:
            return _untouched(step)
        ids, weights, ranked = step.routing.ids, step.routing.weights, step.ranked_ids[:, : self.k]
        kept = (ids[:, :, None] == ranked[:, None, :]).any(2)
        kept_weights = np.where(kept, weights, 0)
        if self.denominator == "renormalise":
            kept_weights *= weights.sum(1, keepdims=True) / kept_weights.sum(1, keepdims=True)
        cost = np.zeros(step.num_experts, np.float32)
        return _executed(step, np.where(kept, ids, ranked[:, :1]), kept_weights, cost)


@dataclass(frozen=True)
class Dense:
    """The stock model."""

    def __call__(self, step: Step, budget: Budget) -> Selection:
        return _untouched(step)


RANKINGS = {
    "base": "removal_cost",
    "weight_sum": "weight_sum",
    "squared_weight": "squared_weight",
    "static_energy": "static_energy",
    "top1_union": "top1_union",
    "oracle": "oracle",
}
"""Ranking of each policy that is nothing but a ranking under the budget."""

POLICIES: dict[str, Callable[..., Callable[[Step, Budget], Selection]]] = {
    "dense": Dense,
    **{name: partial(Ranked, ranking) for name, ranking in RANKINGS.items()},
    "top_k": TopK,
    "oea": Oea,
    "sere": Sere,
    "lynx": Lynx,
    "exfold": ExFold,
    "xshare": XShare,
}


def run_policy(name: str, step: Step, budget: Budget | str | int = "off", **options) -> Selection:
    """Runs the policy `name` on one layer's step.

    Args:
        budget: read by the policies whose active set has one; OEA, SERE and Lynx size theirs by their own options.
        options: the policy's hyperparameters (`k0`, `primary`, `threshold`, `alpha`, `beta`, `fill`, ...).

    Raises:
        ValueError: unknown policy or option, missing calibration, or a hyperparameter outside its range.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}: choose one of {', '.join(POLICIES)}")
    try:
        policy = POLICIES[name](**options)
    except TypeError as error:
        raise ValueError(f"policy {name!r} does not take these options ({error})") from error
    if (step.rows == PREFILL).any():
        return _untouched(step)
    return policy(step, Budget.parse(budget))


def _in_range(policy: str, name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"policy {policy!r}: {name}={value} is outside {low}..{high}")


def _fill_up(active: NDArray[np.bool_], score: NDArray, budget: Budget) -> NDArray[np.bool_]:
    """`active` and the best-scored others up to the budget, without those of score minus infinity."""
    room = max(0, budget.limit(len(active)) - int(active.sum()))
    others = np.where(active, -np.inf, score)
    added = most_preferred(others[None], room)[0]
    filled = active.copy()
    filled[added[others[added] > -np.inf]] = True
    return filled


def _substitute(
    step: Step, active: NDArray[np.bool_], similarity: NDArray, threshold: float, cost: NDArray
) -> Selection:
    """Lost routes go to the likest active expert with their weight, or stay where none is as like as `threshold`."""
    if not active.any():
        return _untouched(step)
    ids = step.routing.ids
    among = np.where(active, similarity, -np.inf)
    nearest = among.argmax(1)
    critical = among.max(1) < threshold if threshold > 0 else np.zeros(step.num_experts, bool)
    return _executed(step, np.where(active[ids] | critical[ids], ids, nearest[ids]), step.routing.weights, cost)


def _untouched(step: Step) -> Selection:
    return _executed(step, step.routing.ids, step.routing.weights, np.zeros(step.num_experts, np.float32))


def _executed(step: Step, ids: NDArray, weights: NDArray, cost: NDArray) -> Selection:
    """What real rows execute is what is read; padding rows repeat an active expert with weight 0."""
    real = step.rows != PADDING
    active = named(ids[real], step.num_experts)
    return Selection(
        np.where(real[:, None], ids, active.argmax()),
        np.where(real[:, None], weights, 0).astype(np.float32),
        active,
        cost,
    )


def _restrict(step: Step, active: NDArray, denominator: Denominator, cost: NDArray) -> Selection:
    """Restricted top-k inside `active`, [E] or of each row [T, E]; experts that no row takes up are not read."""
    routing = step.routing
    allowed = np.broadcast_to(active, routing.scores.shape)
    native = at(allowed, routing.ids).all(1, keepdims=True)
    preference = np.where(allowed, routing.preference, -np.inf)
    anywhere: NDArray[np.bool_] = np.any(allowed, axis=0)
    ids, weights = fill_slots(
        "backfill", denominator, routing.scores, routing.ids, routing.weights, anywhere, preference
    )
    ids = np.where(native, routing.ids, ids)
    weights = np.where(native, routing.weights, weights)
    return _executed(step, ids, weights, cost)
