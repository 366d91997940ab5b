"""The predictor artifact: round trips, and every way in which a file can be wrong."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from base_core import Card, LayerPredictor, Predictor, PredictorError, load_predictor, save_predictor
from base_core.artifact import (
    CARD_KEY,
    CHECKSUM,
    DTYPES,
    checksum,
    from_bfloat16,
    from_int8,
    read_predictor,
    to_bfloat16,
    to_int8,
)
from base_core.fingerprint import FINGERPRINT_TOLERANCE, fingerprint_distance, router_fingerprint

E, D, LAYERS = 6, 16, (2, 10)


def make_predictor(seed=0):
    rng = np.random.default_rng(seed)
    card = Card(
        model_id="tiny",
        model_type="qwen3_moe",
        layers=LAYERS,
        num_experts=E,
        experts_per_token=2,
        hidden_size=D,
        fingerprint={i: tuple(router_fingerprint(rng.normal(size=(E, D)))) for i in LAYERS},
        tokens=100,
        pairs={i: tuple(range(E)) for i in LAYERS},
        ridge={i: (0.1,) * E for i in LAYERS},
        fit={i: {"r2": 0.5} for i in LAYERS},
        fallback={i: (2,) for i in LAYERS},
        versions={"numpy": np.__version__},
    )
    layers = {
        i: LayerPredictor(
            rng.normal(size=(E, D)).astype(np.float32),
            rng.normal(size=E).astype(np.float32),
            rng.random(E).astype(np.float32),
        )
        for i in LAYERS
    }
    return Predictor(card, layers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(tmp_path, dtype):
    predictor = make_predictor()
    path = tmp_path / "predictor.safetensors"
    save_predictor(path, predictor, dtype)
    for source in (path, str(path), tmp_path):
        loaded = load_predictor(source)
        assert loaded.card == predictor.card
        for i in LAYERS:
            expected = predictor.layers[i].weight
            if dtype == "bfloat16":
                expected = from_bfloat16(to_bfloat16(expected))
            elif dtype == "int8":
                expected = from_int8(*to_int8(expected))
            np.testing.assert_array_equal(loaded.layers[i].weight, expected)
            np.testing.assert_array_equal(loaded.layers[i].bias, predictor.layers[i].bias)
            np.testing.assert_array_equal(loaded.layers[i].mean_energy, predictor.layers[i].mean_energy)
    assert list(tmp_path.iterdir()) == [path]


def test_int8_steps():
    steps, scale = to_int8(np.float32([[127, 0.6, -63.4], [0, 0, 0], [-2, 1, 0.5]]))
    np.testing.assert_array_equal(steps, [[127, 1, -63], [0, 0, 0], [-127, 64, 32]])
    np.testing.assert_allclose(scale, [1, 0, 2 / 127], atol=1e-30)
    weight = np.random.default_rng(0).normal(size=(9, 40)).astype(np.float32)
    steps, scale = to_int8(weight)
    assert (np.abs(from_int8(steps, scale) - weight) <= scale[:, None] * 0.5001).all()


def test_int8_is_a_quarter_of_the_file(tmp_path):
    sizes = []
    for dtype in ("float32", "int8"):
        save_predictor(tmp_path / dtype, make_predictor(), dtype)
        sizes.append((tmp_path / dtype).stat().st_size)
    saved = len(LAYERS) * (E * D * 3 - E * 4)
    assert sizes[0] - sizes[1] == pytest.approx(saved, abs=200), "but for the header's longer list of tensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.2.weight_scale"), "lacks the tensor 'layers.2.weight_scale'"),
        (lambda t: t.update({"layers.2.weight_scale": np.ones(E - 1, np.float32)}), r"has shape .*, its factors"),
        (lambda t: t.update({"layers.2.bias": np.ones(E, np.int8)}), "'layers.2.bias' has dtype I8, expected F32 or"),
        (lambda t: t.update({"layers.2.weight": np.ones((E, D), np.int16)}), "expected F32, BF16 or I8"),
        (lambda t: t.update({"layers.2.weight_scale": np.full(E, np.nan, np.float32)}), "not finite"),
    ],
)
def test_int8_that_does_not_fit(tmp_path, change, message):
    path = tmp_path / "p"
    save_predictor(path, make_predictor(), "int8")
    with safe_open(path, "numpy") as file:
        tensors, document = {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()[CARD_KEY])  # noqa: SIM118
    change(tensors)
    del document[CHECKSUM]
    document[CHECKSUM] = checksum(document, {name: array.tobytes() for name, array in tensors.items()})
    save_file(tensors, path, {CARD_KEY: json.dumps(document)})
    with pytest.raises(PredictorError, match=message):
        load_predictor(path)


def test_same_predictor_same_bytes(tmp_path):
    for name in ("a", "b"):
        save_predictor(tmp_path / name, make_predictor())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_log_energy_is_the_paper_formula():
    predictor = make_predictor()
    z = np.random.default_rng(1).normal(size=(3, D)) * 1e3
    layer = predictor.layers[10]
    expected = [[layer.weight[e] @ (row / np.linalg.norm(row)) + layer.bias[e] for e in range(E)] for row in z]
    np.testing.assert_allclose(predictor.log_energy(10, z), expected, rtol=1e-5, atol=1e-5)
    assert np.isfinite(predictor.log_energy(10, np.zeros((1, D)))).all()


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_flipped_byte_is_noticed(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("flip") / "p"
    save_predictor(path, make_predictor())
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PredictorError):
        read_predictor(bytes(content), "flipped")


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_truncation_is_noticed(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "p"
    save_predictor(path, make_predictor())
    content = path.read_bytes()
    with pytest.raises(PredictorError, match="calibrate"):
        read_predictor(content[: data.draw(st.integers(0, len(content) - 1))], "cut")


def test_foreign_files(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"layers.0.weight": np.zeros((2, 2), np.float32)}, path)
    with pytest.raises(PredictorError, match=CARD_KEY):
        load_predictor(path)
    path.write_text(json.dumps({"weights": []}))
    with pytest.raises(PredictorError, match="no whole safetensors"):
        load_predictor(path)


@pytest.mark.parametrize("source", ["no such file", "/nowhere/at/all.safetensors", "a/b/c"])
def test_neither_file_nor_hub_id(source):
    with pytest.raises(PredictorError, match="neither a file"):
        load_predictor(source)


def test_hub_id_offline_without_a_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PredictorError, match="cannot be had from the hub at revision 'v1'"):
        load_predictor("owner/name", revision="v1")


def test_hub_download_honours_the_revision(tmp_path, monkeypatch):
    path = tmp_path / "predictor.safetensors"
    save_predictor(path, make_predictor())
    asked = []
    monkeypatch.setattr("base_core.artifact.hf_hub_download", lambda *a, **k: asked.append((a, k)) or str(path))
    assert load_predictor("owner/name", revision="abc").card.model_id == "tiny"
    assert asked == [(("owner/name", "predictor.safetensors"), {"revision": "abc"})]


@pytest.mark.parametrize("field", ["weight", "bias", "mean_energy"])
def test_values_must_be_finite_and_fit_the_card(field):
    predictor = make_predictor()
    array = getattr(predictor.layers[2], field).copy()
    array.flat[0] = np.nan
    with pytest.raises(PredictorError, match=rf"layers\.2\.{field} holds values that are not finite"):
        Predictor(predictor.card, {**predictor.layers, 2: replace(predictor.layers[2], **{field: array})})
    with pytest.raises(PredictorError, match=rf"layers\.2\.{field} has shape"):
        Predictor(predictor.card, {**predictor.layers, 2: replace(predictor.layers[2], **{field: array[1:]})})


def test_layers_must_match_the_card():
    predictor = make_predictor()
    with pytest.raises(PredictorError, match="holds layers"):
        Predictor(predictor.card, {2: predictor.layers[2]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "x"}, "format field"),
        ({"version": 2}, "version 2"),
        ({"num_experts": "6"}, "num_experts"),
        ({"num_experts": 1}, "above num_experts"),
        ({"layers": [10, 2]}, "ascending"),
        ({"layers": None}, "malformed"),
        ({"fingerprint": {"2": [0.0] * 16}}, "does not cover"),
    ],
)
def test_card_errors_name_the_field(changes, message):
    document = json.loads(json.dumps(make_predictor().card.to_document())) | changes
    with pytest.raises(PredictorError, match=message):
        Card.from_document(document)
    del document["hidden_size"]
    with pytest.raises(PredictorError):
        Card.from_document(document)


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_type", "olmoe"), ("layers", (2, 3)), ("num_experts", 7), ("experts_per_token", 3), ("hidden_size", 8)],
)
def test_another_model_is_refused_by_field(field, value):
    predictor = make_predictor()
    model = {
        name: getattr(predictor.card, name)
        for name in ("model_type", "layers", "num_experts", "experts_per_token", "hidden_size", "fingerprint")
    }
    predictor.check_model(**model)
    with pytest.raises(PredictorError, match=f"its {field} is"):
        predictor.check_model(**model | {field: value})


def test_fingerprint_tells_models_apart_and_forgives_rounding():
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(64, 256)).astype(np.float32)
    groups = weight.reshape(64, -1, 64)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    four_bit = (np.round((groups - low) / (high - low) * 15) / 15 * (high - low) + low).reshape(weight.shape)
    own = {0: router_fingerprint(weight)}
    rounded = fingerprint_distance(own, {0: router_fingerprint(from_bfloat16(to_bfloat16(weight)))})
    quantised = fingerprint_distance(own, {0: router_fingerprint(four_bit)})
    other = fingerprint_distance(own, {0: router_fingerprint(rng.normal(size=(64, 256)))})
    assert rounded < 0.01 and 0.01 < quantised < FINGERPRINT_TOLERANCE and other > 1
    predictor = make_predictor()
    with pytest.raises(PredictorError, match="fingerprint differs"):
        predictor.check_model(
            model_type="qwen3_moe", layers=LAYERS, num_experts=E, experts_per_token=2, hidden_size=D,
            fingerprint=make_predictor(seed=1).card.fingerprint,
        )  # fmt: skip
    assert fingerprint_distance({0: own[0]}, {1: own[0]}) == float("inf")
    with pytest.raises(ValueError, match="finite"):
        router_fingerprint(np.full((2, 2), np.nan))


def test_fingerprint_is_pinned():
    """The sketch is part of the file format: these numbers may never change."""
    sketch = router_fingerprint(np.arange(12, dtype=np.float32).reshape(3, 4) - 5)
    assert sketch[:6] == [-0.496564, 0.165521, -0.827606, -1.158648, 0.0, -0.165521]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "predictor.safetensors"
    save_predictor(path, make_predictor(0))
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_predictor(path, make_predictor(1))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_dtype_is_checked(tmp_path):
    with pytest.raises(ValueError, match="float16"):
        save_predictor(tmp_path / "p", make_predictor(), "float16")
    assert not list(tmp_path.iterdir())


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bfloat16_rounds_to_nearest(value):
    value = np.float32(value)
    rounded = from_bfloat16(to_bfloat16(np.array([value])))[0]
    if abs(value) < 3e38:
        assert abs(rounded - value) <= max(abs(value) * 2**-8, 1e-38)
