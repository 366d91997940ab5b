"""The audit's ablation: drift that is put in comes out, correction takes it away, and the rows are the session's."""

from dataclasses import replace

import numpy as np
import pytest

from base_core import Predictor
from calibrate.evaluation import audit_study
from calibrate.evaluation.document import to_markdown
from calibrate.evaluation.units import Store
from tests.calibrate.evaluation.tiny_subject import make_subject


@pytest.fixture(scope="module")
def subject():
    return make_subject()


def shifted(predictor, by):
    """With intercepts that are too low by `by`."""
    layers = {i: replace(p, bias=(p.bias - by).astype(np.float32)) for i, p in predictor.layers.items()}
    return Predictor(predictor.card, layers)


def test_drift_comes_out_and_correction_follows_it(subject):
    # One order for all experts keeps the choice, and with it everything but the drift.
    plain = audit_study.measure(subject, subject.predictor, correct=False)
    low = audit_study.measure(subject, shifted(subject.predictor, 3), correct=False)
    assert low["drift"] - plain["drift"] == pytest.approx(3, abs=1e-3) and low["warned"]
    for name in ("retained_energy", "active_mean", "accuracy", "pairs", "steps"):
        assert low[name] == plain[name], name
    assert low["audit_kept"] > plain["audit_kept"], "what was removed is underestimated"
    followed = audit_study.measure(subject, shifted(subject.predictor, 3), correct=True)
    assert abs(followed["drift"]) < abs(low["drift"]) and followed["prompts"] == len(subject.prompts)


def test_rows_and_going_on_with_them(subject, tmp_path):
    made = []

    def make():
        made.append(1)
        return shifted(subject.predictor, 3)

    predictors = {"shipped": lambda: subject.predictor, "foreign": make}
    store = Store(tmp_path / "rows", subject.identity(), resume=False)
    rows = audit_study.run_audit(subject, predictors, store)
    assert [row["label"] for row in rows] == ["shipped", "shipped, corrected", "foreign", "foreign, corrected"]
    assert len(made) == 2 and audit_study.run_audit(subject, predictors, store) == rows and len(made) == 2
    assert rows[0]["drift"] != rows[1]["drift"] != rows[3]["drift"]
    text = to_markdown(audit_study.section({"tiny": rows}))
    assert "### tiny, M=2, 32 prompts" in text and "| foreign, corrected |" in text
