"""Variants: a policy with its budget and its hyperparameters, as the evaluation runs it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from base_core import Budget, Predictor
from base_core.policies import RivalCalibration, Step, run_policy
from base_core.selection import Selection
from calibrate.evaluation.scaling import read_scales, scale_restricted

UNION = "union:"
"""Prefix of the evaluation's own budget form: `union:2` allows, in every layer and step, as many experts as the union
of each row's two most preferred ones has. It makes policies comparable at exactly equal active experts (paper table 2).
"""
LAYERS = "layers:"
"""Prefix of a budget plan written out, as `layers:0=9,1=12`, so that a row says all of it and depends on no file."""
READS = {"base": "predicted", "static_energy": "static", "oracle": "true"}
"""Which log-energies a policy reads."""


@dataclass(frozen=True)
class Variant:
    """One line of the evaluation.

    Attributes:
        policy: a name of `base_core.policies.POLICIES`.
        budget: in the forms of `base_core.budget`, `union:n` or `layers:...`; `off` for policies that size
            their active set themselves, and beside `like`.
        options: of the policy; `similarity` (frobenius, cosine or cka) names SERE's matrix, and `scale` gives factors
            as `calibrate.evaluation.scaling` writes them.
        like: in every layer and step as many experts are allowed as this other variant would have read of the same
            rows; it needs no true energies.
    """

    policy: str
    budget: str = "off"
    options: Mapping[str, Any] = field(default_factory=dict)
    like: Variant | None = None

    @property
    def label(self) -> str:
        """As tables name it: `sere primary=1 threshold=0.3`."""
        parts = [self.policy, *(f"{name}={value}" for name, value in self.options.items())]
        if self.like is not None:
            parts.append(f"@as {self.like.label}")
        return " ".join(parts if self.budget == "off" else [*parts, f"@{self.budget}"])


class VariantRule:
    """A variant as a `Rule` for one model.

    Raises:
        ValueError: a budget that is none or does not fit, or calibration that the policy needs and lacks.
    """

    def __init__(
        self,
        variant: Variant,
        num_experts: int,
        predictor: Predictor | None,
        rivals: Mapping[str, Mapping[int, RivalCalibration]] | None,
    ) -> None:
        self.policy = variant.policy
        self.reads = READS.get(variant.policy)
        self.reads_true_energy = self.reads == "true"
        self.options = dict(variant.options)
        similarity = self.options.pop("similarity", "frobenius")
        self.scales = read_scales(self.options.pop("scale", ""))
        self.calibration = {} if rivals is None else rivals[similarity]
        self.predictor = predictor
        if self.reads in ("predicted", "static") and predictor is None:
            raise ValueError(f"policy {variant.policy!r} needs a predictor: pass one with --predictor")
        self.like = None if variant.like is None else VariantRule(variant.like, num_experts, predictor, rivals)
        self.first, self.budget = None, Budget()
        if variant.budget.startswith(UNION):
            self.first = union_size(variant.budget)
        elif variant.budget.startswith(LAYERS):
            self.budget = read_layers(variant.budget)
        else:
            self.budget = Budget.parse(variant.budget)
            if self.budget.layers is None:
                self.budget.limit(num_experts)

    def log_energy(self, layer: int, z: NDArray, true: NDArray | None) -> NDArray | None:
        """See `Rule`."""
        if self.reads == "true":
            return true
        if self.reads is None or self.predictor is None:
            return None
        fitted = self.predictor.layers[layer]
        return fitted.log_energy(z) if self.reads == "predicted" else fitted.static_log_energy()

    def __call__(self, layer: int, step: Step) -> Selection:
        """See `Rule`."""
        if layer in self.calibration:
            step = Step(step.routing, step.rows, step.log_energy, step.logits, self.calibration[layer])
        if self.like is not None:
            budget = Budget(experts=int(self.like(layer, step).active.sum()))
        elif self.first is not None:
            budget = Budget(experts=int(step.members(step.ranked_ids[:, : self.first]).sum()))
        else:
            budget = self.budget.for_layer(layer)
        selection = run_policy(self.policy, step, budget, **self.options)
        return scale_restricted(selection, step, self.scales[layer]) if layer in self.scales else selection


def write_layers(given: Mapping[int, int]) -> str:
    """Experts of each layer as a budget `layers:...`."""
    return LAYERS + ",".join(f"{layer}={experts}" for layer, experts in sorted(given.items()))


def read_layers(budget: str) -> Budget:
    """The plan that `write_layers` wrote out."""
    pairs = (pair.split("=") for pair in budget.removeprefix(LAYERS).split(","))
    return Budget(layers={int(layer): Budget.parse(experts) for layer, experts in pairs})


def union_size(budget: str) -> int:
    """n of `union:n`.

    Raises:
        ValueError: not a positive whole number.
    """
    text = budget.removeprefix(UNION)
    if not re.fullmatch(r"[1-9]\d*", text, re.ASCII):
        raise ValueError(f"budget {budget!r}: after union: comes a positive number of ranks, as in union:1")
    return int(text)
