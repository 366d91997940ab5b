"""One MoE layer under a selection rule, and what is measured there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backends.cuda.experts import routed_outputs
from backends.cuda.families import MoELayer, correction_bias, router_rule, routing_terms
from base_core.policies import Step
from base_core.routing import Routing
from base_core.selection import DECODE, Selection, removal_cost


class Rule(Protocol):
    """A selection rule for the layers of one model.

    Attributes:
        reads_true_energy: every routed expert has to run before the choice.
    """

    reads_true_energy: bool

    def log_energy(self, layer: int, z: NDArray, true: NDArray | None) -> NDArray | None:
        """What `Step.log_energy` is to hold for router inputs z [R, d] of all batches: [R, E], [E] or None."""

    def __call__(self, layer: int, step: Step) -> Selection:
        """The choice for one batch of one layer."""


class Rows(Protocol):
    """The rows of the coming forward pass: their kinds int [R], in batches of `batch` rows."""

    kinds: NDArray
    batch: int


class LayerProbe:
    """Hooks on one layer: routes every batch by the rule and adds up what happens. Measures decode rows only."""

    def __init__(self, layer: MoELayer, rule: Rule, rows: Rows, measure: bool) -> None:
        self.layer, self.rule, self.rows, self.measure = layer, rule, rows, measure
        self.router_rule, self.bias = router_rule(layer), correction_bias(layer)
        self.active: list[int] = []
        self.union: list[int] = []
        self.retained: list[float] = []
        self.fallbacks = 0
        self.squared_error = self.squared_norm = 0.0
        self._dense: Tensor | None = None
        self._handles: list[Any] = []

    def open(self) -> None:
        """Installs the hooks."""
        self._handles.append(self.layer.router.register_forward_hook(self._route))
        if self.measure:
            self._handles.append(self.layer.experts.register_forward_hook(self._compare))

    def close(self) -> None:
        """Takes them away."""
        for handle in self._handles:
            handle.remove()

    def _route(self, router: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, ids = output
        z = args[0].reshape(-1, args[0].shape[-1])
        E = self.layer.num_experts
        true = None
        if self.measure or self.rule.reads_true_energy:
            outputs = routed_outputs(self.layer.experts, z, ids)
            self._dense = (outputs * weights.unsqueeze(-1)).sum(1)
            energy = outputs.float().square().sum(-1).log()
            true = torch.zeros(len(ids), E, device=ids.device).scatter_(1, ids, energy).cpu().numpy()
        terms = routing_terms(logits, self.router_rule, self.bias)
        scores, preference, native_ids, native_weights, raw = (
            tensor.cpu().numpy()
            for tensor in (terms.scores.float(), terms.preference.float(), ids, weights.float(), logits.float())
        )
        log_energy = self.rule.log_energy(self.layer.index, z.float().cpu().numpy(), true)
        new_ids, new_weights = np.zeros_like(native_ids), np.zeros_like(native_weights)
        for start in range(0, len(ids), self.rows.batch):
            part = slice(start, start + self.rows.batch)
            kinds = self.rows.kinds[part].copy()
            voting = kinds == DECODE
            if not voting.any():
                continue
            step = Step(
                Routing(scores[part], preference[part], native_ids[part], native_weights[part]),
                kinds,
                log_energy=log_energy if log_energy is None or log_energy.ndim == 1 else log_energy[part],
                logits=raw[part],
            )
            selection = self.rule(self.layer.index, step)
            new_ids[part], new_weights[part] = selection.ids, selection.weights
            self.active.append(int(selection.active.sum()))
            self.union.append(len(np.unique(native_ids[part][voting])))
            self.fallbacks += selection.fell_back
            if self.measure and true is not None:
                cost = removal_cost(native_ids[part], native_weights[part], true[part], voting, E)
                self.retained.append(retained_energy(cost, selection.active))
        return logits, torch.from_numpy(new_weights).to(weights), torch.from_numpy(new_ids).to(ids)

    def _compare(self, experts: nn.Module, args: tuple, output: Tensor) -> None:
        assert self._dense is not None
        decoding = torch.from_numpy(self.rows.kinds == DECODE).to(output.device)
        dense = self._dense[decoding].double()
        self.squared_error += float((output[decoding].double() - dense).square().sum())
        self.squared_norm += float(dense.square().sum())


def retained_energy(cost: NDArray[np.float32], active: NDArray[np.bool_]) -> float:
    """True removal cost inside `active`, relative to the best set of as many experts.

    Args:
        cost: [E], of true energies.
        active: bool [E].
    """
    best = np.sort(cost)[::-1][: active.sum()].sum(dtype=np.float64)
    return min(1.0, float(cost[active].sum(dtype=np.float64) / best)) if best > 0 else 1.0


@dataclass(frozen=True)
class Tally:
    """Sums over the decode steps of all batches, one entry a layer.

    Attributes:
        layers: indices.
        active_mean, active_max: experts read.
        union_mean: experts that the rows chose natively.
        fallbacks: steps that kept native routing because a cost was not finite.
        retained_energy: mean over steps, or None where it was not measured.
        layer_error: squared error of the routed output relative to the dense one's squared norm, at the same input.
    """

    layers: tuple[int, ...]
    active_mean: tuple[float, ...]
    active_max: tuple[int, ...]
    union_mean: tuple[float, ...]
    fallbacks: int
    retained_energy: tuple[float, ...] | None
    layer_error: tuple[float, ...] | None

    @classmethod
    def of(cls, probes: Sequence[LayerProbe]) -> Tally:
        measured = all(probe.retained for probe in probes)
        return cls(
            tuple(p.layer.index for p in probes),
            tuple(float(np.mean(p.active)) for p in probes),
            tuple(max(p.active) for p in probes),
            tuple(float(np.mean(p.union)) for p in probes),
            sum(p.fallbacks for p in probes),
            tuple(float(np.mean(p.retained)) for p in probes) if measured else None,
            tuple(p.squared_error / p.squared_norm for p in probes) if measured else None,
        )
