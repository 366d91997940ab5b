"""Every implementation of selection against the NumPy reference, on the same cases.

A new backend joins by one entry in `IMPLEMENTATIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from base_core import Budget, RouterRule, route, select
from base_core.selection import DECODE, PADDING, PREFILL, Denominator, Fill, Ranking

RELATIVE = 2e-5
"""Float tolerance of costs and weights, and the decision margin below which active sets may differ."""

ROUNDING = {"float32": RELATIVE, "float16": 2**-10, "bfloat16": 2**-7}


@dataclass(frozen=True)
class Case:
    """Arguments of `base_core.select`, with weights already rounded to `dtype`."""

    scores: np.ndarray
    preference: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    log_energy: np.ndarray
    rows: np.ndarray
    budget: Budget
    groups: np.ndarray | None = None
    ranking: Ranking = "removal_cost"
    fill: Fill = "backfill"
    denominator: Denominator = "native"
    dtype: str = "float32"
    exact: bool = False

    @property
    def limit(self) -> int | np.ndarray:
        """The budget's limit: one number, or with groups and a percentage one for each expert's group."""
        E = self.scores.shape[1]
        if self.groups is None or self.budget.percent is None:
            return self.budget.limit(E)
        return np.array([self.budget.limit(int((self.groups == g).sum())) for g in self.groups])


class Result(NamedTuple):
    ids: np.ndarray
    weights: np.ndarray
    active: np.ndarray
    cost: np.ndarray


class Implementation(NamedTuple):
    """One backend's selection.

    Attributes:
        run: computes a case and returns NumPy arrays, weights as float32.
        examples: hypothesis examples; fewer for what is slow.
        supports: whether it implements a case at all.
    """

    name: str
    run: Callable[[Case], Result]
    examples: int = 150
    supports: Callable[[Case], bool] = lambda case: True


def run_torch(case: Case) -> Result:
    import torch

    from backends.cuda.selection import select_no_sync

    limit = case.limit
    out = select_no_sync(
        torch.from_numpy(case.scores),
        torch.from_numpy(case.ids),
        torch.from_numpy(case.weights).to(getattr(torch, case.dtype)),
        torch.from_numpy(case.log_energy),
        limit if isinstance(limit, int) else torch.from_numpy(limit),
        tau=case.budget.tau,
        floor=case.budget.floor,
        preference=torch.from_numpy(case.preference),
        rows=torch.from_numpy(case.rows),
        groups=None if case.groups is None else torch.from_numpy(case.groups),
        ranking=case.ranking,
        fill=case.fill,
        denominator=case.denominator,
    )
    return Result(out.ids.numpy(), out.weights.float().numpy(), out.active.numpy(), out.cost.numpy())


IMPLEMENTATIONS = [Implementation("torch", run_torch)]


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda implementation: implementation.name, scope="module")
def implementation(request) -> Implementation:
    return request.param


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values that `dtype` represents."""
    if dtype == "float16":
        return array.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    return array


@st.composite
def cases(draw) -> Case:
    """Random batches, with the awkward ones overrepresented."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    T, E = draw(st.sampled_from([1, 2, 5, 16, 33])), draw(st.sampled_from([4, 8, 12, 60, 64]))
    k = draw(st.sampled_from([1, 2, min(8, E), E]))
    exact = draw(st.booleans())
    spread = draw(st.sampled_from([0.0, 1.0, 3.0, 90.0]))
    logits = rng.normal(size=(T, E)).astype(np.float32) * np.float32(spread)
    if exact:
        logits = np.round(logits)
    if draw(st.booleans()):
        logits[rng.integers(T)] = logits[0]
    rule = draw(
        st.sampled_from(
            [
                RouterRule(k),
                RouterRule(k, normalise="none", scale=2.5),
                RouterRule(k, normalise="softmax_selected"),
                RouterRule(k, score="sigmoid", scale=1.5),
                RouterRule(k, normalise="none", num_groups=4, top_groups=4 if k > E // 2 else 2),
            ]
        )
    )
    bias = rng.normal(size=E).astype(np.float32) if rule.score == "sigmoid" else None
    with np.errstate(invalid="ignore"):
        routing = route(logits, rule, bias)
    log_energy = rng.normal(size=(T, E)).astype(np.float32) * np.float32(draw(st.sampled_from([1.0, 5.0, 60.0])))
    weights = np.nan_to_num(routing.weights)
    if exact:
        # Multiples of 1/8 squared and summed are exact in any order, so ties are ties everywhere.
        log_energy[:] = 0
        weights = rng.integers(0, 9, weights.shape).astype(np.float32) / 8
    elif draw(st.sampled_from([False] * 7 + [True])):
        log_energy[rng.integers(T), rng.integers(E)] = np.nan
    dtype = "float32" if exact else draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"]))
    kinds = draw(
        st.sampled_from([[DECODE], [DECODE] * 3 + [PADDING], [DECODE, PADDING, PREFILL], [PADDING], [PREFILL]])
    )
    budget = draw(
        st.one_of(
            st.integers(1, E).map(str),
            st.sampled_from(["1", str(E), "10%", "50%", "energy:0.5", "energy:0.9", "energy:1", "energy:0.95,max=3"]),
            st.sampled_from(["share:0.001", "share:0.03", "share:0.2", "share:1", "share:0.02,max=3"]),
        )
    )
    return Case(
        scores=routing.scores,
        preference=routing.preference,
        ids=routing.ids,
        weights=rounded(weights, dtype),
        log_energy=log_energy,
        rows=rng.choice(kinds, T).astype(np.int32),
        budget=Budget.parse(budget),
        groups=rng.integers(0, 3, E) if draw(st.sampled_from([False, False, True])) else None,
        ranking=draw(st.sampled_from(get_args(Ranking))),
        fill=draw(st.sampled_from(get_args(Fill))),
        denominator=draw(st.sampled_from(get_args(Denominator))),
        dtype=dtype,
        exact=exact,
    )


def reference(case: Case) -> Result:
    out = select(
        case.scores,
        case.ids,
        case.weights,
        case.log_energy,
        case.budget,
        preference=case.preference,
        rows=case.rows,
        groups=case.groups,
        ranking=case.ranking,
        fill=case.fill,
        denominator=case.denominator,
    )
    return Result(out.ids, out.weights, out.active, out.cost)


def is_decided(case: Case, expected: Result) -> bool:
    """False when a relative change of `RELATIVE` in the costs could move the active set."""
    cost = expected.cost.astype(np.float64)
    if case.exact or not np.isfinite(cost).all() or (case.rows == PREFILL).any():
        return True
    groups = np.zeros(len(cost), int) if case.groups is None else case.groups
    for group in np.unique(groups):
        member = groups == group
        kept, lost = cost[member & expected.active], cost[member & ~expected.active]
        if kept.size and lost.size and lost.max() > 0 and kept.min() - lost.max() <= RELATIVE * kept.min():
            return False
        if case.budget.tau is not None and case.budget.tau < 1:
            share = np.cumsum(-np.sort(-cost[member])) / max(cost[member].sum(), 1e-300)
            if (np.abs(share - case.budget.tau) < RELATIVE).any():
                return False
        if case.budget.floor is not None:
            bar = case.budget.floor * cost[member].sum()
            if (np.abs(cost[member] - bar) <= RELATIVE * bar).any() and bar > 0:
                return False
    return True


def check(implementation: Implementation, case: Case) -> None:
    if not implementation.supports(case):
        return
    expected, actual = reference(case), implementation.run(case)
    np.testing.assert_array_equal(np.isfinite(actual.cost), np.isfinite(expected.cost))
    scale = np.nanmax(np.abs(expected.cost), initial=1e-30)
    np.testing.assert_allclose(actual.cost, expected.cost, rtol=RELATIVE, atol=RELATIVE * 1e-3 * scale)
    if not is_decided(case, expected):
        return
    np.testing.assert_array_equal(actual.active, expected.active)
    np.testing.assert_array_equal(actual.ids, expected.ids)
    native = (expected.ids == case.ids).all(1) & (expected.weights == case.weights).all(1)
    np.testing.assert_array_equal(actual.weights[native], case.weights[native])
    tolerance = ROUNDING[case.dtype]
    np.testing.assert_allclose(
        actual.weights, rounded(expected.weights, case.dtype), rtol=tolerance, atol=tolerance * 1e-3
    )


def test_equals_the_reference(implementation):
    @settings(
        max_examples=implementation.examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(cases())
    def equal(case: Case) -> None:
        check(implementation, case)

    equal()


def batch(T: int = 16, E: int = 60, k: int = 4, seed: int = 0, **changes) -> Case:
    rng = np.random.default_rng(seed)
    routing = route(rng.normal(size=(T, E)).astype(np.float32), RouterRule(k))
    case = Case(
        scores=routing.scores,
        preference=routing.preference,
        ids=routing.ids,
        weights=routing.weights,
        log_energy=rng.normal(size=(T, E)).astype(np.float32),
        rows=np.ones(T, np.int32),
        budget=Budget.parse(10),
    )
    return replace(case, **changes)


RANKS = np.arange(60) // 30
WIDE = np.where(RANKS == 0, 50.0, -50.0).astype(np.float32) + np.zeros((16, 1), np.float32)
"""Log-energies so far apart that a float64 sum over both halves forgets the smaller one."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(batch(), id="plain"),
        pytest.param(batch(T=1), id="one row"),
        pytest.param(batch(E=8, k=8, budget=Budget.parse(3)), id="k equals E"),
        pytest.param(batch(budget=Budget.parse(1)), id="one expert"),
        pytest.param(batch(budget=Budget.parse(60)), id="every expert"),
        pytest.param(batch(rows=np.zeros(16, np.int32)), id="padding only"),
        pytest.param(batch(rows=np.array([1, 0] * 8, np.int32)), id="half padding"),
        pytest.param(batch(rows=np.array([1] * 15 + [2], np.int32)), id="one prefill row"),
        pytest.param(batch(log_energy=np.full((16, 60), np.nan, np.float32)), id="no finite cost"),
        pytest.param(batch(groups=np.arange(60) % 4, budget=Budget.parse("10%")), id="expert parallel"),
        pytest.param(batch(weights=np.full((16, 4), 0.25, np.float32), ranking="weight_sum", exact=True), id="ties"),
        pytest.param(batch(preference=np.full((16, 60), 0.5, np.float32)), id="indifferent router"),
        pytest.param(batch(budget=Budget.parse("energy:0.9")), id="energy budget"),
        pytest.param(batch(budget=Budget.parse("share:0.02")), id="share budget"),
        pytest.param(batch(budget=Budget.parse("share:1")), id="only the largest"),
        pytest.param(batch(budget=Budget.parse("share:0.001,max=5")), id="share budget with a cap"),
        pytest.param(batch(log_energy=WIDE, budget=Budget.parse("share:0.05"), groups=RANKS), id="share by rank"),
        pytest.param(batch(log_energy=WIDE, budget=Budget.parse("energy:1")), id="all energy, however small"),
        pytest.param(batch(log_energy=WIDE, budget=Budget.parse("energy:0.9"), groups=RANKS), id="a faint rank"),
    ],
)
def test_named_cases(implementation, case):
    assert is_decided(case, reference(case))
    check(implementation, case)


def test_union_within_the_budget_is_native_bit_for_bit(implementation):
    case = batch(T=3, budget=Budget.parse(12))
    result = implementation.run(case)
    np.testing.assert_array_equal(result.ids, case.ids)
    np.testing.assert_array_equal(result.weights, case.weights)


def test_the_comparison_can_fail():
    """A wrong selection must not pass: one that ranks by the plain weight sum, and one that emits an inactive id."""

    def wrong_ranking(case: Case) -> Result:
        return reference(replace(case, ranking="weight_sum"))

    def inactive_id(case: Case) -> Result:
        result = reference(case)
        return result._replace(ids=np.where(result.weights == 0, (~result.active).argmax(), result.ids))

    for run, case in ((wrong_ranking, batch()), (inactive_id, batch(fill="drop"))):
        with pytest.raises(AssertionError):
            check(Implementation("wrong", run), case)
