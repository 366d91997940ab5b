"""What a variant is worth: right answers, and how close its next-token distributions stay to the dense model's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from base_core.report import wilson_interval
from calibrate.evaluation.engine import EMPTY, Decoded, Decoding, Engine
from calibrate.evaluation.routing import Rule

LIKELIEST = 256
"""Of the dense distribution that many tokens are kept one by one, the rest as one: exact up to such a vocabulary."""

Grade = Callable[[NDArray[np.int64]], NDArray[np.bool_]]
"""Which of the answers int64 [N, max_tokens], as in `Decoded.tokens`, are right: bool [N]."""


@dataclass(frozen=True)
class Reference:
    """The dense model's own answers of N prompts, and its distributions along them. C = min(V, 256).

    Attributes:
        tokens: int64 [N, T], as in `Decoded.tokens`.
        ids: int64 [N, T, C], likeliest tokens at each place, likeliest first; place 0 comes from prefill and is not
            filled.
        log_shares: float32 [N, T, C], their log-probabilities.
    """

    tokens: NDArray[np.int64]
    ids: Tensor
    log_shares: Tensor

    @classmethod
    def record(
        cls, engine: Engine, rule: Rule, decoding: Decoding, queues: Sequence[Sequence[int]]
    ) -> tuple[Reference, Decoded]:
        """Decodes with `rule`, which is to be the dense one, and keeps what the model says."""
        V = engine.prompts.logits.shape[1]
        shape = (len(engine.prompts), decoding.max_tokens, min(V, LIKELIEST))
        ids, log_shares = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)

        def keep(prompts: NDArray, at: NDArray, logits: Tensor) -> None:
            top = logits.log_softmax(-1).topk(shape[2], dim=-1)
            ids[prompts, at], log_shares[prompts, at] = top.indices.cpu(), top.values.cpu()

        decoded = engine.decode(rule, decoding, queues, on_logits=keep)
        return cls(decoded.tokens, ids, log_shares), decoded


class Judge:
    """Compares what a model says along the reference's answers: an `OnLogits`.

    Attributes:
        count: places judged.
        agreed: places where its likeliest token is the dense model's.
        kl: sum of KL(dense || it), nats.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.count = self.agreed = 0
        self.kl = 0.0

    def __call__(self, prompts: NDArray, at: NDArray, logits: Tensor) -> None:
        log_q = logits.log_softmax(-1).cpu()
        ids, log_p = self.reference.ids[prompts, at], self.reference.log_shares[prompts, at]
        self.count += len(prompts)
        self.agreed += int((log_q.argmax(-1) == ids[:, 0]).sum())
        self.kl += float(kl_divergence(log_p, log_q.gather(1, ids), whole=log_q.shape[1] == ids.shape[1]).sum())


def kl_divergence(log_p: Tensor, log_q: Tensor, whole: bool) -> Tensor:
    """KL(p || q) [n] in nats from log-probabilities [n, C] of the same tokens; unless `whole`, the rest counts as one.

    Joining tokens can only make the divergence smaller.
    """
    log_p, log_q = log_p.double(), log_q.double()
    total = (log_p.exp() * (log_p - log_q)).sum(-1)
    if not whole:
        tiny = torch.finfo(torch.float64).tiny
        rest_p, rest_q = ((1 - part.exp().sum(-1)).clamp_min(tiny) for part in (log_p, log_q))
        total = total + rest_p * (rest_p / rest_q).log()
    return total.clamp_min(0)


def evaluate(
    engine: Engine,
    rule: Rule,
    decoding: Decoding,
    queues: Sequence[Sequence[int]],
    reference: Reference,
    grade: Grade | None = None,
    along: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Decodes under `rule` twice: the prompts of `queues` freely, for the answers and the experts read, and those of
    `along` (by default the same) along the dense answers, for everything that compares the model with the dense one.

    Returns:
        `right` bool per prompt of the queues in ascending order (None without `grade`), `accuracy` with its 95 %
        interval, `active_mean`, `active_max`, `union_mean` (free decoding, over batches, steps and layers), `tokens`,
        `steps`, `fallbacks`; and along the dense answers `retained_energy`, `layer_error`, `kl` (nats a token),
        `agreement` with its 95 % interval over `judged` tokens, `active_forced`. `by_layer` has the layers apart.
    """
    started = time.perf_counter()
    free = engine.decode(rule, decoding, queues)
    judge = Judge(reference)
    forced = engine.decode(rule, decoding, along or queues, forced=reference.tokens, measure=True, on_logits=judge)
    prompts = np.array(sorted(prompt for queue in queues for prompt in queue))
    right = None if grade is None else grade(free.tokens)[prompts]
    tally, measured = free.tally, forced.tally
    assert measured.retained_energy is not None and measured.layer_error is not None
    result: dict[str, Any] = {
        "right": None if right is None else right.tolist(),
        "accuracy": None,
        "accuracy_low": None,
        "accuracy_high": None,
        "active_mean": float(np.mean(tally.active_mean)),
        "active_max": max(tally.active_max),
        "union_mean": float(np.mean(tally.union_mean)),
        "tokens": int((free.tokens != EMPTY).sum()),
        "steps": free.steps,
        "fallbacks": tally.fallbacks + measured.fallbacks,
        "retained_energy": float(np.mean(measured.retained_energy)),
        "layer_error": float(np.mean(measured.layer_error)),
        "active_forced": float(np.mean(measured.active_mean)),
        "by_layer": {
            "layer": list(tally.layers),
            "active_mean": list(tally.active_mean),
            "retained_energy": list(measured.retained_energy),
            "layer_error": list(measured.layer_error),
        },
        "kl": judge.kl / judge.count,
        "agreement": judge.agreed / judge.count,
        "judged": judge.count,
    }
    result["agreement_low"], result["agreement_high"] = wilson_interval(judge.agreed, judge.count)
    if right is not None:
        result["accuracy"] = float(right.mean())
        result["accuracy_low"], result["accuracy_high"] = wilson_interval(int(right.sum()), len(right))
    result["seconds"] = time.perf_counter() - started
    return result
