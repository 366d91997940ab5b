"""The budget on tiny random models of all families: stock where it must be, the reference's selection where it acts."""

from __future__ import annotations

import numpy as np
import pytest

from base_core import Budget, BudgetError, PredictorError, select

mx = pytest.importorskip("mlx.core")

from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from backends.mlx import Policy, apply, base_budget, restore, session_of  # noqa: E402
from backends.mlx.families import find_moe_layers  # noqa: E402
from backends.mlx.integration import cache_key, operations, weighted_experts  # noqa: E402
from backends.mlx.selection import select_no_sync  # noqa: E402

QUANTISATIONS = (None, "affine4", "affine8", "mxfp4")


def decode(model, steps: int = 3, batch: int = 5):
    """Greedy logits [batch, 1 + steps, vocabulary] of a batch of random prompts."""
    cache = make_prompt_cache(model)
    logits = [model(mx.random.randint(0, 97, (batch, 6), key=mx.random.key(1)), cache=cache)[:, -1:]]
    for _ in range(steps):
        logits.append(model(logits[-1].argmax(-1), cache=cache))
    return mx.concatenate(logits, axis=1)


def same(a, b) -> bool:
    return mx.array_equal(a, b).item()


def rows_for(layer, T: int):
    return mx.random.normal((T, 1, layer.hidden_size), key=mx.random.key(T))


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_off_and_wide_budgets_are_bit_equal_to_stock(family, quantisation, build):
    model, predictor = build(family, quantisation)
    stock = decode(model)
    E = predictor.card.num_experts
    for budget in ("off", E, "energy:1"):
        with base_budget(model, predictor, budget):
            assert same(decode(model), stock), budget
    with base_budget(model, predictor, E - 1) as session:
        # No union has all E experts here, so this one goes through selection and must come out untouched.
        wide = decode(model)
        stats = session.stats()
        assert stats.active_mean == stats.union_mean < E - 1
        assert same(wide, stock)
    with base_budget(model, predictor, 3) as session:
        narrow = decode(model)
        assert session.stats().active_mean == 3
        assert same(narrow[:, :1], stock[:, :1]), "prefill is never restricted"
        assert not same(narrow, stock)
    assert same(decode(model), stock)


@pytest.mark.parametrize("quantisation", (None, "affine4"))
@pytest.mark.parametrize("budget", (2, "energy:0.6", "share:0.15"))
def test_block_executes_the_reference_selection(family, quantisation, budget, build):
    model, predictor = build(family, quantisation)
    layer = find_moe_layers(model)[0]
    block, x = layer.block, rows_for(layer, 5)
    router = layer.router
    logits = x @ router.weight.T if layer.family.chooses_itself else router(x)
    routing = [np.array(a[:, 0]) for a in layer.family.route(block, logits)]
    scores, preference, ids, weights = routing
    energy = predictor.log_energy(layer.index, np.array(x[:, 0]))
    expected = select(scores, ids, weights, energy, budget, preference=preference)
    y = weighted_experts(
        block[layer.family.experts],
        x,
        mx.array(expected.ids)[:, None],
        mx.array(expected.weights)[:, None],
        layer.family.keeps_dtype,
    )
    shared = layer.family.shared(block, x)
    y = y if shared is None else y + shared
    with base_budget(model, predictor, budget):
        np.testing.assert_allclose(np.array(block(x)), np.array(y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranking", ("removal_cost", "static_energy", "weight_sum", "squared_weight", "top1_union"))
@pytest.mark.parametrize("fill", ("backfill", "drop"))
@pytest.mark.parametrize("denominator", ("native", "renormalise"))
def test_every_combination_runs_and_keeps_the_budget(ranking, fill, denominator, build):
    model, predictor = build("qwen3_moe")
    policy = Policy(ranking=ranking, fill=fill, denominator=denominator)
    needs = ranking in ("removal_cost", "static_energy")
    with base_budget(model, predictor if needs else None, 3, policy) as session:
        assert mx.isfinite(decode(model)).all().item()
        stats = session.stats()
        assert stats.steps == 3 and stats.active_mean <= 3 < stats.union_mean
        assert 0 < stats.kept_energy < 1


def test_parameters_saving_and_loading_stay_as_they_were(build, tmp_path):
    model, predictor = build("qwen3_moe", "affine4")
    before = [name for name, _ in tree_flatten(model.parameters())]
    classes = [type(layer.block) for layer in find_moe_layers(model)]
    with base_budget(model, predictor, 3):
        assert [name for name, _ in tree_flatten(model.parameters())] == before
        assert all(isinstance(a.block, b) for a, b in zip(find_moe_layers(model), classes, strict=True))
        model.save_weights(str(tmp_path / "weights.safetensors"))
        restricted = decode(model)
    copy, _ = build("qwen3_moe", "affine4")
    copy.load_weights(str(tmp_path / "weights.safetensors"))
    with base_budget(copy, predictor, 3):
        assert same(decode(copy), restricted)
    assert [type(layer.block) for layer in find_moe_layers(model)] == classes


def test_router_weights_loaded_later_are_used(build):
    model, predictor = build("qwen3_moe")
    other, _ = build("qwen3_moe")
    layers = find_moe_layers(model)
    with base_budget(model, predictor, 3) as session:
        assert all(layer.stacks for layer in session._layers.values())
        for layer in layers:
            layer.router.weight = layer.router.weight[::-1]
        for layer in find_moe_layers(other):
            layer.router.weight = layer.router.weight[::-1]
        later = decode(model)
    with base_budget(other, predictor, 3, Policy(tolerance=10)):
        assert same(decode(other), later)


def test_restore_after_an_error_and_a_second_apply(build):
    model, predictor = build("qwen2_moe")
    stock = decode(model)
    with pytest.raises(RuntimeError), base_budget(model, predictor, 2):
        raise RuntimeError
    assert session_of(model) is None and same(decode(model), stock)
    apply(model, predictor, 2)
    session = apply(model, predictor, 4)
    assert session_of(model) is session
    decode(model)
    assert session.stats().active_mean == 4
    restore(model)
    restore(model)
    assert same(decode(model), stock)


def test_budgets_switch_and_suspend(build):
    model, predictor = build("olmoe")
    stock = decode(model)
    with base_budget(model, predictor, "off") as session:
        assert same(decode(model), stock) and session.stats().steps == 0
        session.set_budget(2)
        assert not same(decode(model), stock)
        with session.suspended():
            assert same(decode(model), stock)
        with session.prefill():
            assert same(decode(model), stock)
        assert session.stats().active_mean == 2
        session.reset_stats()
        assert session.stats().steps == 0
        with pytest.raises(BudgetError, match=r"17 is outside 1\.\.16"):
            session.set_budget(17)
        assert session.budget == Budget(experts=2)


def test_plans_give_each_layer_its_own_budget(build):
    model, predictor = build("qwen3_moe")
    plan = Budget(layers={0: Budget(experts=2), 1: Budget(), 2: Budget(tau=0.5)})
    with base_budget(model, predictor, plan) as session:
        decode(model)
        names = [type(layer.block).__module__ for layer in find_moe_layers(model)]
        assert [name.startswith("mlx_lm") for name in names] == [False, True, False]
        assert session._layers.keys() == {0, 2}
    with pytest.raises(BudgetError, match="no entry for layer 2"):
        apply(model, predictor, Budget(layers={0: Budget(experts=2), 1: Budget()}))
    assert cache_key(plan) == "0=2;1=off;2=energy:0.5"


def test_wrong_predictors_are_refused_before_the_first_token(build):
    model, predictor = build("qwen3_moe")
    with pytest.raises(PredictorError, match=r"removal_cost.*needs a predictor"):
        apply(model, None, 3)
    with pytest.raises(PredictorError, match="model_type is 'qwen3_moe', the model's is 'qwen2_moe'"):
        apply(build("qwen2_moe")[0], predictor, 3)
    for layer in find_moe_layers(model):
        layer.router.weight = mx.random.normal(layer.router.weight.shape, key=mx.random.key(5))
    with pytest.raises(PredictorError, match="fingerprint differs"):
        apply(model, predictor, 3)
    assert session_of(model) is None
    apply(model, predictor, 3, Policy(tolerance=2))
    restore(model)


def test_a_float_predictor_serves_quantised_copies(build):
    _, predictor = build("qwen3_moe")
    for quantisation in QUANTISATIONS[1:]:
        with base_budget(build("qwen3_moe", quantisation)[0], predictor, 3):
            pass


def test_decoding_is_told_by_shape(build):
    model, predictor = build("qwen3_moe")
    layer = find_moe_layers(model)[0]
    x = mx.random.normal((1, 4, 64), key=mx.random.key(0))
    stock = layer.block(x)
    with base_budget(model, predictor, 2):
        assert same(layer.block(x), stock)
    with base_budget(model, predictor, 2, Policy(decode_window=4)):
        assert not same(layer.block(x), stock)
    with base_budget(model, predictor, 2, Policy(decode_window=3)):
        assert same(layer.block(x), stock)


def test_finished_rows_do_not_vote(build):
    model, predictor = build("qwen3_moe")
    layer = find_moe_layers(model)[0]
    x = rows_for(layer, 6)
    with base_budget(model, predictor, 3) as session:
        alone = layer.block(x[:4])
        session.rows = mx.array([1, 1, 1, 1, 0, 0])
        np.testing.assert_allclose(np.array(layer.block(x)[:4]), np.array(alone), rtol=1e-6, atol=1e-6)
        before = session.stats()
        session.rows = mx.zeros(6, mx.int32)
        assert (layer.block(x) == 0).all().item()
        assert session.stats() == before, "a step of finished rows does not count"


def test_a_cost_that_is_not_finite_falls_back_and_is_counted(build):
    model, predictor = build("qwen3_moe")
    layer = find_moe_layers(model)[0]
    x = rows_for(layer, 5)
    x[2] = mx.nan
    stock = layer.block(x)
    with base_budget(model, predictor, 2) as session:
        restricted = layer.block(x)
        assert session.stats().fallbacks == 1
    keep = mx.array([0, 1, 3, 4])
    assert same(restricted[keep], stock[keep])


def test_selection_never_reads_back_and_takes_the_budget_as_an_array():
    rng = np.random.default_rng(0)
    scores = mx.array(rng.random((5, 16)), mx.float32)
    ids = mx.argsort(-scores, axis=1)[:, :4]
    weights = mx.take_along_axis(scores, ids, axis=1)
    compiled = mx.compile(lambda limit, tau: select_no_sync(scores, ids, weights, scores, limit, tau=tau)[:3])
    for limit in (1, 3, 7):
        got = compiled(mx.array(limit), mx.array(1.0))
        assert got[2].sum().item() == limit
    assert compiled(mx.array(7), mx.array(0.1))[2].sum().item() == 1


def test_layers_are_traced_without_a_read_back(build):
    model, predictor = build("deepseek_v2")
    with base_budget(model, predictor, 3) as session:
        layer = session._layers[1]
        # Tracing alone raises where a value is asked for; running what was traced would only cost time.
        traced = mx.compile(lambda x: layer.select(x)[:5])(rows_for(layer.moe, 4))
        assert [a.shape for a in traced] == [(4, 4), (4, 4), (16,), (16,), (16,)]


def test_counting_everything_changes_nothing(build):
    model, predictor = build("qwen3_moe")
    stock = decode(model, batch=2)
    with base_budget(model, predictor, 8) as session:
        decode(model, batch=2)
        assert session.stats().steps == 0 and not session.restricts(2) and session.restricts(3)
    with base_budget(model, predictor, 8, Policy(count_all=True)) as session:
        assert same(decode(model, batch=2), stock)
        stats = session.stats()
        assert stats.steps == 3 and stats.active_mean == stats.union_mean <= 8


def test_policies_are_checked():
    for wrong, message in (
        (dict(ranking="oracle"), "oracle"),
        (dict(ranking="best"), "best"),
        (dict(fill="refill"), "refill"),
        (dict(decode_window=0), "decode_window 0"),
        (dict(kernels="on"), "kernels 'on'"),
    ):
        with pytest.raises(ValueError, match=message):
            Policy(**wrong)


def test_without_metal_the_operations_are_mlx_own():
    if not mx.metal.is_available():
        assert operations("auto") is operations("off")
    assert operations("off").select is select_no_sync
