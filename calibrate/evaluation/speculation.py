"""Speculative verification: a few tokens drafted under a small budget, then checked in one step, greedily.

The model drafts for itself on one key-value cache: drafts are written behind what is verified and cut off again, the
verifying step writes its own entries for them, and those of refused drafts are cut off too. A verifying step has as
many rows as there are drafts and one more, all of one request, so a budget holds for them together. With dense
verification the answer is the dense model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from backends.cuda import Session, base_budget
from base_core.report import report_row
from base_core.selection import DECODE, PADDING
from calibrate.evaluation.document import Block, Heading, Table, Text
from calibrate.evaluation.engine import EMPTY
from calibrate.evaluation.studies import Part, remember
from calibrate.evaluation.subject import Subject
from calibrate.evaluation.tables import percent
from calibrate.evaluation.units import Row, Store

STUDY = "speculation"
DENSE = "dense"

ABOUT = (
    "One request at a time, greedily: k tokens are drafted by the same model under the draft budget, then checked in "
    "one step of k + 1 rows. *taken*: tokens of the answers for each verifying step, k + 1 at most; *accepted*: share "
    "of drafts that were confirmed. *experts, verify* and *draft*: read by one layer in one step, on average. *experts "
    "a token*: all that a layer reads, drafts and verification together, for each token of the answer; plain decoding "
    "is the line to hold it against. *as dense*: share of answers equal to the dense model's, token for token; with "
    "dense verification all but float ties have to be. torch keeps one cache and takes an answer's first token from "
    "prefill; mlx-lm keeps one cache for drafts and one for verification, checks the first token with the drafts, and "
    "drafts on behind an answer's end, which counts as refused."
)


@dataclass(frozen=True)
class Settings:
    """How much is done.

    Attributes:
        prompts: of the subject.
        drafts: numbers of tokens drafted at a time.
    """

    prompts: int = 64
    drafts: tuple[int, ...] = (1, 2, 4)


@dataclass
class Phase:
    """Steps of one kind, drafts or verifications, and the experts that a layer read in them, summed."""

    steps: int = 0
    experts: float = 0.0

    @property
    def active_mean(self) -> float | None:
        """Experts a layer reads in a step."""
        return self.experts / self.steps if self.steps else None


@dataclass
class Count:
    """What happened over some answers.

    Attributes:
        drafted, accepted: tokens.
        tokens: of the answers, without those that come from prefill.
    """

    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    draft: Phase = field(default_factory=Phase)
    verify: Phase = field(default_factory=Phase)


class Speculator:
    """A subject's model, ready to draft and verify. Made by `speculating`."""

    def __init__(self, subject: Subject, session: Session) -> None:
        self.subject, self.session = subject, session
        self._steps, self._experts = 0, 0.0

    @torch.inference_mode()
    def answer(self, prompt: int, drafts: int, draft_budget: str, verify_budget: str, count: Count) -> list[int]:
        """The answer to a prompt of the subject, its end token included.

        Args:
            prompt: its place.
            drafts: tokens drafted at a time; 0 decodes plainly under the verification's budget.
            draft_budget, verify_budget: `dense`, or in the forms of `base_core.budget`.
            count: what happens is added here.
        """
        ends, most = self.subject.engine.ends.tolist(), self.subject.max_tokens
        prefilled = self.subject.engine.prompts
        cache, start = DynamicCache(), -int(prefilled.lengths[prompt])
        for i, (keys, values) in enumerate(zip(prefilled.keys, prefilled.values, strict=True)):
            cache.update(*(part[prompt : prompt + 1, :, start:] for part in (keys, values)), i)
        answer = [int(prefilled.logits[prompt].argmax())]
        while answer[-1] not in ends and len(answer) < most:
            proposed: list[int] = []
            self._set_budget(draft_budget)
            # The verifying step adds a token of its own, so the last one need not be drafted.
            while len(proposed) < min(drafts, most - len(answer) - 1) and not set(proposed) & set(ends):
                proposed += self._next([(answer + proposed)[-1]], cache, count.draft)
            _cut(cache, len(proposed))
            self._set_budget(verify_budget)
            said = self._next([answer[-1], *proposed], cache, count.verify)
            accepted = next((i for i, token in enumerate(proposed) if token != said[i]), len(proposed))
            _cut(cache, len(proposed) - accepted)
            count.drafted, count.accepted = count.drafted + len(proposed), count.accepted + accepted
            for token in said[: accepted + 1]:
                answer.append(token)
                if token in ends:
                    break
        count.tokens += len(answer) - 1
        return answer

    def _set_budget(self, budget: str) -> None:
        self.session.set_budget(str(self.subject.num_experts) if budget == DENSE else budget)

    def _next(self, tokens: Sequence[int], cache: DynamicCache, phase: Phase) -> list[int]:
        """The likeliest token after each of `tokens`, which the cache takes in."""
        ids = torch.tensor([tokens], device=self.subject.model.device)
        ends = self.subject.engine.ends
        # Nothing comes after a drafted end token: its row has no use for experts.
        self.session.set_rows(
            torch.tensor([PADDING if token in ends else DECODE for token in tokens], device=ids.device)
        )
        logits = self.subject.model(input_ids=ids, cache=cache, use_cache=True).logits[0]
        stats = self.session.stats()
        experts = stats.steps * (stats.active_mean or 0.0)
        phase.steps += stats.steps - self._steps
        phase.experts += experts - self._experts
        self._steps, self._experts = stats.steps, experts
        return logits.argmax(-1).tolist()


def _cut(cache: DynamicCache, count: int) -> None:
    """Takes the last `count` tokens off."""
    if count:
        cache.crop(-count)


@contextmanager
def speculating(subject: Subject) -> Iterator[Speculator]:
    """Puts a session on the subject's model."""
    # With every expert allowed routing is native, and the session counts.
    with base_budget(subject.model, subject.predictor, subject.num_experts) as session:
        yield Speculator(subject, session)


def budget_pairs(k: int) -> list[tuple[str, str]]:
    """Draft and verification budgets of a model with k experts a token: ever smaller drafts, then both restricted."""
    half, quarter = (str(max(1, k // part)) for part in (2, 4))
    pairs = [(DENSE, DENSE), (half, DENSE), (quarter, DENSE), ("1", DENSE), (quarter, str(k)), (quarter, half)]
    return list(dict.fromkeys(pairs))


def measure(subject: Subject, drafts: int, draft_budget: str, verify_budget: str, prompts: int) -> Row:
    """One row, see `speculation_row`."""
    count, places = Count(), range(min(prompts, len(subject.prompts)))
    with speculating(subject) as speculator:
        answers = [speculator.answer(place, drafts, draft_budget, verify_budget, count) for place in places]
    tokens = np.full((len(subject.prompts), subject.max_tokens), EMPTY, np.int64)
    for place, answer in zip(places, answers, strict=True):
        tokens[place, : len(answer)] = answer
    same = (tokens == subject.reference().tokens).all(1)[places]
    return speculation_row(
        subject.name,
        "torch",
        drafts,
        draft_budget,
        verify_budget,
        count,
        same_as_dense=float(same.mean()),
        accuracy=float(subject.grade(tokens)[places].mean()) if subject.has_answers else None,
        prompts=len(places),
    )


def speculation_row(
    model: str, backend: str, drafts: int, draft_budget: str, verify_budget: str, count: Count, **values: Any
) -> Row:
    """Names of `base_core.report`, and `drafts`, `draft_budget`, `verify_budget`, `accepted` (share of drafts), `taken`
    (tokens a verifying step), `active_draft`, `active_mean` (of verifying steps), `experts_per_token`."""
    label = f"k={drafts}, draft {draft_budget}, verify {verify_budget}" if drafts else f"plain, {verify_budget}"
    return report_row(
        model=model,
        policy="base",
        budget=verify_budget,
        batch=1,
        active_mean=count.verify.active_mean,
        study=STUDY,
        backend=backend,
        label=label,
        drafts=drafts,
        draft_budget=draft_budget if drafts else None,
        verify_budget=verify_budget,
        accepted=count.accepted / count.drafted if count.drafted else None,
        taken=count.tokens / count.verify.steps if count.verify.steps else None,
        active_draft=count.draft.active_mean,
        experts_per_token=(count.draft.experts + count.verify.experts) / count.tokens if count.tokens else None,
        **values,
    )


def run_speculation(subject: Subject, settings: Settings | None = None, store: Store | None = None) -> list[Row]:
    """Plain decoding, then every pair of budgets and number of drafts. What is in the store is not done again.

    Raises:
        ValueError: the subject has no predictor.
    """
    settings = settings or Settings()
    if subject.predictor is None:
        raise ValueError(f"drafting under a budget needs the predictor of {subject.name!r}: pass one with --predictor")

    def row(drafts: int, draft: str, verify: str) -> Row:
        about = {"drafts": drafts, "draft": draft, "verify": verify, "prompts": settings.prompts}
        label = f"k={drafts} {draft} {verify}"
        return remember(
            Part(STUDY, label, about), lambda: measure(subject, drafts, draft, verify, settings.prompts), store
        )

    pairs = budget_pairs(subject.k)
    plain = [row(0, DENSE, verify) for verify in dict.fromkeys(verify for _, verify in pairs)]
    return plain + [row(drafts, draft, verify) for draft, verify in pairs for drafts in settings.drafts]


def section(found: Mapping[str, Sequence[Row]], level: int = 2) -> list[Block]:
    """The study's part of a report.

    Args:
        found: rows of each model, of one backend or several, by a name for the heading.
        level: of the heading.
    """
    blocks: list[Block] = [Heading(level, "Drafting under a budget"), Text(ABOUT)]
    header = ["drafts and budgets", "taken", "accepted", "experts, verify", "draft", "experts a token"]
    header += ["as dense", "right answers"]
    for model, rows in found.items():
        body = [
            [
                row["label"],
                *(_number(row[name]) for name in ("taken",)),
                percent(row["accepted"]),
                *(_number(row[name]) for name in ("active_mean", "active_draft", "experts_per_token")),
                percent(row["same_as_dense"]),
                percent(row["accuracy"]),
            ]
            for row in rows
        ]
        strong = frozenset(i for i, row in enumerate(rows) if row["drafts"] == 0)
        blocks += [Heading(level + 1, f"{model}, {rows[0]['prompts']} prompts"), Table(header, body, strong)]
    return blocks


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
