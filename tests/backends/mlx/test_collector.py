"""The calibration collector: energies of single experts, packed documents kept apart, the model left as it was."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from backends.mlx import base_budget  # noqa: E402
from backends.mlx.collector import collecting, documents  # noqa: E402
from backends.mlx.families import find_moe_layers  # noqa: E402

LENGTHS = (5, 7, 12, 3, 9)


def packed(rows: int = 3, length: int = 12):
    """Documents of LENGTHS packed into rows; the first two tokens of each do not count."""
    positions = np.concatenate([np.arange(n) for n in LENGTHS])
    ids = np.random.default_rng(0).integers(1, 90, rows * length)
    ids[positions.size :] = 0
    positions = np.concatenate([positions, np.zeros(rows * length - positions.size, int)])
    counted = (positions > 1) & (ids > 0)
    return [a.reshape(rows, length) for a in (ids, positions, counted)]


def gather(model, layers, batch):
    seen = {index: [] for index in layers}
    with collecting(model, {i: lambda *pairs, i=i: seen[i].append(pairs) for i in layers}) as run:
        run(*batch)
    return {index: [np.concatenate(parts) for parts in zip(*batches, strict=True)] for index, batches in seen.items()}


def test_documents_are_whole_and_apart():
    ids, positions, counted = packed()
    found = []
    for batch, wanted in documents(ids, positions, counted):
        assert batch.size <= ids.size
        found += [(row[:n].tolist(), w.sum()) for row, w in zip(batch, wanted, strict=True) for n in [len(row)]]
    flat, start = ids.ravel(), 0
    for length in LENGTHS:
        text = flat[start : start + length].tolist()
        assert any(row[:length] == text and count == max(length - 2, 0) for row, count in found)
        start += length
    assert sum(count for _, count in found) == counted.sum()


def test_pairs_are_what_the_dense_model_computes(family, build):
    model, _ = build(family)
    layers = find_moe_layers(model)
    before = [type(layer.block) for layer in layers]
    batch = packed()
    last = layers[-1]
    z, ids, energy, weights = gather(model, [layers[0].index, last.index], batch)[last.index]
    assert [type(layer.block) for layer in layers] == before
    assert z.shape == (batch[2].sum(), 64) and ids.shape == energy.shape == weights.shape
    np.testing.assert_allclose(
        weights, np.array(last.family.route(last.block, _logits(last, mx.array(z)))[3]), rtol=1e-4, atol=1e-6
    )
    switch = last.block[last.family.experts]
    for column in range(ids.shape[1]):
        output = np.array(switch(mx.array(z), mx.array(ids[:, column : column + 1])))[:, 0]
        np.testing.assert_allclose(energy[:, column], (output**2).sum(-1), rtol=1e-4)


def _logits(layer, z):
    return z @ layer.router.weight.T if layer.family.chooses_itself else layer.router(z)


def test_packing_changes_nothing(build):
    model, _ = build("qwen3_moe")
    ids, positions, counted = packed()
    together = gather(model, [2], (ids, positions, counted))[2]
    apart = []
    start = 0
    for length in LENGTHS:
        document = slice(start, start + length)
        start += length
        apart.append(gather(model, [2], [a.ravel()[None, document] for a in (ids, positions, counted)])[2])
    a, b = (
        np.sort(pairs[2].ravel()) for pairs in (together, [np.concatenate(parts) for parts in zip(*apart, strict=True)])
    )
    np.testing.assert_allclose(a, b, rtol=1e-4)


def test_what_cannot_be_collected_is_refused(build):
    model, predictor = build("qwen3_moe")
    with pytest.raises(ValueError, match=r"sinks are for layers \[7\]"), collecting(model, {7: print}):
        pass
    with base_budget(model, predictor, 3), pytest.raises(ValueError, match="budget in force"):
        collecting(model, {0: print}).__enter__()
