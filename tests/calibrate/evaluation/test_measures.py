"""Each measure against a computation of its own."""

import math

import numpy as np
import pytest
import torch

from backends.cuda.families import find_moe_layers
from base_core.policies import run_policy
from calibrate.evaluation.engine import Decoding, deal
from calibrate.evaluation.metrics import Judge, Reference, evaluate, kl_divergence
from calibrate.evaluation.routing import LayerProbe, retained_energy
from calibrate.evaluation.units import pack_bits, unpack_bits
from calibrate.evaluation.variants import Variant
from tests.backends.cuda.tiny import make_model
from tests.calibrate.evaluation.test_engine import MOST, make_engine, rule


class Rows:
    kinds = np.array([1, 1, 0, 1, 1, 0])
    batch = 3


def literal_outputs(layer, z):
    """E_e(z_t) for every expert, one row and one expert at a time: [T, E, d]."""
    layer.experts.config._experts_implementation = "eager"
    one = torch.ones(1, 1)
    return torch.stack(
        [
            torch.stack([layer.experts(row[None], torch.tensor([[e]]), one)[0] for e in range(layer.num_experts)])
            for row in z
        ]
    )


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v2"])
@torch.no_grad()
def test_error_and_energy_of_a_layer(model_type):
    model = make_model(model_type)
    layer = find_moe_layers(model)[0]
    z = torch.randn(6, layer.hidden_size)
    each = literal_outputs(layer, z)
    _, weights, ids = layer.router(z)
    predicted = rule(model, Variant("base", "2"))
    probe = LayerProbe(layer, predicted, Rows(), measure=True)
    probe.open()
    _, new_weights, new_ids = layer.router(z)
    output = layer.experts(z, new_ids, new_weights)
    probe.close()

    error = norm = 0.0
    for t in np.flatnonzero(Rows.kinds):
        dense = sum(w * each[t, e] for w, e in zip(weights[t], ids[t], strict=True))
        done = sum(w * each[t, e] for w, e in zip(new_weights[t], new_ids[t], strict=True))
        torch.testing.assert_close(output[t], done, rtol=1e-4, atol=1e-5)
        error, norm = error + float((done - dense).square().sum()), norm + float(dense.square().sum())
    assert probe.squared_error / probe.squared_norm == pytest.approx(error / norm, rel=1e-4)
    assert error > 0

    for batch, (active, union, retained) in enumerate(zip(probe.active, probe.union, probe.retained, strict=True)):
        rows = [t for t in range(3 * batch, 3 * batch + 3) if Rows.kinds[t] == 1]
        cost = dict.fromkeys(range(layer.num_experts), 0.0)
        for t in rows:
            for w, e in zip(weights[t].tolist(), ids[t].tolist(), strict=True):
                cost[e] += w**2 * float(each[t, e].square().sum())
        chosen = {e for t in rows for e in new_ids[t].tolist()}
        assert active == len(chosen) == 2 and union == len({e for t in rows for e in ids[t].tolist()})
        best = sorted(cost.values(), reverse=True)[:2]
        assert retained == pytest.approx(sum(cost[e] for e in chosen) / sum(best), rel=1e-4)


def test_retained_energy_by_hand():
    cost = np.array([4.0, 0.0, 2.0, 1.0], np.float32)
    assert retained_energy(cost, np.array([True, False, False, True])) == pytest.approx(5 / 6)
    assert retained_energy(cost, np.array([False, True, False, False])) == 0
    assert retained_energy(np.zeros(4, np.float32), np.array([True, False, False, False])) == 1


def test_kl_by_hand_and_by_torch():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert float(kl_divergence(p.log(), q.log(), whole=True)) == pytest.approx(expected, rel=1e-6)
    log_p, log_q = torch.randn(5, 9).log_softmax(-1), torch.randn(5, 9).log_softmax(-1)
    theirs = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(kl_divergence(log_p, log_q, whole=True).float(), theirs)
    assert float(kl_divergence(log_p, log_p, whole=True).max()) == 0


def test_kl_of_the_likeliest_tokens_and_the_rest_as_one():
    log_p, log_q = torch.randn(5, 9).log_softmax(-1), torch.randn(5, 9).log_softmax(-1)
    kept_p, kept_q = log_p[:, :4], log_q[:, :4]
    joined = [torch.cat([x.exp(), 1 - x.exp().sum(-1, keepdim=True)], 1).log() for x in (kept_p, kept_q)]
    got = kl_divergence(kept_p, kept_q, whole=False)
    torch.testing.assert_close(got.float(), kl_divergence(*joined, whole=True).float(), rtol=1e-4, atol=1e-6)
    assert (got <= kl_divergence(log_p, log_q, whole=True) + 1e-6).all()


def test_judge_counts_agreement():
    ids = torch.tensor([[[0, 0, 0], [2, 0, 1]], [[0, 0, 0], [1, 0, 2]]])
    shares = torch.tensor([0.5, 0.3, 0.2]).log().expand(2, 2, 3)
    judge = Judge(Reference(np.zeros((2, 2), np.int64), ids, shares))
    # Prompt 0 prefers token 2 as the dense model does; prompt 1 prefers 0, the dense model 1.
    logits = torch.tensor([[0.3, 0.2, 0.5], [0.5, 0.3, 0.2]]).log()
    judge(np.array([0, 1]), np.array([1, 1]), logits)
    assert (judge.count, judge.agreed) == (2, 1)
    swapped = 0.5 * math.log(0.5 / 0.3) + 0.3 * math.log(0.3 / 0.5)
    assert judge.kl == pytest.approx(swapped, rel=1e-5)


def test_dense_is_exactly_dense_and_a_tight_budget_is_not():
    model, prompts, engine = make_engine()
    decoding, queues = Decoding(4, MOST), deal(len(prompts), 2)
    dense = rule(model, Variant("dense"))
    reference, decoded = Reference.record(engine, dense, decoding, queues)

    def grade(tokens):
        return (tokens == decoded.tokens).all(1)

    for variant in (Variant("dense"), Variant("base", "16"), Variant("top_k", options={"k": 4})):
        got = evaluate(engine, rule(model, variant), decoding, queues, reference, grade)
        assert got["kl"] == 0 and got["agreement"] == 1 and got["accuracy"] == 1, variant.label
        assert got["layer_error"] < 1e-10 and got["retained_energy"] == pytest.approx(1, abs=1e-6)
        assert got["active_mean"] == got["union_mean"] == got["active_forced"]
        assert got["right"] == [True] * len(prompts)
    tight = evaluate(engine, rule(model, Variant("base", "1")), decoding, queues, reference, grade)
    assert tight["kl"] > 0.01 and tight["agreement"] < 1 and tight["layer_error"] > 0.1 and tight["accuracy"] < 1
    assert tight["active_mean"] == tight["active_max"] == 1 and tight["judged"] == got["judged"]
    assert tight["accuracy_low"] <= tight["accuracy"] <= tight["accuracy_high"]


def test_measures_along_fewer_prompts():
    model, prompts, engine = make_engine()
    decoding, queues = Decoding(4, MOST), deal(len(prompts), 2)
    reference, _ = Reference.record(engine, rule(model, Variant("dense")), decoding, queues)
    base = rule(model, Variant("base", "2"))
    got = evaluate(engine, base, decoding, queues, reference, along=deal(4, 1))
    assert got["judged"] == sum((reference.tokens[:4] >= 0).sum(1) - 1)
    assert got["accuracy"] is None and got["right"] is None


def test_reference_holds_the_dense_distribution():
    model, prompts, engine = make_engine()
    decoding, queues = Decoding(4, MOST), deal(len(prompts), 2)
    reference, _ = Reference.record(engine, rule(model, Variant("dense")), decoding, queues)
    long = int((reference.tokens >= 0).sum(1).argmax())
    answer = reference.tokens[long]
    with torch.inference_mode():
        text = torch.tensor([prompts[long] + answer[:-1].tolist()])
        expected = model(input_ids=text).logits[0, -1].log_softmax(-1)
    got = torch.empty_like(expected)
    got[reference.ids[long, -1]] = reference.log_shares[long, -1]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("marks", [[True], [False] * 9, [True, False, True, True, False, False, True, False, True]])
def test_marks_survive_packing(marks):
    assert unpack_bits(pack_bits(marks), len(marks)).tolist() == marks


def test_a_rule_may_be_anything():
    """A selection rule of one's own: every batch drops to its rows' favourites."""
    model, prompts, engine = make_engine()

    class Own:
        reads_true_energy = True

        def log_energy(self, layer, z, true):
            assert z.shape == (len(true), model.config.hidden_size)
            return true

        def __call__(self, layer, step):
            assert step.log_energy.shape == step.routing.scores.shape
            return run_policy("oracle", step, 3)

    got = engine.decode(Own(), Decoding(4, MOST), deal(len(prompts), 2), measure=True)
    oracle = engine.decode(rule(model, Variant("oracle", "3")), Decoding(4, MOST), deal(len(prompts), 2))
    assert (got.tokens == oracle.tokens).all()
    assert got.tally.retained_energy == pytest.approx([1.0] * len(got.tally.layers), abs=1e-6)
