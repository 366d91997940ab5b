"""Every named policy on cases small enough to work by hand."""

import numpy as np
import pytest
from hypothesis import assume, given, settings

from base_core import RouterRule, Routing, route, select
from base_core.policies import POLICIES, RANKINGS, RivalCalibration, Step, run_policy
from tests.base_core.oracle import cases


def make_step(scores, k, rows=None, normalise=True, **extra):
    scores = np.asarray(scores, np.float32)
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, ids, 1)
    if normalise:
        weights = weights / weights.sum(1, keepdims=True)
    rows = np.ones(len(scores), int) if rows is None else np.asarray(rows)
    return Step(Routing(scores, scores, ids, weights), rows, **extra)


def active(selection):
    return np.flatnonzero(selection.active).tolist()


SCORES = [[0.5, 0.3, 0.1, 0.06, 0.04], [0.05, 0.1, 0.2, 0.25, 0.4], [0.3, 0.05, 0.4, 0.15, 0.1]]


def test_oea_backfills_inside_the_union_of_favourites():
    got = run_policy("oea", make_step(SCORES, 2), k0=1)
    assert active(got) == [0, 2, 4]
    assert got.ids.tolist() == [[0, 2], [4, 2], [2, 0]]
    np.testing.assert_allclose(got.weights, [[5 / 6, 1 / 6], [2 / 3, 1 / 3], [4 / 7, 3 / 7]], rtol=1e-6)


def test_oea_never_runs_more_than_k_experts():
    step = make_step(np.tile(SCORES, (2, 1)), 3)
    got = run_policy("oea", step, k0=1)
    assert all(len(set(row)) <= 3 for row in got.ids.tolist()) and got.ids.shape == (6, 3)


def test_oea_with_k0_equal_k_is_dense():
    step = make_step(SCORES, 2)
    got = run_policy("oea", step, k0=2)
    assert got.ids.tobytes() == step.routing.ids.tobytes() and got.weights.tobytes() == step.routing.weights.tobytes()


def test_oea_with_fewer_active_than_k_leaves_a_slot_empty():
    got = run_policy("oea", make_step(SCORES[:1], 3), k0=1)
    assert active(got) == [0] and got.ids.tolist() == [[0, 0, 0]]
    np.testing.assert_allclose(got.weights, [[1, 0, 0]])


def test_oea_ignores_padding_rows():
    got = run_policy("oea", make_step(SCORES, 2, rows=[1, 0, 1]), k0=1)
    assert active(got) == [0, 2] and not got.weights[1].any() and got.active[got.ids[1]].all()


SIMILAR = np.array(
    [
        [1.0, 0.2, 0.3, 0.9, 0.1],
        [0.2, 1.0, 0.6, 0.1, 0.6],
        [0.3, 0.6, 1.0, 0.2, 0.5],
        [0.9, 0.1, 0.2, 1.0, 0.05],
        [0.1, 0.6, 0.5, 0.05, 1.0],
    ]
)


def sere(step, **options):
    return run_policy("sere", step, **options)


def sere_step(k=2, rows=None, similarity=SIMILAR):
    return make_step(SCORES, k, rows=rows, calibration=RivalCalibration(similarity=similarity))


def test_sere_moves_secondaries_to_the_likest_primary_and_keeps_weights():
    step = sere_step()
    got = sere(step, primary=1)
    assert active(got) == [0, 2, 4]
    assert got.ids.tolist() == [[0, 2], [4, 0], [2, 0]]  # 1 -> 2 or 4 at 0.6, the lower wins; 3 -> 0; 0 is primary
    np.testing.assert_array_equal(got.weights, step.routing.weights)


def test_sere_two_slots_may_name_one_expert():
    got = sere(sere_step(k=3), primary=1)
    assert [sorted(row) for row in got.ids.tolist()] == [[0, 2, 2], [0, 2, 4], [0, 0, 2]]


def test_sere_threshold_keeps_critical_experts_loaded():
    got = sere(sere_step(), primary=1, threshold=0.7)
    assert active(got) == [0, 1, 2, 4] and got.ids.tolist() == [[0, 1], [4, 0], [2, 0]]


def test_sere_threshold_zero_protects_none():
    hostile = np.full((5, 5), -1.0)
    np.fill_diagonal(hostile, 1)
    assert active(sere(sere_step(similarity=hostile), primary=1)) == [0, 2, 4]


def test_sere_all_primary_is_dense():
    step = sere_step()
    np.testing.assert_array_equal(sere(step, primary=2).ids, step.routing.ids)


def test_sere_identity_matrix_sends_everything_to_the_first_primary():
    got = sere(sere_step(similarity=np.eye(5)), primary=1)
    assert got.ids.tolist() == [[0, 0], [4, 0], [2, 0]]


def lynx_step(logits, k, rows=None):
    logits = np.asarray(logits, np.float32)
    return Step(
        route(logits, RouterRule(k)), np.ones(len(logits), int) if rows is None else np.asarray(rows), logits=logits
    )


LOGITS = [[3.0, 2.5, 0.0, -1.0], [0.0, 3.0, 2.9, -1.0], [2.0, -1.0, 0.0, 4.0]]


def test_lynx_anchors_the_batch_favourite_within_the_top_bin():
    got = run_policy("lynx", lynx_step(LOGITS, 2), alpha=1.0, beta=1)
    # row 0 has experts 0 and 1 in its top bin; 1 has a vote more from row 1; row 2 is sure of 3
    assert active(got) == [1, 3]
    np.testing.assert_allclose(got.cost[:4], [1 + 1 / 3, 2, 1, 1], rtol=1e-6)


def test_lynx_narrow_bins_keep_every_favourite():
    assert active(run_policy("lynx", lynx_step(LOGITS, 2), alpha=100.0, beta=3)) == [0, 1, 3]


def test_lynx_one_row_keeps_its_own_favourite():
    got = run_policy("lynx", lynx_step(LOGITS[1:2], 2), alpha=1.0, beta=1)
    assert active(got) == [1]


def test_lynx_base_outweighs_the_next_bin():
    got = run_policy("lynx", lynx_step([*LOGITS, *LOGITS], 2), alpha=1.0, beta=1)
    np.testing.assert_allclose(got.cost, [2 + 2 / 6, 4, 2, 2], rtol=1e-6)


def test_lynx_weights_are_renormalised():
    got = run_policy("lynx", lynx_step(LOGITS, 2), alpha=1.0, beta=1)
    np.testing.assert_allclose(got.weights.sum(1), 1, rtol=1e-6)


FOLD = RivalCalibration(
    norm=np.array([1.0, 1.0, 1.0, 10.0, 1.0]),
    fold_scalar=np.arange(25, dtype=float).reshape(5, 5) / 10 - 1,
    fold_loss=np.array([[np.inf if s == t else abs(s - t) for t in range(5)] for s in range(5)], float),
)


def test_exfold_keeps_weight_times_norm_and_folds_the_rest():
    step = make_step(SCORES, 2, calibration=FOLD)
    got = run_policy("exfold", step, 2)
    # importance: 0: .625+.4286, 1: .375, 2: .5714, 3: 10*.3846, 4: .6154
    assert active(got) == [0, 3]
    assert got.ids.tolist() == [[0, 0], [3, 3], [3, 0]]
    np.testing.assert_allclose(got.weights[0], [0.625, 0.375 * FOLD.fold_scalar[1, 0]], rtol=1e-6)
    assert got.weights[0, 1] < 0, "folded weights may be negative"


def test_exfold_does_not_conserve_weight():
    got = run_policy("exfold", make_step(SCORES, 2, calibration=FOLD), 2)
    assert abs(got.weights[0].sum() - 1) > 0.1


def test_exfold_with_the_whole_pool_is_dense():
    step = make_step(SCORES, 2, calibration=FOLD)
    np.testing.assert_array_equal(run_policy("exfold", step, 5).ids, step.routing.ids)


def test_exfold_unrouted_experts_are_eligible_but_cost_nothing_unless_used():
    step = make_step(SCORES[:1], 2, calibration=FOLD)
    got = run_policy("exfold", step, 3)
    assert active(got) == [0, 1] and got.ids.tolist() == [[0, 1]]


def test_exfold_ties_go_to_the_lower_index():
    flat = RivalCalibration(
        norm=np.ones(4), fold_scalar=np.ones((4, 4)), fold_loss=1 - np.eye(4) + np.diag([np.inf] * 4)
    )
    step = make_step([[0.3, 0.3, 0.2, 0.2], [0.2, 0.2, 0.3, 0.3]], 2, calibration=flat)
    got = run_policy("exfold", step, 1)
    assert active(got) == [0] and got.ids.tolist() == [[0, 0], [0, 0]]


def test_xshare_takes_the_largest_score_sums():
    got = run_policy("xshare", make_step(SCORES, 2), 2, k0=0)
    np.testing.assert_allclose(got.cost, [0.85, 0.45, 0.7, 0.46, 0.54], rtol=1e-6)
    assert active(got) == [0, 2] and got.ids.tolist() == [[0, 2], [2, 0], [2, 0]]


def test_xshare_warm_up_comes_first_and_may_exceed_the_budget():
    assert active(run_policy("xshare", make_step(SCORES, 2), 2, k0=1)) == [0, 2, 4]


def test_xshare_fills_up_to_the_budget():
    assert active(run_policy("xshare", make_step(SCORES, 2), 4, k0=1)) == [0, 2, 3, 4]


def test_xshare_raw_logits_let_one_row_veto():
    logits = np.array([[2.0, 1.0, 0.0, 0.0], [2.0, 1.0, 0.0, 0.1], [-90.0, 1.0, 0.5, 0.0]], np.float32)
    step = lynx_step(logits, 2)
    assert active(run_policy("xshare", step, 2, k0=0)) == [0, 1]
    assert active(run_policy("xshare", step, 2, k0=0, raw_logits=True)) == [1, 2]


def test_xshare_raw_logits_below_k_restrict_nothing():
    step = lynx_step(LOGITS, 2)
    got = run_policy("xshare", step, 1, k0=0, raw_logits=True)
    assert got.ids.tobytes() == step.routing.ids.tobytes() and got.weights.tobytes() == step.routing.weights.tobytes()


def test_xshare_raw_logits_keep_a_rows_favourite_for_that_row_alone():
    step = lynx_step([[5.0, 3.0, 0.0, 1.0], [5.0, 4.0, 0.0, 1.0], [0.0, -1.0, 2.0, 1.9]], 2)
    got = run_policy("xshare", step, 2, k0=1, raw_logits=True)
    # sums 10, 6, 2, 3.9: 0 and 1 for all, 2 only for row 2, which fills up with 0
    assert active(got) == [0, 1, 2], "one more than the budget"
    assert got.ids.tolist() == [[0, 1], [0, 1], [2, 0]]


def test_xshare_renormalises():
    got = run_policy("xshare", make_step(SCORES, 2), 2, k0=0)
    np.testing.assert_allclose(got.weights.sum(1), 1, rtol=1e-6)


def test_xshare_backfills_from_anybodys_favourite():
    got = run_policy("xshare", make_step(SCORES, 2), 2, k0=1)
    assert got.ids.tolist() == [[0, 2], [4, 2], [2, 0]]


def test_top_k_gives_the_whole_weight_to_what_is_left():
    got = run_policy("top_k", make_step(SCORES, 3), k=2)
    assert active(got) == [0, 1, 2, 3, 4]
    assert got.ids.tolist() == [[0, 1, 0], [4, 3, 4], [2, 0, 2]]
    np.testing.assert_allclose(got.weights, [[5 / 8, 3 / 8, 0], [8 / 13, 5 / 13, 0], [4 / 7, 3 / 7, 0]], rtol=1e-6)


def test_top_k_of_a_model_with_raw_weights_leaves_them():
    got = run_policy("top_k", make_step(SCORES, 3, normalise=False), k=1, denominator="native")
    np.testing.assert_allclose(got.weights, [[0.5, 0, 0], [0.4, 0, 0], [0.4, 0, 0]], rtol=1e-6)


def test_top_k_goes_by_preference_not_by_slot():
    step = make_step(SCORES, 2)
    routing = Routing(*(a[:, ::-1] if a.shape[1] == 2 else a for a in vars(step.routing).values()))
    got = run_policy("top_k", Step(routing, step.rows), k=1)
    assert active(got) == [0, 2, 4]
    np.testing.assert_allclose(got.weights, [[0, 1], [0, 1], [0, 1]])


def test_top_k_of_k_is_dense():
    step = make_step(SCORES, 2)
    got = run_policy("top_k", step, k=2)
    assert got.ids.tobytes() == step.routing.ids.tobytes() and got.weights.tobytes() == step.routing.weights.tobytes()


def test_top_k_ignores_padding_rows():
    got = run_policy("top_k", make_step(SCORES, 2, rows=[1, 0, 1]), k=1)
    assert active(got) == [0, 2] and not got.weights[1].any()


def test_oea_native_denominator_leaves_less_than_the_whole():
    got = run_policy("oea", make_step(SCORES, 2), k0=1, denominator="native")
    np.testing.assert_allclose(got.weights, [[5 / 8, 1 / 8], [8 / 13, 4 / 13], [4 / 7, 3 / 7]], rtol=1e-6)


def test_oea_of_a_model_with_raw_weights_keeps_each_rows_total():
    got = run_policy("oea", make_step(SCORES, 2, normalise=False), k0=1)
    np.testing.assert_allclose(got.weights.sum(1), [0.8, 0.65, 0.7], rtol=1e-6)


def test_sere_ignores_padding_rows():
    got = sere(sere_step(rows=[1, 0, 1]), primary=1)
    assert active(got) == [0, 2], "4 is primary in a padding row only"
    assert got.ids[0].tolist() == [0, 2]


def test_sere_ranks_by_preference_not_by_slot():
    step = sere_step()
    routing = Routing(*(a[:, ::-1] if a.shape[1] == 2 else a for a in vars(step.routing).values()))
    got = sere(Step(routing, step.rows, calibration=step.calibration), primary=1)
    assert active(got) == [0, 2, 4] and got.ids.tolist() == [[2, 0], [0, 4], [0, 2]]


def test_lynx_fills_up_to_the_budget_by_score():
    step = lynx_step(LOGITS, 2)
    # anchors 1 and 3, then 0 with 1 + 1/3 votes before 2 with 1
    assert active(run_policy("lynx", step, 3, alpha=1.0, beta=1, fill_up=True)) == [0, 1, 3]
    assert active(run_policy("lynx", step, 1, alpha=1.0, beta=1, fill_up=True)) == [1, 3], "anchors stay"


def test_lynx_never_fills_up_with_what_nobody_chose():
    step = lynx_step(LOGITS[:1], 2)
    assert active(run_policy("lynx", step, 4, alpha=1.0, beta=1, fill_up=True)) == [0, 1]


def test_lynx_truncates_bins_toward_the_best():
    # The runner-up lies 0.5 below the best: within 1 / alpha it shares the top bin, beyond it does not.
    step = lynx_step([[3.0, 2.5, 0.0], [0.0, 3.0, -9.0]], 2)
    assert active(run_policy("lynx", step, alpha=1.9, beta=1)) == [1]
    assert active(run_policy("lynx", step, alpha=2.1, beta=1)) == [0, 1]


def test_exfold_folds_a_pair_never_seen_with_weight_zero():
    unseen = RivalCalibration(norm=np.ones(5), fold_scalar=np.zeros((5, 5)), fold_loss=np.full((5, 5), 1e30))
    got = run_policy("exfold", make_step(SCORES, 2, calibration=unseen), 2)
    # importance .625 + .4286, .375, .5714, .3846, .6154: 0 and 4 stay; the lowest index takes what has no best target
    assert active(got) == [0, 4] and got.ids.tolist() == [[0, 0], [4, 0], [0, 0]]
    np.testing.assert_allclose(got.weights, [[5 / 8, 0], [8 / 13, 0], [0, 3 / 7]], rtol=1e-6)


def test_exfold_ignores_padding_rows():
    got = run_policy("exfold", make_step(SCORES, 2, rows=[1, 0, 1], calibration=FOLD), 2)
    # importance 0: .625+.4286, 1: .375, 2: .5714
    assert active(got) == [0, 2] and not got.weights[1].any()


def test_substitute_fill_moves_lost_routes_and_keeps_their_weight():
    step = make_step(SCORES, 2, calibration=RivalCalibration(similarity=SIMILAR))
    got = run_policy("weight_sum", step, 2, fill="substitute")
    # sums: 0 1.05, 1 .375, 2 .57, 3 .38, 4 .62
    assert active(got) == [0, 4] and got.ids.tolist() == [[0, 4], [4, 0], [4, 0]]
    np.testing.assert_array_equal(got.weights, step.routing.weights)


def test_substitute_fill_needs_similarities():
    with pytest.raises(ValueError, match="calibration field 'similarity'"):
        run_policy("weight_sum", make_step(SCORES, 2), 2, fill="substitute")


@settings(max_examples=80, deadline=None)
@given(cases())
def test_active_sets_have_the_sizes_of_their_definitions(case):
    routing, rows = case["routing"], case["rows"]
    assume(not (rows == 2).any())
    T, E = routing.scores.shape
    k = routing.ids.shape[1]
    similarity = np.random.default_rng(0).random((E, E))
    step = Step(routing, rows, calibration=RivalCalibration(similarity=similarity))
    live = [t for t in range(T) if rows[t] == 1]
    for n in range(1, k + 1):
        favourites = {int(e) for t in live for e in routing.ids[t][:n]}
        oea = run_policy("oea", step, k0=n)
        assert set(active(oea)) == favourites and len(favourites) <= n * len(live)
        assert set(active(run_policy("top_k", step, k=n))) == favourites

        rest = {int(e) for t in live for e in routing.ids[t][n:]} - favourites
        critical = {e for e in rest if all(similarity[e, p] < 0.9 for p in favourites)}
        assert set(active(run_policy("sere", step, primary=n))) == favourites
        assert set(active(run_policy("sere", step, primary=n, threshold=0.9))) == favourites | critical

        for budget in (1, max(1, E // 3), E):
            got = run_policy("xshare", step, budget, k0=n)
            assert favourites <= set(active(got)) or not live
            assert len(active(got)) <= max(budget, len(favourites))
    lynx = run_policy("lynx", step)
    assert len(active(lynx)) <= len(live)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_policy_keeps_the_contract(case):
    routing, rows = case["routing"], case["rows"]
    E, k = routing.scores.shape[1], routing.ids.shape[1]
    rng = np.random.default_rng(0)
    calibration = RivalCalibration(rng.random((E, E)), rng.random(E), rng.normal(size=(E, E)), rng.random((E, E)))
    step = Step(routing, rows, log_energy=case["log_energy"], calibration=calibration)
    for name in POLICIES:
        options = {"oea": {"k0": 1}, "sere": {"primary": 1}}.get(name, {})
        got = run_policy(name, step, max(1, E // 4), **options)
        assert got.ids.shape == (len(rows), k), name
        assert np.isfinite(got.weights).all(), name
        assert not got.weights[rows == 0].any(), name
        if (rows != 0).any():
            assert got.active[got.ids].all(), name
        if (rows == 2).any():
            np.testing.assert_array_equal(got.ids[rows != 0], routing.ids[rows != 0], err_msg=name)


@pytest.mark.parametrize("name", RANKINGS)
def test_rankings_are_select_under_the_policy_name(name):
    step = make_step(SCORES, 2, log_energy=np.arange(15.0).reshape(3, 5) / 5)
    got = run_policy(name, step, 2)
    routing = step.routing
    expected = select(routing.scores, routing.ids, routing.weights, step.log_energy, 2, ranking=RANKINGS[name])
    np.testing.assert_array_equal(got.ids, expected.ids)
    np.testing.assert_array_equal(got.active, expected.active)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("best", {}, "unknown policy 'best'"),
        ("oea", {"k0": 3}, r"k0=3 is outside 1\.\.2"),
        ("oea", {"M": 3}, "does not take these options"),
        ("sere", {}, "calibration field 'similarity'"),
        ("exfold", {}, "calibration field 'norm'"),
        ("lynx", {"alpha": 0}, "alpha 0 must be positive"),
        ("xshare", {"k0": -1}, r"outside 0\.\.2"),
    ],
)
def test_errors(name, options, message):
    with pytest.raises(ValueError, match=message):
        run_policy(name, make_step(SCORES, 2), 2, **options)
