"""The experts kernels against their twin, in the Triton interpreter."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from backends.cuda.kernels.collect import collect, naive_collect  # noqa: E402
from backends.cuda.kernels.experts import (  # noqa: E402
    MAX_TILES,
    ExpertsLayout,
    down_shape,
    experts,
    gate_up,
    naive_experts,
    tile,
)

pytestmark = pytest.mark.interpreter

GPT_OSS = ExpertsLayout(transposed=True, interleaved=True, clamp=(1.702, 7.0))
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True)  # torch.empty then holds NaN
    yield
    torch.use_deterministic_algorithms(False)


def make(T, E, k, H, I, layout=ExpertsLayout(), dtype=torch.float32, biased=False, seed=0):  # noqa: B008, E741
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    first = normal(E, 2 * I, H, scale=H**-0.5)
    second = normal(E, H, I, scale=I**-0.5)
    if layout.transposed:
        first, second = first.mT.contiguous(), second.mT.contiguous()
    ids = torch.rand(T, E, generator=generator)[:, : max(k, E * 2 // 3)].topk(k).indices  # the last third stays unused
    weights = torch.rand(T, k, generator=generator)
    biases = {"gate_up_bias": normal(E, 2 * I), "down_bias": normal(E, H)} if biased else {}
    return normal(T, H), first, second, ids, weights, biases


def check(z, first, second, ids, weights, biases, layout):
    tickets = torch.zeros(MAX_TILES, dtype=torch.int32)
    out = experts(z, first, second, *collect(ids, weights, len(first)), tickets, layout, **biases)
    exact = naive_experts(z, first, second, ids, weights, layout, **biases)
    assert (out - exact).norm() <= TOLERANCE[z.dtype] * exact.norm()
    assert not tickets.any()
    return out


@pytest.mark.parametrize(
    ("T", "E", "k", "H", "I", "layout", "dtype"),
    [
        (1, 60, 4, 128, 64, ExpertsLayout(), torch.bfloat16),
        (2, 64, 6, 64, 32, ExpertsLayout(), torch.bfloat16),
        (16, 128, 8, 64, 32, GPT_OSS, torch.float32),
        (33, 256, 2, 32, 32, ExpertsLayout(), torch.float16),
        (2, 6, 4, 600, 100, ExpertsLayout(), torch.float32),
        (5, 9, 6, 72, 40, GPT_OSS, torch.bfloat16),
        (16, 12, 8, 128, 96, ExpertsLayout(), torch.float32),
        (16, 7, 4, 192, 160, GPT_OSS, torch.float16),
        (16, 12, 2, 256, 96, ExpertsLayout(), torch.bfloat16),
        (33, 6, 4, 128, 160, ExpertsLayout(), torch.float16),
        (33, 8, 4, 96, 80, GPT_OSS, torch.float32),
        (64, 8, 2, 100, 72, ExpertsLayout(), torch.float32),
        (20, 4, 2, 96, 300, ExpertsLayout(transposed=True), torch.float32),
        (20, 8, 2, 160, 72, ExpertsLayout(interleaved=True), torch.bfloat16),
    ],
)
def test_equals_twin(T, E, k, H, I, layout, dtype):  # noqa: E741
    case = make(T, E, k, H, I, layout, dtype, biased=layout.transposed and layout.interleaved)
    check(*case, layout)


def test_down_with_several_chunks_a_program(monkeypatch):
    monkeypatch.setattr("backends.cuda.kernels.experts.WANTED_WARPS", 8)
    assert down_shape(64, 600, tile(16))[:2] == (3, 2)
    for layout in (ExpertsLayout(), GPT_OSS):
        check(*make(16, 3, 2, 64, 600, layout, biased=layout is GPT_OSS), layout)


def test_nothing_active():
    z, first, second, ids, weights, biases = make(4, 6, 2, 64, 64, GPT_OSS, biased=True)
    assert not check(z, first, second, ids, weights * 0, biases, GPT_OSS).any()


def test_a_row_never_sees_experts_it_does_not_run():
    z, first, second, _, _, _ = make(4, 4, 1, 64, 64)
    ids, weights = torch.tensor([[0], [1], [1], [2]]), torch.tensor([[1.0], [1.0], [0.0], [1.0]])
    first[0] = float("inf")
    tickets = torch.zeros(MAX_TILES, dtype=torch.int32)
    out = experts(z, first, second, *collect(ids, weights, 4), tickets, ExpertsLayout())
    assert not out[0].isfinite().all() and out[1:].isfinite().all() and not out[2].any()


def test_replays_alike():
    z, first, second, ids, weights, _ = make(16, 4, 2, 64, 300)
    tickets = torch.zeros(MAX_TILES, dtype=torch.int32)
    collected = collect(ids, weights, 4)
    a, b = (experts(z, first, second, *collected, tickets, ExpertsLayout()) for _ in range(2))
    assert torch.equal(a, b)


@pytest.mark.parametrize(("T", "E", "k"), [(1, 60, 4), (16, 128, 8), (33, 64, 6), (64, 256, 2)])
def test_collect(T, E, k):
    _, _, _, ids, weights, _ = make(T, E, k, 8, 8)
    weights[0] = 0
    ids[-1, 1], weights[-1, 1] = ids[-1, 0], 0  # an empty slot
    collected, (active, combine) = collect(ids, weights, E), naive_collect(ids, weights, E)
    assert torch.equal(collected.active[: int(collected.count)].long(), active)
    assert torch.equal(collected.combine[: int(collected.count)], combine)


def test_refuses():
    z, first, _, ids, weights, _ = make(4, 6, 2, 64, 64)
    collected = collect(ids, weights, 6)
    with pytest.raises(AssertionError, match="layout"):
        gate_up(z, first.mT.contiguous()[:, :32].contiguous(), *collected, ExpertsLayout())
    with pytest.raises(AssertionError, match="rows"):
        gate_up(z.repeat(20, 1), first, *collected, ExpertsLayout())


def qwen(E, H, I):  # noqa: E741
    from transformers.models.qwen3_moe import modeling_qwen3_moe as m

    config = m.Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=4, norm_topk_prob=True
    )
    return m.Qwen3MoeSparseMoeBlock(config)


def gpt_oss(E, H, I):  # noqa: E741
    from transformers.models.gpt_oss import modeling_gpt_oss as m

    return m.GptOssMLP(m.GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=E, num_experts_per_tok=4))


@pytest.mark.parametrize("family", [qwen, gpt_oss])
def test_in_a_transformers_block(family):
    """The stock block at budget off, and the torch selection's result under a budget."""
    from backends.cuda.families import correction_bias, find_moe_layers, router_rule, routing_terms
    from backends.cuda.kernels.module import FrontRouter, run_experts, runs_on_kernels
    from backends.cuda.selection import select_no_sync
    from base_core.budget import Budget
    from base_core.predictor import LayerPredictor

    torch.manual_seed(0)
    E, H = 16, 64
    block = family(E, H, 48).requires_grad_(False)
    for name, parameter in block.named_parameters():
        parameter.normal_(std=0.1 if "experts" in name else 1.0)
    (layer,) = find_moe_layers(block)
    predictor = LayerPredictor(*(torch.randn(*shape).numpy() for shape in ((E, H), (E,), (E,))))
    z = torch.randn(6, H)
    rows = torch.ones(6, dtype=torch.int32)
    router = FrontRouter(layer, predictor, Budget(experts=E))
    assert FrontRouter.takes(layer) and router.takes_batch(z) and runs_on_kernels(layer.experts, z)
    block.config = None
    stock_logits, stock_weights, stock_ids = layer.router(z)
    logits, weights, ids = router.route(z, rows)
    assert torch.equal(ids, stock_ids)
    torch.testing.assert_close(logits, stock_logits)
    torch.testing.assert_close(weights, stock_weights)

    layer.experts.config._experts_implementation = "eager"
    stock = layer.experts(z, stock_ids, stock_weights)
    torch.testing.assert_close(run_experts(layer.experts, z, ids, weights), stock, rtol=1e-4, atol=1e-5)

    router.budget[0] = 5
    router.attach()
    logits, weights, ids = router.route(z, rows)
    terms = routing_terms(stock_logits, router_rule(layer), correction_bias(layer))
    log_energy = torch.from_numpy(predictor.log_energy(z.numpy()))
    expected = select_no_sync(
        terms.scores, stock_ids, stock_weights, log_energy, 5, preference=terms.preference, rows=rows
    )
    assert torch.equal(ids, expected.ids)
    torch.testing.assert_close(weights, expected.weights)
    stock = layer.experts(z, expected.ids, expected.weights)
    shared = run_experts(layer.experts, z, ids, weights)
    torch.testing.assert_close(shared, stock, rtol=1e-4, atol=1e-5)
    assert torch.equal(shared, run_experts(layer.experts, z, ids.clone(), weights))  # collected instead
    router.detach()
    assert not hasattr(layer.experts, "_base_front")


def test_custom_operators_trace():
    z, first, second, ids, weights, _ = make(4, 6, 2, 64, 64)
    tickets = torch.zeros(MAX_TILES, dtype=torch.int32)
    args = (z, first, second, *collect(ids, weights, 6), tickets, None, None, False, False, None, None)
    torch.library.opcheck(torch.ops.base_moe.experts.default, args, test_utils=("test_schema", "test_faketensor"))
