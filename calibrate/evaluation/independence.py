"""Batch independence: how often a request's answer changes because other requests are decoded beside it.

A budget is shared by the batch, so neighbours decide which experts a request may use. Here the same prompts are dealt
to batches in several orders, and every answer is held against the one of the first order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from base_core.report import report_row, wilson_interval
from calibrate.evaluation.document import Block, Heading, Table, Text
from calibrate.evaluation.studies import Part, remember
from calibrate.evaluation.subject import MIXED, Subject
from calibrate.evaluation.tables import percent
from calibrate.evaluation.units import Row, Store
from calibrate.evaluation.variants import Variant

STUDY = "independence"
SHARES = (1 / 16, 1 / 8, 1 / 4)
"""Fixed budgets, of a layer's experts."""

ABOUT = (
    "The same prompts, dealt to batches of {batch} in {orders} orders: the file's and {shuffles} shuffled ones. "
    "*tokens change*: share of the answers in shuffled orders that are not the first order's, token for token, with "
    "the 95 % interval over all of them as if independent; *ever*: share of prompts with such an answer in any order. "
    "*verdict changes*: share of answers that became right or wrong; *right answers*: the least and the most over the "
    "orders. *not dense*: share of the first order's answers that are not the dense model's. Dense, and top-k, which "
    "restricts every row by itself, depend on neighbours only through the rounding of sums whose rows are grouped "
    "otherwise."
)


@dataclass(frozen=True)
class Settings:
    """How much is done.

    Attributes:
        prompts: of the subject.
        shuffles: orders beside the first.
        batch: slots of a batch.
    """

    prompts: int = 256
    shuffles: int = 3
    batch: int = 16


def variants(subject: Subject) -> list[Variant]:
    """What is tested: dense, BASE at several budgets, and each rival that the subject has the calibration for."""
    E = subject.num_experts
    fixed = [str(max(1, round(share * E))) for share in SHARES]
    middle = fixed[1]
    found = [Variant("dense"), Variant("top_k", options={"k": 2})]
    if subject.predictor is not None:
        found += [Variant("base", budget) for budget in (*fixed, "union:1", "energy:0.95")]
    found += [Variant("weight_sum", middle), Variant("oea", options={"k0": 1})]
    found += [Variant("lynx", options={"alpha": 1.0, "beta": 1}), Variant("xshare", middle, {"k0": 1})]
    if subject.rivals is not None:
        found += [Variant("sere", options={"primary": 1, "threshold": 0.0}), Variant("exfold", middle)]
    return found


def orders(count: int, shuffles: int) -> list[NDArray[np.int64]]:
    """The prompts' own order and shuffled ones, the same in every run."""
    return [np.arange(count), *(np.random.default_rng(seed).permutation(count) for seed in range(shuffles))]


def measure(subject: Subject, variant: Variant, settings: Settings) -> Row:
    """One row: names of `base_core.report`, and the shares that `ABOUT` describes.

    `changed` with its interval, `changed_ever`, `flipped` (None without answers), `accuracy_least`, `accuracy_most`,
    `not_dense`, `prompts`, `shuffles`.
    """
    queues = subject.queues(settings.batch, MIXED, settings.prompts)
    count = sum(map(len, queues))
    rule, decoding = subject.rule(variant), subject.decoding(settings.batch)
    tokens, active = [], []
    for order in orders(count, settings.shuffles):
        decoded = subject.engine.decode(rule, decoding, [order[queue].tolist() for queue in queues])
        tokens.append(decoded.tokens)
        active.append(np.mean(decoded.tally.active_mean))
    first = tokens[0][:count]
    changed = np.array([(other[:count] != first).any(1) for other in tokens[1:]])  # [shuffles, count]
    row = report_row(
        model=subject.name,
        policy=variant.policy,
        budget=variant.budget,
        batch=settings.batch,
        active_mean=float(np.mean(active)),
        study=STUDY,
        label=variant.label,
        prompts=count,
        shuffles=settings.shuffles,
        changed=float(changed.mean()),
        changed_ever=float(changed.any(0).mean()),
        not_dense=float((first != subject.reference().tokens[:count]).any(1).mean()),
        flipped=None,
    )
    row["changed_low"], row["changed_high"] = wilson_interval(int(changed.sum()), changed.size)
    if subject.has_answers:
        right = np.array([subject.grade(one)[:count] for one in tokens])
        row["accuracy"] = float(right.mean())
        row["accuracy_least"], row["accuracy_most"] = (float(f(right.mean(1))) for f in (np.min, np.max))
        row["flipped"] = float((right[1:] != right[0]).mean())
    return row


def run_independence(subject: Subject, settings: Settings | None = None, store: Store | None = None) -> list[Row]:
    """A row for each variant. What is in the store is not done again."""
    settings = settings or Settings()
    about = {"prompts": settings.prompts, "shuffles": settings.shuffles, "batch": settings.batch}

    def row(variant: Variant) -> Row:
        return remember(Part(STUDY, variant.label, about), lambda: measure(subject, variant, settings), store)

    return [row(variant) for variant in variants(subject)]


def section(found: Mapping[str, Sequence[Row]], level: int = 2) -> list[Block]:
    """The test's part of a report.

    Args:
        found: rows of each model by its name.
        level: of the heading.
    """
    some = next(iter(found.values()))[0]
    about = ABOUT.format(batch=some["batch"], orders=some["shuffles"] + 1, shuffles=some["shuffles"])
    blocks: list[Block] = [Heading(level, "How far answers depend on neighbours"), Text(about)]
    header = [
        "policy",
        "experts",
        "tokens change",
        "95 % interval",
        "ever",
        "verdict changes",
        "right answers",
        "not dense",
    ]
    for model, rows in found.items():
        body = [
            [
                row["label"],
                f"{row['active_mean']:.2f}",
                percent(row["changed"], 2),
                f"{100 * row['changed_low']:.2f} - {100 * row['changed_high']:.2f}",
                percent(row["changed_ever"], 2),
                percent(row["flipped"], 2),
                "-"
                if row["flipped"] is None
                else f"{100 * row['accuracy_least']:.1f} - {100 * row['accuracy_most']:.1f} %",
                percent(row["not_dense"], 2),
            ]
            for row in rows
        ]
        strong = frozenset(i for i, row in enumerate(rows) if row["policy"] == "base")
        blocks += [Heading(level + 1, f"{model}, {rows[0]['prompts']} prompts"), Table(header, body, strong)]
    return blocks
