"""Generation under a budget with mlx-lm's own generators: prompts run stock, decode steps under the budget."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.generate import (
    BatchGenerator,
    GenerationBatch,
    GenerationResponse,
    PromptProcessingBatch,
    Sampler,
    greedy_sampler,
)
from mlx_lm.generate import stream_generate as stock_stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tqdm import tqdm

from backends.mlx.integration import Policy, Stats, base_budget, session_of
from base_core.artifact import load_predictor
from base_core.budget import Budget
from base_core.selection import DECODE, PADDING

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True)
class Generated:
    """Answers to the prompts, in their order.

    Attributes:
        texts: without prompts and end tokens.
        token_counts: generated tokens of each, without the end token.
        stats: what the budget did, over all layers and decode steps.
        seconds: of generation, prompts included.
    """

    texts: list[str]
    token_counts: list[int]
    stats: Stats
    seconds: float


def fit_to_device(model: nn.Module, dtype: str | None = None) -> None:
    """Casts the weights: to `dtype`, or on a CPU to float32, which is all that MLX runs experts in there; says so.

    Raises:
        ValueError: an unknown dtype, or one that the device cannot run.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    on_cpu = mx.default_device().type == mx.cpu
    if on_cpu and dtype not in (None, "float32"):
        raise ValueError(
            f"dtype {dtype!r}: MLX's CPU backend runs experts in float32 only; choose float32 or leave it out"
        )
    wanted = mx.float32 if on_cpu else DTYPES.get(dtype or "")
    floating = {a.dtype for _, a in tree_flatten(model.parameters()) if mx.issubdtype(a.dtype, mx.floating)}
    if wanted is not None and floating - {wanted}:
        if on_cpu and dtype is None:
            print("[WARNING] no Metal device: weights are cast to float32 for MLX's CPU backend", file=sys.stderr)
        model.set_dtype(wanted)
    mx.eval(model.parameters())


def load(source: str | os.PathLike, dtype: str | None = None, **options: Any) -> tuple[nn.Module, TokenizerWrapper]:
    """`mlx_lm.load`, then `fit_to_device`."""
    model, tokenizer = mlx_lm.load(str(source), lazy=True, **options)[:2]
    fit_to_device(model, dtype)
    return model, tokenizer


def encode(tokenizer: TokenizerWrapper, prompt: str) -> list[int]:
    """Token ids of a plain prompt.

    Raises:
        ValueError: no token in it.
    """
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError(f"prompt {prompt!r} has no token: give some text")
    return ids


class BudgetedPromptBatch(PromptProcessingBatch):
    """Prompts run stock up to and including their last token, whose step opens generation in mlx-lm."""

    def _stock(self) -> Any:
        session = session_of(self.model)
        return nullcontext() if session is None else session.prefill()

    def prompt(self, tokens: list[list[int]]) -> None:
        with self._stock():
            super().prompt(tokens)

    def generate(self, tokens: list[list[int]]) -> GenerationBatch:
        with self._stock():
            return super().generate(tokens)


class BudgetedGenerationBatch(GenerationBatch):
    """Decode steps in which finished rows do not vote.

    A step is dispatched before its input tokens are read, so a row that has just ended is still in it. Whether it has
    is decided on the device.
    """

    end_tokens: mx.array | None = None

    def _step(self) -> tuple[list[int], list[mx.array]]:
        session = session_of(self.model)
        if session is None or self.end_tokens is None:
            return super()._step()
        spent = [n + 1 >= most for n, most in zip(self._num_tokens, self.max_tokens, strict=True)]
        ended = mx.array(spent) | (self._next_tokens[:, None] == self.end_tokens).any(axis=1)
        session.rows = mx.where(ended, PADDING, DECODE)
        try:
            return super()._step()
        finally:
            session.rows = None


class BudgetedBatchGenerator(BatchGenerator):
    """mlx-lm's continuous batching for a model that may be under a budget.

    Args:
        end_tokens: with them, finished rows leave the vote at once. Their last step is then worthless, so leave them
            out where prompt caches are kept.
    """

    def __init__(self, model: nn.Module, *, end_tokens: Sequence[int] | None = None, **options: Any) -> None:
        super().__init__(model, **options)
        self._prompt_batch.__class__ = BudgetedPromptBatch
        self._generation_batch.__class__ = BudgetedGenerationBatch
        self._generation_batch.end_tokens = None if end_tokens is None else mx.array(sorted(end_tokens), mx.uint32)


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    *,
    sampler: Sampler | None = None,
    **options: Any,
) -> Generator[GenerationResponse, None, None]:
    """mlx-lm's `stream_generate` for a model that may be under a budget: the prompt runs stock whatever its length.

    With a draft model the first verification holds the prompt's last token beside the drafts and is under the budget.
    """
    session = session_of(model)
    if session is None:
        yield from stock_stream_generate(
            model, tokenizer, prompt, max_tokens=max_tokens, draft_model=draft_model, sampler=sampler, **options
        )
        return
    sample = sampler or greedy_sampler

    def end_prefill(logprobs: mx.array) -> mx.array:
        # mlx-lm samples for the first time when the prompt is through, and builds the next step only then.
        session.in_prefill = False
        return sample(logprobs)

    with session.prefill():
        yield from stock_stream_generate(
            model, tokenizer, prompt, max_tokens=max_tokens, draft_model=draft_model, sampler=end_prefill, **options
        )


def generate_batch(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    end_tokens: Sequence[int],
    sampler: Sampler | None = None,
    on_finish: Callable[[], Any] | None = None,
) -> list[list[int]]:
    """Decodes all prompts as one batch that shrinks as they end: the generated ids of each, without the end token."""
    generator = BudgetedBatchGenerator(
        model,
        end_tokens=end_tokens,
        max_tokens=max_tokens,
        stop_tokens=[[token] for token in end_tokens],
        sampler=sampler,
        completion_batch_size=len(prompts),
        prefill_batch_size=len(prompts),
    )
    try:
        uids = generator.insert([list(prompt) for prompt in prompts])
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        while responses := generator.next_generated():
            for response in responses:
                if response.finish_reason != "stop":
                    tokens[response.uid].append(response.token)
                if response.finish_reason is not None and on_finish is not None:
                    on_finish()
        return [tokens[uid] for uid in uids]
    finally:
        generator.close()


def generate_texts(
    model_source: str | os.PathLike,
    predictor_source: str | os.PathLike | None,
    budget: Budget | str | int,
    prompts: Sequence[str],
    *,
    batch: int = 16,
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    dtype: str | None = None,
    progress: bool = False,
    policy: Policy | None = None,
) -> Generated:
    """Answers prompts in groups of `batch`, so that a prompt always meets the same neighbours.

    Args:
        model_source, predictor_source: folders or hub ids; the predictor may be None with the budget off.
        budget: a `Budget`, or its text or number.
        temperature: 0 is greedy.
        dtype: of the weights; None keeps the checkpoint's, or float32 on a CPU.
        progress: shows a bar.
        policy: how the budget is applied; by default the paper's method, with all decode steps counted.

    Raises:
        ValueError: a bad budget, predictor, dtype or prompt; nothing has been generated then.
    """
    if batch < 1 or max_tokens < 1:
        raise ValueError(f"batch {batch} and max_tokens {max_tokens} must be at least 1")
    if not temperature >= 0:
        raise ValueError(f"temperature {temperature} is negative: 0 is greedy")
    budget = Budget.parse(budget)
    predictor = None if predictor_source is None else load_predictor(predictor_source)
    model, tokenizer = load(model_source, dtype)
    encoded = [encode(tokenizer, prompt) for prompt in prompts]
    end_tokens = sorted(tokenizer.eos_token_ids)
    mx.random.seed(seed)
    answers: list[list[int]] = []
    with (
        base_budget(model, predictor, budget, policy or Policy(count_all=True)) as session,
        tqdm(total=len(prompts), unit="prompt", disable=not progress) as bar,
    ):
        started = time.perf_counter()
        for start in range(0, len(encoded), batch):
            answers += generate_batch(
                model,
                encoded[start : start + batch],
                max_tokens=max_tokens,
                end_tokens=end_tokens,
                sampler=make_sampler(temperature),
                on_finish=bar.update,
            )
        seconds = time.perf_counter() - started
        stats = session.stats()
    return Generated(
        [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers],
        [len(ids) for ids in answers],
        stats,
        seconds,
    )
