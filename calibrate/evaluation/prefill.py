"""Prompts through the dense model once: what every policy's decoding starts from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

PREFILL_ROWS = 256


@dataclass(frozen=True)
class Prefilled:
    """The key-value cache of N prompts, and what the dense model says after each. The width P is the longest prompt's.

    Attributes:
        keys, values: per decoder layer, [N, heads, P, head width]; a shorter prompt stands at the right end.
        mask: int64 [N, P], 1 where a prompt has a token.
        logits: float32 [N, V], of the first token to generate.
    """

    keys: list[Tensor]
    values: list[Tensor]
    mask: Tensor
    logits: Tensor

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def lengths(self) -> NDArray:
        """int64 [N], tokens of each prompt."""
        return self.mask.sum(1).cpu().numpy()


@torch.inference_mode()
def prefill(
    model: PreTrainedModel, tokenizer: Any, encoded: Sequence[Sequence[int]], progress: bool = False
) -> Prefilled:
    """Runs every prompt through `model` as it is.

    Args:
        encoded: token ids of each prompt, none empty.
    """
    width = max(map(len, encoded))
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))  # so that little is padded
    parts: list[Prefilled] = []
    bar = tqdm(total=len(encoded), desc="prompts", unit="prompt", leave=False, disable=not progress)
    for start in range(0, len(order), PREFILL_ROWS):
        rows = [encoded[i] for i in order[start : start + PREFILL_ROWS]]
        padding = {"padding": "max_length", "max_length": len(rows[-1])}
        inputs = tokenizer.pad({"input_ids": rows}, return_tensors="pt", **padding).to(model.device)
        mask = inputs["attention_mask"]
        cache = DynamicCache()
        logits = model(
            input_ids=inputs["input_ids"],
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp_min(0),
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        keys, values = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
        parts.append(Prefilled(keys, values, mask, logits.float()))
        bar.update(len(rows))
    bar.close()
    places = torch.tensor(order).argsort()

    def join(tensors: Iterable[Tensor], dim: int) -> Tensor:
        """In the prompts' own order, and padded on the left of `dim` to the width."""
        left = [functional.pad(t, (0, 0) * (t.dim() - 1 - dim) + (width - t.shape[dim], 0)) for t in tensors]
        return torch.cat(left).index_select(0, places.to(left[0].device))

    return Prefilled(
        [join(layer, 2) for layer in zip(*(part.keys for part in parts), strict=True)],
        [join(layer, 2) for layer in zip(*(part.values for part in parts), strict=True)],
        join((part.mask for part in parts), 1),
        torch.cat([part.logits for part in parts])[places],
    )
