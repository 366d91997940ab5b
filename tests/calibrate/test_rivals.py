"""The rivals' calibration against loops over single tokens, experts and pairs."""

import itertools

import numpy as np
import pytest
import torch

from backends.cuda.families import find_moe_layers
from base_core.rivals import UNSEEN_LOSS, load_rivals
from calibrate import rivals as module
from calibrate.cli import main
from calibrate.rivals import CLIP, RIDGE, LayerSums, calibrate_rivals, fold_tables
from calibrate.text import Sequences
from tests.backends.cuda.tiny import VOCABULARY, make_model
from tests.calibrate.evaluation.test_measures import literal_outputs


@pytest.fixture(scope="module")
@torch.no_grad()
def layer_case():
    """A layer, its inputs, chosen experts, and every expert's output for every token, float64 [T, E, d]."""
    layer = find_moe_layers(make_model())[0]
    z = torch.randn(24, layer.hidden_size, generator=torch.Generator().manual_seed(1))
    ids = layer.router(z)[2].long()
    outputs = literal_outputs(layer, z).double().numpy()
    layer.experts.config._experts_implementation = "eager"
    sums = LayerSums(layer)
    for part in (slice(0, 10), slice(10, 24)):
        sums.add(z[part], ids[part])
    return sums.tensors(), ids.numpy(), outputs


def test_frobenius_similarity(layer_case):
    tensors, _, outputs = layer_case
    E = outputs.shape[1]
    distance = np.array([[np.linalg.norm(outputs[:, p] - outputs[:, q]) for q in range(E)] for p in range(E)])
    np.testing.assert_allclose(tensors["similarity_frobenius"], 1 - distance / distance.max(), atol=2e-4)


def test_cosine_similarity(layer_case):
    tensors, _, outputs = layer_case
    unit = outputs / np.linalg.norm(outputs, axis=-1, keepdims=True)
    E = outputs.shape[1]
    expected = [[(np.mean([u[p] @ u[q] for u in unit]) + 1) / 2 for q in range(E)] for p in range(E)]
    np.testing.assert_allclose(tensors["similarity_cosine"], expected, atol=1e-5)


def test_cka_by_features(layer_case):
    tensors, _, outputs = layer_case
    centred = outputs - outputs.mean(0)
    E = outputs.shape[1]

    def cross(p, q):
        return np.linalg.norm(centred[:, p].T @ centred[:, q]) ** 2

    expected = [[cross(p, q) / np.sqrt(cross(p, p) * cross(q, q)) for q in range(E)] for p in range(E)]
    np.testing.assert_allclose(tensors["similarity_cka"], expected, atol=1e-4)


def test_similarities_are_symmetric_with_a_full_diagonal(layer_case):
    for kind in ("frobenius", "cosine", "cka"):
        matrix = layer_case[0][f"similarity_{kind}"]
        np.testing.assert_allclose(matrix, matrix.T, atol=1e-6)
        assert (np.diag(matrix) == 1).all() and matrix.min() >= 0 and matrix.max() <= 1


def test_norms_and_folding(layer_case):
    tensors, ids, outputs = layer_case
    E = outputs.shape[1]
    norm = np.linalg.norm(outputs, axis=-1)
    chosen = [[t for t in range(len(ids)) if e in ids[t]] for e in range(E)]
    means = [norm[rows, e].mean() if rows else np.nan for e, rows in enumerate(chosen)]
    np.testing.assert_allclose(tensors["norm"], np.where(np.isnan(means), np.nanmedian(means), means), rtol=1e-4)
    unseen = 0
    for s, t in itertools.permutations(range(E), 2):
        rows = sorted(set(chosen[s]) & set(chosen[t]))
        if not rows:
            unseen += 1
            assert tensors["fold_scalar"][s, t] == 0 and tensors["fold_loss"][s, t] == UNSEEN_LOSS
            continue
        n, u, v = norm[rows, s], outputs[rows, s], outputs[rows, t]
        c = np.clip((n * (u * v).sum(1)).sum() / ((n * (v * v).sum(1)).sum() + RIDGE), -CLIP, CLIP)
        loss = (n * ((u - c * v) ** 2).sum(1)).sum() / (n**3).sum()
        assert tensors["fold_scalar"][s, t] == pytest.approx(c, rel=1e-3, abs=1e-5)
        assert tensors["fold_loss"][s, t] == pytest.approx(loss, rel=1e-3)
    assert (np.diag(tensors["fold_scalar"]) == 1).all() and (np.diag(tensors["fold_loss"]) == UNSEEN_LOSS).all()
    assert 0 < unseen < E * (E - 1)


def test_scalars_are_clipped_and_losses_know_it():
    scalar, loss = fold_tables(np.full((2, 2), 90.0), np.full((2, 2), 10.0), np.full((2, 2), 1000.0))
    assert scalar[0, 1] == CLIP and loss[0, 1] == pytest.approx((1000 - 8 * 90 + 16 * 10) / 1000)


def test_a_token_is_counted_once_and_only_if_it_counts():
    model = make_model()
    rng = np.random.default_rng(0)
    ids = rng.integers(2, VOCABULARY, (3, 8))
    counted = rng.random((3, 8)) < 0.6
    sequences = Sequences(ids, np.tile(np.arange(8), (3, 1)), counted, 24)
    got = calibrate_rivals(model, sequences, batch_tokens=8)
    assert got.card.tokens == counted.sum() and model.get_experts_implementation() != "base"

    seen = []
    layer = find_moe_layers(model)[1]
    handle = layer.router.register_forward_hook(lambda m, args, out: seen.append((args[0].reshape(-1, 32), out[2])))
    with torch.inference_mode():
        for row in ids:
            model(input_ids=torch.from_numpy(row[None]))
    handle.remove()
    sums = LayerSums(layer)
    with torch.inference_mode():
        for (z, chosen), kept in zip(seen, counted, strict=True):
            sums.add(z[torch.from_numpy(kept)], chosen[torch.from_numpy(kept)].long())
    for name, array in sums.tensors().items():
        np.testing.assert_allclose(got.layers[layer.index][name], array, rtol=2e-3, atol=2e-4, err_msg=name)


def test_limits_on_tokens(monkeypatch):
    monkeypatch.setattr(module, "SIMILARITY_TOKENS", 6)
    monkeypatch.setattr(module, "CKA_TOKENS", 4)
    model = make_model()
    ids = np.random.default_rng(0).integers(2, VOCABULARY, (2, 8))
    sequences = Sequences(ids, np.tile(np.arange(8), (2, 1)), np.ones((2, 8), bool), 16)
    few = calibrate_rivals(model, sequences, tokens=10)
    assert few.card.tokens == 10
    assert few.settings["similarity_tokens"] == 6 and few.settings["cka_tokens"] == 4
    with pytest.raises(ValueError, match="no token that counts"):
        calibrate_rivals(model, Sequences(ids, sequences.positions, np.zeros((2, 8), bool), 16))


def test_command(tmp_path, capsys):
    text = tmp_path / "t.jsonl"
    text.write_text('{"prompt": "1+2=", "answer": "3\\n"}\n{"prompt": "sort 312=", "answer": "123\\n"}\n' * 20)
    out = tmp_path / "rivals.safetensors"
    assert main(["calibrate", "--data", str(text), "--rivals", str(out), "--rival-tokens", "40"]) == 0
    rivals = load_rivals(out)
    assert rivals.card.tokens == 40 and rivals.card.model_id == "embedded/qwen3_moe" and "t.jsonl" in rivals.card.source
    assert "40 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing to calibrate"),
        (["--rivals", "{tmp}/no/where"], "--rivals .* its folder does not exist"),
        (["--rivals", "{tmp}"], "is a folder"),
        (["--rivals", "{tmp}/r", "--rival-tokens", "0"], "--rival-tokens 0 must be above 0"),
        (["--rivals", "{tmp}/r", "--backend", "mlx"], "calibrated through torch"),
    ],
)
def test_bad_options(tmp_path, capsys, options, message):
    text = tmp_path / "t.txt"
    text.write_text("1+2=3")
    argv = ["calibrate", "--data", str(text), *(option.format(tmp=tmp_path) for option in options)]
    assert main(argv) == 2
    import re

    assert re.search(message, capsys.readouterr().err)
