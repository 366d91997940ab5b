"""The audit against energies and sums computed in NumPy; drift that is put in has to come out."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from base_core import Budget, Predictor
from base_core.audit import CORRECTION_RATE

mx = pytest.importorskip("mlx.core")

from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from backends.mlx import Policy, base_budget, integration, session_of  # noqa: E402
from backends.mlx.audit import Audit  # noqa: E402
from backends.mlx.families import find_moe_layers  # noqa: E402
from backends.mlx.graph import graph_nodes  # noqa: E402
from backends.mlx.integration import STOCK_OPERATIONS, BudgetedLayer, Operations  # noqa: E402

M, T, STEPS = 3, 5, 4
FOLD = 0.125


def decode(model, steps: int = STEPS):
    """Greedy logits [T, 1 + steps, vocabulary] of a batch of random prompts."""
    cache = make_prompt_cache(model)
    logits = [model(mx.random.randint(0, 97, (T, 6), key=mx.random.key(1)), cache=cache)[:, -1:]]
    for _ in range(steps):
        logits.append(model(logits[-1].argmax(-1), cache=cache))
    return mx.concatenate(logits, axis=1)


def same(a, b) -> bool:
    return mx.array_equal(a, b).item()


def rows_for(layer, count: int = T):
    return mx.random.normal((count, 1, layer.hidden_size), key=mx.random.key(count))


def true_log_energy(layer, z):
    """log ||E_e(z_t)||^2 of every expert for z [T, d], in NumPy: float64 [T, E]."""
    experts = layer.block[layer.family.experts]
    gate, up, down = (np.array(experts[name].weight, np.float64) for name in ("gate_proj", "up_proj", "down_proj"))
    opened = np.einsum("td,eid->tei", z, gate)
    inner = opened / (1 + np.exp(-opened)) * np.einsum("td,eid->tei", z, up)
    return np.log(np.square(np.einsum("tei,edi->ted", inner, down)).sum(-1))


def native(layer, x):
    """Native ids and weights [T, k] of router inputs x [T, 1, d]."""
    router = layer.router
    routing = layer.family.route(layer.block, x @ router.weight.T if layer.family.chooses_itself else router(x))
    return np.array(routing.ids[:, 0]).astype(int), np.array(routing.weights[:, 0], np.float64)


def changed(predictor: Predictor, by=0.0, fold=None, **layers) -> Predictor:
    """`predictor` with intercepts moved by `by`, and a card that tells what calibration folded into them."""
    card = predictor.card
    if fold is not None:
        card = replace(card, fit={i: {"correction": fold} for i in card.layers})
    return Predictor(
        card, {i: replace(p, bias=(p.bias + by).astype(np.float32), **layers) for i, p in predictor.layers.items()}
    )


def exact(predictor: Predictor, layer, z, fold: float = 0.0) -> Predictor:
    """A predictor that is exact for the rows z [T, d], T <= d, of this layer, `fold` apart."""
    energies = true_log_energy(layer, z)
    weight = np.linalg.lstsq(z / np.linalg.norm(z, axis=1, keepdims=True), energies, rcond=None)[0].T
    own = replace(
        predictor.layers[layer.index],
        weight=weight.astype(np.float32),
        bias=np.full(len(weight), fold, np.float32),
    )
    return changed(Predictor(predictor.card, {**predictor.layers, layer.index: own}), fold=fold)


@pytest.fixture
def watched(monkeypatch):
    """Of each layer under a budget, by index: (x, arguments of selection, selection) of its decode steps."""
    seen: dict[int, list] = {}
    routed, select = BudgetedLayer.routed, integration.select_no_sync

    def keep(self, x):
        arguments = routed(self, x)
        seen.setdefault(self.moe.index, []).append([np.array(x[:, 0], np.float64), arguments])
        return arguments

    def add(**arguments):
        selection = select(**arguments)
        next(steps[-1] for steps in seen.values() if len(steps[-1]) == 2).append(selection)
        return selection

    monkeypatch.setattr(BudgetedLayer, "routed", keep)
    monkeypatch.setattr(integration, "select_no_sync", add)
    monkeypatch.setattr(integration, "operations", lambda kernels: Operations(add, integration.weighted_experts))
    return seen


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize("every", [1, 2])
def test_equals_pairs_gone_through_one_by_one(name, every, build, watched):
    model, predictor = build(name)
    predictor = changed(predictor, fold=FOLD)
    layers = find_moe_layers(model)
    with base_budget(model, predictor, M, Policy(audit=every)) as session:
        decode(model)
        with pytest.warns(UserWarning, match=r"drifts by more than 0\.25"):
            audit = session.stats().audit
    audited = range(0, STEPS, every)
    assert audit.steps == len(audited) and len(audit.layers) == len(layers)
    for layer, found in zip(layers, audit.layers, strict=True):
        drift, kept, whole = [], 0.0, 0.0
        assert len(watched[layer.index]) == STEPS
        for step in audited:
            z, arguments, selection = watched[layer.index][step]
            ids, weights = np.array(arguments["ids"]), np.array(arguments["weights"], np.float64)
            guess, true = predictor.log_energy(layer.index, z), true_log_energy(layer, z)
            active = np.array(selection.active)
            assert active.sum() <= M
            for t in range(T):
                for e, w in zip(ids[t], weights[t], strict=True):
                    energy = true[t, e] if active[e] else guess[t, e]
                    if active[e]:
                        drift.append(true[t, e] - (guess[t, e] - FOLD))
                        kept += w**2 * np.exp(energy)
                    whole += w**2 * np.exp(energy)
        assert found.layer == layer.index and found.pairs == len(drift) > 0
        assert found.drift == pytest.approx(np.mean(drift), abs=1e-4)
        assert found.rms == pytest.approx(np.sqrt(np.mean(np.square(drift))), rel=1e-4)
        assert found.kept_energy == pytest.approx(kept / whole, rel=1e-4)
        assert 0 < found.kept_energy < 1


@pytest.mark.parametrize("fold", [0.0, FOLD])
def test_an_exact_predictor_does_not_drift(fold, build, recwarn):
    model, predictor = build("qwen3_moe")
    layer = find_moe_layers(model)[0]
    x = rows_for(layer)
    predictor = exact(predictor, layer, np.array(x[:, 0], np.float64), fold)
    with base_budget(model, predictor, M, Policy(audit=1)) as session:
        for _ in range(2):
            layer.block(x)
        stats = session.stats()
    found = stats.audit.layers[0]
    assert stats.audit.steps == 2 and found.pairs > 0
    assert found.drift == pytest.approx(0, abs=1e-4) and found.rms < 1e-3
    if not fold:  # what was kept is then what was predicted
        assert found.kept_energy == pytest.approx(stats.kept_energy, abs=1e-4)
    assert (stats.audit.layers[1].pairs, stats.audit.layers[1].drift, stats.audit.layers[1].kept_energy) == (
        0,
        None,
        None,
    )
    assert not [w for w in recwarn if "audit" in str(w.message)]


def test_a_shift_is_found_exactly_and_warned_of(build):
    """Every expert by as much: the choice stays, so the pairs are the same and the drift moves by the shift alone."""
    model, predictor = build("qwen3_moe")
    layer = find_moe_layers(model)[0]
    x = rows_for(layer)
    predictor = exact(predictor, layer, np.array(x[:, 0], np.float64))
    for by in (1.5, -0.5):
        with base_budget(model, changed(predictor, by), M, Policy(audit=1)) as session:
            layer.block(x)
            with pytest.warns(UserWarning, match=re.escape(f"1 of 3 layers, most in layer 0 by {-by:+.3f}")):
                found = session.stats().audit.layers[0]
        assert found.drift == pytest.approx(-by, abs=1e-4) and found.rms == pytest.approx(abs(by), abs=1e-4)


@pytest.mark.filterwarnings("ignore:audit")
def test_correction_is_an_exponential_average_of_each_experts_drift(build):
    """The same decode step again and again: what an expert drifts by goes over at the rate, and no other moves."""
    model, predictor = build("qwen3_moe")
    layer = find_moe_layers(model)[0]
    x = rows_for(layer)
    # With every expert allowed the corrections cannot change what the step executes.
    with base_budget(model, predictor, 16, Policy(audit=1, audit_correct=True)) as session:
        for _ in range(3):
            mx.eval(layer.block(x))
        bias = np.array(session._layers[0].bias)
    z = np.array(x[:, 0], np.float64)
    drift = true_log_energy(layer, z) - predictor.log_energy(0, z)
    ids, _ = native(layer, x)
    expected = predictor.layers[0].bias.astype(np.float64)
    for e in range(16):
        rows = [t for t in range(T) if e in ids[t]]
        if rows:
            expected[e] += (1 - (1 - CORRECTION_RATE) ** 3) * drift[rows, e].mean()
    assert 3 < (expected != predictor.layers[0].bias).sum() < 16
    np.testing.assert_allclose(bias, expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore:audit")
def test_correction_follows_a_shift_until_the_audit_is_silent(build):
    model, predictor = build("qwen3_moe")
    layer = find_moe_layers(model)[0]
    x = rows_for(layer)
    predictor = changed(exact(predictor, layer, np.array(x[:, 0], np.float64)), 2.0)
    with base_budget(model, predictor, M, Policy(audit=1, audit_correct=True)) as session:
        drifts = []
        for _ in range(8):
            for _ in range(10):
                mx.eval(layer.block(x))
            audit = session.stats().audit
            drifts.append(audit.layers[0].drift)
            session.reset_stats()
        assert drifts == sorted(drifts) and drifts[0] < -0.5 and abs(drifts[-1]) < 0.05
        assert audit.warning() is None
        moved = np.array(session._layers[0].bias) - predictor.layers[0].bias
        assert (moved < -1).any() and (moved == 0).any(), "only what ran is corrected"


@pytest.mark.filterwarnings("ignore:audit")
@pytest.mark.parametrize("quantisation", (None, "affine4"))
def test_neither_off_nor_on_changes_logits(family, quantisation, build):
    model, predictor = build(family, quantisation)
    results = []
    for audit in (0, 2):
        with base_budget(model, predictor, M, Policy(audit=audit)) as session:
            results.append((decode(model), session.stats()))
    (expected, off), (got, on) = results
    assert same(expected, got)
    assert off.audit is None and replace(on, audit=None) == off
    assert on.audit.steps == 2 and all(a.pairs > 0 and np.isfinite(a.drift) for a in on.audit.layers)


def test_no_step_runs_an_expert_twice_and_steps_between_audits_cost_nothing(build, monkeypatch):
    model, predictor = build("qwen3_moe")
    layer = find_moe_layers(model)[0]
    switch = type(layer.block.switch_mlp)
    calls, forward = [], switch.__call__
    with monkeypatch.context() as patch:
        patch.setattr(switch, "__call__", lambda self, *args: calls.append(1) or forward(self, *args))
        with base_budget(model, predictor, M) as session:
            assert session._audit is None
            decode(model)
        without = len(calls)
        with base_budget(model, predictor, M, Policy(audit=1)):
            decode(model)
    assert len(calls) == 2 * without
    nodes = []
    for audit in (0, 1000):
        with base_budget(model, predictor, M, Policy(audit=audit)):
            mx.eval(layer.block(rows_for(layer)))
            nodes.append(graph_nodes(layer.block, rows_for(layer)))
    assert nodes[0] == nodes[1]


@pytest.mark.filterwarnings("ignore:audit")
def test_audited_steps_leave_the_kernels_and_corrections_reach_them(build, monkeypatch):
    model, predictor = build("qwen3_moe")
    layer = find_moe_layers(model)[0]
    biases = []

    def select(**arguments):
        biases.append(arguments["log_energy"].bias)
        return STOCK_OPERATIONS.select(**arguments)

    monkeypatch.setattr(integration, "operations", lambda kernels: Operations(select, STOCK_OPERATIONS.experts))
    with base_budget(model, predictor, M, Policy(audit=2, audit_correct=True)) as session:
        for _ in range(4):
            layer.block(rows_for(layer))
        stats = session.stats()
    assert stats.steps == 4 and stats.audit.steps == 2
    start = mx.array(predictor.layers[0].bias)
    assert len(biases) == 2 and not same(biases[0], start) and not same(biases[0], biases[1])


def test_audited_layers_are_traced_without_a_read_back(build):
    model, predictor = build("deepseek_v2")
    with base_budget(model, predictor, M, Policy(audit=1, audit_correct=True)) as session:
        layer = session._layers[1]
        # Tracing alone raises where a value is asked for.
        traced = mx.compile(lambda x: layer.execute_audited(session._audit, x, None))(rows_for(layer.moe, 4))
        assert traced.shape == (4, 1, 64)


@pytest.mark.filterwarnings("ignore:audit")
def test_finished_rows_do_not_count(build):
    model, predictor = build("qwen3_moe")
    layer = find_moe_layers(model)[0]
    x = rows_for(layer, 6)
    found = []
    for rows in (4, 6):
        with base_budget(model, predictor, M, Policy(audit=1)) as session:
            session.rows = mx.array([1, 1, 1, 1, 0, 0][:rows])
            layer.block(x[:rows])
            session.rows = mx.zeros(rows, mx.int32)
            layer.block(x[:rows])
            found.append(session.stats().audit)
    assert found[0].steps == found[1].steps == 1
    assert found[0].layers[0].pairs == found[1].layers[0].pairs
    assert found[0].layers[0].drift == pytest.approx(found[1].layers[0].drift, abs=1e-5)


@pytest.mark.filterwarnings("ignore:audit")
def test_prompts_are_not_audited_and_steps_that_no_budget_changes_are(build):
    model, predictor = build("qwen3_moe")
    layer = find_moe_layers(model)[0]
    x = rows_for(layer, 1)
    stock = layer.block(x)
    with base_budget(model, predictor, 4, Policy(audit=1)) as session:
        with session.prefill():
            layer.block(x)
        layer.block(rows_for(layer, 3).reshape(1, 3, -1))
        with session.suspended():
            layer.block(x)
        assert session.stats().audit.steps == 0
        assert same(layer.block(x), stock)
        stats = session.stats()
        assert stats.steps == 0 and stats.audit.steps == 1
        assert stats.audit.layers[0].pairs == 4 and stats.audit.layers[0].kept_energy == 1
        session.reset_stats()
        assert session.stats().audit.steps == 0


@pytest.mark.filterwarnings("ignore:audit")
def test_plans_and_switches_leave_the_audit_in_force(build):
    model, predictor = build("qwen3_moe")
    plan = Budget(layers={0: Budget(), 1: Budget(experts=2), 2: Budget(experts=3)})
    with base_budget(model, predictor, plan, Policy(audit=2)) as session:
        decode(model)
        audit = session.stats().audit
        assert audit.steps == 2 and [a.layer for a in audit.layers] == [0, 1, 2]
        assert [a.pairs > 0 for a in audit.layers] == [False, True, True]
        session.set_budget("energy:0.5")
        decode(model)
        later = session.stats().audit
        assert later.steps == 4 and later.layers[0].pairs > 0


@pytest.mark.filterwarnings("ignore:audit")
def test_sharded_experts_are_measured_whole(build, monkeypatch):
    """Where an expert's output is a sum over machines, so is what is measured: here of two equal halves."""
    model, predictor = build("qwen3_moe")
    layer = find_moe_layers(model)[0]
    drifts = []
    for group in (None, mx.distributed.init()):
        layer.block.sharding_group = group
        monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group: 2 * x)
        with base_budget(model, predictor, M, Policy(audit=1)) as session:
            layer.block(rows_for(layer))
            drifts.append(session.stats().audit.layers[0].drift)
    assert drifts[1] == pytest.approx(drifts[0] + np.log(4), abs=1e-4)


def test_sums_lose_nothing_to_float32():
    audit = Audit({0: 0.0}, 1, False)
    for value in (2.0**26, *[1.0] * 100):
        audit._add(0, mx.array([1.0, value, value, 0, 0, 0]))
    stats = audit.stats()
    assert stats.steps == 101 and stats.layers[0].pairs == 2**26 + 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audit": -1}, "audit -1"),
        ({"audit_correct": True}, "audit 0"),
        ({"audit": 1, "ranking": "weight_sum"}, "does not read"),
    ],
)
def test_refused_policies(changes, message):
    with pytest.raises(ValueError, match=message):
        Policy(**changes)


def test_refused_sessions(build):
    model, predictor = build("qwen3_moe")
    for own in (predictor, None):
        with pytest.raises(ValueError, match="the budget is off"), base_budget(model, own, "off", Policy(audit=1)):
            pass
    with pytest.raises(ValueError, match="needs a predictor"), base_budget(model, None, M, Policy(audit=1)):
        pass
    assert session_of(model) is None
