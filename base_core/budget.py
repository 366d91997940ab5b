"""Budgets: how many experts one MoE layer may read in one decode step.

16                     at most 16 experts in every layer
12.5%                  that share of the layer's experts, rounded up
energy:0.98            as few experts as hold 98 % of the step's predicted removal cost
energy:0.98,max=24     the same, but never more than 24
share:0.01             the experts that hold at least 1 % of that cost each, one threshold for all layers
share:0.01,max=24      the same, but never more than 24
plan:FILE              a JSON plan with a budget of its own for each layer (a path ending in .json works too)
off                    the stock model
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

from base_core.files import write_atomically

FORMS = "a number (16), a percentage (12.5%), energy:TAU, share:SHARE, either with ,max=N, plan:FILE, or off"
SHARES = {"energy:": ("tau", "energy:0.98"), "share:": ("floor", "share:0.01")}
"""Forms that begin with a share of the cost: the field of `Budget` that takes it, and an example."""
PLAN_FORMAT = "base-moe-plan"
PLAN_VERSION = 1


class BudgetError(ValueError):
    """A budget that cannot be read, or that does not fit the model."""


@dataclass(frozen=True)
class Budget:
    """A parsed budget; see the module's text for the forms.

    Attributes:
        experts: at most this many experts, or None.
        percent: at most this share of the experts, in percent, or None.
        tau: share of the removal cost to keep, in (0, 1], or None.
        floor: share of the removal cost that an expert needs for itself, in (0, 1], or None; the largest always stays.
        layers: budget of each layer by layer index (a plan), or None.

    With nothing set the budget is off. `experts` or `percent` beside `tau` or `floor` is a cap. `tau` and
    `floor` exclude each other.
    """

    experts: int | None = None
    percent: float | None = None
    tau: float | None = None
    floor: float | None = None
    layers: Mapping[int, Budget] | None = None

    @classmethod
    def parse(cls, text: str | int | Budget) -> Budget:
        """Reads a budget from its text form.

        Raises:
            BudgetError: unknown text, a number below 1, a share outside its range, or a plan that cannot be read.
        """
        if isinstance(text, Budget):
            return text
        if isinstance(text, int) and not isinstance(text, bool):
            text = str(text)
        if not isinstance(text, str):
            raise BudgetError(f"budget {text!r} is a {type(text).__name__}: give {FORMS}")
        text = text.strip()
        if text.lower() == "off":
            return cls()
        if text.startswith("plan:") or text.endswith(".json"):
            return load_plan(text.removeprefix("plan:"))
        for form, (field, example) in SHARES.items():
            if text.startswith(form):
                share, cap = _parse_share(text, form, example)
                return replace(cap, tau=share) if field == "tau" else replace(cap, floor=share)
        return _parse_limit(text, text)

    @property
    def follows_cost(self) -> bool:
        """True when the costs of a step say how many experts it reads, so that a small union may be cut too."""
        return self.tau is not None or self.floor is not None

    @property
    def is_off(self) -> bool:
        """True when nothing is restricted."""
        return self == Budget()

    def for_layer(self, layer: int) -> Budget:
        """The budget of one layer: the plan's entry, or this budget itself.

        Raises:
            BudgetError: a plan without an entry for `layer`.
        """
        if self.layers is None:
            return self
        if layer not in self.layers:
            known = ", ".join(map(str, sorted(self.layers)))
            raise BudgetError(
                f"the budget plan has no entry for layer {layer} (it has {known}): add one, or use off there"
            )
        return self.layers[layer]

    def limit(self, num_experts: int) -> int:
        """The most experts this budget allows out of `num_experts`, in 1..num_experts.

        Raises:
            BudgetError: more experts than there are, or a plan (take `for_layer` first).
        """
        if self.layers is not None:
            raise BudgetError("a budget plan has one budget per layer: take for_layer(i) first")
        if self.percent is not None:
            return max(1, math.ceil(num_experts * self.percent / 100))
        if self.experts is None:
            return num_experts
        if not 1 <= self.experts <= num_experts:
            raise BudgetError(f"budget {self.experts} is outside 1..{num_experts}, the number of experts of this layer")
        return self.experts

    def __str__(self) -> str:
        if self.layers is not None:
            return "plan"
        limit = f"{self.percent:g}%" if self.percent is not None else "" if self.experts is None else str(self.experts)
        for form, (field, _) in SHARES.items():
            share = getattr(self, field)
            if share is not None:
                return f"{form}{Decimal(str(float(share))).normalize():f}" + (f",max={limit}" if limit else "")
        return limit or "off"


def _number(text: str, budget: str) -> float:
    if not re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)\s*", text, re.ASCII):
        raise BudgetError(f"budget {budget!r} is not understood: give {FORMS}")
    return float(text)


def _parse_share(text: str, form: str, example: str) -> tuple[float, Budget]:
    share, separator, cap = text.removeprefix(form).partition(",")
    if separator and not cap.strip().startswith("max="):
        raise BudgetError(f"budget {text!r}: after the comma comes max=N, as in {example},max=24")
    value = _number(share, text)
    if not 0 < value <= 1:
        raise BudgetError(f"budget {text!r}: the share {share} of the cost is outside (0, 1], try {example}")
    return value, _parse_limit(cap.strip().removeprefix("max="), text) if separator else Budget()


def _parse_limit(text: str, budget: str) -> Budget:
    if text.endswith("%"):
        percent = _number(text[:-1], budget)
        if not 0 < percent <= 100:
            raise BudgetError(f"budget {budget!r}: the percentage is outside (0, 100]")
        return Budget(percent=percent)
    experts = _number(text, budget)
    if experts != int(experts):
        raise BudgetError(f"budget {budget!r}: experts come whole; for a share write {text}%")
    if experts < 1:
        raise BudgetError(f"budget {budget!r} is below 1: give 1..E experts, or off")
    return Budget(experts=int(experts))


def load_plan(path: str | os.PathLike) -> Budget:
    """Reads a plan file: `{"format": "base-moe-plan", "version": 1, "layers": {"0": "16", "1": "energy:0.98"}}`.

    Raises:
        BudgetError: no such file, not a plan, or an entry that is no budget; the message names the entry.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BudgetError(f"budget plan {str(path)!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise BudgetError(f"budget plan {str(path)!r} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != PLAN_FORMAT:
        raise BudgetError(f"{str(path)!r} is no budget plan: its format field must be {PLAN_FORMAT!r}")
    if document.get("version") != PLAN_VERSION:
        raise BudgetError(
            f"budget plan {str(path)!r} has version {document.get('version')!r}: this release reads {PLAN_VERSION}"
        )
    entries = document.get("layers")
    if not isinstance(entries, dict) or not entries:
        raise BudgetError(f"budget plan {str(path)!r}: layers must map layer indices to budgets")
    layers: dict[int, Budget] = {}
    for key, text in entries.items():
        if not re.fullmatch(r"\d+", key, re.ASCII):
            raise BudgetError(f"budget plan {str(path)!r}: layer {key!r} is not an index")
        if isinstance(text, str) and (text.startswith("plan:") or text.endswith(".json")):
            raise BudgetError(f"budget plan {str(path)!r}, layer {key}: a plan cannot hold another plan")
        try:
            layers[int(key)] = Budget.parse(text)
        except BudgetError as error:
            raise BudgetError(f"budget plan {str(path)!r}, layer {key}: {error}") from error
    return Budget(layers=layers)


def save_plan(path: str | os.PathLike, layers: Mapping[int, Budget]) -> None:
    """Writes a plan file, whole or not at all."""
    document = {
        "format": PLAN_FORMAT,
        "version": PLAN_VERSION,
        "layers": {str(i): str(b) for i, b in sorted(layers.items())},
    }
    write_atomically(path, (json.dumps(document, indent=2) + "\n").encode())
