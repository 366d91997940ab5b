"""Ablation: budgets that choose themselves, and denominators, beside one number of experts for all layers and steps.

What bears on quality comes from calibration prompts: the plan's curves, and the factors of the `scaled` denominator.
Energy and share budgets have one number, which is set so that they read as many experts as the fixed budget does.
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
from calibrate.evaluation.matching import TOLERANCE, compare
from calibrate.evaluation.prompt_file import Prompt
from calibrate.evaluation.scaling import fit_scales, write_scales
from calibrate.evaluation.studies import Part, remember
from calibrate.evaluation.subject import MIXED, Subject
from calibrate.evaluation.tables import CLOSENESS, closeness, interval, percent
from calibrate.evaluation.units import Row, Store, Unit, run_jobs
from calibrate.evaluation.variants import Variant, write_layers
from calibrate.layer_plan import TRAINING_SEED, WEIGHINGS, allocate, record_damage

STUDY = "budgets"
TIGHT, LOOSE = (1 / 16, 1 / 8), (1 / 4, 3 / 8)
"""Mean sizes, as shares of a layer's experts."""
CALIBRATION_PROMPTS = 512
BATCH = 16
SMALLEST_SHARE = 1e-6
MATCHED, MOST_TRIES = 0.002, 12
"""How far, as a share of M, the mean of a budget that follows the costs may be from M, and decodings tried for it."""

ABOUT = (
    "Equal mean active experts. *plan*: M experts a layer on average, shared out over the layers by damage curves of "
    "calibration prompts, weighed as named (`base-moe plan --by`). *energy*: `energy:TAU` in every layer and step. "
    "*share*: `share:SHARE`, one threshold for all layers. Their one number is set to read as many experts as M does "
    "on these same prompts, within 0.2 %: it fixes the size, and no answer is looked at. *renormalise* and *scaled* "
    "are M with another denominator: the row's total shared out over what it executes, and the native weights of "
    "restricted rows times a factor for each layer, the least-squares one between the layer's output under M and the "
    "dense output on calibration prompts. A line that reads over 1 % more than M (`+`) is not counted as ahead or "
    "closer. *ahead of uniform*: right answers, paired by prompt, with the 95 % interval."
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


def active_mean(subject: Subject, variant: Variant) -> float:
    """Experts that a layer reads in a step, decoding the subject's prompts under `variant`."""
    decoded = subject.engine.decode(subject.rule(variant), subject.decoding(BATCH), subject.queues(BATCH, MIXED))
    return float(np.mean(decoded.tally.active_mean))


def meet(measure: Callable[[float], float], low: float, high: float, ends: tuple[float, float], target: float) -> float:
    """Where `measure`, which falls from `low` to `high`, both positive, comes within `MATCHED` of `target`.

    Regula falsi on logarithms; the end that stays counts half from its second time on (Illinois). Gives what came
    closest after `MOST_TRIES`.

    Args:
        ends: values at `low` and `high`, or bounds of them, on either side of the target.
    """
    a, b = math.log(low), math.log(high)
    above, below = (math.log(value / target) for value in ends)
    tried: list[tuple[float, float]] = []
    last = 0
    while len(tried) < MOST_TRIES and not any(abs(off) <= MATCHED for off, _ in tried):
        middle = (above * b - below * a) / (above - below)
        off = math.log(measure(math.exp(middle)) / target)
        tried.append((off, math.exp(middle)))
        if off > 0:
            a, above, below, last = middle, off, below / 2 if last > 0 else below, 1
        else:
            b, below, above, last = middle, off, above / 2 if last < 0 else above, -1
    return min(tried, key=lambda one: abs(one[0]))[1]


def tuned(subject: Subject, form: str, target: float) -> str:
    """The budget `energy:...` or `share:...` that reads `target` experts on average.

    Args:
        form: `energy` or `share`.
        target: above 1.
    """

    def budget(share: float) -> str:
        return f"{form}:{1 - share if form == 'energy' else share:.7f}"

    found = meet(
        lambda share: active_mean(subject, Variant("base", budget(share))),
        SMALLEST_SHARE,
        1 - SMALLEST_SHARE,
        (subject.num_experts, 1),
        target,
    )
    return budget(found)


def variants(subject: Subject, calibration: Subject, experts: int) -> dict[str, Variant]:
    """What is compared at a mean of `experts` a layer, by name; uniform comes first.

    Args:
        calibration: `subject` with other prompts, for everything that bears on quality.
    """
    fixed = Variant("base", str(experts))
    found = {"uniform": fixed}
    for weighing, damage in record_damage(calibration, BATCH, experts, WEIGHINGS).items():
        found[f"plan by {weighing}"] = Variant("base", write_layers(allocate(damage, experts * len(damage))))
    target = active_mean(subject, fixed)
    for form in ("energy", "share"):
        found[form] = Variant("base", tuned(subject, form, target))
    scales = fit_scales(calibration.engine.layers, lambda: active_mean(calibration, fixed))
    found["renormalise"] = Variant("base", fixed.budget, {"denominator": "renormalise"})
    found["scaled"] = Variant("base", fixed.budget, {"scale": write_scales(scales)})
    return found


def tune(subject: Subject, experts: int, store: Store | None) -> Row:
    """`variants` on the training split's prompts: policy, budget and options by name. Comes from the store if there."""

    def make() -> Row:
        calibration = subject.beside(calibration_prompts())
        chosen = variants(subject, calibration, experts)
        return {name: [one.policy, one.budget, dict(one.options)] for name, one in chosen.items()}

    return remember(Part(STUDY, f"M={experts}", {"prompts": CALIBRATION_PROMPTS}), make, store)


@dataclass(frozen=True)
class Place:
    """A unit of the ablation, and where its row stands there; see `AblationRow`."""

    experts: int
    tight: bool
    name: str
    unit: Unit


def tune_all(
    subject: Subject, store: Store | None = None, bar: tqdm | None = None, pool: ProcessPoolExecutor | None = None
) -> list[Place]:
    """The ablation's units. What the store has is not tuned again.

    Args:
        pool: see `run_jobs`.
    """
    by_size = sizes(subject.num_experts)
    found: dict[int, Row] = {}
    for place, chosen in run_jobs(subject, [(tune, (experts, store)) for experts in by_size], pool):
        found[place] = chosen
        if bar is not None:
            bar.set_postfix_str("budgets that choose themselves")
            bar.update()
    return [
        Place(experts, tight, name, Unit(Variant(*parts), BATCH))
        for place, (experts, tight) in enumerate(by_size.items())
        for name, parts in found[place].items()
    ]


def ablation_rows(places: Sequence[Place], rows: Sequence[Row]) -> list[AblationRow]:
    """The rows of the places' units in their place."""
    return [AblationRow(own.experts, own.tight, own.name, row) for own, row in zip(places, rows, strict=True)]


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
