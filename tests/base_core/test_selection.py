"""`base_core.select` against the loop oracle, and each rule of DESIGN section 2 as a property of its own."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base_core import Budget, RouterRule, removal_cost, route, select
from tests.base_core.oracle import cases, loop_select

TOLERANCE = 1e-5


def run(case, budget, **changes):
    routing = case["routing"]
    options = {name: case[name] for name in ("rows", "groups", "ranking", "fill", "denominator")} | changes
    return select(
        routing.scores,
        routing.ids,
        routing.weights,
        case["log_energy"],
        budget,
        preference=routing.preference,
        **options,
    )


def decision_margin(cost, active, tau, groups, floor):
    """How far a cost or a running sum is from changing the active set, relative to its rank's total."""
    margin = np.inf
    for g in set(groups.tolist()):
        own, kept = cost[groups == g].astype(np.float64), active[groups == g]
        if not own.sum() > 0:
            continue
        gaps = [own[kept].min() - own[~kept].max()] if kept.any() and not kept.all() else []
        if tau is not None:
            gaps += [abs(r - tau * own.sum()) for r in np.cumsum(-np.sort(-own))]
        if floor is not None:
            gaps += [abs(c - floor * own.sum()) for c in own]
        margin = min([margin, *(abs(gap) / own.sum() for gap in gaps)])
    return margin


def budgets(E):
    return st.one_of(
        st.integers(1, E).map(lambda m: (str(m), lambda n, m=m: min(m, n), None, None)),
        st.integers(1, 100).map(lambda p: (f"{p}%", lambda n, p=p: max(1, math.ceil(n * p / 100)), None, None)),
        st.tuples(st.sampled_from([0.3, 0.9, 0.98, 1.0]), st.integers(1, E)).map(
            lambda x: (f"energy:{x[0]},max={x[1]}", lambda n, m=x[1]: min(m, n), x[0], None)
        ),
        st.tuples(st.sampled_from([1e-4, 0.01, 0.05, 0.2, 1.0]), st.integers(1, E)).map(
            lambda x: (f"share:{x[0]},max={x[1]}", lambda n, m=x[1]: min(m, n), None, x[0])
        ),
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_equals_the_loop_oracle(data):
    case = data.draw(cases())
    routing = case["routing"]
    E = routing.scores.shape[1]
    text, limit_of, tau, floor = data.draw(budgets(E))
    got = run(case, text)
    groups = np.zeros(E, int) if case["groups"] is None else case["groups"]
    ids, weights, active, cost = loop_select(
        routing.scores, routing.ids, routing.weights, case["log_energy"], limit_of, tau, routing.preference,
        case["rows"], groups, case["ranking"], case["fill"], case["denominator"], floor=floor,
    )  # fmt: skip
    np.testing.assert_allclose(got.cost, cost, rtol=TOLERANCE, atol=1e-30)
    if set(np.flatnonzero(got.active)) != active:
        assert decision_margin(cost, got.active, tau, groups, floor) < TOLERANCE
        return
    np.testing.assert_array_equal(got.ids, ids)
    np.testing.assert_allclose(got.weights, weights, rtol=TOLERANCE, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_invariants(data):
    case = data.draw(cases())
    routing, rows = case["routing"], case["rows"]
    E = routing.scores.shape[1]
    text, limit_of, *_ = data.draw(budgets(E))
    got = run(case, text)
    assert got.ids.shape == routing.ids.shape and got.weights.shape == routing.weights.shape
    assert got.ids.dtype == routing.ids.dtype and got.weights.dtype == routing.weights.dtype
    assert np.isfinite(got.weights).all()
    if (rows != 0).any():
        assert got.active[got.ids].all(), "an id outside the active set"
    assert not got.weights[rows == 0].any()
    native = (rows != 0) & got.active[routing.ids].all(1)
    np.testing.assert_array_equal(got.ids[native], routing.ids[native])
    assert got.weights[native].tobytes() == routing.weights[native].tobytes()
    if (rows == 2).any():
        assert native[rows != 0].all(), "a batch that holds prefill rows was changed"
    else:
        groups = np.zeros(E, int) if case["groups"] is None else case["groups"]
        for g in set(groups):
            assert got.active[groups == g].sum() <= limit_of(int((groups == g).sum()))
        executed = np.unique(got.ids[(rows == 1)[:, None] & (got.weights != 0)])
        if case["ranking"] in ("weight_sum", "squared_weight") and (routing.weights[rows == 1] > 1e-6).all():
            assert set(executed) == set(np.flatnonzero(got.active)), "an active expert that nobody executes"


@settings(max_examples=100, deadline=None)
@given(cases())
def test_off_and_generous_budgets_change_nothing(case):
    routing, real = case["routing"], case["rows"] != 0
    off = run(case, "off")
    assert off.ids.tobytes() == routing.ids.tobytes() and off.weights.tobytes() == routing.weights.tobytes()
    union = len(np.unique(routing.ids[case["rows"] == 1]))
    for budget in {routing.scores.shape[1], max(1, union)}:
        got = run(case, int(budget), groups=None)
        assert got.ids[real].tobytes() == routing.ids[real].tobytes()
        assert got.weights[real].tobytes() == routing.weights[real].tobytes()


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_padding_rows_decide_nothing(case, seed):
    routing = case["routing"]
    rows = np.where(case["rows"] == 2, 1, case["rows"])
    real = rows != 0
    if not real.any():
        return
    budget = max(1, routing.scores.shape[1] // 3)
    with_padding = run(case, budget, rows=rows)
    without = select(
        routing.scores[real], routing.ids[real], routing.weights[real], case["log_energy"][real], budget,
        preference=routing.preference[real], groups=case["groups"], ranking=case["ranking"], fill=case["fill"],
        denominator=case["denominator"],
    )  # fmt: skip
    np.testing.assert_array_equal(with_padding.active, without.active)
    np.testing.assert_array_equal(with_padding.ids[real], without.ids)
    garbage = {**case, "log_energy": np.where(real[:, None], case["log_energy"], np.nan)}
    again = run(garbage, budget, rows=rows)
    np.testing.assert_array_equal(again.ids, with_padding.ids)


def test_removal_cost_by_hand():
    ids = np.array([[0, 2], [2, 1]])
    weights = np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)
    energy = np.log(np.array([[4.0, 1.0, 16.0], [1.0, 8.0, 2.0]]))
    cost = removal_cost(ids, weights, energy, np.array([True, True]), 3)
    np.testing.assert_allclose(cost, [0.5625 * 4, 0.25 * 8, 0.0625 * 16 + 0.25 * 2], rtol=1e-6)


def test_one_selection_by_hand():
    scores = np.array([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]], np.float32)
    ids = np.array([[0, 1], [3, 2]])
    weights = np.array([[0.625, 0.375], [4 / 7, 3 / 7]], np.float32)
    got = select(scores, ids, weights, np.zeros((2, 4)), 2)
    assert np.flatnonzero(got.active).tolist() == [0, 3]
    assert got.ids.tolist() == [[0, 3], [3, 0]]
    np.testing.assert_allclose(got.weights, [[0.625, 0.0625], [4 / 7, 1 / 7]], rtol=1e-6)
    dropped = select(scores, ids, weights, np.zeros((2, 4)), 2, fill="drop")
    assert dropped.ids.tolist() == [[0, 0], [3, 3]] and (dropped.weights[:, 1] == 0).all()
    whole = select(scores, ids, weights, np.zeros((2, 4)), 2, denominator="renormalise")
    np.testing.assert_allclose(whole.weights.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(whole.weights[0], [0.5 / 0.55, 0.05 / 0.55], rtol=1e-5)


def test_a_forbidden_group_leaves_the_slot_empty():
    scores = np.full((1, 4), 0.25, np.float32)
    preference = np.array([[0.3, 0.2, -np.inf, -np.inf], [-np.inf, -np.inf, 0.9, 0.8]], np.float32)
    ids = np.array([[0, 1], [2, 3]])
    weights = np.array([[0.1, 0.1], [1.0, 0.9]], np.float32)
    got = select(np.repeat(scores, 2, 0), ids, weights, np.zeros((2, 4)), 2, preference=preference)
    assert np.flatnonzero(got.active).tolist() == [2, 3]
    assert got.ids[0].tolist() == [2, 2] and got.weights[0].tolist() == [0, 0]
    assert got.ids[1].tolist() == [2, 3]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_cost_that_is_not_finite_keeps_the_native_routing(poison):
    routing = route(np.random.default_rng(0).normal(size=(4, 16)), RouterRule(4))
    weights = routing.weights.copy()
    weights[2, 1] = poison
    got = select(routing.scores, routing.ids, weights, np.zeros((4, 16)), 3)
    assert got.fell_back
    np.testing.assert_array_equal(got.ids, routing.ids)
    assert not select(routing.scores, routing.ids, routing.weights, np.zeros((4, 16)), 3).fell_back


def test_log_energy_is_clamped_before_the_exponential():
    routing = route(np.zeros((2, 4)), RouterRule(2))
    got = select(routing.scores, routing.ids, routing.weights, np.full((2, 4), 1e30), 1)
    assert not got.fell_back and np.isfinite(got.cost).all() and got.active.tolist() == [True, False, False, False]


def test_ties_go_to_the_lower_index():
    routing = route(np.zeros((3, 8)), RouterRule(3))
    assert routing.ids.tolist() == [[0, 1, 2]] * 3
    got = select(routing.scores, routing.ids, routing.weights, np.zeros((3, 8)), 2)
    assert np.flatnonzero(got.active).tolist() == [0, 1]


def test_a_per_rank_budget_holds_in_every_rank():
    rng = np.random.default_rng(3)
    routing = route(rng.normal(size=(16, 64)), RouterRule(8))
    groups = np.arange(64) // 16
    got = select(routing.scores, routing.ids, routing.weights, rng.normal(size=(16, 64)), 3, groups=groups)
    assert [got.active[groups == g].sum() for g in range(4)] == [3, 3, 3, 3]


def test_a_batch_of_padding_alone_reads_nothing():
    routing = route(np.random.default_rng(1).normal(size=(3, 8)), RouterRule(2))
    got = select(routing.scores, routing.ids, routing.weights, np.zeros((3, 8)), 2, rows=[0, 0, 0])
    assert not got.active.any() and not got.weights.any() and not got.ids.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": np.zeros(8)}, "scores has shape"),
        ({"ids": np.zeros((2, 2), int)}, "repeats an expert"),
        ({"ids": np.array([[0, 8], [1, 2]])}, "expected 0..7"),
        ({"ids": np.array([[0.0, 1.0], [1.0, 2.0]])}, "expected integers"),
        ({"ids": np.zeros((3, 2), int)}, "ids has shape"),
        ({"weights": np.zeros((2, 3))}, "weights has shape"),
        ({"log_energy": np.zeros((2, 9))}, "log_energy has shape"),
        ({"log_energy": None}, "needs log_energy"),
        ({"rows": [1, 3]}, "only 0"),
        ({"rows": [1]}, "rows has shape"),
        ({"groups": [0, 1]}, "groups has shape"),
        ({"ranking": "best"}, "removal_cost"),
        ({"fill": "fold"}, "backfill"),
        ({"denominator": "raw"}, "renormalise"),
        ({"budget": 0}, "below 1"),
        ({"budget": 9}, r"1\.\.8"),
        ({"budget": "lots"}, "not understood"),
    ],
)
def test_errors_name_the_field(changes, message):
    arguments = {
        "scores": np.full((2, 8), 0.125),
        "ids": np.array([[0, 1], [1, 2]]),
        "weights": np.full((2, 2), 0.5),
        "log_energy": np.zeros((2, 8)),
        "budget": 2,
    } | changes
    with pytest.raises(ValueError, match=message):
        select(**arguments)


def test_static_energy_may_be_one_vector():
    routing = route(np.random.default_rng(5).normal(size=(4, 8)), RouterRule(2))
    vector = np.log(np.arange(1, 9, dtype=np.float32))
    one = select(routing.scores, routing.ids, routing.weights, vector, 3, ranking="static_energy")
    each = select(
        routing.scores, routing.ids, routing.weights, np.tile(vector, (4, 1)), Budget.parse(3), ranking="oracle"
    )
    np.testing.assert_array_equal(one.ids, each.ids)
