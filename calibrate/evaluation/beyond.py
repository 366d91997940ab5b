"""The studies beside the evaluation's grid, together: what the predictor needs, neighbours, and drafting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from calibrate.evaluation import ablations_predictor, independence, speculation
from calibrate.evaluation.document import Block, Text
from calibrate.evaluation.subject import Subject
from calibrate.evaluation.units import Row, Store

NO_MLX = "Drafting on MLX: not measured, mlx-lm was not installed."


def run_studies(
    subject: Subject, source: str | Path, store: Store | None = None, bar: tqdm | None = None
) -> dict[str, list[Row]]:
    """Rows by study. Drafting is measured on MLX too where it is installed. What is in the store is not done again.

    Args:
        subject: with a predictor.
        source: of its checkpoint.
    """
    assert subject.predictor is not None
    found = {
        ablations_predictor.STUDY: ablations_predictor.run_predictors(subject, store=store, bar=bar),
        independence.STUDY: independence.run_independence(subject, store=store, bar=bar),
        speculation.STUDY: speculation.run_speculation(subject, store=store, bar=bar),
    }
    if find_spec("mlx_lm") is not None:
        from calibrate.evaluation import speculation_mlx

        found[speculation_mlx.STUDY] = speculation_mlx.run_speculation_mlx(
            subject.name,
            source,
            subject.predictor,
            subject.prompts[: speculation_mlx.PROMPTS],
            max_tokens=subject.max_tokens,
            store=store,
            bar=bar,
        )
    return found


def sections(found: Mapping[str, Mapping[str, Sequence[Row]]]) -> list[Block]:
    """The studies' part of a report.

    Args:
        found: what `run_studies` gave, by the model's name.
    """
    blocks: list[Block] = []
    for study in (ablations_predictor, independence):
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
