"""What the table of families says about each model, against the reference's router rules."""

from __future__ import annotations

import numpy as np
import pytest

from base_core import RouterRule, route
from base_core.fingerprint import FINGERPRINT_TOLERANCE, fingerprint_distance

mx = pytest.importorskip("mlx.core")

from backends.mlx.families import FAMILIES, find_moe_layers, fingerprint  # noqa: E402

RULES = {
    "qwen3_moe": RouterRule(4, normalise="selected"),
    "qwen3_next": RouterRule(4, normalise="selected"),
    "qwen2_moe": RouterRule(4, normalise="none"),
    "olmoe": RouterRule(4, normalise="none"),
    "mixtral": RouterRule(2, normalise="softmax_selected"),
    "gpt_oss": RouterRule(4, normalise="softmax_selected"),
    "deepseek_v2": RouterRule(4, normalise="none", scale=1.5, num_groups=4, top_groups=2),
    "glm4_moe": RouterRule(4, "sigmoid", "selected", 1.5, num_groups=4, top_groups=2, group_score="top2_sum"),
}


def test_layers_are_found_as_the_model_numbers_them(family, build):
    model, _ = build(family)
    layers = find_moe_layers(model)
    first = 1 if family in ("deepseek_v2", "glm4_moe") else 0
    assert [layer.index for layer in layers] == list(range(first, 3))
    for layer in layers:
        E = 8 if family == "mixtral" else 16
        assert (layer.num_experts, layer.experts_per_token, layer.hidden_size) == (E, RULES[family].k, 64)
        assert layer.router_weight.shape == (E, 64) and layer.router_weight.dtype == np.float32


def test_route_follows_the_rule(family, build):
    model, _ = build(family)
    layer = find_moe_layers(model)[0]
    logits = mx.random.normal((5, layer.num_experts), key=mx.random.key(1)) * 2
    got = [np.array(a) for a in layer.family.route(layer.block, logits)]
    bias = np.array(layer.router.e_score_correction_bias) if family == "glm4_moe" else None
    expected = route(np.array(logits), RULES[family], bias)
    np.testing.assert_allclose(got[0], expected.scores, rtol=1e-5)
    np.testing.assert_allclose(got[1], expected.preference, rtol=1e-5)
    order, wanted = np.argsort(got[2], axis=1), np.argsort(expected.ids, axis=1)
    np.testing.assert_array_equal(np.take_along_axis(got[2], order, 1), np.take_along_axis(expected.ids, wanted, 1))
    weights = np.take_along_axis(expected.weights, wanted, 1)
    np.testing.assert_allclose(np.take_along_axis(got[3], order, 1), weights, rtol=1e-5)


def test_fingerprint_survives_quantisation_only(family, build):
    own = fingerprint(build(family)[0])
    for quantisation in ("affine8", "affine4", "mxfp4"):
        # Quantisation alone is to be seen, so both come from one model.
        assert fingerprint_distance(own, fingerprint(build(family, quantisation)[0])) < FINGERPRINT_TOLERANCE
    other = {i: tuple(np.random.default_rng(i).normal(size=16)) for i in own}
    assert fingerprint_distance(own, other) > 1


def test_unsupported_models_are_named():
    from mlx_lm.models import llama, phixtral

    dense = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=1,
            intermediate_size=32,
            num_attention_heads=2,
            rms_norm_eps=1e-6,
            vocab_size=11,
        )
    )
    with pytest.raises(ValueError, match=r"llama\.Model has no mixture-of-experts layer; supported families: qwen3"):
        find_moe_layers(dense)
    sizes = dict(num_vocab=11, model_dim=64, num_heads=2, num_layers=1, rotary_dim=16, num_local_experts=4)
    unknown = phixtral.Model(phixtral.ModelArgs(model_type="phixtral", **sizes))
    with pytest.raises(ValueError, match=r"block mlx_lm\.models\.phixtral\.MOE in layer 0 .* glm4_moe"):
        find_moe_layers(type("Wrapper", (), {"layers": unknown.transformer.h})())


def test_every_family_is_tested():
    assert [module for module, _ in FAMILIES] == list(RULES)
