"""The studies together: what is run, and that its report has all of it."""

import pytest

from calibrate.evaluation import ablations_predictor, beyond, independence, speculation
from calibrate.evaluation.document import Heading, to_markdown
from tests.calibrate.evaluation.tiny_subject import MOST, checkpoint, make_subject


@pytest.fixture
def small(monkeypatch):
    for study, settings in (
        (ablations_predictor, ablations_predictor.Settings(4096, 64, 16, (1.0,), (2,))),
        (independence, independence.Settings(32, 1)),
        (speculation, speculation.Settings(2, (1,))),
    ):
        monkeypatch.setattr(study, "Settings", lambda settings=settings: settings)


def test_without_mlx(small, monkeypatch):
    monkeypatch.setattr(beyond, "find_spec", lambda name: None)
    found = beyond.run_studies(make_subject(), checkpoint())
    assert list(found) == ["predictor", "audit", "speculation", "independence"]
    blocks = beyond.sections({"tiny": found})
    titles = [block.text for block in blocks if isinstance(block, Heading)]
    assert len(titles) == 8 and titles[-1] == "tiny, torch, 2 prompts"
    assert beyond.NO_MLX in to_markdown(blocks)


def test_with_mlx(small, monkeypatch):
    """The tiny checkpoint is not in mlx-lm's spelling; what is asked of MLX is looked at instead."""
    speculation_mlx = pytest.importorskip("calibrate.evaluation.speculation_mlx")
    subject, asked = make_subject(), []

    def answer(*args, **options):
        asked.append((args, options))
        return [{**row, "backend": "mlx"} for row in speculation.run_speculation(subject)]

    monkeypatch.setattr(speculation_mlx, "run_speculation_mlx", answer)
    found = beyond.run_studies(subject, checkpoint())
    ((name, source, predictor, prompts), options) = asked[0]
    assert (name, source, predictor) == ("tiny", checkpoint(), subject.predictor) and options["max_tokens"] == MOST
    assert prompts == subject.prompts[: speculation_mlx.PROMPTS]
    text = to_markdown(beyond.sections({"tiny": found}))
    assert "### tiny, torch, 2 prompts" in text and "### tiny, mlx, 2 prompts" in text and beyond.NO_MLX not in text
