"""Streaming statistics against sums written out, and the checkpoint file."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate import statistics
from calibrate.statistics import (
    LayerStatistics,
    read_state,
    read_tensors,
    statistics_bytes,
    write_checkpoint,
)

E, D, K, EPS = 6, 10, 2, 1e-3


def make_rows(rng, T, experts=E):
    ids = np.argsort(rng.random((T, experts)), axis=1)[:, :K]
    return rng.normal(size=(T, D)).astype(np.float32), ids, rng.random((T, K)) + 0.01, rng.random((T, K))


def literal(chunks):
    """float64 sums, one pair at a time."""
    pairs, moments = np.zeros(E, int), np.zeros((E, 4))
    first, gram = np.zeros((E, 2, D)), np.zeros((E, D, D))
    for z, ids, energy, weights in chunks:
        for t, slot in np.ndindex(ids.shape):
            e, v = ids[t, slot], weights[t, slot]
            x = z[t].astype(float) / np.linalg.norm(z[t].astype(float))
            y = np.log(energy[t, slot] + EPS)
            pairs[e] += 1
            moments[e] += v, v * y, v * y * y, energy[t, slot]
            first[e] += v * x, v * y * x
            gram[e] += v * np.outer(x, x)
    return pairs, moments, first, gram


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    experts=st.integers(K, E),
    block=st.sampled_from([3, 4, 5, 512]),
)
@settings(max_examples=40, deadline=None)
def test_equal_to_sums_written_out(seed, sizes, experts, block):
    rng = np.random.default_rng(seed)
    chunks = [make_rows(rng, T, experts) for T in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "GRAM_BLOCK", block)
        streamed = LayerStatistics(E, D)
        for chunk in chunks:
            streamed.add(*chunk, EPS)
        gram = streamed.full_gram(slice(0, E)).numpy()
        some = streamed.full_gram(slice(2, 5)).numpy()
    pairs, moments, first, expected = literal(chunks)
    np.testing.assert_array_equal(streamed.pairs.numpy(), pairs)
    np.testing.assert_allclose(streamed.moments.numpy(), moments, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(streamed.first.numpy(), first, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gram, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(some, gram[2:5])


def test_torch_and_numpy_rows_are_one():
    chunk = make_rows(np.random.default_rng(0), 7)
    first, second = LayerStatistics(E, D), LayerStatistics(E, D)
    first.add(*chunk, EPS)
    second.add(*(torch.from_numpy(array) for array in chunk), EPS)
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[name]), name


@pytest.mark.parametrize("width", [10, 512, 700, 2048])
def test_memory_is_what_is_said(width):
    held = LayerStatistics(2, width).tensors().values()
    assert sum(tensor.numel() * tensor.element_size() for tensor in held) == statistics_bytes(2, width)
    assert statistics_bytes(1, 2048) < 0.65 * 4 * 2048**2


@pytest.fixture
def filled():
    rng = np.random.default_rng(1)
    streamed = LayerStatistics(E, D)
    streamed.add(*make_rows(rng, 20), EPS)
    return streamed


def test_checkpoint_gives_back_every_bit(tmp_path, filled):
    path = tmp_path / "out.partial"
    write_checkpoint(path, {"pass": 1}, {f"statistics.7.{n}": t for n, t in filled.tensors().items()})
    assert read_state(path) == {"pass": 1}
    again = LayerStatistics(E, D)
    again.load(read_tensors(path, "statistics.7."))
    for name, tensor in filled.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), name
    rows = make_rows(np.random.default_rng(2), 5)
    filled.add(*rows, EPS)
    again.add(*rows, EPS)
    assert torch.equal(filled.gram[0], again.gram[0])


def test_failed_checkpoint_leaves_the_last_one(tmp_path, filled, monkeypatch):
    path = tmp_path / "out.partial"
    write_checkpoint(path, {"pass": 1}, filled.tensors())

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(statistics.os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_checkpoint(path, {"pass": 2}, filled.tensors())
    assert read_state(path) == {"pass": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["out.partial"]


@pytest.mark.parametrize("damage", ["cut", "foreign", "missing"])
def test_damaged_checkpoint(tmp_path, filled, damage):
    path = tmp_path / "out.partial"
    write_checkpoint(path, {"pass": 1}, filled.tensors())
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "foreign":
        path.write_text("text")
    else:
        path.unlink()
    with pytest.raises(ValueError, match=r"out\.partial.*remove it"):
        read_state(path)


def test_statistics_of_another_shape_are_refused(filled):
    with pytest.raises(ValueError, match="'moments'"):
        LayerStatistics(E, D).load({**filled.tensors(), "moments": torch.zeros(E, 3, dtype=torch.float64)})
    with pytest.raises(ValueError, match="first"):
        LayerStatistics(E, D + 1).load(filled.tensors())
