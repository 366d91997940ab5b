"""Both kernels in an mlx-lm model, in the place of the operations they replace."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from mlx import nn  # noqa: E402
from mlx_lm.models import qwen3_moe  # noqa: E402

from backends.mlx import integration  # noqa: E402
from tests.backends.mlx.conftest import make_predictor  # noqa: E402
from tests.metal import harness  # noqa: E402

selection, experts = (importlib.import_module(f"backends.mlx.kernels.{name}") for name in ("selection", "experts"))

pytestmark = pytest.mark.skipif(
    not (harness.AVAILABLE or mx.metal.is_available()), reason="needs Linux and g++, or a Metal device"
)


def make_model(quantised_router):
    mx.random.seed(0)
    args = qwen3_moe.ModelArgs(
        model_type="qwen3_moe",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        vocab_size=100,
    )
    model = qwen3_moe.Model(args)
    nn.quantize(
        model,
        group_size=64,
        bits=4,
        class_predicate=lambda path, module: (
            hasattr(module, "to_quantized") and (quantised_router or not path.endswith("gate"))
        ),
    )
    return model


@pytest.mark.parametrize("ranking", ["removal_cost", "squared_weight"])
@pytest.mark.parametrize("budget", ["5", "energy:0.8"])
@pytest.mark.parametrize("quantised_router", [True, False])
def test_logits_and_statistics_equal_the_operations(quantised_router, budget, ranking, monkeypatch):
    model = make_model(quantised_router)
    predictor = make_predictor(model)
    tokens = mx.array(np.random.default_rng(0).integers(0, 100, (6, 1)))
    results = []
    for operations in (integration.STOCK_OPERATIONS, integration.Operations(selection.select, experts.experts)):
        monkeypatch.setattr(integration, "operations", lambda kernels, chosen=operations: chosen)
        with ExitStack() as stack:
            launches = stack.enter_context(harness.runnable(selection))
            launches |= stack.enter_context(harness.runnable(experts, partial=["_gate_up_kernel"]))
            session = integration.apply(model, predictor, budget, integration.Policy(ranking=ranking))
            results.append((np.array(model(tokens)), session.stats()))
            integration.restore(model)
    if launches:
        counts = {name: len(stand_in.launches) for name, stand_in in launches.items()}
        layers = {name: count / 2 for name, count in counts.items() if count}
        assert layers == {"_select_and_list_kernel": 1, "_gate_up_kernel": 1, "_down_kernel": 1}
    (expected, expected_stats), (got, stats) = results
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert stats.kept_energy == pytest.approx(expected_stats.kept_energy, abs=1e-5)
    assert replace(stats, kept_energy=0) == replace(expected_stats, kept_energy=0)
