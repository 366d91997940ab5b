"""Models of a real one's width and random weights, for measurements that no weights need be fetched for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn

ATTENTION = {
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QWEN = {"decoder_sparse_step": 1, "mlp_only_layers": []}


@dataclass(frozen=True)
class Shape:
    """A model's widths.

    Attributes:
        model_type: the mlx-lm module that builds it.
        config: its arguments, without the number of layers.
    """

    model_type: str
    config: dict[str, Any] = field(hash=False)

    def build(self, num_layers: int, bits: int, seed: int = 0) -> nn.Module:
        """Random weights; experts and all other linear layers quantised, one decoder layer after the other.

        Args:
            num_layers: decoder layers.
            bits: 4 or 8, affine in groups of 64; 16 keeps bfloat16, on a CPU float32.
        """
        module = importlib.import_module(f"mlx_lm.models.{self.model_type}")
        arguments = {"model_type": self.model_type, "num_hidden_layers": num_layers} | ATTENTION | self.config
        mx.random.seed(seed)
        model = module.Model(module.ModelArgs.from_dict(arguments))
        on_metal = mx.metal.is_available()
        for part in (*model.layers, model):
            part.set_dtype(mx.bfloat16 if on_metal else mx.float32)
            if bits < 16:
                nn.quantize(part, group_size=64, bits=bits)
            mx.eval(part.parameters())
        model.eval()
        return model


SHAPES = {
    "qwen3-30b-a3b": Shape(
        "qwen3_moe",
        QWEN
        | {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
        | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"norm_topk_prob": True},
    ),
    "qwen1.5-moe": Shape(
        "qwen2_moe",
        QWEN
        | {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16}
        | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
        | {"shared_expert_intermediate_size": 5632},
    ),
    "olmoe-1b-7b": Shape(
        "olmoe",
        {"hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16}
        | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    ),
    "tiny": Shape(
        "qwen3_moe",
        QWEN
        | {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"head_dim": 32, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
        | {"norm_topk_prob": True, "vocab_size": 512},
    ),
}
