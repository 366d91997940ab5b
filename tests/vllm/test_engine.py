"""Budgets inside vLLM's engine on the embedded model: eager and compiled, in one process and over two ranks."""

from __future__ import annotations

import pytest

from backends.cuda.generate import generate_texts
from base_core.embedded import model_path, predictor_path
from tests.vllm.engines import base

BUDGET = 8
EXPERTS = 64


@pytest.fixture(scope="module")
def stock(run_engine, checkpoint, groups):
    return run_engine(checkpoint, groups)


@pytest.fixture(scope="module")
def eager(run_engine, checkpoint, groups):
    return run_engine(checkpoint, groups, base=base(BUDGET), watch="experts")


@pytest.fixture(scope="module")
def compiled(run_engine, checkpoint, groups):
    return run_engine(checkpoint, groups, base=base(BUDGET), watch="operator", engine={"enforce_eager": False})


@pytest.fixture(scope="module")
def two_ranks(run_engine, checkpoint, groups):
    return run_engine(
        checkpoint,
        groups,
        base=base(BUDGET),
        watch="experts",
        one_process=False,
        engine={"tensor_parallel_size": 2},
    )


def decode_only(ran, rank=0):
    return [record for record in ran.result["seen"][rank]["records"] if record["counted"]]


def assert_within_budget(ran, rank=0):
    """Looks at the emitted ids of every step, and holds the engine's own counters against them."""
    steps = decode_only(ran, rank)
    assert len(steps) > 100 and {record["layer"] for record in steps} == {0, 1, 2, 3}
    assert max(len(record["emitted"]) for record in steps) == BUDGET
    assert max(len(record["native"]) for record in steps) > 3 * BUDGET
    stats = ran.result["stats"][rank]
    for slot, layer in enumerate(stats["layers"]):
        mine = [record for record in steps if record["layer"] == layer]
        assert stats["steps"][slot] == len(mine)
        assert stats["active"][slot] == sum(len(record["emitted"]) for record in mine)
        assert stats["union"][slot] == sum(len(record["native"]) for record in mine)
        assert stats["most"][slot] == max(len(record["emitted"]) for record in mine)
        assert stats["fallbacks"][slot] == 0


def test_without_the_entry_nothing_is_touched(stock):
    assert "BASE" not in stock.log


def test_off_is_the_stock_engine(run_engine, checkpoint, groups, stock):
    off = run_engine(checkpoint, groups[:1], base={"budget": "off"})
    assert "BASE is off" in off.log
    assert off.result["tokens"] == stock.result["tokens"][:16]


def test_a_budget_of_all_experts_gives_the_stock_tokens(run_engine, checkpoint, groups, stock):
    whole = run_engine(checkpoint, groups, base=base(EXPERTS), watch="experts")
    assert whole.result["tokens"] == stock.result["tokens"]
    assert all(record["same"] for record in whole.result["seen"][0]["records"])
    assert max(whole.result["stats"][0]["most"]) > BUDGET


def test_the_log_says_once_what_is_in_force(eager):
    line = f"BASE active: 4 layers, budget {BUDGET}, predictor {predictor_path()}"
    assert eager.log.count("BASE active") == 1 and line in eager.log


def test_at_most_the_budget_is_read_in_every_decode_step(eager):
    assert_within_budget(eager)


def test_the_expert_kernels_get_what_the_operator_emits(eager):
    seen = eager.result["seen"][0]
    assert [(r["layer"], r["emitted"]) for r in seen["records"]] == [(c["layer"], c["read"]) for c in seen["calls"]]


def test_prefill_is_left_alone(eager):
    prefill = [record for record in eager.result["seen"][0]["records"] if not record["counted"]]
    assert prefill and all(record["same"] for record in prefill)
    assert max(len(record["emitted"]) for record in prefill) > 3 * BUDGET


@pytest.mark.parametrize("budget", [BUDGET, 16, "energy:0.9,max=12", "share:0.03"])
def test_tokens_equal_the_pytorch_path(budget, eager, run_engine, checkpoint, groups, prompts, stock):
    """Sixteen requests arrive together in both, so every step has the same rows."""
    ran = eager if budget == BUDGET else run_engine(checkpoint, groups, base=base(budget))
    reference = generate_texts(
        model_path(), predictor_path(), budget, prompts, batch=16, max_tokens=14, dtype="float32"
    )
    assert [text.removesuffix("\n") for text in ran.result["texts"]] == [
        text.removesuffix("\n") for text in reference.texts
    ]
    stats = ran.result["stats"][0]
    assert stats["steps"][0] == reference.stats.steps
    assert sum(stats["active"]) / sum(stats["steps"]) == pytest.approx(reference.stats.active_mean)
    assert ran.result["tokens"] != stock.result["tokens"]


def test_the_compiled_engine_holds_the_budget_too(compiled):
    assert_within_budget(compiled)


def test_the_compiled_engine_gives_the_eager_tokens(compiled, eager):
    assert compiled.result["tokens"] == eager.result["tokens"]


def test_tensor_parallel_ranks_choose_the_same_experts(two_ranks):
    first, second = (rank["records"] for rank in two_ranks.result["seen"])
    assert [record["digest"] for record in first] == [record["digest"] for record in second]
    assert two_ranks.result["stats"][0] == two_ranks.result["stats"][1]
    assert two_ranks.log.count("BASE active") == 1
    for rank in (0, 1):
        assert_within_budget(two_ranks, rank)
