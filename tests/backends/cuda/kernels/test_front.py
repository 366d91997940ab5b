"""The fused front against its twin and against base_core.select, in the Triton interpreter."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from backends.cuda.kernels.front import FrontState, budget_value, front, front_shape, naive_front  # noqa: E402
from base_core import select  # noqa: E402
from base_core.budget import Budget  # noqa: E402
from base_core.routing import RouterRule, route  # noqa: E402

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True)  # torch.empty then holds NaN and the largest integers
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make(T, E, H=64, *, seed=0, dtype=torch.float32, sharp=1.0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(T, H, generator=generator).to(dtype)
    weight = torch.randn(2 * E, H, generator=generator) * sharp / H**0.5
    weight[E:] *= H**0.5  # the predictor sees unit vectors
    rows = torch.ones(T, dtype=torch.int32)
    return z, weight.to(dtype), torch.randn(E, generator=generator), rows


def run(case, budget, rule, state=None, **options):
    z, weight, bias, rows = case
    E = len(bias)
    return front(
        z, weight, bias, rows, budget_value(Budget.parse(budget), E), state or FrontState.zeros("cpu"), rule, **options
    )


def reference(case, out, budget, rule, correction=None):
    """base_core.route and select on the kernel's own logits, so that only the float32 steps after them can differ."""
    z, weight, bias, rows = case
    routing = route(out.logits.numpy(), rule, None if correction is None else correction.numpy())
    log_energy = naive_front(z, weight, bias, rows, Budget.parse("off"), rule).log_energy.float().numpy()
    rows = rows[: len(z)].numpy()
    weights = torch.from_numpy(routing.weights).to(out.weights.dtype).float().numpy()
    return select(routing.scores, routing.ids, weights, log_energy, budget, preference=routing.preference, rows=rows)


def check(case, budget, rule, *, cost_tolerance=1e-4, **options):
    out = run(case, budget, rule, **options)
    z, _, bias, _ = case
    E, T = len(bias), len(z)
    expected = reference(case, out, budget, rule, options.get("correction"))
    count = int(out.count)
    active = torch.zeros(E, dtype=torch.bool)
    active[out.active[:count].long()] = True
    assert active.numpy().tolist() == expected.active.tolist()
    assert out.active[:count].tolist() == sorted(out.active[:count].tolist())
    assert out.ids.numpy().tolist() == expected.ids.tolist()
    rounding = 2e-2 if out.weights.dtype == torch.bfloat16 else 0  # the interpreter truncates to bfloat16
    np.testing.assert_allclose(out.weights.float(), expected.weights, rtol=2e-6 + rounding, atol=1e-7)
    np.testing.assert_allclose(out.cost, expected.cost, rtol=cost_tolerance)
    combine = torch.zeros(T, E).scatter_add_(1, out.ids, out.weights.float()).T
    assert torch.equal(out.combine[:count], combine[active])
    return out, expected


# Pairwise: every value of E, k and T, budgets below and above k, odd d, both precisions.
CASES = [
    # T, E, k, budget, H, dtype
    (1, 60, 2, 1, 64, torch.float32),
    (1, 128, 8, 8, 80, torch.bfloat16),
    (2, 64, 6, 3, 100, torch.float32),
    (2, 256, 4, 16, 64, torch.bfloat16),
    (5, 60, 4, 10, 64, torch.bfloat16),
    (5, 256, 8, 4, 64, torch.float32),
    (16, 128, 8, 10, 256, torch.float32),
    (16, 64, 2, 1, 64, torch.bfloat16),
    (16, 256, 6, 12, 64, torch.float32),
    (33, 128, 4, 16, 64, torch.float32),
    (33, 60, 8, 5, 64, torch.bfloat16),
    (33, 256, 2, 24, 32, torch.float32),
    (64, 64, 8, 20, 64, torch.float32),
    (64, 128, 6, 2, 64, torch.bfloat16),
    (64, 60, 6, "12.5%", 48, torch.float32),
    (200, 64, 4, 9, 32, torch.float32),
]


@pytest.mark.parametrize(("T", "E", "k", "budget", "H", "dtype"), CASES)
def test_equals_reference(T, E, k, budget, H, dtype):
    case = make(T, E, H, seed=T + E + k, dtype=dtype)
    state = FrontState.zeros("cpu")
    out, expected = check(case, budget, RouterRule(k), state=state)
    exact = naive_front(*case, Budget.parse("off"), RouterRule(k))
    torch.testing.assert_close(out.logits, exact.logits.float(), rtol=1e-5, atol=1e-5)
    assert not state.tickets.any()
    union = len(np.unique(np.asarray(exact.ids)))
    active = int(expected.active.sum())
    assert state.counters.tolist() == [1, 0, active, union, active]


def test_equals_twin():
    case = make(16, 128, 128, seed=3)
    out, twin = run(case, 10, RouterRule(8)), naive_front(*case, Budget.parse(10), RouterRule(8))
    assert torch.equal(out.ids, twin.ids)
    torch.testing.assert_close(out.weights, twin.weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.combine[: int(out.count)], twin.combine[twin.active], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.cost, twin.cost, rtol=1e-4, atol=0)


RULES = {
    "raw softmax": RouterRule(6, normalise="none", scale=16.0),
    "renormalised": RouterRule(6),
    "softmax over the k": RouterRule(4, normalise="softmax_selected"),
    "sigmoid": RouterRule(8, score="sigmoid", scale=2.5),
}


@pytest.mark.parametrize("name", RULES)
def test_router_rules(name):
    rule = RULES[name]
    E = 32
    correction = torch.linspace(-0.3, 0.3, E) if rule.score == "sigmoid" else None
    case = make(16, E, seed=4, sharp=2.0)
    router_bias = torch.randn(E, generator=torch.Generator().manual_seed(1)) if "over the k" in name else None
    out, _ = check(case, 9, rule, correction=correction, router_bias=router_bias)
    exact = naive_front(*case, Budget.parse("off"), rule, router_bias=router_bias)
    torch.testing.assert_close(out.logits, exact.logits.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [16, 40])
@pytest.mark.parametrize("budget", ["energy:0.5", "energy:0.9,max=6", "energy:1"])
def test_energy_budgets(T, budget):
    check(make(T, 64, seed=5), budget, RouterRule(4))


def test_weights_rounded_to_the_routers_dtype():
    out, _ = check(make(16, 64, seed=6), 12, RouterRule(6), weight_dtype=torch.bfloat16, cost_tolerance=3e-2)
    assert out.weights.dtype == torch.bfloat16


@pytest.mark.parametrize("T", [16, 48])
def test_rows(T):
    case = make(T, 64, seed=7)
    rows = case[3]
    rows[3], rows[T - 1] = 0, 0
    out, _ = check(case, 8, RouterRule(4))
    assert out.weights[3].eq(0).all() and out.ids[3].eq(out.active[0]).all()

    rows[5] = 2
    state = FrontState.zeros("cpu")
    mixed, _ = check(case, 8, RouterRule(4), state=state)
    assert not state.counters.any()  # not a decode step
    real = rows != 0
    native = run((*case[:3], torch.ones_like(rows)), 64, RouterRule(4))
    assert torch.equal(mixed.ids[real], native.ids[real]) and torch.equal(mixed.weights[real], native.weights[real])


def test_rows_buffer_may_be_longer_than_the_batch():
    z, weight, bias, rows = make(5, 64, seed=8)
    longer = torch.cat([rows, torch.full((27,), 2, dtype=torch.int32)])
    assert torch.equal(
        run((z, weight, bias, longer), 6, RouterRule(4)).ids, run((z, weight, bias, rows), 6, RouterRule(4)).ids
    )


def test_only_padding():
    case = make(4, 64)
    case[3].zero_()
    out, _ = check(case, 8, RouterRule(4))
    assert int(out.count) == 0 and not out.ids.any() and not out.weights.any()


@pytest.mark.parametrize("T", [1, 16, 33])
def test_native_rows_bit_for_bit(T):
    case = make(T, 64, seed=9)
    union = len(naive_front(*case, Budget.parse("off"), RouterRule(6)).ids.unique())
    off, restricted = run(case, 64, RouterRule(6)), run(case, union - 2, RouterRule(6))
    active = restricted.active[: int(restricted.count)]
    kept = torch.isin(off.ids, active.long()).all(1)
    assert kept.any() or T == 1
    assert torch.equal(off.ids[kept], restricted.ids[kept]) and torch.equal(off.weights[kept], restricted.weights[kept])
    at_union = run(case, union, RouterRule(6))
    assert torch.equal(off.ids, at_union.ids) and torch.equal(off.weights, at_union.weights)
    assert torch.equal(off.combine[: int(off.count)], at_union.combine[: int(at_union.count)])


@pytest.mark.parametrize("T", [5, 40])
def test_ties_go_to_the_lower_index(T):
    z, weight, bias, rows = make(T, 64, seed=10)
    z, weight = z.round(), (weight * 4).round()  # small integers: products are exact
    weight[32:64], weight[96:] = weight[:32].clone(), weight[64:96].clone()
    bias[32:] = bias[:32].clone()
    check((z, weight, bias, rows), 7, RouterRule(6))
    z[:] = z[0].clone()  # duplicate rows
    check((z, weight, bias, rows), 3, RouterRule(6))


@pytest.mark.parametrize("T", [16, 40])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_falls_back_where_a_cost_is_not_finite(T, value):
    case = make(T, 64, seed=11)
    case[0][2, 5] = value
    state = FrontState.zeros("cpu")
    out = run(case, 4, RouterRule(4), state=state)
    assert state.counters[1] == 1
    assert ((out.ids >= 0) & (out.ids < 64)).all()
    clean = torch.arange(T) != 2
    native = run((case[0][clean].contiguous(), *case[1:3], case[3][clean].contiguous()), 64, RouterRule(4))
    assert torch.equal(out.ids[clean], native.ids)


def test_extreme_logits():
    z, weight, bias, rows = make(16, 64, seed=12, sharp=200.0)
    rule = RouterRule(6, normalise="softmax_selected")
    check((z, weight, bias + 300, rows), 8, rule, cost_tolerance=2e-3)
    z[0] = 0
    check((z, weight, bias, rows), 8, rule, cost_tolerance=2e-3)


def test_replays_alike():
    case, state = make(40, 64, seed=13), FrontState.zeros("cpu")
    first, second = run(case, 9, RouterRule(6), state), run(case, 9, RouterRule(6), state)
    for name, a, b in zip(first._fields, first, second, strict=True):
        rows = int(first.count) if name == "combine" else len(a)
        assert torch.equal(a[:rows], b[:rows]), name
    assert not state.tickets.any() and state.counters[0] == 2


def test_budget_is_a_device_value():
    case, state = make(16, 64, seed=14), FrontState.zeros("cpu")
    value = budget_value(Budget.parse(5), 64)
    args = (*case, value, state, RouterRule(4))
    assert int(front(*args).count) == 5
    value.copy_(budget_value(Budget.parse(9), 64))
    assert int(front(*args).count) == 9


def test_launches():
    assert [front_shape(T, 128, 8, 2048).blocks for T in (1, 16, 32, 33, 256)] == [1, 1, 1, 2, 8]


def test_refuses():
    z, weight, bias, rows = make(4, 64)
    value, state = budget_value(Budget.parse(5), 64), FrontState.zeros("cpu")
    with pytest.raises(ValueError, match="expert groups"):
        front(z, weight, bias, rows, value, state, RouterRule(4, num_groups=4, top_groups=2))
    with pytest.raises(ValueError, match="rows"):
        front(z.repeat(80, 1), weight, bias, rows.repeat(80), value, state, RouterRule(4))
    with pytest.raises(ValueError, match="weight"):
        front(z, weight.half(), bias, rows, value, state, RouterRule(4))
