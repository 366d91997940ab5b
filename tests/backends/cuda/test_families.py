"""The family table against the transformers models themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from backends.cuda.families import (
    FAMILIES,
    correction_bias,
    find_moe_layers,
    fingerprint,
    router_rule,
    routing_terms,
)
from base_core import route
from base_core.fingerprint import fingerprint_distance
from tests.backends.cuda.tiny import MODEL_TYPES, make_model

VARIANTS = [
    *((model_type, {}) for model_type in MODEL_TYPES),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("deepseek_v2", {"topk_method": "greedy"}),
    ("glm4_moe", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sorted_by_id(ids, values):
    order = np.argsort(ids, axis=1)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS, ids=str)
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_reference_reproduces_the_router(model_type, changes, spread):
    layer = find_moe_layers(make_model(model_type, **changes))[-1]
    with torch.no_grad():
        logits, weights, ids = layer.router(torch.randn(64, layer.hidden_size) * spread)
    rule, bias = router_rule(layer), correction_bias(layer)
    expected = route(logits.numpy(), rule, None if bias is None else bias.numpy())

    for native, reference in zip(
        sorted_by_id(ids.numpy(), weights.numpy()), sorted_by_id(expected.ids, expected.weights), strict=True
    ):
        np.testing.assert_allclose(native, reference, rtol=1e-5, atol=1e-7)

    terms = routing_terms(logits, rule, bias)
    np.testing.assert_allclose(terms.scores.numpy(), expected.scores, rtol=1e-5, atol=1e-12)
    np.testing.assert_array_equal(np.isinf(terms.preference.numpy()), np.isinf(expected.preference))
    allowed = np.isfinite(expected.preference)
    np.testing.assert_allclose(terms.preference.numpy()[allowed], expected.preference[allowed], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_terms_lead_to_the_native_choice(model_type):
    """The two rows of terms alone say what the router chose, and c_t * scores what weight it gave."""
    layer = find_moe_layers(make_model(model_type))[0]
    with torch.no_grad():
        logits, weights, ids = layer.router(torch.randn(32, layer.hidden_size))
        scores, preference = routing_terms(logits, router_rule(layer), correction_bias(layer))
    best = preference.topk(layer.experts_per_token).indices
    assert torch.equal(best.sort().values, ids.sort().values)
    chosen = scores.gather(1, ids)
    expected = chosen * weights.sum(1, keepdim=True) / chosen.sum(1, keepdim=True)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_layers_are_found(model_type):
    model = make_model(model_type)
    layers = find_moe_layers(model)
    first_dense = getattr(model.config, "first_k_dense_replace", 0)
    assert [layer.index for layer in layers] == list(range(first_dense, model.config.num_hidden_layers))
    for layer in layers:
        assert layer.family.model_type == model_type
        assert (layer.num_experts, layer.hidden_size) == tuple(layer.router.weight.shape)
        assert layer.experts_per_token == model.config.num_experts_per_tok
        weight = layer.router_weight()
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, layer.router.weight.detach().numpy())


def test_router_weight_is_a_float32_copy():
    layer = find_moe_layers(make_model(dtype=torch.bfloat16))[0]
    weight = layer.router_weight()
    weight[:] = 0
    assert weight.dtype == np.float32
    assert layer.router.weight.abs().sum() > 0


def test_fingerprint_tells_models_apart_and_rounding_not():
    model = make_model()
    first = fingerprint(model)
    assert list(first) == [0, 1]
    assert fingerprint_distance(first, fingerprint(model.to(torch.bfloat16))) < 0.01
    assert fingerprint_distance(first, fingerprint(make_model(seed=1))) > 1


def test_a_lone_block_and_a_list_of_blocks():
    blocks = [decoder.mlp for decoder in make_model().model.layers]
    assert [layer.index for layer in find_moe_layers(blocks[0])] == [0]
    assert [layer.index for layer in find_moe_layers(torch.nn.ModuleList(blocks))] == [0, 1]


def test_unsupported_models_are_named():
    dense = LlamaForCausalLM(
        LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    )
    with pytest.raises(ValueError, match="LlamaForCausalLM") as error:
        find_moe_layers(dense)
    assert all(family.model_type in str(error.value) for family in FAMILIES)


def test_two_decoders_in_one_module_are_refused():
    with pytest.raises(ValueError, match="two MoE blocks of index 0"):
        find_moe_layers(torch.nn.ModuleDict({"a": make_model(), "b": make_model()}))
