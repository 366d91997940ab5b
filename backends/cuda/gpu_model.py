"""A whole model of true size and random weights on a GPU, decoding a batch: dense, under budgets, and under rivals.

Qwen3-30B-A3B, the paper's main model, is built on the device from its configuration, without a download. Each variant
is one captured decode step; all budgets share one, whose budget is overwritten in place. Random weights route almost
uniformly, so that the dense union is as large as it gets.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, StaticCache

from backends.cuda.bench import predictor_for, rows_by_expert
from backends.cuda.experts import EXPERTS_IMPLEMENTATION, register_experts
from backends.cuda.families import find_moe_layers
from backends.cuda.graphs import REPLAYS, capture, microseconds
from backends.cuda.integration import base_budget
from backends.cuda.rivals import Oea, Rule, Sere, XShare, rival
from backends.cuda.roof import seconds
from base_core import Predictor
from base_core.report import report_row

MODEL = "qwen3-30b-a3b"
CONTEXT = 512
EAGER_STEPS = 5
HOST_BOUND = 1.2
"""An eager step that takes this much longer than its captured form waits for the host."""
RIVAL_BUDGETS = (10, 16)
CONTROLS = ("weight_sum", "top1_union")
PAPER_FITS = {
    "Qwen3-30B-A3B": (8.13, 278.1, 0.9967),
    "Qwen1.5-MoE": (7.55, 264.5, 0.9970),
    "DeepSeek-V2-Lite": (7.68, 276.8, 0.9981),
}
"""t(M) = a + b M of the paper's Table 7 (RTX PRO 6000 Max-Q, batch 16): a in ms, b in us, R^2."""


@dataclass(frozen=True)
class Fit:
    """t(M) = a + b M: a in ms, b in us an expert of every layer, and R^2."""

    a_ms: float
    b_us: float
    r2: float


@dataclass
class ModelTimes:
    """What was found of the whole model; figures are None after a dry run.

    Attributes:
        layers: MoE layers that were built, fewer than the model's own where memory does not suffice.
        rows: stock, dense and every budget.
        rivals: rivals and controls, each followed by BASE at as many active experts.
        fit: over the budgets.
        router_us, front_us: one layer's stock router, and the front with the selection in it.
        eager_ms: a dense step without a captured graph.
    """

    layers: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    rivals: list[dict[str, Any]] = field(default_factory=list)
    fit: Fit | None = None
    router_us: float | None = None
    front_us: float | None = None
    eager_ms: float | None = None

    @property
    def host_bound(self) -> bool:
        """Whether eager decoding waits for the host, so that a budget gains little without a captured graph."""
        dense = next(row["ms_per_step"] for row in self.rows if row["policy"] == "dense")
        return bool(self.eager_ms and dense and self.eager_ms > HOST_BOUND * dense)


def fit_line(budgets: Sequence[float], milliseconds: Sequence[float]) -> Fit:
    """Least squares of step times over budgets."""
    x, y = np.asarray(budgets, float), np.asarray(milliseconds, float)
    slope, start = np.polyfit(x, y, 1)
    rest = y - (start + slope * x)
    return Fit(float(start), float(slope * 1e3), float(1 - (rest**2).sum() / ((y - y.mean()) ** 2).sum()))


def model_config(dry: bool, num_layers: int = 48) -> Qwen3MoeConfig:
    """Qwen3-30B-A3B's sizes, or a toy's; no token ends a row."""
    sizes: dict[str, Any] = dict(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
    )
    if dry:
        sizes = dict(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=24,
            num_experts_per_tok=4,
        )
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return Qwen3MoeConfig(**sizes, **ends, norm_topk_prob=True, tie_word_embeddings=False)


def expert_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of one expert."""
    return 3 * config.hidden_size * config.moe_intermediate_size * dtype.itemsize


def layers_that_fit(config: Any, dtype: torch.dtype, free_bytes: int) -> int:
    """How many of the model's layers leave a tenth of the memory, and the embeddings, room."""
    embeddings = 2 * config.vocab_size * config.hidden_size * dtype.itemsize
    attention = 4 * config.hidden_size * config.num_attention_heads * config.head_dim * dtype.itemsize
    layer = config.num_experts * expert_bytes(config, dtype) + attention
    return max(1, min(config.num_hidden_layers, int((0.9 * free_bytes - embeddings) // layer)))


class Decoder:
    """Greedy decoding of a batch over a static cache that is filled up to `context`."""

    def __init__(self, model: Any, batch: int, context: int) -> None:
        self.model, self.context = model, context
        self.cache = StaticCache(config=model.config, max_cache_len=context + 2 * REPLAYS)
        prompt = torch.randint(model.config.vocab_size, (batch, context), device=model.device)
        logits = model(input_ids=prompt, cache=self.cache, logits_to_keep=1).logits
        self.tokens = logits[:, -1:].argmax(-1)

    def step(self) -> Tensor:
        """One token of every row; the tokens stay in one tensor, so that the step can be captured."""
        logits = self.model(input_ids=self.tokens, cache=self.cache).logits
        return self.tokens.copy_(logits[:, -1:].argmax(-1))

    def rewind(self) -> None:
        """Takes the cache back to the prompt."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)


def read_bytes(model: nn.Module, active: float, batch: int, context: int) -> float:
    """What one decode step has to read: active experts, all other weights but the embeddings, and the cached rows."""
    config: Any = model.config
    dtype = next(model.parameters()).dtype
    others = sum(p.numel() for name, p in model.named_parameters() if ".experts." not in name and "embed" not in name)
    cached = 2 * batch * context * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    experts = active * len(find_moe_layers(model)) * expert_bytes(config, dtype)
    return experts + (others + cached) * dtype.itemsize


@dataclass(frozen=True)
class _Variant:
    """One way to run the model.

    Attributes:
        active: mean active experts of a layer.
        replay: takes a captured step; None in a dry run.
        holds: whatever owns tensors that the captured step reads or writes.
    """

    policy: str
    budget: int | None
    active: float
    replay: Callable[[], Any] | None
    holds: Any = None


@torch.no_grad()
def bench_model(
    batch: int, budgets: Sequence[int], device: torch.device, roof: float | None, *, rivals: bool, seed: int
) -> ModelTimes:
    """Builds the model and times its decode step under every variant.

    Args:
        roof: measured copy bandwidth, bytes a second. None is a dry run: everything runs once and no time is taken.
        rivals: also times the rivals and controls, and BASE beside each.
    """
    dry = roof is None
    config, dtype, context = model_config(dry), torch.float32 if dry else torch.bfloat16, 4 if dry else CONTEXT
    if not dry:
        torch.cuda.empty_cache()
        config = model_config(dry, layers_that_fit(config, dtype, torch.cuda.mem_get_info(device)[0]))
    register_experts()
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    predictor = predictor_for(model, seed)
    decoder = Decoder(model, batch, context)
    times = ModelTimes(config.num_hidden_layers)
    budgets = [budget for budget in budgets if budget < config.num_experts]

    def active() -> float:
        decoder.rewind()
        return statistics.mean(map(len, rows_by_expert(model, decoder.step)))

    def captured() -> Callable[[], Any] | None:
        decoder.rewind()
        return None if dry else capture(decoder.step)[0].replay

    model.set_experts_implementation("grouped_mm")
    variants = [_Variant("stock", None, active(), captured())]
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    variants.append(_Variant("dense", None, active(), captured()))
    if not dry:
        decoder.rewind()
        times.eager_ms = 1e3 * statistics.median(seconds(decoder.step, device) for _ in range(EAGER_STEPS))
        times.router_us, times.front_us = _router_times(model, predictor, batch, budgets[-1])
    others = []
    for policy, budget, way, holds in _rivals(model, seed) if rivals else []:
        with way as session:
            others.append(_Variant(policy, budget, active(), captured(), (holds, session)))

    with base_budget(model, predictor, budgets[0]) as session:
        shared = captured()

        def under(budget: int) -> _Variant:
            session.set_budget(budget)
            return _Variant("base", budget, active(), shared)

        variants += [under(budget) for budget in budgets]
        pairs = []
        for other in others:
            pairs += [other, under(max(1, round(other.active)))]
        every = {str(i): one for i, one in enumerate([*variants, *pairs])}

        def before(name: str) -> None:
            decoder.rewind()
            one = every[name]
            if one.policy == "base" and one.budget is not None:
                session.set_budget(one.budget)

        replays = {name: one.replay for name, one in every.items() if one.replay is not None}
        found = None if dry else microseconds(replays, before=before)

    dense_ms = None if found is None else found["1"] / 1e3
    stock_ms = None if found is None else found["0"] / 1e3
    for name, one in every.items():
        row = report_row(
            model=MODEL if not dry else "toy", policy=one.policy, budget=one.budget, batch=batch,
            active_mean=one.active, context=context, floor_ms=None, ratio_to_stock=None, selection_share=None,
        )  # fmt: skip
        if found is not None and roof is not None and dense_ms and stock_ms:
            ms, read = found[name] / 1e3, read_bytes(model, one.active, batch, context)
            row |= {
                "ms_per_step": ms, "tokens_per_s": batch / ms * 1e3, "floor_ms": read / roof * 1e3,
                "gb_per_s": read / ms / 1e6, "roof_fraction": read / roof * 1e3 / ms,
                "ratio_to_dense": dense_ms / ms, "ratio_to_stock": stock_ms / ms,
            }  # fmt: skip
            if one.policy == "base" and times.front_us is not None and times.router_us is not None:
                row["selection_share"] = (times.front_us - times.router_us) * times.layers / 1e3 / ms
        (times.rows if int(name) < len(variants) else times.rivals).append(row)
    if found is not None:
        line = [row for row in times.rows if row["policy"] == "base"]
        times.fit = fit_line([row["budget"] for row in line], [row["ms_per_step"] for row in line])
    return times


def _router_times(model: Any, predictor: Predictor, batch: int, budget: int) -> tuple[float, float]:
    """Microseconds a layer of the stock router, and of the front with router, selection and refill in it."""
    blocks = nn.ModuleList(decoder.mlp for decoder in model.model.layers)
    routers = [layer.router for layer in find_moe_layers(blocks)]
    z = torch.randn(batch, model.config.hidden_size, dtype=model.dtype, device=model.device)

    def route() -> list[Any]:
        return [router(z) for router in routers]

    stock = capture(route)[0].replay
    with base_budget(blocks, predictor, budget):
        fused = capture(route)[0].replay
        found = microseconds({"stock": stock, "front": fused})
    return found["stock"] / len(routers), found["front"] / len(routers)


def _rivals(model: Any, seed: int) -> Iterator[tuple[str, int | None, AbstractContextManager, Any]]:
    """Every rival and control that the torch path offers: name, budget, context, and what owns its tensors."""
    E = model.config.num_experts
    sere = Sere(1, torch.rand(E, E, generator=torch.Generator().manual_seed(seed)).to(model.device))
    named: list[tuple[str, int | None, Rule]] = [
        ("oea k0=1", None, Oea(1)),
        ("oea k0=2", None, Oea(2)),
        ("sere S=1", None, sere),
    ]
    named += [("xshare", budget, XShare(budget)) for budget in RIVAL_BUDGETS]
    for policy, budget, rule in named:
        yield policy, budget, rival(model, rule), rule
    for control in CONTROLS:
        for limit in RIVAL_BUDGETS:
            yield control, limit, base_budget(model, None, limit, ranking=control), None
