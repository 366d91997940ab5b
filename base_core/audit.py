"""Audit: the true energies of executed experts beside the predicted ones. What every backend shares of it."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from base_core.report import format_table

DRIFT_BOUND = 0.25
"""Largest mean drift of a layer, either way, that raises no warning: log-energies, so 28 % of the energy."""
CORRECTION_RATE = 0.1
"""Share of an audited step's mean drift of an expert that its intercept takes over."""
DEFAULT_AUDIT = 16
"""Decode steps from one audit to the next where `--audit` names no number."""
NOTHING_TO_WATCH = "audit watches what a budget removes, and the budget is off: give one, or set audit=0"
SUMS = 6
"""A layer's sums: audited steps, pairs, drift, its square, removal cost kept, removal cost in all."""


@dataclass(frozen=True)
class LayerAudit:
    """One layer's audit; None where no pair was audited.

    Attributes:
        layer: its index.
        pairs: audited pairs: a decode row and a native expert of it that was executed.
        drift: mean of true minus predicted log-energy, natural log, the predictor as in force at the time. What
            calibration added for exponentiating is taken off, so that an exact predictor has 0.
        rms: root of the mean square of the same.
        kept_energy: share of the step's removal cost that the active set held: true for what was executed, predicted
            for what was removed.
    """

    layer: int
    pairs: int
    drift: float | None
    rms: float | None
    kept_energy: float | None


@dataclass(frozen=True)
class AuditStats:
    """Of a session: the number of audited decode steps, and the layers under the budget."""

    steps: int
    layers: tuple[LayerAudit, ...]

    @classmethod
    def of_sums(cls, layers: Sequence[int], sums: Iterable[Sequence[float]]) -> AuditStats:
        """From the `SUMS` sums of each layer, in the order of the layers' indices."""
        found, steps = [], 0
        for layer, (n, pairs, first, second, kept, whole) in zip(layers, sums, strict=True):
            steps = max(steps, round(n))
            found.append(
                LayerAudit(
                    layer,
                    round(pairs),
                    first / pairs if pairs else None,
                    (second / pairs) ** 0.5 if pairs else None,
                    kept / whole if whole else None,
                )
            )
        return cls(steps, tuple(found))

    def warning(self) -> str | None:
        """What to say where a layer drifts beyond `DRIFT_BOUND`, or None."""
        far = [a for a in self.layers if a.drift is not None and not abs(a.drift) <= DRIFT_BOUND]
        if not far:
            return None
        worst = max(far, key=lambda a: abs(a.drift or 0))
        return (
            f"audit: the predictor drifts by more than {DRIFT_BOUND:g} (natural log of the energy) in {len(far)} of "
            f"{len(self.layers)} layers, most in layer {worst.layer} by {worst.drift:+.3f}: calibrate on text like "
            f"this, or let audit_correct follow it"
        )

    def warn(self) -> None:
        """Raises a Python warning where there is one."""
        text = self.warning()
        if text is not None:
            warnings.warn(text, stacklevel=3)


def check_audit(audit: int, correct: bool, ranking: str) -> None:
    """Refuses the audit of a policy.

    Raises:
        ValueError: a negative number, a correction without an audit, or a ranking that predicts no energies by row.
    """
    if audit < 0 or (correct and not audit):
        raise ValueError(f"audit {audit}: give 1 or more decode steps between two audits, or 0 and no correction")
    if audit and ranking != "removal_cost":
        raise ValueError(f"audit compares predicted energies, which ranking {ranking!r} does not read")


def add_audit_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `--audit` and `--audit-correct`."""
    parser.add_argument(
        "--audit",
        type=int,
        nargs="?",
        const=DEFAULT_AUDIT,
        default=0,
        metavar="N",
        help=f"every N decode steps (alone: {DEFAULT_AUDIT}) also measure true energies; warns of drift",
    )
    parser.add_argument(
        "--audit-correct", action="store_true", help="with --audit: the predictor's intercepts follow what is measured"
    )


def audit_table(audit: Mapping[str, Any]) -> str:
    """`AuditStats` as text, a layer a line.

    Args:
        audit: its fields by name, layers included (`dataclasses.asdict`).
    """

    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        [
            f"layer {a['layer']}",
            str(a["pairs"]),
            cell(a["kept_energy"], ".2%"),
            cell(a["drift"], "+.3f"),
            cell(a["rms"], ".3f"),
        ]
        for a in audit["layers"]
    ]
    return format_table([[f"audit, {audit['steps']} steps", "pairs", "energy kept", "drift", "rms"], *rows])
