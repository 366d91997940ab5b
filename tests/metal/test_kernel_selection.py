"""Kernel A against `base_core.select` and its MLX twin, from its own Metal source; on a Mac, on the device."""

from __future__ import annotations

import importlib
from itertools import cycle, product

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from backends.mlx.selection import SHARE_UNIT, Predicted, count_no_sync, select_no_sync  # noqa: E402
from base_core import Budget, select  # noqa: E402
from tests.metal import harness  # noqa: E402

kernel = importlib.import_module("backends.mlx.kernels.selection")

pytestmark = pytest.mark.skipif(
    not (harness.AVAILABLE or mx.metal.is_available()), reason="needs Linux and g++, or a Metal device"
)
needs_harness = pytest.mark.skipif(not harness.AVAILABLE, reason="the harness needs Linux and g++")
needs_clang = pytest.mark.skipif(harness.clang() is None, reason="no clang: install ziglang")

EXPERTS = (60, 64, 128, 256, 512)
ROWS = (1, 2, 7, 16, 64, 128, 256)
SLOTS = (2, 4, 6, 8, 10)
DTYPES = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}
BUDGETS = ("8", "25%", "1", "energy:0.9", "energy:0.7,max=12", "energy:1,max=16", "50%")
FILLS, DENOMINATORS = ("backfill", "backfill", "drop"), ("native", "native", "renormalise")


def grid():
    """Every pair of listed values of E, T, k and the dtype, and the other choices in turn."""
    budgets, fills, denominators = cycle(BUDGETS), cycle(FILLS), cycle(DENOMINATORS)
    dtypes = list(DTYPES)
    for (e, E), (t, T) in product(enumerate(EXPERTS), enumerate(ROWS)):
        yield E, T, SLOTS[(e + t) % 5], dtypes[(t + 2 * e) % 3], next(budgets), next(fills), next(denominators)


def as_float32(array):
    return np.array(array.astype(mx.float32))


def make(rng, E, T, k, dtype=mx.float32, *, levels=0, kinds=(1,), bias=False, forbid=0.0):
    """Router outputs as a model has them: MLX arrays, ids in no particular order."""
    raw = rng.dirichlet(np.full(E, 0.3), T) + 1e-4 if not levels else (rng.integers(0, levels, (T, E)) + 1) / levels
    scores = mx.array(raw.astype(np.float32)).astype(dtype)
    preference = as_float32(scores) + (rng.normal(scale=0.1, size=E) if bias else 0)
    preference = as_float32(mx.array(preference.astype(np.float32)).astype(dtype))
    ids = rng.permuted(np.argsort(-preference, axis=1, kind="stable")[:, :k], axis=1)
    forbidden = rng.random((T, E)) < forbid
    np.put_along_axis(forbidden, ids, False, axis=1)
    preference = np.where(forbidden, -np.inf, preference)
    weights = np.take_along_axis(as_float32(scores), ids, axis=1) * rng.uniform(0.5, 2)
    return {
        "scores": scores,
        "ids": mx.array(ids.astype(np.uint32)),
        "weights": mx.array(weights.astype(np.float32)).astype(dtype),
        "log_energy": mx.array(rng.normal(size=(T, E)).astype(np.float32)),
        "preference": mx.array(preference.astype(np.float32)).astype(dtype),
        "rows": mx.array(rng.choice(kinds, T).astype(np.int32)),
    }


def undecided(cost, tau):
    """True when rounding decides how many experts hold the share `tau`: float32 sums here, float64 in the reference."""
    running = np.cumsum(np.sort(cost.astype(np.float64))[::-1])
    return tau is not None and tau < 1 and bool((np.abs(running / running[-1] - tau) <= 1e-6).any())


def compare(case, budget, tolerance, **choices):
    """Runs the kernel and checks everything that it returns; None where the case is undecided."""
    E = case["scores"].shape[1]
    budget = Budget.parse(budget)
    values = dict(case)
    if isinstance(case["log_energy"], Predicted):
        values["log_energy"] = case["log_energy"].log_energy()
    arrays = {
        n: None if a is None else np.array(a) if n in ("ids", "rows") else as_float32(a) for n, a in values.items()
    }
    expected = select(**arrays, budget=budget, **choices)
    if np.isfinite(expected.cost).all() and expected.cost.any() and undecided(expected.cost, budget.tau):
        return None
    before = mx.array([3, 5, 7, 11, 13], mx.int64)
    arguments = {**case, "limit": mx.array(budget.limit(E)), "tau": budget.tau, "counters": before, **choices}
    got = kernel.select(**arguments)
    active, ids = np.array(got.active), np.array(got.ids)
    finite = np.isfinite(expected.cost)
    np.testing.assert_allclose(np.array(got.cost)[finite], expected.cost[finite], rtol=1e-5)
    np.testing.assert_array_equal(active, expected.active)
    np.testing.assert_array_equal(ids, expected.ids)
    assert got.ids.dtype == case["ids"].dtype and got.weights.dtype == case["weights"].dtype
    np.testing.assert_allclose(as_float32(got.weights), expected.weights, rtol=tolerance, atol=1e-12)
    keeps = (np.array(case["rows"]) != 0) & expected.active[arrays["ids"].astype(int)].all(1)
    np.testing.assert_array_equal(as_float32(got.weights)[keeps], arrays["weights"][keeps])
    assert active[ids].all() or not active.any()

    assert got.fell_back.item() == expected.fell_back
    union = np.isin(np.arange(E), arrays["ids"][arrays["rows"] != 0])
    np.testing.assert_array_equal(np.array(got.union), union)
    counted, twin = np.array(got.counters), np.array(count_no_sync(got, before))
    np.testing.assert_array_equal(counted[[0, 1, 2, 4]], twin[[0, 1, 2, 4]])
    assert abs(counted[3] - twin[3]) <= SHARE_UNIT * 1e-5
    if union.any():
        np.testing.assert_array_equal(
            twin[[0, 1, 2, 4]], [4, 5 + active.sum(), 7 + union.sum(), 13 + got.fell_back.item()]
        )
    else:
        np.testing.assert_array_equal(twin, np.array(before))
    assert (got.lists is not None) == (len(ids) <= kernel.LISTED_ROWS)
    if got.lists is not None:
        check_lists(got.lists, ids, as_float32(got.weights))
    return got


def check_lists(lists, ids, weights):
    """Row lists against a literal reading of ids and weights."""
    pairs = {int(e): [p for p in range(ids.size) if ids.flat[p] == e and weights.flat[p]] for e in np.unique(ids)}
    wanted = {e: own for e, own in pairs.items() if own}
    experts, starts, listed = (np.array(a) for a in lists[:3])
    used = lists.used.item()
    assert used == len(wanted) and experts[:used].tolist() == list(wanted)
    assert {int(e): listed[starts[i] : starts[i + 1]].tolist() for i, e in enumerate(experts[:used])} == wanted
    assert (starts[used:] == sum(map(len, wanted.values()))).all()


@pytest.fixture
def launches():
    with harness.runnable(kernel) as kernels:
        yield kernels


@pytest.mark.parametrize(("E", "T", "k", "dtype", "budget", "fill", "denominator"), grid())
def test_equals_reference(launches, E, T, k, dtype, budget, fill, denominator):
    case = make(np.random.default_rng(E * 1000 + T), E, T, k, dtype, kinds=(0, 1, 1, 1), bias=T % 2 == 0, forbid=0.2)
    assert compare(case, budget, DTYPES[dtype], fill=fill, denominator=denominator) is not None


def test_grid_covers_every_pair():
    values = (EXPERTS, ROWS, SLOTS, tuple(DTYPES))
    for i, j in product(range(4), repeat=2):
        if i < j:
            assert {(row[i], row[j]) for row in grid()} == set(product(values[i], values[j]))


@pytest.mark.parametrize("fill", ["backfill", "drop"])
@pytest.mark.parametrize("denominator", ["native", "renormalise"])
def test_corner_cases(launches, fill, denominator):
    """Ties, duplicate rows, padding, prefill, costs of zero or not finite, limits from 1 to more than the union."""
    rng, compared = np.random.default_rng(5), 0
    for i in range(60):
        T = int(rng.integers(1, 9))
        kinds = ((1,), (0, 1), (0,), (0, 1, 2))[i % 4]
        case = make(rng, 60, T, 4, levels=(0, 1, 3)[i % 3], kinds=kinds, bias=i % 2 == 0, forbid=(0, 0.5, 0.95)[i % 3])
        energy = np.zeros((T, 60), np.float32) if i % 3 else np.array(case["log_energy"])
        spoiled = int(case["ids"][0, 0].item())
        if i % 10 == 7:
            energy[0, spoiled] = (np.nan, np.inf, -np.inf)[i % 3]
        if i % 10 == 3:
            energy[:] = rng.choice([-200, 200, 0], (T, 60))
        if i % 10 == 5:
            for name in ("scores", "weights", "preference"):
                case[name] = mx.broadcast_to(case[name][:1], case[name].shape)
            case["ids"] = mx.broadcast_to(case["ids"][:1], case["ids"].shape)
        if i % 10 == 9:
            case["weights"] = mx.where(mx.array(rng.random((T, 4)) < 0.5), 0, case["weights"])
        case["log_energy"] = mx.array(energy)
        budget = ("1", "3", "60", "energy:0.5", "energy:1", "energy:0.9,max=2", "10")[i % 7]
        compared += compare(case, budget, 2e-6, fill=fill, denominator=denominator) is not None
    assert compared >= 55


def predicted(rng, case, d, dtype, stacked):
    """The case with log-energies still to be made: a product, maybe behind router logits, and the rows it came from."""
    T, E = case["scores"].shape
    x = mx.array(rng.normal(scale=3, size=(T, d)).astype(np.float32)).astype(dtype)
    weight = mx.array(rng.normal(size=(E, d)).astype(np.float32)).astype(dtype)
    product = x.astype(mx.float32) @ weight.astype(mx.float32).T
    if stacked:
        product = mx.concatenate([mx.array(rng.normal(size=(T, E)).astype(np.float32)), product], axis=1).astype(dtype)
    bias = mx.array(rng.normal(size=E).astype(np.float32))
    return {**case, "log_energy": Predicted(product, E if stacked else 0, x, bias)}


@pytest.mark.parametrize(
    ("E", "T", "k", "d", "dtype", "stacked"),
    [
        (60, 1, 4, 40, mx.float32, True),
        (64, 16, 6, 72, mx.float16, False),
        (128, 16, 8, 128, mx.bfloat16, True),
        (128, 40, 8, 33, mx.float32, False),
        (256, 7, 8, 64, mx.bfloat16, False),
        (64, 130, 2, 64, mx.float16, True),
    ],
)
def test_energies_from_the_products(launches, E, T, k, d, dtype, stacked):
    rng = np.random.default_rng(E + T)
    case = make(rng, E, T, k, dtype, kinds=(0, 1, 1), bias=True)
    for budget in ("9", "energy:0.8"):
        assert compare(predicted(rng, case, d, dtype, stacked), budget, DTYPES[dtype]) is not None


def test_rows_of_zeros_have_the_bias_as_their_energy(launches):
    rng = np.random.default_rng(11)
    case = predicted(rng, make(rng, 60, 4, 4), 32, mx.float32, False)
    product, first, x, bias = case["log_energy"]
    case["log_energy"] = Predicted(mx.zeros_like(product), first, mx.zeros_like(x), bias)
    assert compare(case, "5", 2e-6) is not None


def test_weights_that_are_not_finite(launches):
    case = make(np.random.default_rng(6), 60, 5, 4)
    case["weights"][2, 1] = mx.array(float("inf"))
    got = compare(case, "3", 2e-6)
    assert got.fell_back.item()


def test_other_rankings(launches):
    rng = np.random.default_rng(7)
    case = make(rng, 60, 6, 4)
    static = {**case, "log_energy": mx.array(rng.normal(size=60).astype(np.float32))}
    compare(static, "7", 2e-6, ranking="static_energy")
    compare({**case, "log_energy": None}, "7", 2e-6, ranking="squared_weight")
    for ranking in ("weight_sum", "top1_union"):
        assert kernel.select(**case, limit=7, ranking=ranking) is None
    assert kernel.select(**case, limit=7, floor=mx.array(0.02)) is None
    with pytest.raises(ValueError, match="needs log_energy"):
        kernel.select(**{**case, "log_energy": None}, limit=7)


def test_defaults(launches):
    case = make(np.random.default_rng(8), 60, 6, 4)
    case["preference"], case["rows"] = case["scores"], mx.ones((6,), mx.int32)
    bare = {n: case[n] for n in ("scores", "ids", "weights", "log_energy")}
    expected = compare(case, "7", 2e-6)
    for limit, tau in ((7, None), (mx.array([7]), mx.array(0.0))):
        got = kernel.select(**bare, limit=limit, tau=tau)
        assert mx.array_equal(got.ids, expected.ids) and mx.array_equal(got.weights, expected.weights)
    twin = select_no_sync(**bare, limit=7)
    assert mx.array_equal(twin.ids, expected.ids) and mx.allclose(twin.weights, expected.weights, rtol=2e-6)


@pytest.mark.parametrize(("T", "E", "k"), [(257, 8, 2), (4, 513, 2), (4, 32, 17)])
def test_larger_layers_are_left_to_the_operations(T, E, k):
    case = make(np.random.default_rng(9), E, T, k)
    assert kernel.select(**case, limit=4) is None


def recorded(T):
    """The launches of one call with everything in it."""
    with harness.simulated(kernel) as kernels:
        rng = np.random.default_rng(10)
        case = predicted(rng, make(rng, 60, T, 2, kinds=(0, 1), bias=True), 64, mx.float32, True)
        kernel.select(**case, limit=5, tau=0.95)
        return [launch for stand_in in kernels.values() for launch in stand_in.launches]


@needs_harness
@pytest.mark.parametrize("T", [5, 33, 128])
def test_no_races(T):
    assert [harness.races(launch) for launch in recorded(T)] == [[]] * (1 if T < kernel.SPLIT_ROWS else 2)


@needs_harness
def test_every_barrier_is_needed():
    (launch,) = recorded(16)
    missing = list(harness.without_barriers(launch))
    assert len(missing) == 9
    for faulty in missing:
        with pytest.raises(harness.KernelError, match="differs"):
            harness.run_checked(faulty)


@needs_harness
@needs_clang
@pytest.mark.parametrize("T", [1, 33, 128])
def test_address_spaces(T):
    assert [harness.address_space_errors(launch.source) for launch in recorded(T)] == [[]] * (1 if T < 128 else 2)


@needs_harness
@pytest.mark.parametrize("T", [16, 128])
def test_no_choice_depends_on_the_order_of_reductions(T):
    for launch in recorded(T):
        results = [harness.run(launch, reduction=order) for order in (0, 1, 5)]
        counters = [i for i, dtype in enumerate(launch.output_dtypes) if dtype == mx.int64]
        for i, outputs in enumerate(zip(*results, strict=True)):
            assert i in counters or all(np.array_equal(outputs[0], other) for other in outputs[1:])
