"""The studies beside the evaluation's grid, together: what the predictor needs, the audit, neighbours, and drafting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from calibrate.evaluation import ablations_predictor, audit_study, independence, speculation
from calibrate.evaluation.document import Block, Text
from calibrate.evaluation.subject import Subject
from calibrate.evaluation.units import Job, Row, Store, run_jobs

NO_MLX = "Drafting on MLX: not measured, mlx-lm was not installed."

Studies = dict[str, list[Row]]
"""Rows by the name of their study."""


def study_jobs(source: str | Path, store: Store | None = None) -> list[Job]:
    """What `run_jobs` is to do, the longest first; each gives a `Studies`. What is in the store is not done again.

    Drafting is measured on MLX too where it is installed.

    Args:
        source: of the subject's checkpoint.
    """
    jobs: list[Job] = [(_predictors_and_audit, (store,)), (_speculation, (store,)), (_independence, (store,))]
    return jobs + ([(_speculation_mlx, (source, store))] if find_spec("mlx_lm") is not None else [])


def run_studies(
    subject: Subject,
    source: str | Path,
    store: Store | None = None,
    bar: tqdm | None = None,
    pool: ProcessPoolExecutor | None = None,
) -> Studies:
    """Rows by study, see `study_jobs`.

    Args:
        subject: with a predictor.
        pool: see `run_jobs`.
    """
    found: dict[int, Studies] = {}
    for place, studies in run_jobs(subject, study_jobs(source, store), pool):
        found[place] = studies
        if bar is not None:
            bar.set_postfix_str(" and ".join(studies))
            bar.update()
    return {name: rows for _, studies in sorted(found.items()) for name, rows in studies.items()}


def _predictors_and_audit(subject: Subject, store: Store | None) -> Studies:
    settings = ablations_predictor.Settings()
    make = ablations_predictor.Predictors(subject, settings)
    predictors = {"shipped": lambda: make.shipped, "prompts only": lambda: make.of(ablations_predictor.PROMPT_PART)[1]}
    return {
        ablations_predictor.STUDY: ablations_predictor.run_predictors(subject, settings, store, make),
        audit_study.STUDY: audit_study.run_audit(subject, predictors, store),
    }


def _independence(subject: Subject, store: Store | None) -> Studies:
    return {independence.STUDY: independence.run_independence(subject, store=store)}


def _speculation(subject: Subject, store: Store | None) -> Studies:
    return {speculation.STUDY: speculation.run_speculation(subject, store=store)}


def _speculation_mlx(subject: Subject, source: str | Path, store: Store | None) -> Studies:
    from calibrate.evaluation import speculation_mlx

    assert subject.predictor is not None
    rows = speculation_mlx.run_speculation_mlx(
        subject.name,
        source,
        subject.predictor,
        subject.prompts[: speculation_mlx.PROMPTS],
        max_tokens=subject.max_tokens,
        drafts=speculation_mlx.DRAFTS,
        store=store,
    )
    return {speculation_mlx.STUDY: rows}


def sections(found: Mapping[str, Mapping[str, Sequence[Row]]]) -> list[Block]:
    """The studies' part of a report.

    Args:
        found: what `run_studies` gave, by the model's name.
    """
    blocks: list[Block] = []
    for study in (ablations_predictor, audit_study, independence):
        blocks += study.section({model: studies[study.STUDY] for model, studies in found.items()})
    drafting = {
        f"{model}, {rows[0]['backend']}": rows
        for model, studies in found.items()
        for study, rows in studies.items()
        if study.startswith(speculation.STUDY)
    }
    blocks += speculation.section(drafting)
    if not any(rows[0]["backend"] == "mlx" for rows in drafting.values()):
        blocks.append(Text(NO_MLX))
    return blocks
