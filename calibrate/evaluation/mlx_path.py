"""The evaluation on MLX: the policies that its session offers, decoded by mlx-lm's own generators, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler
from tqdm import tqdm

from backends.mlx.generate import encode, generate_batch, load
from backends.mlx.integration import Policy, base_budget
from base_core import Predictor
from base_core.policies import RANKINGS
from base_core.report import report_row, wilson_interval
from calibrate.evaluation.prompt_file import Prompt
from calibrate.evaluation.variants import UNION, Variant

OFFERED = ("dense", *(policy for policy in RANKINGS if policy != "oracle"))


def check_offered(policies: Sequence[str], budgets: Sequence[str]) -> None:
    """Refuses what the MLX session cannot do.

    Raises:
        ValueError: naming it and what there is instead.
    """
    for policy in policies:
        if policy not in OFFERED:
            raise ValueError(
                f"--backend mlx does not offer policy {policy!r}: it has {', '.join(OFFERED)}; torch has all"
            )
    for budget in budgets:
        if budget.startswith(UNION):
            raise ValueError(
                f"--backend mlx does not offer budget {budget!r}: give numbers, percentages, energy:TAU or share:SHARE"
            )


def evaluate_mlx(
    name: str,
    source: str | Path,
    predictor: Predictor | None,
    prompts: Sequence[Prompt],
    variants: Sequence[Variant],
    *,
    batch: int,
    max_tokens: int,
    temperature: float,
    seeds: Sequence[int],
    dtype: str | None,
    bar: tqdm,
) -> list[dict[str, Any]]:
    """Rows as the PyTorch evaluation's; what needs true energies or the dense distribution is None.

    `kept_energy` is the share of the ranking's own cost that the active sets held, `tokens_per_s` is end to end.

    Args:
        variants: of `OFFERED` policies, without options.
        batch: prompts that decode together; a batch shrinks as they end.
    """
    model, tokenizer = load(source, dtype)
    encoded = [encode(tokenizer, prompt.text) for prompt in prompts]
    ends = sorted(tokenizer.eos_token_ids)

    def answer(seed: int, on_finish: Callable[[], Any] | None = None) -> tuple[list[list[int]], float]:
        mx.random.seed(seed)
        started = time.perf_counter()
        answers: list[list[int]] = []
        for start in range(0, len(encoded), batch):
            answers += generate_batch(
                model,
                encoded[start : start + batch],
                max_tokens=max_tokens,
                end_tokens=ends,
                sampler=make_sampler(temperature),
                on_finish=on_finish,
            )
        return answers, time.perf_counter() - started

    rows = []
    for seed in seeds:
        dense_speed = None
        for variant in variants:
            bar.set_postfix_str(variant.label)
            dense = variant.policy == "dense"
            policy = Policy(ranking="weight_sum" if dense else RANKINGS[variant.policy], count_all=True)  # type: ignore[arg-type]
            # With every expert allowed the session counts, and nothing changes.
            with base_budget(model, predictor, "100%" if dense else variant.budget, policy) as session:
                answers, seconds = answer(seed, None if dense else bar.update)
                stats = session.stats()
            if dense:
                answers, seconds = answer(seed, bar.update)
            tokens = sum(map(len, answers))
            dense_speed = dense_speed or tokens / seconds
            row = report_row(
                model=name,
                policy=variant.policy,
                budget=variant.budget,
                batch=batch,
                active_mean=stats.active_mean,
                tokens_per_s=tokens / seconds,
                ratio_to_dense=tokens / seconds / dense_speed,
                label=variant.label,
                seed=seed,
                prompts=len(prompts),
                union_mean=stats.union_mean,
                kept_energy=None if dense else stats.kept_energy,
                tokens=tokens,
                fallbacks=stats.fallbacks,
            )
            if prompts[0].answer is not None:
                texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]
                right = sum(text == str(p.answer).strip() for text, p in zip(texts, prompts, strict=True))
                row["accuracy"] = right / len(prompts)
                row["accuracy_low"], row["accuracy_high"] = wilson_interval(right, len(prompts))
            rows.append(row)
    return rows
