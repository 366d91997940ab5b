"""The file of the rivals' calibration: what goes in comes out, and anything else is refused."""

from dataclasses import replace

import numpy as np
import pytest

from base_core import Card, PredictorError
from base_core.rivals import SIMILARITIES, TENSORS, Rivals, load_rivals, save_rivals

E = 4


def make_rivals(layers=(1, 3), **changes):
    rng = np.random.default_rng(0)
    tensors = {
        i: {name: rng.normal(size=E if name == "norm" else (E, E)).astype(np.float32) for name in TENSORS}
        for i in layers
    }
    card = Card("m", "qwen3_moe", layers, E, 2, 8, {i: (0.0,) * 16 for i in layers}, source="text", tokens=99)
    return Rivals(replace(card, **changes), {"ridge": 1e-3}, tensors)


def test_round_trip_and_same_bytes(tmp_path):
    rivals = make_rivals()
    for name in ("a", "b"):
        save_rivals(tmp_path / name, rivals)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    loaded = load_rivals(tmp_path / "a")
    assert loaded.card == rivals.card and loaded.settings == rivals.settings
    for i in rivals.layers:
        for name in TENSORS:
            np.testing.assert_array_equal(loaded.layers[i][name], rivals.layers[i][name])


@pytest.mark.parametrize("kind", SIMILARITIES)
def test_calibration_has_the_similarity_asked_for(kind):
    rivals = make_rivals()
    got = rivals.calibration(3, kind)
    np.testing.assert_array_equal(got.similarity, rivals.layers[3][f"similarity_{kind}"])
    np.testing.assert_array_equal(got.fold_loss, rivals.layers[3]["fold_loss"])


def test_unknown_similarity():
    with pytest.raises(ValueError, match="unknown similarity 'rbf'"):
        make_rivals().calibration(1, "rbf")


def test_any_flipped_byte_is_noticed(tmp_path):
    save_rivals(tmp_path / "r", make_rivals())
    content = (tmp_path / "r").read_bytes()
    for at in [*np.random.default_rng(0).integers(0, len(content), 60).tolist(), len(content) - 1]:
        (tmp_path / "r").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ValueError, match="rivals file"):
            load_rivals(tmp_path / "r")
    (tmp_path / "r").write_bytes(content[:-10])
    with pytest.raises(ValueError, match="no whole safetensors file"):
        load_rivals(tmp_path / "r")


def test_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        load_rivals(tmp_path / "missing")
    from base_core.embedded import predictor_path

    with pytest.raises(ValueError, match="holds no rivals"):
        load_rivals(predictor_path())


@pytest.mark.parametrize("bad", ["shape", "nan", "missing"])
def test_tensors_that_contradict_the_card(bad):
    rivals = make_rivals()
    layer = dict(rivals.layers[1])
    if bad == "missing":
        del layer["norm"]
    else:
        layer["norm"] = np.ones(E + 1, np.float32) if bad == "shape" else np.full(E, np.nan, np.float32)
    with pytest.raises(ValueError, match=r"layers\.1\.norm"):
        Rivals(rivals.card, {}, {**rivals.layers, 1: layer})
    with pytest.raises(ValueError, match="hold layers"):
        Rivals(rivals.card, {}, {1: rivals.layers[1]})


def test_another_models_file_is_refused():
    card = make_rivals().card
    facts = {name: getattr(card, name) for name in ("model_type", "layers", "experts_per_token", "hidden_size")}
    with pytest.raises(PredictorError, match=r"rivals file is for another model: its num_experts is 4"):
        card.check_model("rivals file", "do it", num_experts=8, fingerprint=card.fingerprint, **facts)
