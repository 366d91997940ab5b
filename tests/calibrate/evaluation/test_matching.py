"""Variants and their counterparts, paired comparisons, equal time and equal quality, by hand."""

import json

import numpy as np
import pytest

from base_core.policies import RivalCalibration, run_policy
from base_core.report import paired_interval
from calibrate.evaluation import tables
from calibrate.evaluation.matching import StepCost, compare, experts_for, match_every_step, match_fixed
from calibrate.evaluation.plan import counterpart, ladder
from calibrate.evaluation.units import pack_bits
from calibrate.evaluation.variants import Variant, VariantRule, union_size
from tests.backends.cuda.tiny import make_model, make_predictor
from tests.base_core.test_policies import LOGITS, SCORES, SIMILAR, active, lynx_step, make_step

E = 5


def row(variant, active_mean, right, **changes):
    return {
        "model": "m", "batch": 16, "arrangement": "mixed", "seed": 0, "prompts": len(right), "label": variant.label,
        "policy": variant.policy, "budget": variant.budget, "options": dict(variant.options),
        "active_mean": active_mean, "accuracy": float(np.mean(right)), "kl": 0.1, "right": pack_bits(right), **changes,
    }  # fmt: skip


def test_labels_tell_variants_apart():
    oea = Variant("oea", options={"k0": 2})
    labels = [oea.label, Variant("base", "8").label, Variant("base", "union:1").label, Variant("base", like=oea).label]
    assert labels == ["oea k0=2", "base @8", "base @union:1", "base @as oea k0=2"]


@pytest.mark.parametrize("n", [1, 2])
def test_union_budget_is_the_size_of_the_union(n):
    step = make_step(SCORES, 2)
    got = VariantRule(Variant("weight_sum", f"union:{n}"), E, None, None)(0, step)
    oea = run_policy("oea", step, k0=n)
    assert got.active.sum() == oea.active.sum()


def test_like_budget_reads_as_many_as_the_other_rule_would():
    rival = Variant("lynx", options={"alpha": 1.0, "beta": 1})
    got = VariantRule(Variant("weight_sum", like=rival), 4, None, None)(0, lynx_step(LOGITS, 2))
    assert got.active.sum() == 2, "lynx anchors 1 and 3"
    protected = Variant("sere", options={"primary": 1, "threshold": 0.7, "similarity": "cka"})
    rivals = {kind: {0: RivalCalibration(similarity=SIMILAR)} for kind in ("frobenius", "cosine", "cka")}
    step = make_step(SCORES, 2)
    assert len(active(VariantRule(protected, E, None, rivals)(0, step))) == 4
    assert len(active(VariantRule(Variant("weight_sum", like=protected), E, None, rivals)(0, step))) == 4


def test_similarity_is_chosen_by_name():
    first, second = np.eye(E), SIMILAR
    rivals = {"frobenius": {0: RivalCalibration(first)}, "cosine": {0: RivalCalibration(second)}}
    step = make_step(SCORES, 2)
    for kind, matrix in (("frobenius", first), ("cosine", second)):
        variant = Variant("sere", options={"primary": 1, "similarity": kind})
        expected = run_policy("sere", make_step(SCORES, 2, calibration=RivalCalibration(matrix)), primary=1)
        assert (VariantRule(variant, E, None, rivals)(0, step).ids == expected.ids).all()


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (Variant("base", "8"), "needs a predictor"),
        (Variant("weight_sum", "99"), "outside 1..16"),
        (Variant("weight_sum", "union:0"), "positive number of ranks"),
        (Variant("weight_sum", "many"), "not understood"),
        (Variant("base", like=Variant("static_energy", "8")), "needs a predictor"),
    ],
)
def test_variants_that_cannot_run(variant, message):
    with pytest.raises(ValueError, match=message):
        VariantRule(variant, 16, None, None)


def test_static_energy_is_one_row_for_all():
    model = make_model()
    predictor = make_predictor(model)
    rule = VariantRule(Variant("static_energy", "8"), 16, predictor, None)
    np.testing.assert_array_equal(rule.log_energy(0, np.ones((3, 32)), None), predictor.layers[0].static_log_energy())


def test_union_size():
    assert union_size("union:12") == 12


@pytest.mark.parametrize(
    ("rival", "expected"),
    [
        (Variant("oea", options={"k0": 2}), "base @union:2"),
        (Variant("top_k", options={"k": 3, "denominator": "native"}), "base @union:3"),
        (Variant("sere", options={"primary": 1, "threshold": 0.0, "similarity": "cka"}), "base @union:1"),
        (
            Variant("sere", options={"primary": 1, "threshold": 0.3, "similarity": "cka"}),
            "base @as sere primary=1 threshold=0.3 similarity=cka",
        ),
        (Variant("exfold", "9"), "base @9"),
        (Variant("xshare", "9", {"k0": 0}), "base @9"),
        (
            Variant("xshare", "9", {"k0": 0, "raw_logits": True}),
            "base @as xshare k0=0 raw_logits=True @9",
        ),
        (Variant("xshare", "9", {"k0": 1}), "base @as xshare k0=1 @9"),
        (Variant("xshare", "9"), "base @as xshare @9"),
    ],
)
def test_counterparts(rival, expected):
    assert counterpart(rival).label == expected


def test_comparison_pairs_prompts():
    base = row(Variant("base", "4"), 4.0, [True, True, True, False, False] * 40)
    rival = row(Variant("oea", options={"k0": 1}), 4.0, [True, False, True, True, False] * 40)
    even = compare(base, rival)
    assert even.difference == 0 and even.verdict == "even" and even.low == pytest.approx(-even.high)
    worse = row(Variant("oea", options={"k0": 1}), 4.0, [True, False, True, False, False] * 40)
    assert compare(base, worse).difference == pytest.approx(0.2) and compare(base, worse).verdict == "base"
    assert compare(worse, base).verdict == "rival"
    assert compare(base, {**rival, "right": None}) is None
    with pytest.raises(ValueError, match="different prompts"):
        compare(base, {**rival, "prompts": 100})


def test_paired_interval_by_hand():
    low, high = paired_interval(10, 2, 98)
    # n 100, b 10.5, c 2.5: difference 0.08, spread 1.96 sqrt((0.13 - 0.0064) / 100)
    assert (low + high) / 2 == pytest.approx(0.08) and (high - low) / 2 == pytest.approx(0.068906, rel=1e-4)
    low, high = paired_interval(0, 0, 100)
    assert low == -high and 0 < high < 0.03


def test_paired_interval_covers():
    """Of many experiments with a known difference about 95 % hold it."""
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(300, [0.06, 0.03, 0.91], size=2000)
    inside = [low <= 0.03 <= high for low, high in (paired_interval(int(b), int(c), 300) for b, c, _ in drawn)]
    assert 0.93 < np.mean(inside) < 0.975


def test_matching_finds_the_rows():
    right = [True] * 4
    rival = row(Variant("oea", options={"k0": 1}), 5.3, right)
    rows = [row(Variant("base", str(n)), n - 0.1, right) for n in (3, 5, 6)]
    rows += [row(Variant("base", "union:1"), 5.29, right), row(Variant("base", "5", {"fill": "drop"}), 5.2, right)]
    rows += [row(Variant("base", "5"), 5.0, right, batch=4)]
    assert match_fixed(rival, rows)["budget"] == "5"
    assert match_fixed(rival, rows, spared=1.0)["budget"] == "3"
    assert match_fixed(rival, rows, spared=4.0) is None
    assert match_every_step(rival, rows)["budget"] == "union:1"
    assert match_every_step({**rival, "batch": 4}, rows) is None


def test_experts_for_an_accuracy():
    rows = [
        row(Variant("base", str(n)), n, [True] * right + [False] * (10 - right))
        for n, right in ((2, 4), (4, 8), (8, 9))
    ]
    assert experts_for(rows, 0.6) == pytest.approx(3)
    assert experts_for(rows, 0.4) == 2 and experts_for(rows, 0.2) == 2
    assert experts_for(rows, 0.85) == pytest.approx(6)
    assert experts_for(rows, 0.95) is None


def write_bench(path, rows):
    facts = {"model": "wide", "batch": 16}
    about = {"versions": {"platform": "here"}, "settings": {"threads": 2}}
    path.write_text(json.dumps({"rows": [{**facts, **row} for row in rows], **about}))
    return path


def bench_row(policy, experts, ms, selection=None):
    return {"policy": policy, "active_mean": experts, "ms_per_layer": ms, "selection_ms_per_layer": selection}


def test_cost_of_a_step(tmp_path):
    rows = [bench_row("stock", 80, 99.0), bench_row("dense", 80, 17.0), bench_row("base", 10, 3.4, 0.4)]
    rows += [bench_row("oea", 15, 4.1, 0.1), bench_row("xshare", 10, 3.6, 0.6)]
    cost = StepCost.read(write_bench(tmp_path / "b.json", rows))
    assert (cost.fixed_ms, cost.expert_ms) == pytest.approx((1.0, 0.2))
    assert cost.selection_ms == pytest.approx({"base": 0.4, "oea": 0.1, "xshare": 0.6})
    spared = {rival: cost.spared(rival) for rival in ("oea", "xshare", "lynx")}
    assert spared == pytest.approx({"oea": 1.5, "xshare": -1, "lynx": 2})
    assert cost.layer_ms("oea", 15) == pytest.approx(4.1) and cost.layer_ms("dense", 80) == pytest.approx(17)
    assert cost.what == "wide, 16 rows, 2 CPU threads, here"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no file of base-moe bench"),
        ([{"policy": "dense"}], "no file of base-moe bench"),
        ([bench_row("dense", 80, 17.0), bench_row("base", 10, 3.0)], "no time for BASE's selection"),
        ([bench_row("dense", 80, 1.0), bench_row("base", 10, 3.0, 0.4)], "does not grow"),
    ],
)
def test_bench_files_that_do_not_serve(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        StepCost.read(write_bench(tmp_path / "b.json", rows))


def test_equal_time_charges_base_with_its_selection():
    right = [True] * 4
    rows = [row(Variant("dense"), 30.0, right), row(Variant("oea", options={"k0": 1}), 6.0, right)]
    rows += [row(Variant("base", str(n)), n, right) for n in (3, 4, 6)]
    (line,) = tables.equal_time(rows, StepCost(1.0, 0.2, {"base": 0.4}, "b.json", "here")).rows
    assert line[4:6] == ["@4", "4.00"] and line[-2:] == ["2.200", "2.200"]
    (line,) = tables.equal_time(rows, StepCost(1.0, 0.2, {"base": 0.4, "oea": 0.4}, "b.json", "here")).rows
    assert line[4:6] == ["@6", "6.00"] and line[-2:] == ["2.600", "2.600"]


def test_ladder_stays_inside():
    assert ladder(64) == [2, 4, 6, 8, 12, 16, 24, 32] and ladder(8) == [1, 2, 3, 4]
