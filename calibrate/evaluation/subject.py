"""What is evaluated: a model with its prompts, its predictor and the rivals' calibration."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.cuda.families import fingerprint, router_rule
from backends.cuda.generate import load
from base_core import Predictor, load_predictor
from base_core.policies import RivalCalibration
from base_core.rivals import SIMILARITIES, Rivals
from calibrate.evaluation.engine import EMPTY, Decoding, Engine, deal
from calibrate.evaluation.metrics import Reference
from calibrate.evaluation.prefill import prefill
from calibrate.evaluation.prompt_file import Prompt
from calibrate.evaluation.variants import Variant, VariantRule

ROWS_TOGETHER = 256
"""Rows of all batches that decode side by side."""
MIXED, ONE_TASK = "mixed", "one task"


class Subject:
    """A model that has answered for its prompts' prefill and is ready for one variant after another.

    Args:
        name: for the tables.
        source: folder or hub id of the checkpoint.
        predictor_source: of its predictor, or None.
        max_tokens: of an answer, its end token included.
        temperature: 0 is greedy.
        dtype: of the weights; None keeps the checkpoint's.

    Raises:
        ValueError: a model, predictor or prompt that cannot be used.
    """

    def __init__(
        self,
        name: str,
        source: str | Path,
        predictor_source: str | Path | None,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        dtype: str | None = None,
        progress: bool = False,
    ) -> None:
        self.name = name
        self.max_tokens, self.temperature = max_tokens, temperature
        self.predictor: Predictor | None = None if predictor_source is None else load_predictor(predictor_source)
        self.rivals: dict[str, Mapping[int, RivalCalibration]] | None = None
        model, self.tokenizer = load(source, dtype)
        self._prefill(model, prompts, progress)
        layers = self.engine.layers
        self.num_experts, self.k = layers[0].num_experts, layers[0].experts_per_token
        self.normalises = router_rule(layers[0]).normalise != "none"
        self._description: dict[str, Any] = {
            "model_type": layers[0].family.model_type,
            "layers": tuple(layer.index for layer in layers),
            "num_experts": self.num_experts,
            "experts_per_token": self.k,
            "hidden_size": layers[0].hidden_size,
            "fingerprint": fingerprint(model),
        }
        if self.predictor is not None:
            self.predictor.check_model(**self._description)

    def _prefill(self, model: Any, prompts: Sequence[Prompt], progress: bool = False) -> None:
        encoded = [self.tokenizer(prompt.text)["input_ids"] for prompt in prompts]
        for prompt, ids in zip(prompts, encoded, strict=True):
            if not ids:
                raise ValueError(f"prompt {prompt.text!r} has no token: give some text")
        stored = model.generation_config.eos_token_id
        stored = self.tokenizer.eos_token_id if stored is None else stored
        ends = stored if isinstance(stored, (list, tuple)) else [] if stored is None else [stored]
        self.prompts = list(prompts)
        self.engine = Engine(model, prefill(model, self.tokenizer, encoded, progress), ends)
        self._references: dict[int, Reference] = {}

    def beside(self, prompts: Sequence[Prompt]) -> Subject:
        """The same loaded model with other prompts.

        Raises:
            ValueError: a prompt without a token.
        """
        other = copy(self)
        other._prefill(self.model, prompts)
        return other

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.engine.model

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, in order of appearance; empty when unknown."""
        return list(dict.fromkeys(prompt.task for prompt in self.prompts if prompt.task is not None))

    def set_rivals(self, rivals: Rivals) -> None:
        """Takes the rivals' calibration over.

        Raises:
            ValueError: it was made for another model.
        """
        rivals.card.check_model("rivals file", "base-moe calibrate --rivals", **self._description)
        self.rivals = {kind: {i: rivals.calibration(i, kind) for i in rivals.layers} for kind in SIMILARITIES}

    def rule(self, variant: Variant) -> VariantRule:
        """The variant on this model; see `VariantRule` for its errors."""
        return VariantRule(variant, self.num_experts, self.predictor, self.rivals)

    def decoding(self, batch: int, seed: int = 0) -> Decoding:
        """How a batch of this size decodes."""
        return Decoding(batch, self.max_tokens, self.temperature, seed)

    def queues(self, batch: int, arrangement: str, count: int | None = None) -> list[list[int]]:
        """Prompts of the batches that decode side by side, in all about `ROWS_TOGETHER` rows.

        Args:
            arrangement: `mixed`, prompts in their order; or `one task`, every batch with prompts of one task only.
            count: only the first so many prompts.
        """
        count = len(self.prompts) if count is None else min(count, len(self.prompts))
        batches = max(1, min(ROWS_TOGETHER // batch, count // batch))
        if arrangement == MIXED:
            return deal(count, batches)
        queues = []
        for task in self.tasks:
            own = [i for i in range(count) if self.prompts[i].task == task]
            parts = deal(len(own), max(1, round(batches / len(self.tasks))))
            queues += [[own[i] for i in part] for part in parts]
        return queues

    def reference(self, seed: int = 0) -> Reference:
        """The dense model's own answers to all prompts; made once."""
        if seed not in self._references:
            batch = 16
            queues = self.queues(batch, MIXED)
            rule = self.rule(Variant("dense"))
            self._references[seed], _ = Reference.record(self.engine, rule, self.decoding(batch, seed), queues)
        return self._references[seed]

    def texts(self, tokens: NDArray[np.int64]) -> list[str]:
        """Answers int64 [N, max_tokens] as text, without end tokens and surrounding white space."""
        kept = np.where(np.isin(tokens, self.engine.ends), EMPTY, tokens)
        return [self.tokenizer.decode(row[row != EMPTY].tolist(), skip_special_tokens=True).strip() for row in kept]

    def grade(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which answers are right to the letter, white space around them aside."""
        pairs = zip(self.texts(tokens), self.prompts, strict=True)
        return np.array([prompt.answer is not None and text == prompt.answer.strip() for text, prompt in pairs])

    @property
    def has_answers(self) -> bool:
        """Whether accuracy can be measured."""
        return self.prompts[0].answer is not None

    def identity(self) -> dict[str, Any]:
        """What results must agree with to be put together."""
        text = json.dumps([[p.text, p.answer, p.task] for p in self.prompts])
        predictor = (
            b"" if self.predictor is None else self.predictor.layers[self.predictor.card.layers[0]].weight.tobytes()
        )
        rivals = (
            b""
            if self.rivals is None
            else b"".join(np.ascontiguousarray(c.similarity).tobytes() for c in self.rivals[SIMILARITIES[0]].values())
        )
        return {
            "model": self.name,
            "routers": {str(i): list(sketch) for i, sketch in self._description["fingerprint"].items()},
            "predictor": zlib.crc32(predictor),
            "rivals": zlib.crc32(rivals),
            "prompts": zlib.crc32(text.encode()),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
