"""What `base-moe inspect` says."""

from dataclasses import replace

import numpy as np
import pytest

from base_core import Card, LayerPredictor, Predictor, save_predictor
from calibrate.cli import main
from calibrate.inspect import describe


@pytest.fixture
def predictor():
    E, d = 4, 3
    card = Card(
        model_id="some/model",
        model_revision="f00d",
        model_type="qwen3_moe",
        layers=(2, 5),
        num_experts=E,
        experts_per_token=2,
        hidden_size=d,
        fingerprint={2: (0.5,) * 16, 5: (0.25,) * 16},
        source="text.jsonl (sha256 0123)",
        tokens=12345,
        eps=1e-12,
        pairs={2: (1000, 10, 2000, 30), 5: (7, 7, 7, 7)},
        ridge={2: (0.1, 0.2, 0.3, 0.4), 5: (1.0,) * 4},
        fit={2: {"r2": 0.91234, "residual_std": 0.5, "correction": 0.125}, 5: {}},
        fallback={2: (1,), 5: ()},
        versions={"torch": "2.13.0"},
    )
    layer = LayerPredictor(np.zeros((E, d), np.float32), np.zeros(E, np.float32), np.ones(E, np.float32))
    return Predictor(card, {2: layer, 5: layer})


def test_card_is_printed(tmp_path, predictor, capsys):
    path = tmp_path / "predictor.safetensors"
    save_predictor(path, predictor)
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    for part in (
        "some/model at f00d (qwen3_moe)",
        "2 of 4 experts, 2 a token, width 3",
        "text.jsonl (sha256 0123)",
        "12,345",
        "torch 2.13.0",
        "1 of 8 experts use",
        "layer 2 fell back: 1",
    ):
        assert part in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line[:1].isdigit()}
    assert rows["2"] == ["2", "3,040", "10", "0.25", "0.912", "0.500", "0.125", "1"]
    assert rows["5"] == ["5", "28", "7", "1", "-", "-", "-", "0"]
    assert "layer 5 fell back" not in out
    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out == out


def test_a_bare_card(predictor):
    card = replace(
        predictor.card,
        model_id="",
        model_revision=None,
        source="",
        versions={},
        pairs={},
        ridge={},
        fit={},
        fallback={},
    )
    text = describe(replace(predictor, card=card))
    assert "unnamed (qwen3_moe)" in text
    assert "None" not in text


def test_not_a_predictor(tmp_path, capsys):
    path = tmp_path / "file"
    path.write_text("text")
    assert main(["inspect", str(path)]) == 2
    assert "no whole safetensors file" in capsys.readouterr().err
