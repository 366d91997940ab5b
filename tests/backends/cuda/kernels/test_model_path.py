"""Whole models through the kernels, in the Triton interpreter: the same as through torch, and no trace afterwards."""

import functools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache  # noqa: E402

from backends.cuda import base_budget, find_moe_layers  # noqa: E402
from backends.cuda.kernels import module  # noqa: E402
from backends.cuda.kernels.front import front  # noqa: E402
from backends.cuda.kernels.module import FrontRouter  # noqa: E402
from base_core import Budget, load_predictor, save_plan  # noqa: E402
from base_core.embedded import model_path, predictor_path, tasks  # noqa: E402
from base_core.selection import DECODE, PADDING, PREFILL  # noqa: E402
from tests.backends.cuda.no_sync import NoSync  # noqa: E402
from tests.backends.cuda.tiny import (  # noqa: E402
    EOS,
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

pytestmark = pytest.mark.interpreter

M = 3


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True)  # torch.empty then holds NaN and the largest integers
    yield
    torch.use_deterministic_algorithms(False)


UNGROUPED = {
    "qwen3_moe": {},
    "qwen2_moe": {},
    "mixtral": {},
    "olmoe": {},
    "gpt_oss": {},
    "deepseek_v2": {"topk_method": "greedy"},
    "glm4_moe": {"n_group": 1, "topk_group": 1},
}


@functools.cache
def model_of(model_type="qwen3_moe"):
    return make_model(model_type, **UNGROUPED[model_type])


@functools.cache
def predictor_of(model_type="qwen3_moe"):
    return make_predictor(model_of(model_type))


class Calls:
    """How often the two kernel paths ran."""

    def __init__(self, patch):
        self.front = self.own_list = self.collected = 0

        def count(name, attribute):
            original = getattr(module, name)

            def counted(*args, **kwargs):
                setattr(self, attribute, getattr(self, attribute) + 1)
                return original(*args, **kwargs)

            patch.setattr(module, name, counted)

        count("front", "front")
        count("collect", "collected")
        count("experts", "own_list")  # every call of the experts; those that collected are taken off below

    @property
    def handed_over(self):
        return self.own_list - self.collected


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


def both(model, predictor, budget, run, **options):
    """What `run(session)` returns through the kernels and through torch, and the two sessions' stats."""
    found = []
    for kernels in ("auto", "off"):
        with base_budget(model, predictor, budget, kernels=kernels, **options) as session, spy(model) as seen:
            assert [hook.front is None for hook in session._hooks].count(False) == (
                0 if kernels == "off" else sum(hook.limit is not None for hook in session._hooks)
            )
            found.append((run(session), session.stats(), seen))
    (auto, auto_stats, auto_seen), (off, off_stats, off_seen) = found
    assert len(auto_seen) == len(off_seen)
    for (layer, ids, weights), (other, other_ids, other_weights) in zip(auto_seen, off_seen, strict=True):
        assert layer == other
        # torch.topk leaves the order of a row's experts open, and an empty slot any active expert will do.
        for row, other_row in zip(sets(ids, weights), sets(other_ids, other_weights), strict=True):
            assert row.keys() == other_row.keys()
            assert [row[e] for e in sorted(row)] == pytest.approx([other_row[e] for e in sorted(row)], rel=1e-3)
    assert auto_stats == off_stats
    return auto, off, auto_stats


def sets(ids, weights):
    return [
        {e: w for e, w in zip(*pair, strict=True) if w} for pair in zip(ids.tolist(), weights.tolist(), strict=True)
    ]


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("model_type", UNGROUPED)
def test_tokens_ids_weights_and_stats_are_those_of_torch(model_type, padded, calls):
    model = model_of(model_type)
    auto, off, stats = both(model, predictor_of(model_type), M, lambda _: generate(model, padded))
    assert torch.equal(auto, off)
    layers = len(find_moe_layers(model))
    assert stats.steps == NEW - 1 and stats.active_max == M and stats.fallbacks == 0
    # Prefill goes through the experts kernels too, on ids that the stock router chose.
    assert calls.front == calls.handed_over == layers * (NEW - 1)
    assert calls.collected == layers


@pytest.mark.parametrize("budget", [6, "energy:0.9,max=16"])
def test_embedded_model(budget, calls):
    tokenizer = AutoTokenizer.from_pretrained(model_path(), padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32, use_safetensors=True).eval()
    examples = tasks.evaluation_examples(4)
    inputs = tokenizer([e.prompt for e in examples], return_tensors="pt", padding=True)

    def run(_):
        with torch.inference_mode():
            return model.generate(**inputs, max_new_tokens=3, do_sample=False)

    auto, off, _ = both(model, load_predictor(predictor_path()), budget, run)
    assert torch.equal(auto, off)
    assert calls.front > 0


def test_batches_whose_rows_end_one_by_one(monkeypatch):
    model = model_of()
    stop = int(generate(model)[0, L + 1])
    monkeypatch.setattr(model.generation_config, "eos_token_id", [stop, EOS])
    auto, off, _ = both(
        model, predictor_of(), 4, lambda _: generate(model, min_new_tokens=None, max_new_tokens=NEW + 2)
    )
    assert torch.equal(auto, off) and (auto == PAD).any()


def test_budgets_change_in_place():
    model = model_of()

    def run(session):
        tokens = []
        for budget in (2, "energy:0.8", 16, "25%"):
            session.set_budget(budget)
            assert session.budget == Budget.parse(budget)
            tokens.append(generate(model))
        return torch.stack(tokens)

    auto, off, _ = both(model, predictor_of(), M, run)
    assert torch.equal(auto, off)
    for budget, tokens in ((2, auto[0]), (16, auto[2])):
        with base_budget(model, predictor_of(), budget):
            assert torch.equal(generate(model), tokens)
    assert not torch.equal(auto[0], auto[2])


def test_share_budgets_are_left_to_torch(calls):
    model = model_of()
    found = []
    for kernels in ("auto", "off"):
        with base_budget(model, predictor_of(), "share:0.2", kernels=kernels) as session:
            found.append((generate(model), session.stats()))
    (auto, stats), (off, off_stats) = found
    assert torch.equal(auto, off) and stats == off_stats
    assert calls.front == 0 < calls.collected
    assert stats.steps == NEW - 1 and 1 <= stats.active_mean < stats.union_mean
    with base_budget(model, predictor_of(), M) as session, pytest.raises(ValueError, match="front kernel"):
        session.set_budget("share:0.2")


def test_a_plan_with_a_layer_left_alone(tmp_path):
    model = model_of()
    save_plan(tmp_path / "plan.json", {0: Budget.parse("off"), 1: Budget.parse(2)})
    auto, off, stats = both(model, predictor_of(), f"plan:{tmp_path}/plan.json", lambda _: generate(model))
    assert torch.equal(auto, off)
    assert stats.steps == NEW - 1 and 2 < stats.active_mean < stats.union_mean


def test_a_cost_that_is_not_finite_falls_back(calls):
    model = model_of()

    def run(session):
        hook = session._hooks[0]
        (hook.front.energy_bias if hook.front else hook.offset).fill_(torch.nan)
        return generate(model)

    auto, off, stats = both(model, predictor_of(), M, run)
    assert torch.equal(auto, off)
    assert stats.fallbacks == NEW - 1 and calls.front > 0


def blocks_of(model_type="qwen3_moe"):
    routers = [layer.router for layer in find_moe_layers(model_of(model_type))]
    return torch.nn.ModuleList(m for m in model_of(model_type).modules() if any(c in routers for c in m.children()))


@torch.no_grad()
def test_batches_of_every_size(calls):
    """One launch, two, experts by torch, everything by torch: in one session, with one count."""
    blocks = blocks_of()
    predictor = make_predictor(blocks)
    for layer in find_moe_layers(blocks):
        layer.experts.config._experts_implementation = "base"

    def run(session):
        outputs = []
        for T in (1, 16, 40, 64, 70, 300, 5):
            session.set_rows(torch.tensor([DECODE] * (T - 1) + [PADDING if T > 1 else DECODE]))
            z = torch.randn(T, 32, generator=torch.Generator().manual_seed(T))
            outputs += [block(z.unsqueeze(1)).flatten(0, 1) for block in blocks]
        return torch.cat(outputs)

    try:
        auto, off, stats = both(blocks, predictor, M, run)
    finally:
        for layer in find_moe_layers(blocks):
            layer.experts.config._experts_implementation = "grouped_mm"
    torch.testing.assert_close(auto, off, rtol=1e-3, atol=1e-3)
    assert stats.steps == 7
    assert calls.front == 6 * len(blocks) and calls.handed_over == 5 * len(blocks)


@torch.no_grad()
def test_given_rows_are_kept_in_place():
    """What a captured graph would read is overwritten, not replaced."""
    blocks = blocks_of()
    with base_budget(blocks, make_predictor(blocks), M) as session, spy(blocks) as seen:
        session.set_rows(torch.tensor([DECODE] * 6))
        before = session._fixed
        session.set_rows(torch.tensor([DECODE, PADDING, PADDING, PREFILL, DECODE, DECODE]))
        assert session._fixed is before
        assert before.raw.tolist() == [1, 0, 0, 2, 1, 1] and before.raw.dtype == torch.int32
        assert before.rows.mixed and not before.counted
        session.set_rows(torch.tensor([DECODE] + [PADDING] * 5))
        blocks[0](torch.randn(6, 1, 32))
        assert len(seen[-1][1].unique()) == M and not seen[-1][2][1:].any()
        assert not session._hooks[0].front.state.counters[1]


@pytest.mark.parametrize("model_type", UNGROUPED)
@torch.no_grad()
def test_weights_have_the_routers_own_dtype(model_type):
    model = make_model(model_type, dtype=torch.float16, **UNGROUPED[model_type])
    for layer in find_moe_layers(model):
        layer.router.weight.copy_(layer.router.weight.half())  # deepseek_v2 and glm4_moe keep it in float32
        z = torch.randn(3, layer.hidden_size).half()
        front = FrontRouter(layer, make_predictor(model).layers[layer.index], Budget())
        logits, weights, ids = front.route(z, torch.ones(3, dtype=torch.int32))
        stock_logits, stock_weights, stock_ids = layer.router(z)
        assert weights.dtype == stock_weights.dtype and ids.dtype == stock_ids.dtype
        assert torch.equal(ids.sort().values, stock_ids.sort().values)
        torch.testing.assert_close(logits, stock_logits.float(), rtol=2e-3, atol=2e-3)


def test_a_float32_router_of_a_half_precision_model_stays_in_float32():
    model = make_model("deepseek_v2", dtype=torch.float16, **UNGROUPED["deepseek_v2"])
    for layer in find_moe_layers(model):
        front = FrontRouter(layer, make_predictor(model).layers[layer.index], Budget())
        assert front.weight.dtype == torch.float32 and not front.takes_batch(torch.zeros(3, 32).half())
    with base_budget(model, make_predictor(model), M) as session:
        generate(model)
    assert session.stats().active_max == M and session.stats().steps == NEW - 1


def test_half_precision_model():
    model = make_model(dtype=torch.float16)
    with base_budget(model, make_predictor(model), M) as session:
        generate(model)
        assert all(hook.front is not None for hook in session._hooks)
    assert session.stats().active_max == M


def traces(model):
    return [
        name
        for name, child in model.named_modules()
        for attribute in ("forward", "_base_front", "_base_session")
        if attribute in child.__dict__
    ]


def test_restores_the_model_after_an_exception():
    model = model_of()
    expected, implementation = generate(model), model.get_experts_implementation()
    with pytest.raises(RuntimeError, match="stop"), base_budget(model, predictor_of(), M) as session:
        assert traces(model)

        def stop(*_):
            raise RuntimeError("stop")

        handle = find_moe_layers(model)[1].experts.register_forward_pre_hook(stop)
        try:
            generate(model)
        finally:
            handle.remove()
    assert not traces(model) and hooks_of(model) == 0
    assert model.get_experts_implementation() == implementation
    assert torch.equal(generate(model), expected)
    session.close()  # a second time
    session.stats()


def test_a_hook_that_fails_to_open_leaves_no_trace(monkeypatch):
    def broken(self):
        raise RuntimeError("no")

    model = model_of()
    monkeypatch.setattr(FrontRouter, "attach", broken)
    with pytest.raises(RuntimeError, match="no"):
        base_budget(model, predictor_of(), M).__enter__()
    assert not traces(model) and hooks_of(model) == 0


def test_a_forward_that_somebody_else_put_there_is_called(monkeypatch):
    model = model_of()
    router = find_moe_layers(model)[0].router
    own, seen = router.forward, []
    monkeypatch.setattr(router, "forward", lambda hidden_states: seen.append(1) or own(hidden_states))
    with base_budget(model, predictor_of(), M) as session:
        assert [hook.front is None for hook in session._hooks] == [True, False]
        tokens = generate(model)
    assert len(seen) == NEW
    assert session.stats().steps == NEW - 1 and session.stats().active_max == M
    monkeypatch.undo()
    with base_budget(model, predictor_of(), M):
        assert torch.equal(generate(model), tokens)


@pytest.mark.parametrize(
    "changes",
    [{"ranking": "static_energy"}, {"fill": "drop"}, {"denominator": "renormalise"}, {"measure": True}],
    ids=str,
)
def test_other_methods_select_in_torch(changes, calls):
    model = model_of()
    with base_budget(model, predictor_of(), M, **changes) as session:
        generate(model)
    assert calls.front == 0 and calls.collected > 0
    assert session.stats().active_max <= M


def test_with_stock_experts():
    model = model_of()
    with base_budget(model, predictor_of(), M) as session:
        tokens = generate(model)
    with base_budget(model, predictor_of(), M, experts_implementation=None) as session:
        assert torch.equal(generate(model), tokens)
        assert all(hook.front.take() is None for hook in session._hooks)  # nobody takes it, so nothing is kept


def test_continuous_batching():
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = model_of()
    options = {
        "generation_config": GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=PAD, use_cache=True
        ),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64, page_size=16),
        "progress_bar": False,
    }

    def run(_):
        answers = model.generate_batch(inputs=[[5, 6, 7], [8, 9], [10], [11, 12, 13, 14]], **options)
        return sorted(answer.prompt_ids + answer.generated_tokens for answer in answers.values())

    auto, off, stats = both(model, predictor_of(), M, run)
    assert auto == off and stats.steps >= NEW - 1


def test_static_cache(calls):
    model = model_of()
    auto, off, _ = both(model, predictor_of(), M, lambda _: generate(model, cache_implementation="static"))
    assert torch.equal(auto, off) and calls.front > 0


@torch.no_grad()
def test_compiled_step_is_one_graph_that_follows_budget_and_rows():
    """No break, no output beside the logits, and neither the budget nor the rows are frozen in it."""
    model = make_model(num_hidden_layers=2)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    def logits(forward, session, step, budget):
        session.set_budget(budget)
        cache = StaticCache(config=model.config, max_cache_len=8)
        model(input_ids=prompts()["input_ids"][:4], cache=cache)
        return forward(input_ids=torch.tensor(step).unsqueeze(1), cache=cache).logits

    with base_budget(model, make_predictor(model), M) as session:
        compiled = torch.compile(model, fullgraph=True, backend=keep)
        functional = torch.compile(model.__call__, fullgraph=True, backend="aot_eager")  # what `generate` compiles
        for step, budget in (([5, 9, PAD, 17], M), ([5, 9, 12, 17], M), ([5, EOS, 12, 17], 6)):
            eager = logits(model, session, step, budget)
            torch.testing.assert_close(logits(compiled, session, step, budget), eager)
        steps = session.stats().steps
        torch.testing.assert_close(logits(functional, session, step, budget), eager)
    assert session.stats().fallbacks == 0 and session.stats().steps == steps + 1
    _, graph = graphs  # the row kinds, and the model: neither was traced again
    targets = [str(node.target) for node in graph.graph.nodes]
    assert sum("base_moe.front" in t for t in targets) == sum("base_moe.experts" in t for t in targets) == 2
    assert not any("collect" in t or "topk" in t or "sort" in t for t in targets)
    # What would be copied into a CUDA graph at every step, or keep one from being made: nothing of ours.
    ours = [node for node in graph.graph.nodes if node.op == "placeholder" and "front" in node.name]
    assert len(ours) >= 2 * len(("weight", "energy_bias", "budget", "tickets", "counters"))
    assert all(node.meta["tensor_dict"].get("_dynamo_static_input_type") for node in ours)
    (output,) = [node for node in graph.graph.nodes if node.op == "output"]
    assert not any("base_moe" in str(source.target) for source in output.all_input_nodes)


@torch.no_grad()
def test_nothing_synchronises():
    for model_type in UNGROUPED:
        blocks = blocks_of(model_type)
        for layer in find_moe_layers(blocks):
            with base_budget(blocks, make_predictor(blocks), M) as session:
                session.set_rows(torch.tensor([DECODE] * 5 + [PADDING]))
                with NoSync():
                    _, weights, ids = layer.router(torch.randn(B, 32))
                assert len(ids.unique()) == M and not weights[-1].any()


@pytest.mark.parametrize("T", [24, 40])
def test_operators_are_what_they_say(T):
    """Schema, fake implementation and tracing, on the arguments that a model gives them."""
    torch.manual_seed(0)
    model = model_of()
    layer = find_moe_layers(model)[0]
    router = FrontRouter(layer, predictor_of().layers[0], Budget())
    z, rows = torch.randn(T, 32), torch.ones(T, dtype=torch.int32)
    rule, state = router.rule, router.state
    args = (z, router.weight, router.energy_bias, rows, router.budget, state.tickets, state.counters, None, None)
    args += (rule.k, rule.score, rule.normalise, rule.scale, torch.float32)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    # Of `combine` only the active experts' rows are written: with all of them active there is nothing else to compare.
    assert int(front(z, router.weight, router.energy_bias, rows, router.budget, state, rule).count) == 16
    torch.library.opcheck(torch.ops.base_moe.front.default, args, test_utils=tests)
    _, weights, ids = router.route(z, rows)
    torch.library.opcheck(torch.ops.base_moe.collect.default, (ids, weights, 16), test_utils=tests)


@pytest.mark.filterwarnings("ignore:audit")
def test_audited_steps_leave_the_front_and_corrections_reach_it(calls):
    """Every other step is audited in torch; the front of the others follows the moved intercepts."""
    model, predictor = model_of(), predictor_of()
    found = []
    for kernels in ("auto", "off"):
        with base_budget(model, predictor, M, kernels=kernels, audit=2, audit_correct=True) as session:
            found.append((generate(model), session.stats()))
            if kernels == "auto":
                layers, audited = len(session._hooks), -(-(NEW - 1) // 2)
                assert calls.front == layers * (NEW - 1 - audited)
                for hook in session._hooks:
                    moved = hook.offset != torch.tensor(predictor.layers[hook.layer.index].bias)
                    assert moved.any() and torch.equal(hook.front.energy_bias, hook.offset)
    (tokens, stats), (expected, expected_stats) = found
    assert torch.equal(tokens, expected) and stats.active_mean == expected_stats.active_mean
    assert stats.steps == expected_stats.steps == NEW - 1
    assert stats.audit.steps == expected_stats.audit.steps == audited
    for own, other in zip(stats.audit.layers, expected_stats.audit.layers, strict=True):
        assert own.pairs == other.pairs and own.drift == pytest.approx(other.drift, abs=1e-3)
