"""BASE against each rival: at equal active experts, at equal time for a step, and at equal quality."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from base_core.report import paired_interval
from calibrate.evaluation.plan import counterpart
from calibrate.evaluation.units import Row, unpack_bits
from calibrate.evaluation.variants import UNION, Variant

TOLERANCE = 0.01
"""BASE may read this share more experts than the rival and still count as equal: the means of one budget differ by so
much between two policies, because each decodes its own text."""


@dataclass(frozen=True)
class Comparison:
    """BASE and a rival on the same prompts.

    Attributes:
        base, rival: their rows.
        difference, low, high: BASE's accuracy minus the rival's, with its 95 % interval.
    """

    base: Row
    rival: Row
    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`base`, `rival`, or `even` where the interval holds zero."""
        return "base" if self.low > 0 else "rival" if self.high < 0 else "even"


def compare(base: Row, rival: Row) -> Comparison | None:
    """Pairs two rows prompt by prompt; None without answers."""
    if base["right"] is None or rival["right"] is None:
        return None
    if base["prompts"] != rival["prompts"]:
        raise ValueError(f"{base['label']} and {rival['label']} answered different prompts: evaluate both on the same")
    first, second = (unpack_bits(row["right"], row["prompts"]) for row in (base, rival))
    only_base, only_rival = int((first & ~second).sum()), int((second & ~first).sum())
    low, high = paired_interval(only_base, only_rival, len(first))
    return Comparison(base, rival, (only_base - only_rival) / len(first), low, high)


def is_plain_base(row: Row) -> bool:
    """Whether a row is BASE as published, at some budget."""
    return row["policy"] == "base" and not row["options"]


def setting(row: Row) -> tuple[Any, ...]:
    """What two rows must share to be compared."""
    return row["model"], row["batch"], row["arrangement"], row["seed"], row["prompts"]


def is_fixed_base(row: Row) -> bool:
    """Whether a row is BASE as published: one number of experts for all layers and steps."""
    return is_plain_base(row) and row["budget"] != "off" and not row["budget"].startswith(UNION)


def match_every_step(rival: Row, rows: Iterable[Row]) -> Row | None:
    """The BASE row with as many experts as the rival in every layer and step, see `counterpart`; None without one."""
    label = counterpart(Variant(rival["policy"], rival["budget"], rival["options"])).label
    return next((row for row in rows if row["label"] == label and setting(row) == setting(rival)), None)


def match_fixed(rival: Row, rows: Iterable[Row], spared: float = 0.0) -> Row | None:
    """The BASE row of a fixed budget that reads most without reading more than the rival on average.

    Args:
        spared: experts that BASE has to do with less.
    """
    limit = rival["active_mean"] * (1 + TOLERANCE) - spared
    fitting = [row for row in rows if is_fixed_base(row) and setting(row) == setting(rival)]
    fitting = [row for row in fitting if row["active_mean"] <= limit]
    return max(fitting, key=lambda row: row["active_mean"], default=None)


@dataclass(frozen=True)
class StepCost:
    """Time of one MoE layer by what it reads, from a bench file.

    Attributes:
        fixed_ms, expert_ms: ms a layer = fixed_ms + expert_ms * active experts, least squares over the bench's rows
            without what their selection takes.
        selection_ms: by policy, what its selection adds to a layer. One that was not measured counts as free.
        source: name of the file.
        what: model shape, rows and machine of the bench, in words.
    """

    fixed_ms: float
    expert_ms: float
    selection_ms: Mapping[str, float]
    source: str
    what: str

    def spared(self, rival: str) -> float:
        """Experts that BASE has to do with less than this policy, because its selection takes longer."""
        more = self.selection_ms["base"] - self.selection_ms.get(rival, 0.0)
        return more / self.expert_ms

    def layer_ms(self, policy: str, experts: float) -> float:
        """Time of a layer."""
        return self.fixed_ms + self.expert_ms * experts + self.selection_ms.get(policy, 0.0)

    @classmethod
    def read(cls, path: Path) -> StepCost:
        """From `base-moe bench --json`.

        Raises:
            ValueError: a file that is none, or whose rows do not give a cost for each expert.
        """
        try:
            report = json.loads(path.read_text())
            rows = [row for row in report["rows"] if row["policy"] in ("dense", "base")]
            points = [(r["active_mean"], r["ms_per_layer"] - (r["selection_ms_per_layer"] or 0)) for r in rows]
            taken: dict[str, list[float]] = {}
            for row in report["rows"]:
                if row.get("selection_ms_per_layer") is not None:
                    taken.setdefault(row["policy"], []).append(row["selection_ms_per_layer"])
            selection = {policy: max(0.0, float(np.median(found))) for policy, found in taken.items()}
            active, milliseconds = np.array(points, float).T
            slope, fixed = np.polyfit(active, milliseconds, 1)
            settings = report["settings"]
            machine = f"{settings['threads']} CPU threads" if "threads" in settings else settings["device"]
            what = f"{rows[0]['model']}, {rows[0]['batch']} rows, {machine}, {report['versions']['platform']}"
            if "base" not in selection:
                raise ValueError("no time for BASE's selection")
        except (OSError, ValueError, KeyError, TypeError, IndexError, np.linalg.LinAlgError) as error:
            raise ValueError(f"--bench {str(path)!r} is no file of base-moe bench --json: {error}") from error
        if not (slope > 0 and np.isfinite([slope, fixed, *selection.values()]).all()):
            raise ValueError(
                f"--bench {str(path)!r}: time does not grow with experts there; measure on a quiet machine"
            )
        return cls(float(fixed), float(slope), selection, path.name, what)


def experts_for(rows: Sequence[Row], accuracy: float) -> float | None:
    """Active experts at which a policy's rows reach `accuracy`, by straight lines between them; None if they do not.

    The first row that reaches it counts, with the row before it in order of active experts.
    """
    before: Row | None = None
    for row in sorted(rows, key=lambda row: row["active_mean"]):
        if row["accuracy"] >= accuracy:
            if before is None:
                return row["active_mean"]
            rise = row["accuracy"] - before["accuracy"]
            share = (accuracy - before["accuracy"]) / rise
            return before["active_mean"] + share * (row["active_mean"] - before["active_mean"])
        before = row
    return None
