"""Decoding side by side against transformers' own generation, alone and under a budget."""

from functools import cache

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from backends.cuda import base_budget
from base_core.policies import run_policy
from calibrate.evaluation import prefill as prefill_module
from calibrate.evaluation.engine import EMPTY, Decoding, Engine, deal
from calibrate.evaluation.prefill import prefill
from calibrate.evaluation.variants import Variant, VariantRule
from tests.backends.cuda.tiny import EOS, PAD, VOCABULARY, make_model, make_predictor

MOST = 7
FAMILIES = ("qwen3_moe", "qwen2_moe", "deepseek_v2", "gpt_oss")


class Padder:
    """Pads on the left, as a tokenizer does."""

    def pad(self, encoded, return_tensors, padding, max_length):
        from transformers import BatchEncoding

        ids = torch.tensor([[PAD] * (max_length - len(row)) + row for row in encoded["input_ids"]])
        mask = torch.tensor([[0] * (max_length - len(row)) + [1] * len(row) for row in encoded["input_ids"]])
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})


def make_prompts(count=10, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCABULARY, rng.integers(2, 9)).tolist() for _ in range(count)]


@cache
def make_engine(model_type="qwen3_moe"):
    model = make_model(model_type)
    # Padding is the end token here: a random model may well say PAD, which the hooks would take for a finished row.
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=EOS, max_new_tokens=MOST, do_sample=False)
    prompts = make_prompts()
    return model, prompts, Engine(model, prefill(model, Padder(), prompts), [EOS])


def rule(model, variant, predictor=None):
    return VariantRule(variant, model.config.num_experts, predictor or make_predictor(model), None)


def answers(tokens):
    return [row[row != EMPTY].tolist() for row in tokens]


def generated(model, prompts):
    """transformers' own answers to left-padded prompts, all in one batch."""
    inputs = Padder().pad({"input_ids": prompts}, "pt", "max_length", max(map(len, prompts)))
    with torch.inference_mode():
        output = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in output]


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(("batch", "batches"), [(1, 10), (2, 3), (16, 1)])
def test_dense_decoding_is_every_prompt_alone(model_type, batch, batches):
    model, prompts, engine = make_engine(model_type)
    alone = [generated(model, [prompt])[0] for prompt in prompts]
    got = engine.decode(rule(model, Variant("dense")), Decoding(batch, MOST), deal(len(prompts), batches))
    assert answers(got.tokens) == alone
    assert len(set(map(len, alone))) > 1 or model_type != "qwen3_moe", "answers of one length would not test refilling"


@pytest.mark.parametrize("model_type", FAMILIES[:3])
@pytest.mark.parametrize("budget", [2, 5])
def test_base_without_refilling_is_the_budgeted_model(model_type, budget):
    """Rows that end become padding there, free slots here; neither votes. Counters and energies agree too."""
    model, prompts, engine = make_engine(model_type)
    predictor = make_predictor(model)
    with base_budget(model, predictor, budget, measure=True) as session:
        expected, stats = generated(model, prompts), session.stats()
    decoded = engine.decode(
        rule(model, Variant("base", str(budget)), predictor),
        Decoding(len(prompts), MOST),
        [range(len(prompts))],
        measure=True,
    )
    assert answers(decoded.tokens) == expected
    assert np.mean(decoded.tally.active_mean) == pytest.approx(stats.active_mean)
    assert np.mean(decoded.tally.union_mean) == pytest.approx(stats.union_mean)
    assert np.mean(decoded.tally.retained_energy) == pytest.approx(stats.retained_energy, rel=1e-5)
    assert max(decoded.tally.active_max) == stats.active_max <= budget
    assert decoded.steps == stats.steps


def test_all_experts_allowed_is_dense():
    model, prompts, engine = make_engine()
    decoding, queues = Decoding(4, MOST), deal(len(prompts), 2)
    dense = engine.decode(rule(model, Variant("dense")), decoding, queues)
    for policy in ("base", "weight_sum", "oracle", "xshare"):
        got = engine.decode(rule(model, Variant(policy, "16")), decoding, queues)
        assert (got.tokens == dense.tokens).all() and got.tally.active_mean == dense.tally.active_mean, policy


def test_a_budget_changes_answers_and_binds():
    model, prompts, engine = make_engine()
    decoding, queues = Decoding(4, MOST), deal(len(prompts), 2)
    dense = engine.decode(rule(model, Variant("dense")), decoding, queues)
    got = engine.decode(rule(model, Variant("base", "2")), decoding, queues)
    assert (got.tokens != dense.tokens).any() and max(got.tally.active_max) == 2
    assert (got.tokens[:, 0] == dense.tokens[:, 0]).all(), "the first token comes from prefill"


def test_forced_tokens_are_decoded_whatever_the_model_says():
    model, prompts, engine = make_engine()
    decoding, queues = Decoding(4, MOST), deal(len(prompts), 2)
    dense = engine.decode(rule(model, Variant("dense")), decoding, queues)
    told = []
    got = engine.decode(
        rule(model, Variant("base", "1")),
        decoding,
        queues,
        forced=dense.tokens,
        on_logits=lambda prompts, at, logits: told.extend(zip(prompts.tolist(), at.tolist(), strict=True)),
    )
    assert (got.tokens == dense.tokens).all() and got.steps == dense.steps
    assert sorted(told) == [(p, at) for p, row in enumerate(answers(dense.tokens)) for at in range(1, len(row))]


def test_every_batch_is_chosen_for_on_its_own():
    """Two batches side by side are the same as one after the other, and each sees its own rows."""
    model, _prompts, engine = make_engine()
    base, decoding = rule(model, Variant("base", "2")), Decoding(3, MOST)
    both = engine.decode(base, decoding, [range(5), range(5, 10)])
    for queue in (range(5), range(5, 10)):
        alone = engine.decode(base, decoding, [queue])
        assert (alone.tokens[list(queue)] == both.tokens[list(queue)]).all()


def test_a_freed_slot_goes_to_the_next_prompt_of_its_queue():
    _model, _prompts, engine = make_engine()
    seen = []

    class Watching(VariantRule):
        def __call__(self, layer, step):
            if layer == 0:
                seen.append(int((step.rows == 1).sum()))
            return run_policy("dense", step)

    watching = Watching(Variant("dense"), 16, None, None)
    decoded = engine.decode(watching, Decoding(3, MOST), [range(10)])
    steps = sum(len(row) - 1 for row in answers(decoded.tokens))
    assert sum(seen) == steps and len(seen) == decoded.steps
    assert seen == sorted(seen, reverse=True) and seen[0] == 3, "full while anybody waits"


def test_sampling_depends_on_seed_and_prompt_alone():
    model, prompts, engine = make_engine()
    dense = rule(model, Variant("dense"))

    def sample(seed, batch, batches):
        return engine.decode(dense, Decoding(batch, MOST, 1.5, seed), deal(len(prompts), batches)).tokens.tolist()

    first = sample(0, 4, 2)
    assert first == sample(0, 1, 10) == sample(0, 4, 2)
    assert first != sample(1, 4, 2) and first != engine.decode(dense, Decoding(4, MOST), [range(10)]).tokens.tolist()


def test_sampling_follows_the_distribution():
    model = make_engine()[0]
    engine = Engine(model, prefill(model, Padder(), [make_prompts()[0]] * 400), [VOCABULARY])
    shares = (engine.prompts.logits[0].double() / 2).softmax(-1)
    drawn = engine.decode(rule(model, Variant("dense")), Decoding(400, 2, 2.0), [range(400)]).tokens[:, 0]
    likely = shares.argmax()
    assert abs((drawn == int(likely)).mean() - shares[likely]) < 4 * (shares[likely] / 400) ** 0.5


@pytest.mark.parametrize("model_type", FAMILIES)
def test_prefill_in_parts_is_prefill_of_each_prompt(model_type, monkeypatch):
    model, prompts, _ = make_engine(model_type)
    monkeypatch.setattr(prefill_module, "PREFILL_ROWS", 3)
    together = prefill(model, Padder(), prompts)
    assert together.lengths.tolist() == list(map(len, prompts))
    for place, prompt in enumerate(prompts):
        alone = prefill(model, Padder(), [prompt])
        torch.testing.assert_close(together.logits[place], alone.logits[0])
        for found, own in zip(together.keys + together.values, alone.keys + alone.values, strict=True):
            torch.testing.assert_close(found[place, :, -len(prompt) :], own[0])


def test_hooks_are_gone_afterwards_also_after_an_error():
    model, _prompts, engine = make_engine()

    def fail(*_):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        engine.decode(rule(model, Variant("base", "2")), Decoding(4, MOST), [range(10)], measure=True, on_logits=fail)
    assert not any(layer.router._forward_hooks or layer.experts._forward_hooks for layer in engine.layers)


def test_answers_of_one_token_are_refused():
    model, _prompts, engine = make_engine()
    with pytest.raises(ValueError, match="nothing was decoded"):
        engine.decode(rule(model, Variant("dense")), Decoding(4, 1), [range(10)])


def test_deal_leaves_no_prompt_out():
    assert deal(7, 3) == [[0, 1, 2], [3, 4], [5, 6]]
