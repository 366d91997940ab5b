"""Ablation: budgets that choose themselves, and denominators, beside one number of experts for all layers and steps.

Everything that is tuned is tuned on calibration prompts: the plan's curves, the thresholds that make energy and share
budgets read as many experts as the fixed budget does, and the factors of the `scaled` denominator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
from tqdm import tqdm

from base_core.embedded.tasks import examples
from calibrate.evaluation.document import Block, Heading, Table, Text
from calibrate.evaluation.engine import deal
from calibrate.evaluation.matching import TOLERANCE, compare
from calibrate.evaluation.prompt_file import Prompt
from calibrate.evaluation.scaling import fit_scales, write_scales
from calibrate.evaluation.subject import MIXED, Subject
from calibrate.evaluation.tables import CLOSENESS, closeness, interval, percent
from calibrate.evaluation.units import Row, Store, Unit, run_units
from calibrate.evaluation.variants import Variant, write_layers
from calibrate.layer_plan import TRAINING_SEED, WEIGHINGS, allocate, record_damage

TIGHT, LOOSE = (1 / 16, 1 / 8), (1 / 4, 3 / 8)
"""Mean sizes, as shares of a layer's experts."""
CALIBRATION_PROMPTS = 256
BATCH = 16
HALVINGS = 12
SMALLEST_SHARE = 1e-6

ABOUT = (
    "Equal mean active experts: each line is tuned on calibration prompts of the training split, in queues as long as "
    "the evaluation's, to the mean that the fixed budget M reads there. A line that reads over 1 % more than M on the "
    "evaluation's prompts (`+`) is not counted as ahead or closer. *plan*: M experts a layer on average, shared out "
    "over the layers by damage curves weighed as named (`base-moe plan --by`). *energy*: `energy:TAU` in every layer "
    "and step. *share*: `share:SHARE`, one threshold for all layers. *renormalise* and *scaled* are M with another "
    "denominator: the row's total shared out over what it executes, and the native weights of restricted rows times a "
    "factor for each layer, the least-squares one between the layer's output under M and the dense output. *ahead of "
    "uniform*: right answers, paired by prompt, with the 95 % interval."
)


@dataclass(frozen=True)
class AblationRow:
    """A row of the evaluation and its place in the ablation.

    Attributes:
        experts: the fixed budget M that it is held against.
        tight: whether M is one of the tight sizes.
        name: uniform, plan by ..., energy, share, renormalise or scaled.
    """

    experts: int
    tight: bool
    name: str
    row: Row


def sizes(num_experts: int) -> dict[int, bool]:
    """The fixed budgets, and whether each is a tight one."""
    return {max(1, round(share * num_experts)): share in TIGHT for share in (*TIGHT, *LOOSE)}


def calibration_prompts(count: int = CALIBRATION_PROMPTS) -> list[Prompt]:
    """Prompts of the embedded tasks' training split."""
    return [Prompt(e.prompt, e.answer, e.task) for e in islice(examples(TRAINING_SEED), count)]


@dataclass(frozen=True)
class Calibration:
    """A model with calibration prompts, which it decodes as the evaluation does its own.

    Attributes:
        batches: that the prompts are dealt to. Short queues would leave slots empty for much of the time, and budgets
            that follow the costs read less of a batch that is half empty.
    """

    subject: Subject
    batches: int

    @classmethod
    def beside(cls, evaluated: Subject, subject: Subject) -> Calibration:
        """With queues as long as those of `evaluated`, as far as the prompts go."""
        length = len(evaluated.prompts) / len(evaluated.queues(BATCH, MIXED))
        return cls(subject, max(1, round(len(subject.prompts) / length)))

    def active_mean(self, variant: Variant) -> float:
        """Experts that a layer reads in a step, decoding under `variant`."""
        subject = self.subject
        queues = deal(len(subject.prompts), self.batches)
        decoded = subject.engine.decode(subject.rule(variant), subject.decoding(BATCH), queues)
        return float(np.mean(decoded.tally.active_mean))


def bisect(measure: Callable[[float], float], low: float, high: float, target: float) -> float:
    """Where `measure`, which falls from `low` to `high`, both positive, comes closest to `target`; halves their log."""
    tried = []
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        value = measure(middle)
        tried.append((abs(value - target), middle))
        if value > target:
            low = middle
        else:
            high = middle
    return min(tried)[1]


def tuned(calibration: Calibration, form: str, target: float) -> str:
    """The budget `energy:...` or `share:...` that reads `target` experts on average.

    Args:
        form: `energy` or `share`.
    """

    def budget(share: float) -> str:
        return f"{form}:{1 - share if form == 'energy' else share:.7f}"

    found = bisect(
        lambda share: calibration.active_mean(Variant("base", budget(share))),
        SMALLEST_SHARE,
        1 - SMALLEST_SHARE,
        target,
    )
    return budget(found)


def variants(calibration: Calibration, experts: int) -> dict[str, Variant]:
    """What is compared at a mean of `experts` a layer, by name; uniform comes first."""
    fixed = Variant("base", str(experts))
    target = calibration.active_mean(fixed)
    found = {"uniform": fixed}
    for weighing in WEIGHINGS:
        damage = record_damage(calibration.subject, BATCH, experts, weighing)
        found[f"plan by {weighing}"] = Variant("base", write_layers(allocate(damage, experts * len(damage))))
    for form in ("energy", "share"):
        found[form] = Variant("base", tuned(calibration, form, target))
    scales = fit_scales(calibration.subject.engine.layers, lambda: calibration.active_mean(fixed))
    found["renormalise"] = Variant("base", fixed.budget, {"denominator": "renormalise"})
    found["scaled"] = Variant("base", fixed.budget, {"scale": write_scales(scales)})
    return found


def run_ablation(
    subject: Subject,
    calibration: Subject,
    store: Store | None = None,
    bar: tqdm | None = None,
    pool: ProcessPoolExecutor | None = None,
) -> list[AblationRow]:
    """Evaluates everything at every size. What is in the store is not evaluated again; tuning is done anew.

    Args:
        subject: the model with the evaluation's prompts.
        calibration: the same model with calibration prompts, apart from those.
        pool: as for `run_units`.
    """
    beside = Calibration.beside(subject, calibration)
    places = [
        (experts, tight, name, Unit(variant, BATCH))
        for experts, tight in sizes(subject.num_experts).items()
        for name, variant in variants(beside, experts).items()
    ]
    rows = run_units(subject, [unit for *_, unit in places], store, bar, pool)
    return [AblationRow(*place[:3], row) for place, row in zip(places, rows, strict=True)]


def section(found: Mapping[str, Sequence[AblationRow]], level: int = 2) -> list[Block]:
    """The ablation's part of a report.

    Args:
        found: of each model by its name.
        level: of the heading.
    """
    blocks: list[Block] = [Heading(level, "Budgets that choose themselves, and denominators"), Text(ABOUT)]
    for model, rows in found.items():
        blocks += [Heading(level + 1, model), _table(rows), *_verdicts(rows)]
    return blocks


def _uniform(rows: Sequence[AblationRow], experts: int) -> AblationRow:
    return next(row for row in rows if row.experts == experts and row.name == "uniform")


def _reads_more(rows: Sequence[AblationRow], own: AblationRow) -> bool:
    allowed = _uniform(rows, own.experts).row["active_mean"] * (1 + TOLERANCE)
    return own.row["active_mean"] > allowed


def _table(rows: Sequence[AblationRow]) -> Table:
    body = []
    for own in rows:
        row, pair = own.row, compare(own.row, _uniform(rows, own.experts).row)
        ahead = "-"
        if pair is not None:
            ahead = f"{100 * pair.difference:+.1f} ({100 * pair.low:+.1f} to {100 * pair.high:+.1f})"
        body.append(
            [
                f"{own.name}, M={own.experts}{' (tight)' if own.tight else ''}",
                row["budget"] if own.name != "scaled" else f"scale {row['options']['scale']}",
                f"{row['active_mean']:.2f}{' +' if _reads_more(rows, own) else ''}",
                percent(row["accuracy"]),
                interval(row),
                *closeness(row),
                "" if own.name == "uniform" else ahead,
            ]
        )
    header = ["budget", "as given", "experts", "right answers", "95 % interval", *CLOSENESS]
    strong = frozenset(i for i, own in enumerate(rows) if own.name == "uniform")
    return Table([*header, "ahead of uniform, points"], body, strong)


def _verdicts(rows: Sequence[AblationRow]) -> list[Block]:
    """What was found, in words: by name, how often right answers and KL are better or worse than uniform's."""
    lines = []
    for name in dict.fromkeys(own.name for own in rows if own.name != "uniform"):
        parts = []
        for tight in (True, False):
            own = [row for row in rows if row.name == name and row.tight is tight]
            if not own:
                continue
            fair = [row for row in own if not _reads_more(rows, row)]
            ahead = sum(_verdict(rows, row) == "base" for row in fair)
            behind = sum(_verdict(rows, row) == "rival" for row in own)
            closer = sum(row.row["kl"] < _uniform(rows, row.experts).row["kl"] for row in fair)
            parts.append(
                f"{'tight' if tight else 'loose'}, ahead {ahead}, behind {behind}, closer to dense {closer} "
                f"of {len(own)}"
            )
        lines.append(f"{name}: {'; '.join(parts)}.")
    return [Text("Against uniform M, by right answers beyond the 95 % interval, and by KL. " + " ".join(lines))]


def _verdict(rows: Sequence[AblationRow], own: AblationRow) -> str | None:
    pair = compare(own.row, _uniform(rows, own.experts).row)
    return None if pair is None else pair.verdict
