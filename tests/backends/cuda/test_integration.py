"""Budgets on whole tiny models of every family, measured at the experts' own input by hooks of the test."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import StaticCache

from backends.cuda import base_budget, disable_base, enable_base, find_moe_layers, routed_log_energy
from backends.cuda.families import correction_bias, router_rule
from backends.cuda.integration import classify_rows, retained_energy
from base_core import Budget, BudgetError, PredictorError, load_plan, route, save_plan, select
from base_core.selection import DECODE, PADDING, PREFILL
from tests.backends.cuda.no_sync import NoSync
from tests.backends.cuda.tiny import (
    EOS,
    MODEL_TYPES,
    NEW,
    PAD,
    B,
    L,
    generate,
    hooks_of,
    make_model,
    make_predictor,
    prompts,
    spy,
)

M = 3


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_budget_left():
    """One test's open session must not fail the next."""
    yield
    for model_type in MODEL_TYPES:
        if session := getattr(find_moe_layers(model_of(model_type))[0].router, "_base_session", None):
            session.close()


@functools.cache
def model_of(model_type: str = "qwen3_moe"):
    """Shared by the tests: whatever they do, the model must come out of it unchanged."""
    return make_model(model_type)


@functools.cache
def predictor_of(model_type: str = "qwen3_moe"):
    return make_predictor(model_of(model_type))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_decode_step_reads_at_most_the_budget(model_type):
    model, predictor = model_of(model_type), predictor_of(model_type)
    with spy(model) as stock:
        expected = generate(model)
    with base_budget(model, predictor, M, experts_implementation=None) as session, spy(model) as calls:
        tokens = generate(model)

    layers = len(find_moe_layers(model))
    assert len(calls) == len(stock) == layers * NEW
    for (_, ids, weights), (_, stock_ids, stock_weights) in zip(calls[:layers], stock[:layers], strict=True):
        assert torch.equal(ids, stock_ids)
        assert torch.equal(weights, stock_weights)
    read = [len(ids.unique()) for _, ids, _ in calls[layers:]]
    assert max(read) <= M < max(len(ids.unique()) for _, ids, _ in stock[layers:])
    assert torch.equal(tokens[:, : L + 1], expected[:, : L + 1])  # the first token is prefill's
    assert not torch.equal(tokens, expected)

    stats = session.stats()
    assert stats.steps == NEW - 1
    assert stats.active_mean == pytest.approx(np.mean(read))
    assert stats.active_max == max(read)
    assert stats.fallbacks == 0
    assert stats.union_mean > M


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_budget_of_every_expert_changes_nothing(model_type, padded):
    model = model_of(model_type)
    expected = generate(model, padded)
    experts = find_moe_layers(model)[0].num_experts
    with base_budget(model, predictor_of(model_type), experts, experts_implementation=None):
        assert torch.equal(generate(model, padded), expected)
    assert torch.equal(generate(model, padded), expected)
    assert hooks_of(model) == 0


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_routing_equals_the_reference(model_type):
    """One decode step, every layer: what the experts get is what base_core computes from the router's logits."""
    model, predictor = model_of(model_type), predictor_of(model_type)
    seen = {}

    def record(layer, module, args, output):
        seen[layer.index] = (args[0], *output)

    handles = [
        layer.router.register_forward_hook(functools.partial(record, layer), prepend=True)
        for layer in find_moe_layers(model)
    ]
    try:
        with torch.no_grad():
            cache = model(**prompts(), use_cache=True).past_key_values
            seen.clear()
            rows = torch.full((B, 1), 7)
            rows[-1] = PAD
            with base_budget(model, predictor, M), spy(model) as calls:
                model(input_ids=rows, cache=cache, use_cache=True)
    finally:
        for handle in handles:
            handle.remove()

    assert len(calls) == len(seen) > 0
    for layer, (index, ids, weights) in zip(find_moe_layers(model), calls, strict=True):
        assert layer.index == index
        z, logits, native_weights, native_ids = seen[index]
        z = z.reshape(-1, layer.hidden_size)
        bias = correction_bias(layer)
        routing = route(logits.numpy(), router_rule(layer), None if bias is None else bias.numpy())
        expected = select(
            routing.scores,
            native_ids.numpy(),
            native_weights.numpy(),
            predictor.log_energy(index, z.numpy()),
            M,
            preference=routing.preference,
            rows=np.array([DECODE] * (B - 1) + [PADDING]),
        )
        np.testing.assert_array_equal(ids.numpy(), expected.ids)
        np.testing.assert_allclose(weights.numpy(), expected.weights, rtol=1e-5, atol=1e-6)


def test_off_touches_nothing():
    model = model_of()
    before = model.get_experts_implementation()
    with base_budget(model, None, "off") as session:
        assert hooks_of(model) == 0
        assert model.get_experts_implementation() == before
        generate(model)
    assert session.stats().steps == 0


def test_restores_the_model_after_an_exception():
    model = model_of()
    before = model.get_experts_implementation()
    state = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(RuntimeError, match="stop"), base_budget(model, predictor_of(), M):
        assert set(model.get_experts_implementation().values()) == {"base"}
        assert hooks_of(model) == 2 + len(find_moe_layers(model))
        raise RuntimeError("stop")
    assert model.get_experts_implementation() == before
    assert hooks_of(model) == 0
    for name, module in model.named_modules():
        assert module.__dict__.keys() == state[name].keys()


def test_enable_and_disable():
    model = model_of()
    expected = generate(model)
    enable_base(model, predictor_of(), M)
    with pytest.raises(ValueError, match="already has a budget"), base_budget(model, predictor_of(), M):
        pass
    with pytest.raises(ValueError, match="already has a budget"):
        enable_base(model.model, None, "off")
    assert not torch.equal(generate(model), expected)
    disable_base(model)
    assert torch.equal(generate(model), expected)
    with pytest.raises(ValueError, match="no budget in force"):
        disable_base(model)


def test_finished_rows_neither_vote_nor_read():
    model, predictor = model_of(), predictor_of()
    k = model.config.num_experts_per_tok
    step = torch.tensor([[EOS], [9], [PAD], [PAD], [13], [EOS]])
    live = (step > EOS).flatten()
    with torch.no_grad():
        cache = model(**prompts(), use_cache=True).past_key_values
        with spy(model) as stock:
            model(input_ids=step, cache=cache, use_cache=True)
        cache.crop(-1)
        with base_budget(model, predictor, 2 * k) as session, spy(model) as calls:
            model(input_ids=step, cache=cache, use_cache=True)
    assert session.stats().active_max <= 2 * k
    # The two live rows fit into the budget between them, so all that they chose is read and nothing else.
    (_, ids, weights), (_, stock_ids, stock_weights) = calls[0], stock[0]
    assert torch.equal(ids[live], stock_ids[live])
    assert torch.equal(weights[live], stock_weights[live])
    assert set(ids[~live].flatten().tolist()) <= set(ids[live].flatten().tolist())
    assert not weights[~live].any()


def test_generation_ends_rows_one_by_one():
    """Rows end at different times; the last steps run with one live row, whose k experts fit any budget of k."""
    model = model_of()
    k = model.config.num_experts_per_tok
    first = generate(model)[:, L:]
    stop = int(first[0, 1])  # the second token of row 0 ends it, and every other row that comes to it
    stored = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [stop, EOS]
    try:
        with base_budget(model, predictor_of(), k), spy(model) as calls:
            tokens = generate(model, min_new_tokens=None, max_new_tokens=NEW + 4)[:, L:]
    finally:
        model.generation_config.eos_token_id = stored
    assert (tokens == PAD).any()
    layers = len(find_moe_layers(model))
    for step in range(1, len(calls) // layers):
        dead = (tokens[:, step - 1] == stop) | (tokens[:, step - 1] <= EOS)
        for _, _, weights in calls[step * layers : (step + 1) * layers]:
            assert torch.equal(weights.eq(0).all(1), dead)


@pytest.mark.parametrize(
    "ranking", ["removal_cost", "static_energy", "oracle", "weight_sum", "squared_weight", "top1_union"]
)
def test_every_ranking_holds_the_budget(ranking):
    model = model_of()
    needs_predictor = ranking in ("removal_cost", "static_energy")
    with base_budget(model, predictor_of() if needs_predictor else None, M, ranking=ranking, measure=True) as session:
        generate(model)
    stats = session.stats()
    assert stats.active_max <= M
    assert stats.retained_energy == pytest.approx(1.0) if ranking == "oracle" else 0.1 < stats.retained_energy < 1


def test_measuring_changes_no_token():
    model = model_of()
    expected = generate(model)
    with base_budget(model, None, "off", measure=True) as session:
        assert torch.equal(generate(model), expected)
    stats = session.stats()
    assert stats.active_mean == stats.union_mean > M
    assert stats.retained_energy == pytest.approx(1.0)
    with base_budget(model, predictor_of(), M):
        expected = generate(model)
    with base_budget(model, predictor_of(), M, measure=True):
        assert torch.equal(generate(model), expected)


def test_energy_budgets_keep_what_they_promise():
    model = model_of()
    with base_budget(model, predictor_of(), "energy:0.9") as session:
        generate(model)
    loose = session.stats()
    with base_budget(model, predictor_of(), f"energy:0.9,max={M}") as session:
        generate(model)
    assert session.stats().active_max <= M < loose.active_mean < loose.union_mean


def test_drop_reads_no_more_than_backfill():
    model = model_of()
    for fill in ("drop", "backfill"):
        with base_budget(model, predictor_of(), M, fill=fill, denominator="renormalise"), spy(model) as calls:
            generate(model)
        assert all(len(ids.unique()) <= M for _, ids, _ in calls[2:])


def test_a_plan_gives_each_layer_its_own_budget(tmp_path):
    model = model_of()
    save_plan(tmp_path / "plan.json", {0: Budget.parse(2), 1: Budget.parse("off")})
    with spy(model) as stock:
        generate(model)
    with base_budget(model, predictor_of(), f"plan:{tmp_path}/plan.json"), spy(model) as calls:
        generate(model)
    sizes = {i: max(len(ids.unique()) for index, ids, _ in calls[2:] if index == i) for i in (0, 1)}
    assert sizes[0] == 2
    assert sizes[1] > M
    assert len(stock) == len(calls)
    save_plan(tmp_path / "short.json", {0: Budget.parse(2)})
    with pytest.raises(BudgetError, match="no entry for layer 1"):
        enable_base(model, predictor_of(), load_plan(tmp_path / "short.json"))
    assert hooks_of(model) == 0


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ((None, M), {}, "removal_cost.*needs a predictor"),
        ((None, M), {"ranking": "static_energy"}, "static_energy.*needs a predictor"),
        (("own", 17), {}, r"outside 1\.\.16"),
        (("own", 0), {}, "below 1"),
        (("own", M), {"ranking": "loudest"}, "unknown ranking 'loudest'"),
        (("own", M), {"fill": "guess"}, "unknown fill"),
        (("own", M), {"decode_window": 0}, "decode_window 0"),
        (("own", M), {"colour": "red"}, "colour"),
        (("own", M), {"kernels": "metal"}, "kernels 'metal'"),
        (("own", M), {"experts_implementation": "nonsense"}, "nonsense"),
    ],
)
def test_bad_settings_are_refused_and_leave_no_trace(arguments, changes, message):
    model = model_of()
    predictor, budget = arguments
    with pytest.raises(ValueError, match=message):
        enable_base(model, predictor_of() if predictor == "own" else None, budget, **changes)
    assert hooks_of(model) == 0
    assert not any("_base_session" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "olmoe"}, "model_type"),
        ({"experts_per_token": 2}, "experts_per_token"),
        ({"fingerprint": {0: (0.1,) * 16, 1: (0.2,) * 16}}, "fingerprint"),
    ],
)
def test_a_foreign_predictor_is_refused(changes, message):
    with pytest.raises(PredictorError, match=message):
        enable_base(model_of(), make_predictor(model_of(), **changes), M)
    with pytest.raises(PredictorError, match="layers"):
        enable_base(model_of(), make_predictor(make_model(num_hidden_layers=3)), M)
    with pytest.raises(PredictorError, match="fingerprint"):
        enable_base(model_of(), make_predictor(make_model(seed=1)), M)
    assert hooks_of(model_of()) == 0


def test_a_cost_that_is_not_finite_falls_back_and_is_counted():
    model = model_of()
    with base_budget(model, predictor_of(), M) as session, spy(model) as calls:
        session._hooks[0].offset.fill_(torch.nan)
        generate(model)
    sizes = {i: [len(ids.unique()) for index, ids, _ in calls[2:] if index == i] for i in (0, 1)}
    assert min(sizes[0]) > M >= max(sizes[1])
    assert session.stats().fallbacks == NEW - 1


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_true_energies(model_type):
    layer = find_moe_layers(model_of(model_type))[0]
    z = torch.randn(3, layer.hidden_size)
    ids = torch.stack([torch.randperm(layer.num_experts)[:2] for _ in range(3)])
    with torch.no_grad():
        energy = routed_log_energy(layer.experts, z, ids)
        for t in range(3):
            for slot in range(2):
                output = layer.experts(z[t : t + 1], ids[t, slot].view(1, 1), torch.ones(1, 1))
                torch.testing.assert_close(energy[t, slot], output.square().sum().log(), rtol=1e-4, atol=1e-5)


def test_retained_energy_by_hand():
    ids, weights = torch.tensor([[0, 1], [1, 2]]), torch.tensor([[1.0, 1.0], [1.0, 2.0]])
    energy, silent = torch.zeros(2, 2), torch.tensor([[False], [False]])
    for active, expected in (([0, 0, 1, 0], 1.0), ([0, 1, 0, 0], 0.5), ([1, 1, 0, 0], 0.5), ([0, 1, 1, 0], 1.0)):
        share = retained_energy(ids, weights, energy, silent, torch.tensor(active, dtype=torch.bool))
        assert share.item() == pytest.approx(expected)
    silent = torch.tensor([[False], [True]])
    assert retained_energy(ids, weights, energy, silent, torch.tensor([True, False, False, False])).item() == 1


def test_blocks_without_a_model():
    blocks = torch.nn.ModuleList(decoder.mlp for decoder in model_of().model.layers)
    z = torch.randn(B, 1, 32)
    predictor = make_predictor(blocks)
    with torch.no_grad(), base_budget(blocks, predictor, M) as session, spy(blocks) as calls:
        for block in blocks:
            block(z)
        assert [len(ids.unique()) for _, ids, _ in calls] == [M, M]
        session.set_rows(torch.tensor([DECODE, PADDING, PADDING, PADDING, PADDING, PADDING]))
        for block in blocks:
            block(z)
        assert not calls[-1][2][1:].any()
        session.set_rows(torch.tensor([DECODE] * 5 + [PREFILL]))
        for block in blocks:
            block(z)
        assert len(calls[-1][1].unique()) > M
        session.set_rows(torch.tensor([DECODE] * 4))
        with pytest.raises(ValueError, match="4 rows, the router got 6"):
            blocks[0](z)
        assert session.stats().steps == 2


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [(M, "off", "restricts other layers"), ("off", M, "restricts other layers"), (M, 17, r"outside 1\.\.16")],
)
def test_a_budget_that_cannot_follow_is_refused(first, second, message):
    model = model_of()
    with base_budget(model, predictor_of(), first) as session:
        tokens = generate(model)
        with pytest.raises(ValueError, match=message):
            session.set_budget(second)
        assert session.budget == Budget.parse(first)
        assert torch.equal(generate(model), tokens)


def test_given_rows_replace_the_model_s_own():
    model = model_of()
    with torch.no_grad(), base_budget(model, predictor_of(), M) as session, spy(model) as calls:
        session.set_rows(torch.full((B * L,), DECODE))
        model(**prompts())
        assert all(len(ids.unique()) <= M for _, ids, _ in calls)
        model.model.layers[0].mlp(torch.randn(1, 4, 32))  # outside of a forward pass of the model routing is stock
        assert len(calls[-1][1].unique()) > M
        session.set_rows(None)
        calls.clear()
        model(**prompts())
        assert all(len(ids.unique()) > M for _, ids, _ in calls)


def test_continuous_batching():
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, predictor = model_of(), predictor_of()
    requests = [[5, 6, 7], [8, 9], [10], [11, 12, 13, 14], [15, 16, 17]]
    options = {
        "generation_config": GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=PAD, use_cache=True
        ),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64, page_size=16),
        "progress_bar": False,
    }

    def tokens():
        answers = model.generate_batch(inputs=requests, **options)
        return sorted(answer.prompt_ids + answer.generated_tokens for answer in answers.values())

    expected = tokens()
    with base_budget(model, predictor, 16, experts_implementation=None):
        assert tokens() == expected
    with base_budget(model, predictor, M) as session, spy(model) as calls:
        restricted = tokens()
    decode = [len(ids.unique()) for _, ids, _ in calls if len(ids) == len(requests)]
    prefill = [len(ids.unique()) for _, ids, _ in calls if len(ids) > len(requests)]
    assert max(decode) <= M < min(prefill)
    assert session.stats().steps >= NEW - 1
    assert restricted != expected
    length = [len(request) + 1 for request in sorted(requests)]
    assert [r[:n] for r, n in zip(restricted, length, strict=True)] == [
        e[:n] for e, n in zip(expected, length, strict=True)
    ]


def test_a_wrapped_model_still_says_what_its_rows_are():
    model = model_of()
    expected = generate(model)
    with base_budget(torch.nn.ModuleDict({"inner": model}), predictor_of(), 1) as session:
        tokens = generate(model)
        assert set(model.get_experts_implementation().values()) == {"base"}
    assert session.stats().steps == NEW - 1
    assert torch.equal(tokens[:, : L + 1], expected[:, : L + 1])


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hooks_never_synchronise(model_type):
    layers = [layer.router for layer in find_moe_layers(model_of(model_type))]
    blocks = torch.nn.ModuleList(
        module for module in model_of(model_type).modules() if any(child in layers for child in module.children())
    )
    for budget in (M, "energy:0.9"):
        with torch.no_grad(), base_budget(blocks, make_predictor(blocks), budget) as session, NoSync():
            session.set_rows(torch.tensor([DECODE] * 5 + [PADDING]))
            for router in layers:
                router(torch.randn(B, 32))
    ids = torch.full((B, 1), 7)
    with NoSync():
        classify_rows(ids, {"cache": Cache(torch.tensor(3)), "attention_mask": torch.ones(B, 4)}, 1, [PAD, EOS])
        packed = {"cu_seq_lens_q": torch.arange(B + 1), "position_ids": torch.ones(1, B)}
        classify_rows(ids.view(1, B), packed, 1, [PAD, EOS])


class Cache:
    def __init__(self, length):
        self.length = length

    def get_seq_length(self):
        return self.length


def kinds(ids, cached=3, window=1, **kwargs) -> list[int] | None:
    cache = None if cached is None else Cache(cached)
    rows = classify_rows(torch.tensor(ids), {"cache": cache, **kwargs}, window, [PAD, EOS])
    return None if rows is None else rows.tolist()


def test_row_kinds_of_a_batch():
    assert kinds([[5], [6]]) == [DECODE, DECODE]
    assert kinds([[5], [EOS], [PAD]]) == [DECODE, PADDING, PADDING]
    assert kinds([[5, 6]]) is None
    assert kinds([[5]], cached=0) is None
    assert kinds([[5]], cached=None) is None
    assert kinds([[5, 6], [7, PAD]], window=2) == [DECODE, DECODE, DECODE, PADDING]
    assert kinds([[5], [6]], attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])) == [DECODE, PADDING]
    assert kinds([[5], [6]], attention_mask=torch.ones(2, 1, 1, 4)) == [DECODE, DECODE]
    assert kinds([[5]], cached=torch.tensor(0)) == [PREFILL]
    assert kinds([[5]], cached=torch.tensor(2)) == [DECODE]
    embeds = {"inputs_embeds": torch.zeros(2, 1, 4), "past_key_values": Cache(1)}
    assert classify_rows(None, embeds, 1, [PAD]).tolist() == [DECODE, DECODE]


def test_row_kinds_of_a_packed_batch():
    bounds, positions = torch.tensor([0, 1, 4, 5, 6, 6, 6]), torch.tensor([[9, 0, 1, 2, 4, 0, 0, 0]])
    rows = kinds([[5] * 8], cached=None, cu_seq_lens_q=bounds, position_ids=positions)
    # a decoding row, a prompt of three, a decoding row, a prompt of one, two rows of padding
    assert rows == [DECODE, PREFILL, PREFILL, PREFILL, DECODE, PREFILL, PADDING, PADDING]


def test_one_token_prompts_are_prefill():
    model = model_of()
    with spy(model) as stock, torch.no_grad():
        model.generate(input_ids=torch.arange(2, 8).view(B, 1), max_new_tokens=1, do_sample=False)
    with base_budget(model, predictor_of(), 1) as session, spy(model) as calls, torch.no_grad():
        model.generate(input_ids=torch.arange(2, 8).view(B, 1), max_new_tokens=1, do_sample=False)
    assert session.stats().steps == 0
    for (_, ids, _), (_, expected, _) in zip(calls, stock, strict=True):
        assert torch.equal(ids, expected)


def test_static_cache():
    model = model_of()
    with base_budget(model, predictor_of(), M) as session:
        dynamic = generate(model)
        assert torch.equal(generate(model, cache_implementation="static"), dynamic)
    assert session.stats().active_max <= M


def test_compiled_decode_step_equals_eager():
    """Hooks and selection trace into one graph without breaks; what the graph holds is what eager does."""
    model = make_model(num_hidden_layers=1)
    step = torch.tensor([[5], [9], [PAD], [17]])

    def logits(forward):
        cache = StaticCache(config=model.config, max_cache_len=8)
        model(input_ids=prompts()["input_ids"][:4], cache=cache)
        return forward(input_ids=step, cache=cache).logits

    with torch.no_grad():
        stock = logits(model)
        with base_budget(model, None, M, ranking="weight_sum", experts_implementation="grouped_mm"):
            eager = logits(model)
            torch.testing.assert_close(logits(torch.compile(model, fullgraph=True, backend="eager")), eager)
    assert (eager - stock).abs().max() > 0.1


def test_bfloat16_models():
    model = make_model(dtype=torch.bfloat16)
    with base_budget(model, make_predictor(model), M) as session:
        generate(model)
    assert session.stats().active_max <= M


def test_without_triton():
    """A machine that has no Triton runs budgets all the same."""
    program = """
import sys
sys.modules["triton"] = None
import torch
from backends.cuda import base_budget
from tests.backends.cuda.tiny import generate, make_model, make_predictor
model = make_model()
with base_budget(model, make_predictor(model), 3) as session:
    generate(model)
print(session.stats().active_max, "backends.cuda.kernels" in sys.modules)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["3", "False"]
