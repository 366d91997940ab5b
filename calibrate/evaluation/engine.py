"""Batched decoding under any selection rule, many independent batches side by side.

Every batch is a number of slots with a queue of prompts: a prompt that ends gives its slot to the next one, so that the
rows of a batch are at different positions, as in serving. Prompts come from a dense prefill. The rows of all batches go
through the model together, and each batch is routed on its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from backends.cuda.experts import EXPERTS_IMPLEMENTATION, register_experts
from backends.cuda.families import find_moe_layers
from base_core.selection import DECODE, PADDING
from calibrate.evaluation.prefill import Prefilled
from calibrate.evaluation.routing import LayerProbe, Rule, Tally

EMPTY = -1


@dataclass(frozen=True)
class Decoding:
    """How prompts are decoded.

    Attributes:
        batch: slots of a batch.
        max_tokens: of an answer, its end token included.
        temperature: 0 is greedy.
        seed: of sampling; a prompt's random numbers depend on it and on the prompt's place, not on its neighbours.
    """

    batch: int = 16
    max_tokens: int = 12
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Decoded:
    """Answers of N prompts and what was measured on the way.

    Attributes:
        tokens: int64 [N, max_tokens], generated ids with the end token, then -1; all -1 for a prompt in no queue.
        tally: of the layers.
        steps: forward passes of single batches.
    """

    tokens: NDArray[np.int64]
    tally: Tally
    steps: int


OnLogits = Callable[[NDArray[np.int64], NDArray[np.int64], Tensor], Any]
"""Told of prompts int [n], the places int [n] of their next tokens (1 is the first decoded one) and logits [n, V]."""


class Engine:
    """A model ready to decode under one selection rule after another.

    Args:
        model: of a supported family, in eval mode. Its experts implementation is set to this package's own.
        ends: end tokens.
    """

    def __init__(self, model: PreTrainedModel, prompts: Prefilled, ends: Sequence[int]) -> None:
        register_experts()
        model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
        self.model, self.prompts, self.ends = model, prompts, np.asarray(ends, np.int64)
        self.layers = find_moe_layers(model)

    @torch.inference_mode()
    def decode(
        self,
        rule: Rule,
        decoding: Decoding,
        queues: Sequence[Sequence[int]],
        *,
        forced: NDArray[np.int64] | None = None,
        measure: bool = False,
        on_logits: OnLogits | None = None,
    ) -> Decoded:
        """Answers the prompts.

        Args:
            rule: chooses for one batch, layer and step.
            queues: one for each batch, the prompts it answers by their place; they decode side by side.
            forced: int64 [N, max_tokens] as `Decoded.tokens`: these tokens are decoded whatever the model says.
            measure: also run every routed expert on its own, for true energies and the exact output error.
            on_logits: told after every step what the model says.

        Raises:
            ValueError: no answer has a second token.
        """
        run = _Run(self, decoding, queues, forced, on_logits)
        probes = [LayerProbe(layer, rule, run, measure) for layer in self.layers]
        try:
            for probe in probes:
                probe.open()
            while run.refill():
                run.step()
        finally:
            for probe in probes:
                probe.close()
        if not run.steps:
            raise ValueError("every answer ends with its first token, which comes from prefill: nothing was decoded")
        return Decoded(run.tokens, Tally.of(probes), run.steps)


def deal(count: int, batches: int) -> list[list[int]]:
    """Queues for `batches` batches: `count` prompts in their order, cut into near equal parts."""
    return [part.tolist() for part in np.array_split(np.arange(count), batches)]


class _Run:
    """One decoding under way.

    Attributes:
        kinds: int [R], the kind of every row; batch after batch, `batch` rows each.
    """

    def __init__(
        self,
        engine: Engine,
        decoding: Decoding,
        queues: Sequence[Sequence[int]],
        forced: NDArray | None,
        on_logits: OnLogits | None,
    ) -> None:
        self.engine, self.decoding, self.prompts = engine, decoding, engine.prompts
        self.forced, self.on_logits, self.batch = forced, on_logits, decoding.batch
        self.queues = [deque(queue) for queue in queues]
        R, N = len(queues) * decoding.batch, len(self.prompts)
        self.owner, self.kinds = np.full(R, EMPTY), np.full(R, PADDING)
        self.tokens = np.full((N, decoding.max_tokens), EMPTY, np.int64)
        self.made = np.zeros(N, np.int64)
        self.random = np.random.default_rng(decoding.seed).random(self.tokens.shape)
        self.lengths = self.prompts.lengths
        self.first = self._choose(np.arange(N), np.zeros(N, np.int64), self.prompts.logits)
        self.steps = 0
        self.mask = torch.zeros_like(self.prompts.mask[:1]).repeat(R, 1)
        self.cache = DynamicCache()
        for i, parts in enumerate(zip(self.prompts.keys, self.prompts.values, strict=True)):
            self.cache.update(*(torch.zeros_like(part[:1]).repeat(R, 1, 1, 1) for part in parts), i)

    def refill(self) -> bool:
        """Gives free slots to waiting prompts; False when nothing is left to decode."""
        started: list[int] = []
        for row in np.flatnonzero(self.owner == EMPTY).tolist():
            queue = self.queues[row // self.batch]
            while queue:
                prompt = queue.popleft()
                if not self._take(np.array([prompt]), self.first[[prompt]]).any():
                    self.owner[row], self.kinds[row] = prompt, DECODE
                    started.append(row)
                    break
        if started:
            rows, prompts = torch.tensor(started), torch.from_numpy(self.owner[started])
            start = self.mask.shape[1] - self.prompts.mask.shape[1]
            for layer, keys, values in zip(self.cache.layers, self.prompts.keys, self.prompts.values, strict=True):
                layer.keys[rows, :, start:] = keys[prompts]
                layer.values[rows, :, start:] = values[prompts]
            self.mask[rows] = 0
            self.mask[rows, start:] = self.prompts.mask[prompts]
        return bool((self.owner != EMPTY).any())

    def step(self) -> None:
        """One forward pass of all batches."""
        rows = np.flatnonzero(self.owner != EMPTY)
        prompts = self.owner[rows]
        at = self.made[prompts]
        inputs = np.zeros((2, len(self.owner), 1), np.int64)  # ids, positions
        inputs[0, rows, 0] = self.tokens[prompts, at - 1]
        inputs[1, rows, 0] = self.lengths[prompts] + at - 1
        ids, positions = torch.from_numpy(inputs).to(self.mask.device)
        self.mask = torch.cat((self.mask, torch.ones_like(self.mask[:, :1])), dim=1)
        logits = self.engine.model(
            input_ids=ids, attention_mask=self.mask, position_ids=positions, cache=self.cache, use_cache=True
        ).logits[torch.from_numpy(rows), -1]
        # Columns on the left that no row reaches back to are dropped; a new prompt always fits.
        reach = max(int((self.lengths[prompts] + at).max()), self.prompts.mask.shape[1])
        self.mask = self.mask[:, -reach:]
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, -reach:], layer.values[:, :, -reach:]
        self.steps += len(np.unique(rows // self.batch))
        logits = logits.float()
        if self.on_logits is not None:
            self.on_logits(prompts, at, logits)
        ended = rows[self._take(prompts, self._choose(prompts, at, logits))]
        self.owner[ended], self.kinds[ended] = EMPTY, PADDING

    def _take(self, prompts: NDArray, tokens: NDArray) -> NDArray[np.bool_]:
        """Adds a token to each prompt's answer; true where the answer has ended with it."""
        self.tokens[prompts, self.made[prompts]] = tokens
        self.made[prompts] += 1
        return (tokens[:, None] == self.engine.ends).any(1) | (self.made[prompts] == self.decoding.max_tokens)

    def _choose(self, prompts: NDArray, at: NDArray, logits: Tensor) -> NDArray[np.int64]:
        """Next tokens int [n] of prompts [n], the `at`th of their answers, by logits [n, V]."""
        if self.forced is not None:
            return self.forced[prompts, at]
        if self.decoding.temperature == 0:
            return logits.argmax(-1).cpu().numpy()
        shares = (logits.double() / self.decoding.temperature).softmax(-1).cumsum(-1)
        drawn = torch.from_numpy(self.random[prompts, at]).to(shares.device)
        return (shares < drawn[:, None]).sum(-1).clamp_max(shares.shape[1] - 1).cpu().numpy()
