"""Tiny random models of every supported family, quantised and not, and predictors for them."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from base_core import Card, LayerPredictor, Predictor

mx = pytest.importorskip("mlx.core")
nn = pytest.importorskip("mlx.nn")

ATTENTION = dict(
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    vocab_size=97,
    max_position_embeddings=512,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
QWEN = dict(decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=64, num_experts=16, num_experts_per_tok=4)
GROUPED = dict(
    moe_intermediate_size=64,
    n_shared_experts=1,
    n_routed_experts=16,
    num_experts_per_tok=4,
    routed_scaling_factor=1.5,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    rope_scaling=None,
)
GPT_OSS_LAYERS = ["sliding_attention", "full_attention", "full_attention"]
CONFIGS = {
    "qwen3_moe": ATTENTION | QWEN | dict(norm_topk_prob=True, head_dim=32),
    "qwen3_next": ATTENTION
    | QWEN
    | dict(
        norm_topk_prob=True,
        head_dim=32,
        full_attention_interval=2,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        shared_expert_intermediate_size=64,
        partial_rotary_factor=0.5,
    ),
    "qwen2_moe": ATTENTION | QWEN | dict(shared_expert_intermediate_size=64),
    "olmoe": ATTENTION | dict(num_experts=16, num_experts_per_tok=4, norm_topk_prob=False),
    "mixtral": ATTENTION | dict(num_local_experts=8, num_experts_per_tok=2),
    "gpt_oss": ATTENTION
    | dict(num_local_experts=16, num_experts_per_tok=4, head_dim=32, sliding_window=64, layer_types=GPT_OSS_LAYERS),
    "deepseek_v2": ATTENTION
    | GROUPED
    | dict(
        topk_method="group_limited_greedy",
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_rope_head_dim=16,
        qk_nope_head_dim=48,
        v_head_dim=64,
        moe_layer_freq=1,
        rope_scaling={"type": "yarn", "factor": 1.0, "mscale_all_dim": 0},
        attention_bias=False,
    ),
    "glm4_moe": ATTENTION
    | GROUPED
    | dict(
        norm_topk_prob=True,
        head_dim=32,
        use_qk_norm=False,
        attention_bias=False,
        partial_rotary_factor=0.5,
    ),
}
QUANTISATIONS = {
    "affine4": dict(group_size=64, bits=4, mode="affine"),
    "affine8": dict(group_size=64, bits=8, mode="affine"),
    "mxfp4": dict(group_size=32, bits=4, mode="mxfp4"),
}


def make_model(family: str, quantisation: str | None = None, seed: int = 0):
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict({"model_type": family} | CONFIGS[family]))
    for layer in model.layers:
        for block in layer.children().values():
            gate = block.get("gate", block.get("router")) if isinstance(block, nn.Module) else None
            if gate is None or not hasattr(gate, "weight"):
                continue
            # Routers initialised to zero, as some are, would tie everywhere.
            gate.weight = mx.random.normal(gate.weight.shape) * 0.3
            if "e_score_correction_bias" in gate:
                gate.e_score_correction_bias = mx.random.normal(gate.e_score_correction_bias.shape) * 0.05
    if quantisation is not None:
        nn.quantize(model, **QUANTISATIONS[quantisation])
    model.eval()
    mx.eval(model.parameters())
    return model


def make_predictor(model, seed: int = 0) -> Predictor:
    from backends.mlx.families import describe

    facts = describe(model)
    rng = np.random.default_rng(seed)
    E, d = facts["num_experts"], facts["hidden_size"]
    layers = {
        i: LayerPredictor(
            rng.normal(size=(E, d)).astype(np.float32),
            rng.normal(size=E).astype(np.float32),
            rng.uniform(0.1, 2, E).astype(np.float32),
        )
        for i in facts["layers"]
    }
    return Predictor(Card(model_id="tiny", **facts), layers)


@pytest.fixture(params=list(CONFIGS))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def build():
    """`build(family, quantisation=None) -> (model, predictor)`, made anew."""

    def make(family: str, quantisation: str | None = None):
        model = make_model(family, quantisation)
        return model, make_predictor(model)

    return make


@pytest.fixture(scope="session")
def embedded():
    """`(model, tokenizer, predictor)` of the embedded checkpoint, float32, with a random predictor."""
    from backends.mlx.generate import load
    from base_core.embedded import model_path

    model, tokenizer = load(model_path(), "float32")
    return model, tokenizer, make_predictor(model)


@pytest.fixture(scope="session")
def predictor_file(embedded, tmp_path_factory):
    """That predictor as a file."""
    from base_core import save_predictor

    path = tmp_path_factory.mktemp("predictor") / "predictor.safetensors"
    save_predictor(path, embedded[2])
    return path
