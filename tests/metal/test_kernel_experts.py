"""Kernel B against its literal twin, from its own Metal source; on a Mac, on the device."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from mlx import nn  # noqa: E402
from mlx_lm.models.switch_layers import SwitchGLU  # noqa: E402

from tests.metal import harness  # noqa: E402

kernel = importlib.import_module("backends.mlx.kernels.experts")
lists = importlib.import_module("backends.mlx.kernels.lists")

pytestmark = pytest.mark.skipif(
    not (harness.AVAILABLE or mx.metal.is_available()), reason="needs Linux and g++, or a Metal device"
)
needs_harness = pytest.mark.skipif(not harness.AVAILABLE, reason="the harness needs Linux and g++")
needs_clang = pytest.mark.skipif(harness.clang() is None, reason="no clang: install ziglang")

# Of the largest output: the hidden layer and the result are rounded to the dtype.
TOLERANCES = {mx.float32: 3e-6, mx.float16: 3e-3, mx.bfloat16: 2e-2}


def make_projections(rng, E, d, H, dtype, bits=0, group_size=64):
    def projection(out, into):
        weight = mx.array(rng.normal(scale=into**-0.5, size=(E, out, into)).astype(np.float32)).astype(dtype)
        if not bits:
            return kernel.Projection(weight)
        return kernel.Projection(*mx.quantize(weight, group_size, bits), bits, group_size)

    return {"gate": projection(H, d), "up": projection(H, d), "down": projection(d, H)}


def make_rows(rng, T, E, k, d, dtype):
    x = mx.array(rng.normal(size=(T, d)).astype(np.float32)).astype(dtype)
    ids = mx.array(np.stack([rng.permutation(E)[:k] for _ in range(T)]).astype(np.uint32))
    weights = mx.array(rng.random((T, k)).astype(np.float32) + 0.1).astype(dtype)
    return x, ids, weights


def compare(x, ids, weights, projections, **options):
    got = kernel.grouped_experts(x, ids, weights, **projections, **options)
    expected = np.array(kernel.grouped_experts_naive(x, ids, weights, **projections))
    assert got.dtype == options.get("out_dtype", x.dtype)
    error = np.abs(np.array(got.astype(mx.float32)) - expected).max()
    assert error <= TOLERANCES[x.dtype] * np.abs(expected).max(), error
    return got


@pytest.fixture(autouse=True)
def launches():
    # The hidden layer of an empty slot is neither written nor read.
    with (
        harness.runnable(lists) as listing,
        harness.runnable(kernel, partial=["_gate_up_kernel"]) as kernels,
    ):
        yield listing | kernels


@pytest.mark.parametrize("T", range(1, 33))
def test_rows(T):
    rng = np.random.default_rng(T)
    compare(*make_rows(rng, T, 6, 3, 64, mx.float32), make_projections(rng, 6, 64, 64, mx.float32, 4))


# d and H against the 1024, 512 or 256 inputs and the 4 to 16 outputs of a tile.
SHAPES = [
    (mx.float32, 4, 64, 192, 128),
    (mx.bfloat16, 4, 64, 1088, 64),
    (mx.float16, 4, 32, 96, 160),
    (mx.float32, 4, 128, 128, 256),
    (mx.float32, 8, 64, 192, 576),
    (mx.bfloat16, 8, 32, 96, 32),
    (mx.float32, 0, 0, 40, 264),
    (mx.float16, 0, 0, 72, 40),
    (mx.bfloat16, 0, 0, 280, 8),
]


@pytest.mark.parametrize(("dtype", "bits", "group_size", "d", "H"), SHAPES)
def test_formats_and_odd_shapes(dtype, bits, group_size, d, H):
    rng = np.random.default_rng(d + H)
    compare(*make_rows(rng, 3, 5, 2, d, dtype), make_projections(rng, 5, d, H, dtype, bits, group_size))


def test_ragged_rows():
    """One expert on every row, others on one, some on none; empty slots repeat an expert with weight 0."""
    rng = np.random.default_rng(1)
    projections = make_projections(rng, 40, 64, 64, mx.float32, 4)
    for T in (31, 32):
        x, _, weights = make_rows(rng, T, 40, 3, 64, mx.float32)
        ids = np.stack([np.full(T, 7), np.arange(T) % 35 + (np.arange(T) % 35 >= 7), np.full(T, 39)], 1)
        weights = np.array(weights)
        weights[:, 2] = 0
        weights[T // 2 :, 1] = 0
        ids[T // 2 :, 1:] = 7
        weights[3] = 0
        got = compare(x, mx.array(ids.astype(np.uint32)), mx.array(weights), projections)
        assert (np.array(got)[3] == 0).all()


def test_more_experts_than_slots_at_once():
    rng = np.random.default_rng(2)
    projections = make_projections(rng, 70, 64, 64, mx.float32, 4)
    compare(*make_rows(rng, 8, 70, 6, 64, mx.float32), projections)


def test_inactive_experts_are_not_read():
    rng = np.random.default_rng(3)
    projections = make_projections(rng, 6, 64, 64, mx.float32, 4)
    x, _, weights = make_rows(rng, 4, 6, 2, 64, mx.float32)
    ids = mx.array(rng.permuted(np.tile([1, 4], (4, 1)), axis=1).astype(np.uint32))
    expected = kernel.grouped_experts(x, ids, weights, **projections)
    for projection in projections.values():
        for spoiled in (0, 2, 3, 5):
            projection.scales[spoiled] = mx.array(float("nan"))
    assert mx.array_equal(kernel.grouped_experts(x, ids, weights, **projections), expected)


def test_result_of_a_row_does_not_depend_on_the_others():
    rng = np.random.default_rng(4)
    projections = make_projections(rng, 6, 64, 64, mx.float32, 4)
    x, ids, weights = make_rows(rng, 5, 6, 3, 64, mx.float32)
    twice = (mx.concatenate([a, a[:2]]) for a in (x, ids, weights))
    got = kernel.grouped_experts(*twice, **projections)
    assert mx.array_equal(got[:2], got[5:])


def make_switch(E=6, d=64, H=64, bits=4, **options):
    mx.random.seed(0)
    switch = SwitchGLU(d, H, E, **options)
    if bits:
        nn.quantize(switch, group_size=64, bits=bits)
    return switch


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_switch_glu(bits):
    rng = np.random.default_rng(5)
    switch = make_switch(bits=bits)
    x, ids, weights = make_rows(rng, 4, 6, 2, 64, mx.float32)
    shaped = [a.reshape(4, 1, -1) for a in (x, ids, weights)]
    got = kernel.experts(switch, *shaped, True)
    expected = (switch(*shaped[:2]) * shaped[2][..., None]).sum(axis=-2)
    assert got.shape == (4, 1, 64)
    assert mx.allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_dtype_of_the_result():
    rng = np.random.default_rng(6)
    switch = make_switch(bits=0)
    switch.set_dtype(mx.bfloat16)
    x, ids, weights = make_rows(rng, 2, 6, 2, 64, mx.bfloat16)
    for scale, keeps, dtype in (
        (mx.float32, False, mx.float32),
        (mx.float32, True, mx.bfloat16),
        (mx.bfloat16, False, mx.bfloat16),
    ):
        assert kernel.experts(switch, x, ids, weights.astype(scale), keeps).dtype == dtype


class OtherActivation(nn.Module):
    def __call__(self, x, gate):
        return nn.gelu(gate) * x


@pytest.mark.parametrize(
    "options",
    [{"rows": 33}, {"bias": True}, {"activation": OtherActivation()}, {"bits": 3}, {"d": 68, "bits": 0}],
    ids=str,
)
def test_what_is_left_to_the_operations(options):
    options = dict(options)
    T, d = options.pop("rows", 2), options.get("d", 64)
    x, ids, weights = make_rows(np.random.default_rng(7), T, 6, 2, d, mx.float32)
    assert kernel.experts(make_switch(**options), x, ids, weights, True) is None


def test_mxfp4_is_left_to_the_operations():
    switch = make_switch(bits=0)
    nn.quantize(switch, group_size=32, bits=4, mode="mxfp4")
    assert kernel.experts(switch, *make_rows(np.random.default_rng(7), 2, 6, 2, 64, mx.float32), True) is None


def test_shapes_that_do_not_fit():
    rng = np.random.default_rng(8)
    projections = make_projections(rng, 6, 64, 128, mx.float32, 4)
    x, ids, weights = make_rows(rng, 2, 6, 2, 64, mx.float32)
    with pytest.raises(ValueError, match="down maps"):
        kernel.grouped_experts(x, ids, weights, **{**projections, "down": projections["gate"]})
    with pytest.raises(ValueError, match="another kind"):
        other = make_projections(rng, 6, 64, 128, mx.float32, 8)
        kernel.grouped_experts(x, ids, weights, **{**projections, "up": other["up"]})
    with pytest.raises(ValueError, match="33 rows"):
        kernel.grouped_experts(*make_rows(rng, 33, 6, 2, 64, mx.float32), **projections)


@needs_harness
def test_every_barrier_is_needed(launches):
    rng = np.random.default_rng(9)
    x, ids, weights = make_rows(rng, 4, 40, 2, 64, mx.float32)
    kernel.grouped_experts(x, ids, weights, **make_projections(rng, 40, 64, 64, mx.float32, 4))
    for name, barriers in (("_list_kernel", 2), ("_gate_up_kernel", 0), ("_down_kernel", 1)):
        missing = list(harness.without_barriers(launches[name].launches[0]))
        assert len(missing) == barriers
        for faulty in missing:
            with pytest.raises(harness.KernelError):
                harness.run_checked(faulty)


@needs_harness
@pytest.mark.parametrize("bits", [4, 0])
def test_races_and_address_spaces(bits, launches):
    rng = np.random.default_rng(9)
    x, ids, weights = make_rows(rng, 4, 3, 2, 64, mx.float32)
    weights[0, 1] = 0
    kernel.grouped_experts(x, ids, weights, **make_projections(rng, 3, 64, 64, mx.float32, bits))
    recorded = [launch for stand_in in launches.values() for launch in stand_in.launches]
    assert len(recorded) == 3
    for launch in recorded:
        assert harness.races(launch) == []
        if harness.clang():
            assert harness.address_space_errors(launch.source) == []
