"""The MoE layers that benchmarks and compile checks are about: the paper's three models, and gpt-oss-120b."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from base_core.routing import RouterRule


@dataclass(frozen=True)
class Shape:
    """Routed experts of one MoE layer.

    Attributes:
        name: as on the command line.
        model_type: the transformers family whose router and experts are built.
        hidden_size, expert_size, num_experts, experts_per_token: d, I, E, k.
    """

    name: str
    model_type: str
    hidden_size: int
    expert_size: int
    num_experts: int
    experts_per_token: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A known model's name, or `DxIxExK`: hidden size, expert width, experts, experts per token.

        Raises:
            ValueError: neither, or a width of zero, or more experts per token than experts.
        """
        if text in SHAPES:
            return SHAPES[text]
        if not re.fullmatch(r"\d+x\d+x\d+x\d+", text):
            raise ValueError(
                f"shape {text!r} is unknown: give one of {', '.join(SHAPES)}, or DxIxExK as 2048x768x128x8"
            )
        widths = [int(part) for part in text.split("x")]
        if min(widths) < 1 or widths[3] > widths[2]:
            raise ValueError(f"shape {text!r}: D, I, E and K are at least 1, and K at most E")
        return cls(text, "qwen3_moe", *widths)

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """E, k, H and I, as the kernels name them."""
        return self.num_experts, self.experts_per_token, self.hidden_size, self.expert_size

    @property
    def gpt_oss(self) -> bool:
        """Whether experts are stored transposed and interleaved, with biases."""
        return self.model_type == "gpt_oss"

    @property
    def rule(self) -> RouterRule:
        """What the router does with its logits; all four kinds cost the same."""
        return RouterRule(self.experts_per_token, normalise="softmax_selected" if self.gpt_oss else "selected")

    def expert_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one expert's three matrices."""
        return 3 * self.hidden_size * self.expert_size * dtype.itemsize


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", "qwen3_moe", 2048, 768, 128, 8),
        Shape("qwen1.5-moe", "qwen2_moe", 2048, 1408, 60, 4),
        Shape("deepseek-v2-lite", "deepseek_v2", 2048, 1408, 64, 6),
        Shape("gpt-oss-120b", "gpt_oss", 2880, 2880, 128, 4),
    )
}
