"""Generation under a budget with transformers: prompts in left-padded batches, prefill untouched."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from backends.cuda.integration import Policy, Stats, base_budget
from base_core import Budget, load_predictor

DTYPES = ("float32", "bfloat16", "float16")


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


def load(source: str | os.PathLike, dtype: str | None = None) -> tuple[Any, Any]:
    """Model and tokenizer of a checkpoint, ready for left-padded batches, on the GPU where there is one.

    Args:
        source: a folder or a hub id; only safetensors weights and code of transformers itself are read.
        dtype: of the weights; None keeps the checkpoint's.

    Raises:
        ValueError: an unknown dtype, or a tokenizer that can neither pad nor end.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown: choose one of {', '.join(DTYPES)}")
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"the tokenizer of {str(source)!r} has neither pad_token nor eos_token: set one of them there"
            )
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto", use_safetensors=True)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def set_decoding(model: Any, tokenizer: Any, max_tokens: int, temperature: float) -> list[int]:
    """Makes plain greedy or temperature sampling the model's own way to generate; returns its end tokens.

    It is written into the model because that is where the budget's hooks look for finished rows.
    """
    stored = model.generation_config.eos_token_id
    stored = tokenizer.eos_token_id if stored is None else stored
    ends = list(stored) if isinstance(stored, (list, tuple)) else [] if stored is None else [stored]
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    model.generation_config = GenerationConfig(
        max_new_tokens=max_tokens,
        eos_token_id=ends or None,
        pad_token_id=tokenizer.pad_token_id,
        **(sampling if temperature > 0 else {"do_sample": False}),
    )
    return ends


def answer_batches(
    model: Any, tokenizer: Any, encoded: Sequence[Sequence[int]], ends: Sequence[int], batch: int
) -> Iterator[list[list[int]]]:
    """Generates for prompts, given as token ids, in groups of `batch`: of each group the answers, without end tokens.

    Args:
        ends: of `set_decoding`, which has to come before.
    """
    for start in range(0, len(encoded), batch):
        inputs = tokenizer.pad({"input_ids": encoded[start : start + batch]}, return_tensors="pt").to(model.device)
        output = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        yield [
            list(takewhile(lambda t: t not in ends, ids)) for ids in output[:, inputs["input_ids"].shape[1] :].tolist()
        ]


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
        dtype: of the weights; None keeps the checkpoint's.
        progress: shows a bar with tokens/s.

    Raises:
        ValueError: a bad budget, predictor, dtype, size or prompt; nothing has been generated then.
    """
    if batch < 1 or max_tokens < 1:
        raise ValueError(f"batch {batch} and max_tokens {max_tokens} must be at least 1")
    if not temperature >= 0:
        raise ValueError(f"temperature {temperature} is negative: 0 is greedy")
    budget = Budget.parse(budget)
    predictor = None if predictor_source is None else load_predictor(predictor_source)
    model, tokenizer = load(model_source, dtype)
    encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise ValueError(f"prompt {prompt!r} has no token: give some text")
    ends = set_decoding(model, tokenizer, max_tokens, temperature)

    texts: list[str] = []
    counts: list[int] = []
    torch.manual_seed(seed)
    with (
        base_budget(model, predictor, budget, policy) as session,
        torch.inference_mode(),
        tqdm(total=len(prompts), unit="prompt", disable=not progress) as bar,
    ):
        started = time.perf_counter()
        for answers in answer_batches(model, tokenizer, encoded, ends, batch):
            texts += [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
            counts += [len(ids) for ids in answers]
            bar.set_postfix_str(f"{sum(counts) / (time.perf_counter() - started):.1f} tokens/s", refresh=False)
            bar.update(len(answers))
        seconds = time.perf_counter() - started
        stats = session.stats()
    return Generated(texts, counts, stats, seconds)
