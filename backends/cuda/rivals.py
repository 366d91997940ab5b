"""Published rivals in PyTorch without host synchronisation, for speed at equal active experts on the same kernels.

`base_core.policies` is the reference, which also has Lynx and ExFold: the former keeps one anchor a row as OEA with
k0 = 1 does, and the latter reads as many experts as BASE under the same budget, so neither would add a time of its own.
All rows decode here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backends.cuda.families import RoutingTerms, correction_bias, find_moe_layers, router_rule, routing_terms
from backends.cuda.selection import fill_no_sync, native_union

Rule = Callable[[RoutingTerms, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From scores and preference [T, E], ids and weights [T, k] of a router to the ids and weights that are executed."""


@dataclass(frozen=True)
class Oea:
    """Union of each row's first `k0` experts, backfilled, renormalised: see `base_core.policies.Oea`."""

    k0: int

    def __call__(self, terms: RoutingTerms, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return _restrict(terms, ids, weights, _first(terms, ids, self.k0))


@dataclass(frozen=True)
class XShare:
    """First `k0` experts of each row, then the largest score sums up to `budget`: see `base_core.policies.XShare`."""

    budget: int
    k0: int = 1

    def __call__(self, terms: RoutingTerms, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        warm = _first(terms, ids, self.k0)
        order = torch.where(warm, torch.inf, terms.scores.sum(0)).sort(descending=True, stable=True).indices
        place = torch.arange(len(order), device=order.device)
        active = torch.zeros_like(warm).scatter_(0, order, place < warm.sum().clamp_min(self.budget))
        return _restrict(terms, ids, weights, active)


@dataclass(frozen=True, eq=False)
class Sere:
    """Experts beyond each row's first `primary` become the most similar of those: see `base_core.policies.Sere`.

    Attributes:
        primary: S.
        similarity: float [E, E].
    """

    primary: int
    similarity: Tensor

    def __call__(self, terms: RoutingTerms, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        primaries = _first(terms, ids, self.primary)
        nearest = torch.where(primaries, self.similarity, -torch.inf).argmax(1)
        return torch.where(primaries.take(ids), ids, nearest.take(ids)), weights


def _first(terms: RoutingTerms, ids: Tensor, k0: int) -> Tensor:
    """bool [E]: the `k0` most preferred experts of every row."""
    places = terms.preference.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    first = ids.gather(1, places[:, :k0])
    return native_union(first, torch.ones(len(ids), 1, dtype=torch.bool, device=ids.device), terms.scores.shape[1])


def _restrict(terms: RoutingTerms, ids: Tensor, weights: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    real = torch.ones(len(ids), 1, dtype=torch.bool, device=ids.device)
    return fill_no_sync(terms.scores, ids, weights, active, terms.preference, real, "backfill", "renormalise")


@contextmanager
def rival(model: nn.Module, rule: Rule) -> Iterator[None]:
    """Every router of `model` returns what `rule` makes of its output."""
    handles = []
    for layer in find_moe_layers(model):
        terms = (router_rule(layer), correction_bias(layer))

        def hook(_module: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor], terms=terms) -> Any:
            logits, weights, ids = output
            new_ids, new_weights = rule(routing_terms(logits, *terms), ids, weights)
            return logits, new_weights, new_ids

        handles.append(layer.router.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
