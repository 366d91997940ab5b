"""The audit against energies and sums computed apart; drift that is put in has to come out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from backends.cuda import Policy, base_budget, find_moe_layers
from backends.cuda.audit import CORRECTION_RATE, DRIFT_BOUND, AuditStats, LayerAudit
from base_core import Predictor
from tests.backends.cuda.no_sync import NoSync
from tests.backends.cuda.tiny import NEW, generate, make_model, make_predictor, prompts

M = 3
FOLD = 0.125


def shifted(predictor: Predictor, by: float) -> Predictor:
    return Predictor(
        predictor.card, {i: replace(p, bias=(p.bias + by).astype(np.float32)) for i, p in predictor.layers.items()}
    )


def watched(model):
    """Every decode step's (layer, z, native ids, native weights, executed ids), by hooks of the test."""
    seen: dict[int, list] = {layer.index: [] for layer in find_moe_layers(model)}
    handles = []
    for layer in find_moe_layers(model):

        def keep(router, args, output, index=layer.index):
            seen[index].append([args[0].reshape(-1, args[0].shape[-1]).clone(), output[2].clone(), output[1].clone()])

        def add(experts, args, index=layer.index):
            seen[index][-1].append(args[1].clone())

        handles += [layer.router.register_forward_hook(keep), layer.experts.register_forward_pre_hook(add)]
    return seen, handles


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize("every", [1, 2])
def test_equals_pairs_gone_through_one_by_one(model_type, every):
    model = make_model(model_type)
    layers = find_moe_layers(model)
    predictor = make_predictor(model, fit={layer.index: {"correction": FOLD} for layer in layers})
    seen, handles = watched(model)
    with pytest.warns(UserWarning, match="drifts by more than 0.25"):
        with base_budget(model, predictor, M, audit=every, kernels="off") as session:
            generate(model)
        audit = session.stats().audit
    for handle in handles:
        handle.remove()

    audited = range(1, NEW, every)  # the first pass is prefill
    assert audit.steps == len(audited) and len(audit.layers) == len(layers)
    for layer, found in zip(layers, audit.layers, strict=True):
        drift, kept, whole = [], 0.0, 0.0
        for step in audited:
            z, ids, weights, executed = seen[layer.index][step]
            guess = predictor.log_energy(layer.index, z.numpy())
            active = set(executed.flatten().tolist())
            for t in range(len(z)):
                for e, w in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
                    true = guess[t, e]
                    if e in active:
                        one = torch.ones(1, 1)
                        with torch.no_grad():
                            output = layer.experts.forward(z[t : t + 1], torch.tensor([[e]]), one)
                        true = np.log(float(output.square().sum()))
                        drift.append(true - (guess[t, e] - FOLD))
                        kept += w**2 * np.exp(true)
                    whole += w**2 * np.exp(true)
        assert found.layer == layer.index and found.pairs == len(drift) > 0
        assert found.drift == pytest.approx(np.mean(drift), abs=1e-4)
        assert found.rms == pytest.approx(np.sqrt(np.mean(np.square(drift))), rel=1e-4)
        assert found.kept_energy == pytest.approx(kept / whole, rel=1e-4)
        assert 0 < found.kept_energy < 1


@pytest.mark.filterwarnings("ignore:audit")
def test_a_shift_is_found_exactly():
    """Every expert by as much: the choice stays, so the pairs are the same and the drift moves by the shift alone."""
    model = make_model()
    predictor = make_predictor(model)
    found = []
    for by in (0.0, 1.5):
        with base_budget(model, shifted(predictor, by), M, audit=1) as session:
            generate(model)
        found.append(session.stats().audit)
    for before, after in zip(found[0].layers, found[1].layers, strict=True):
        assert after.pairs == before.pairs
        assert after.drift == pytest.approx(before.drift - 1.5, abs=1e-4)


@pytest.mark.filterwarnings("ignore:audit")
def test_correction_is_an_exponential_average_of_each_experts_drift():
    """The same decode step again and again: what an expert drifts by goes over at the rate, and no other moves."""
    model = make_model(num_hidden_layers=1)
    layer = find_moe_layers(model)[0]
    predictor = make_predictor(model)
    seen, handles = watched(model)
    # With every expert allowed the corrections cannot change what the step executes.
    with base_budget(model, predictor, 16, audit=1, audit_correct=True, kernels="off") as session:
        for _ in range(3):
            generate(model, max_new_tokens=2, min_new_tokens=2)
        offset = session._hooks[0].offset.clone()
    for handle in handles:
        handle.remove()
    z, ids, _, _ = seen[layer.index][1]
    expected = predictor.layers[0].bias.astype(np.float64)
    for e in range(16):
        rows = [t for t in range(len(z)) if e in ids[t].tolist()]
        if not rows:
            continue
        with torch.no_grad():
            outputs = layer.experts.forward(z[rows], torch.full((len(rows), 1), e), torch.ones(len(rows), 1))
        true = outputs.square().sum(-1).log().numpy()
        drift = np.mean(true - predictor.log_energy(0, z[rows].numpy())[:, e])
        expected[e] += (1 - (1 - CORRECTION_RATE) ** 3) * drift
    assert (expected != predictor.layers[0].bias).sum() > 3
    np.testing.assert_allclose(offset.numpy(), expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore:audit")
def test_correction_follows_a_shift_until_the_audit_is_silent():
    model = make_model(num_hidden_layers=1)
    predictor = make_predictor(model)
    offsets = []
    for by in (0.0, 2.0):
        with base_budget(model, shifted(predictor, by), "16", audit=1, audit_correct=True) as session:
            for _ in range(80):
                generate(model, max_new_tokens=2, min_new_tokens=2)
            offsets.append(session._hooks[0].offset.clone())
    start = torch.tensor(predictor.layers[0].bias)
    seen = offsets[0] != start  # experts that some row chose
    assert seen.any() and not seen.all()
    torch.testing.assert_close(offsets[0][seen], offsets[1][seen], atol=2e-3, rtol=0)
    torch.testing.assert_close(offsets[1][~seen], start[~seen] + 2)


@pytest.mark.filterwarnings("ignore:audit")
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_neither_off_nor_on_changes_tokens(padded):
    model = make_model()
    predictor = make_predictor(model)
    tokens = []
    for audit in (0, 1):
        with base_budget(model, predictor, M, audit=audit) as session:
            tokens.append(generate(model, padded))
        assert (session.stats().audit is None) == (audit == 0)
    assert torch.equal(*tokens)


def test_off_runs_no_expert_twice():
    model = make_model()
    with base_budget(model, make_predictor(model), M) as session:
        assert session._audit is None
        layer = find_moe_layers(model)[0]
        calls = []
        forward = layer.experts.forward
        layer.experts.forward = lambda *args: calls.append(1) or forward(*args)
        generate(model)
        del layer.experts.forward
    assert len(calls) == NEW


def test_audited_steps_do_not_wait_for_the_device():
    model = make_model()
    with (
        base_budget(
            model, make_predictor(model), M, audit=1, audit_correct=True, experts_implementation=None
        ) as session,
        torch.no_grad(),
    ):
        model.set_experts_implementation("batched_mm")
        cached = model(**prompts(), use_cache=True)
        cache, ids = cached.past_key_values, cached.logits[:, -1:].argmax(-1)
        # transformers' mask looks at the values of a given attention mask, so none is given.
        with NoSync():
            model(input_ids=ids, cache=cache)
        with pytest.warns(UserWarning, match="drifts"):
            assert session.stats().audit.steps == 1


def test_warns_beyond_the_bound_only():
    def stats(*drifts):
        return AuditStats(1, tuple(LayerAudit(i, 4, drift, 1.0, 0.9) for i, drift in enumerate(drifts)))

    assert stats(DRIFT_BOUND, -DRIFT_BOUND, None).warning() is None
    assert "1 of 2 layers, most in layer 1 by -0.300" in stats(0.2, -0.3).warning()
    assert stats(float("nan")).warning() is not None


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


def test_refused_sessions():
    model = make_model()
    with pytest.raises(ValueError, match="the budget is off"), base_budget(model, None, "off", audit=1):
        pass
    block = model.model.layers[0].mlp
    predictor = make_predictor(model)
    only = Predictor(
        replace(predictor.card, layers=(0,), fingerprint={0: predictor.card.fingerprint[0]}), {0: predictor.layers[0]}
    )
    with pytest.raises(ValueError, match="audit counts"), base_budget(block, only, M, audit=1):
        pass
