"""Speculative verification on MLX: mlx-lm's own speculative generation, a second copy of the model for drafts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlx import nn

from backends.mlx.generate import encode, load, stream_generate
from backends.mlx.integration import Policy, Session, base_budget
from base_core import Predictor
from calibrate.evaluation.prompt_file import Prompt
from calibrate.evaluation.speculation import DENSE, Count, Phase, budget_pairs, speculation_row
from calibrate.evaluation.studies import Part, remember
from calibrate.evaluation.units import Row, Store

STUDY = "speculation mlx"
PROMPTS = 16
DRAFTS = (1, 2, 4)
DRAFT_WINDOW = 2
"""Tokens that mlx-lm gives the draft model at once when all its drafts were accepted."""


class Pair:
    """A model and the copy that drafts for it."""

    def __init__(self, source: str | Path, predictor: Predictor) -> None:
        self.predictor = predictor
        self.model, self.tokenizer = load(source, "float32")
        self.drafter = load(source, "float32")[0]

    def answers(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, drafts: int, draft_budget: str, verify_budget: str
    ) -> tuple[list[list[int]], Count]:
        """Greedy answers with their end tokens, and what happened.

        Args:
            prompts: token ids; each longer than `DRAFT_WINDOW` and one, or its prefill counts as drafting.
            drafts: at a time; 0 decodes plainly.
        """
        with ExitStack() as stack:
            verifying = stack.enter_context(self._budget(self.model, verify_budget, drafts + 1))
            options: dict[str, Any] = {}
            drafting: Session | None = None
            if drafts:
                drafting = stack.enter_context(self._budget(self.drafter, draft_budget, DRAFT_WINDOW))
                options = {"draft_model": self.drafter, "num_draft_tokens": drafts}
            count, found = Count(), []
            for prompt in prompts:
                said = list(stream_generate(self.model, self.tokenizer, list(prompt), max_tokens, **options))
                found.append([response.token for response in said])
                count.accepted += sum(response.from_draft for response in said)
                count.tokens += len(said)
            count.verify = _phase(verifying)
            if drafting is not None:
                count.draft = _phase(drafting)
            # Every draft takes one step of the draft model.
            count.drafted = count.draft.steps
        return found, count

    def _budget(self, model: nn.Module, budget: str, window: int) -> Any:
        # With every expert allowed the session counts, and nothing changes.
        return base_budget(
            model, self.predictor, "100%" if budget == DENSE else budget, Policy(decode_window=window, count_all=True)
        )


def _phase(session: Session) -> Phase:
    stats = session.stats()
    return Phase(stats.steps, stats.steps * (stats.active_mean or 0.0))


def run_speculation_mlx(
    name: str,
    source: str | Path,
    predictor: Predictor,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    drafts: Sequence[int],
    store: Store | None = None,
) -> list[Row]:
    """Rows as `run_speculation` makes them, of the same pairs of budgets. What is in the store is not done again."""
    pair: list[Pair] = []
    encoded: list[list[int]] = []
    dense: list[list[int]] = []

    def measure(k: int, draft: str, verify: str) -> Row:
        if not pair:
            pair.append(Pair(source, predictor))
            encoded.extend(encode(pair[0].tokenizer, prompt.text) for prompt in prompts)
            dense.extend(pair[0].answers(encoded, max_tokens, 0, DENSE, DENSE)[0])
        answers, count = pair[0].answers(encoded, max_tokens, k, draft, verify)
        accuracy = None
        if prompts[0].answer is not None:
            texts = [pair[0].tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]
            right = [text == str(prompt.answer).strip() for text, prompt in zip(texts, prompts, strict=True)]
            accuracy = sum(right) / len(right)
        same = [own == other for own, other in zip(answers, dense, strict=True)]
        return speculation_row(
            name,
            "mlx",
            k,
            draft,
            verify,
            count,
            same_as_dense=sum(same) / len(same),
            accuracy=accuracy,
            prompts=len(prompts),
        )

    def row(k: int, draft: str, verify: str) -> Row:
        about = {"drafts": k, "draft": draft, "verify": verify, "prompts": len(prompts)}
        part = Part(STUDY, f"k={k} {draft} {verify}", about)
        return remember(part, lambda: measure(k, draft, verify), store)

    pairs = budget_pairs(predictor.card.experts_per_token)
    plain = [row(0, DENSE, verify) for verify in dict.fromkeys(verify for _, verify in pairs)]
    return plain + [row(k, draft, verify) for draft, verify in pairs for k in drafts]
