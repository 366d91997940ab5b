"""Tiny random models of the seven families, and predictors that fit them."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from backends.cuda.families import find_moe_layers, fingerprint
from base_core import Card, LayerPredictor, Predictor

EOS, PAD = 1, 0
VOCABULARY = 64
B, L, NEW = 6, 5, 6
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
GROUPS = {"n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
OVERRIDES: dict[str, dict] = {
    "qwen3_moe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 24, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {},
    "gpt_oss": {"num_local_experts": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "deepseek_v2": {
        **GROUPS,
        "num_hidden_layers": 3,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.5,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "glm4_moe": {**GROUPS, "num_hidden_layers": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
}
MODEL_TYPES = tuple(OVERRIDES)


def make_model(model_type: str = "qwen3_moe", seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """A model whose tokens change when experts are left out: wide initialisation, experts above all."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**COMMON, **OVERRIDES[model_type], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                continue
            experts = ".experts." in name
            parameter.normal_(std=0.35 if experts else 0.5 if "embed" in name or "lm_head" in name else 0.2)
        for layer in find_moe_layers(model):
            if hasattr(layer.router, "e_score_correction_bias"):
                layer.router.e_score_correction_bias.normal_(std=0.1)
    return model


def make_predictor(model: PreTrainedModel, seed: int = 0, **changes) -> Predictor:
    """Random values under a card that fits `model`."""
    layers = find_moe_layers(model)
    first = layers[0]
    rng = np.random.default_rng(seed)
    E, d = first.num_experts, first.hidden_size
    card = {
        "model_id": "tiny",
        "model_type": first.family.model_type,
        "layers": tuple(layer.index for layer in layers),
        "num_experts": E,
        "experts_per_token": first.experts_per_token,
        "hidden_size": d,
        "fingerprint": fingerprint(model),
        **changes,
    }
    return Predictor(
        Card(**card),
        {
            layer.index: LayerPredictor(
                weight=rng.normal(size=(E, d)).astype(np.float32),
                bias=rng.normal(size=E).astype(np.float32),
                mean_energy=rng.random(E).astype(np.float32),
            )
            for layer in layers
        },
    )


def prompts(padded: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCABULARY, (B, L), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        for row in range(B):
            mask[row, : row % L] = 0
        ids = ids * mask + PAD * (1 - mask)
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, padded: bool = False, **options) -> torch.Tensor:
    # Without a stop: a random model would also sample the padding token, which stands for a finished row.
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "suppress_tokens": [PAD], "do_sample": False, **options}
    with torch.no_grad():
        return model.generate(**prompts(padded), **options)


@contextmanager
def spy(model):
    """Records (layer, ids, weights) of every call of an experts module."""
    calls: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    handles = [
        layer.experts.register_forward_pre_hook(
            lambda module, args, index=layer.index: calls.append((index, args[1].clone(), args[2].clone()))
        )
        for layer in find_moe_layers(model)
    ]
    yield calls
    for handle in handles:
        handle.remove()


def hooks_of(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def save_checkpoint(folder: Path, **changes) -> PreTrainedModel:
    """A checkpoint folder: safetensors and a tokenizer of single characters; `changes` rename or remove tokens."""
    characters = [chr(c) for c in range(ord("0"), ord("0") + VOCABULARY - 3)]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokens = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", **changes}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{name: token for name, token in tokens.items() if token}
    ).save_pretrained(folder)
    model = make_model()
    model.save_pretrained(folder)
    return model
