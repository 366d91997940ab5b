"""What is evaluated: the variants of every policy, and the units of the whole report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calibrate.evaluation.subject import MIXED, ONE_TASK, Subject
from calibrate.evaluation.units import Row, Unit
from calibrate.evaluation.variants import UNION, Variant

BUDGETED = ("base", "static_energy", "squared_weight", "weight_sum", "top1_union", "oracle", "exfold", "xshare")
"""Policies that take a budget; the others size their active set by an option."""
RIVALS = ("top_k", "oea", "sere", "lynx", "exfold", "xshare")
CONTROLS = ("static_energy", "squared_weight", "weight_sum", "oracle")
REGIMES = {"restricted": 1, "relaxed": 2}
"""The paper's two regimes by the union of each row's first n experts, which is what OEA and SERE load there."""
LADDER = (1 / 32, 1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)
"""Shares of the experts that the curves go through."""
SERE_THRESHOLDS = {"frobenius": (0.0, 0.3, 0.5), "cosine": (0.0, 0.55), "cka": (0.0, 0.3)}
"""Not comparable across the kinds: a cosine of 0 counts as 0.5."""
LYNX = ((0.47, 1), (0.5, 1), (0.7, 1), (1.0, 1), (2.0, 1), (3.0, 2))
SWEEP_BATCHES = (1, 4, 8, 32, 64)


def sized_by_options(policy: str, subject: Subject) -> list[dict[str, Any]]:
    """Hyperparameters at which a policy without a budget is evaluated."""
    few = range(1, min(4, subject.k) + 1)
    if policy == "top_k":
        # What a model does whose top-k is set lower: it normalises its weights, or it does not.
        denominator = "renormalise" if subject.normalises else "native"
        return [{"k": n, "denominator": denominator} for n in few]
    if policy == "oea":
        # The authors renormalise; with BASE's denominator what remains are ranking and size.
        return [*({"k0": n} for n in few), *({"k0": n, "denominator": "native"} for n in few[:2])]
    if policy == "sere":
        return [
            {"primary": n, "threshold": threshold, "similarity": kind}
            for n in few[:2]
            for kind, thresholds in SERE_THRESHOLDS.items()
            for threshold in thresholds
        ]
    if policy == "lynx":
        return [{"alpha": alpha, "beta": beta} for alpha, beta in LYNX]
    return [{}]


def counterpart(rival: Variant) -> Variant:
    """BASE with as many experts as the rival, in every layer and step.

    For a rival that reads exactly what it is allowed that is the same budget, for OEA, top-k and unprotected SERE the
    union that they read, and else what the rival's rule reads of BASE's own rows.
    """
    options = rival.options
    if rival.policy in ("oea", "top_k"):
        return Variant("base", f"{UNION}{options['k0' if rival.policy == 'oea' else 'k']}")
    if rival.policy == "sere" and options["threshold"] == 0:
        return Variant("base", f"{UNION}{options['primary']}")
    keeps = rival.policy == "xshare" and options.get("k0", 1) == 0 and not options.get("raw_logits")
    if rival.policy == "exfold" or keeps:
        return Variant("base", rival.budget)
    return Variant("base", like=rival)


def grid(policies: Sequence[str], budgets: Sequence[str], subject: Subject) -> list[Variant]:
    """Every policy at every budget, or at its own hyperparameters; dense comes first whatever is asked for."""
    variants = [Variant("dense")]
    for policy in policies:
        if policy in BUDGETED:
            variants += [Variant(policy, budget) for budget in budgets]
        elif policy != "dense":
            variants += [Variant(policy, options=options) for options in sized_by_options(policy, subject)]
    if "base" in policies:
        variants += [counterpart(variant) for variant in variants if variant.policy in RIVALS]
    return distinct(variants)


def distinct(variants: Iterable[Variant]) -> list[Variant]:
    """The variants without repeats."""
    return list({variant.label: variant for variant in variants}.values())


def ladder(num_experts: int) -> list[int]:
    """Budgets of the curves."""
    return sorted({max(1, math.ceil(share * num_experts)) for share in LADDER})


def anchors() -> list[Unit]:
    """The units that the rest of the report is laid out by: dense, and OEA in each regime."""
    return [Unit(Variant("dense")), *(Unit(Variant("oea", options={"k0": n})) for n in REGIMES.values())]


def regime_budgets(rows: Sequence[Row]) -> dict[str, int]:
    """Fixed budget of each regime: what OEA reads there on average, rounded down."""
    found = {row["options"]["k0"]: row["active_mean"] for row in rows if row["policy"] == "oea"}
    return {name: max(1, int(found[n])) for name, n in REGIMES.items()}


def main_units(subject: Subject, budgets: Mapping[str, int]) -> list[Unit]:
    """Batches of 16, mixed tasks: every policy with its hyperparameters, rankings and fill rules.

    Args:
        budgets: of the regimes.
    """
    E, fixed = subject.num_experts, [str(n) for n in budgets.values()]
    unions = [f"union:{n}" for n in REGIMES.values()]
    # Every number up to the relaxed one, so that a fixed budget close to any rival's mean is among them.
    rungs = sorted({*ladder(E), *range(max(2, ladder(E)[0]), budgets["relaxed"] + 1)})
    some = list(dict.fromkeys([*[str(n) for n in ladder(E)[1:6:2]], *fixed]))
    variants = [Variant("dense"), *(Variant("base", budget) for budget in [*map(str, rungs), *fixed, *unions])]
    variants += [Variant(policy, budget) for policy in CONTROLS for budget in [*some, *unions]]
    variants += [Variant("top1_union", unions[0])]
    for policy in ("top_k", "oea", "sere", "lynx"):
        variants += [Variant(policy, options=options) for options in sized_by_options(policy, subject)]
    variants += [Variant("lynx", budget, {"alpha": 1.0, "beta": 1, "fill_up": True}) for budget in fixed]
    variants += [Variant("exfold", budget) for budget in [*some, *unions]]
    variants += [Variant("xshare", budget, {"k0": 1}) for budget in [*some, *unions]]
    variants += [Variant("xshare", budget, {"k0": 0}) for budget in [*fixed, *unions]]
    variants += [Variant("xshare", budget, {"k0": 0, "raw_logits": True}) for budget in fixed]
    variants += [Variant("base", budget, {"fill": fill}) for fill in ("drop", "substitute") for budget in fixed]
    variants += [counterpart(variant) for variant in variants if variant.policy in RIVALS]
    return [Unit(variant) for variant in distinct(variants)]


def arrangement_units() -> list[Unit]:
    """Batches of one task, both regimes."""
    variants = [Variant("dense"), *(variant for n in REGIMES.values() for variant in _regime(n))]
    return [Unit(variant, arrangement=ONE_TASK) for variant in variants]


def sweep_units(prompts: int) -> list[Unit]:
    """Other batch sizes in the restricted regime, on the first `prompts` prompts, batches of 16 among them."""
    return [
        Unit(variant, batch=batch, arrangement=MIXED, prompts=prompts)
        for batch in sorted((*SWEEP_BATCHES, 16))
        for variant in [Variant("dense"), *_regime(REGIMES["restricted"])]
    ]


def _regime(n: int) -> list[Variant]:
    budget = f"union:{n}"
    return [
        Variant("base", budget),
        Variant("oracle", budget),
        Variant("oea", options={"k0": n}),
        Variant("sere", options={"primary": n, "threshold": 0.0, "similarity": "frobenius"}),
        Variant("exfold", budget),
        Variant("xshare", budget, {"k0": 0}),
    ]
