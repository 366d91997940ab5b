"""Ablation: the audit and its running correction, with a predictor that fits the text and with one that does not.

The audit sees only experts that run; what it says of drift and of the energy kept stands here beside the energy that
was truly kept, for which every routed expert has to run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from backends.cuda import Policy, base_budget
from backends.cuda.audit import CORRECTION_RATE, DRIFT_BOUND
from backends.cuda.generate import answer_batches, set_decoding
from base_core import Predictor
from base_core.report import report_row
from calibrate.evaluation.document import Block, Heading, Table, Text
from calibrate.evaluation.studies import Part, remember
from calibrate.evaluation.subject import Subject
from calibrate.evaluation.tables import percent
from calibrate.evaluation.units import Row, Store

STUDY = "audit"
SHARE = 1 / 8
"""The budget, of a layer's experts."""
PROMPTS, BATCH = 256, 16

ABOUT = (
    f"Batches of {BATCH}, an eighth of the experts, every decode step audited. *shipped* fits the text; *prompts only* "
    "was calibrated on prompts, which no decode step reads. *corrected*: the intercepts follow what the audit finds, "
    f"a share of {CORRECTION_RATE:g} of each step's mean drift of an expert (`--audit-correct`). *drift*: mean of true "
    "minus predicted log-energy over executed pairs, the largest of a layer, natural log; beyond "
    f"{DRIFT_BOUND:g} the audit *warns*. *kept by audit*: share of the step's removal cost in the active set, true for "
    "what ran, predicted for what was removed, mean over layers. *energy kept*: true, relative to the oracle's choice "
    "of as many."
)


def measure(subject: Subject, predictor: Predictor, correct: bool) -> Row:
    """One row: names of `base_core.report`, and `steps`, `pairs`, `drift`, `rms`, `audit_kept`, `warned`."""
    budget = str(max(1, round(SHARE * subject.num_experts)))
    chosen = subject.prompts[:PROMPTS]
    encoded = [subject.tokenizer(prompt.text)["input_ids"] for prompt in chosen]
    ends = set_decoding(subject.model, subject.tokenizer, subject.max_tokens, temperature=0)
    policy = Policy(audit=1, audit_correct=correct, measure=True)
    texts: list[str] = []
    with (
        warnings.catch_warnings(),  # the row says whether the audit warns
        base_budget(subject.model, predictor, budget, policy) as session,
        torch.inference_mode(),
    ):
        warnings.simplefilter("ignore", UserWarning)
        for answers in answer_batches(subject.model, subject.tokenizer, encoded, ends, BATCH):
            texts += [subject.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]
        stats = session.stats()
    audit = stats.audit
    assert audit is not None
    right = [text == (prompt.answer or "").strip() for text, prompt in zip(texts, chosen, strict=True)]
    return report_row(
        model=subject.name,
        policy="base",
        budget=budget,
        batch=BATCH,
        active_mean=stats.active_mean,
        retained_energy=stats.retained_energy,
        accuracy=float(np.mean(right)) if subject.has_answers else None,
        study=STUDY,
        prompts=len(chosen),
        steps=audit.steps,
        pairs=sum(layer.pairs for layer in audit.layers),
        drift=max((layer.drift for layer in audit.layers if layer.drift is not None), key=abs),
        rms=max(layer.rms for layer in audit.layers if layer.rms is not None),
        audit_kept=float(np.mean([layer.kept_energy for layer in audit.layers])),
        warned=audit.warning() is not None,
    )


def run_audit(
    subject: Subject, predictors: Mapping[str, Callable[[], Predictor]], store: Store | None = None
) -> list[Row]:
    """For each predictor a row without and with correction. What is in the store is not done again.

    Args:
        predictors: by a name for the tables, made when they are needed.
    """
    rows = []
    for name, make in predictors.items():
        for correct in (False, True):
            label = f"{name}, corrected" if correct else name

            def row(make: Callable[[], Predictor] = make, correct: bool = correct, label: str = label) -> Row:
                return {**measure(subject, make(), correct), "label": label}

            rows.append(remember(Part(STUDY, label, {"prompts": PROMPTS}), row, store))
    return rows


def section(found: Mapping[str, Sequence[Row]], level: int = 2) -> list[Block]:
    """The study's part of a report.

    Args:
        found: rows of each model by its name.
        level: of the heading.
    """
    header = ["predictor", "audited steps", "pairs", "drift", "rms", "warns", "kept by audit", "energy kept", "right"]
    blocks: list[Block] = [Heading(level, "The audit, and a predictor that does not fit"), Text(ABOUT)]
    for model, rows in found.items():
        body = [
            [
                row["label"],
                str(row["steps"]),
                f"{row['pairs']:,}",
                f"{row['drift']:+.3f}",
                f"{row['rms']:.3f}",
                "yes" if row["warned"] else "no",
                percent(row["audit_kept"], 2),
                percent(row["retained_energy"], 2),
                percent(row["accuracy"]),
            ]
            for row in rows
        ]
        title = f"{model}, M={rows[0]['budget']}, {rows[0]['prompts']} prompts"
        blocks += [Heading(level + 1, title), Table(header, body)]
    return blocks
