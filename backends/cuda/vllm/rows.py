"""Row kinds of vLLM's batches: told from the scheduler's data on the host, kept on the device for every layer.

The tensors stay where they are, so that a captured CUDA graph or a compiled model reads each step's values.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from backends.cuda.selection import RowKinds
from base_core.selection import DECODE, PADDING, PREFILL


class RowBuffer:
    """The kinds of one engine's rows, written once per step before the model runs. Until then all are prefill.

    Attributes:
        counted: bool [], the step has a decode row and no prefill row.
        written: set by the first step.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._kinds = torch.full((size,), PREFILL, dtype=torch.int8, device=device)
            self._silent = torch.ones(size, 1, dtype=torch.bool, device=device)
            self._real = torch.ones(size, 1, dtype=torch.bool, device=device)
            self._mixed = torch.ones((), dtype=torch.bool, device=device)
            self.counted = torch.zeros((), dtype=torch.bool, device=device)
        self.written = threading.Event()

    def write(self, kinds: NDArray[np.int8]) -> None:
        """Sets the rows of the coming step, [n]; all behind them are padding."""
        padded = np.full(len(self._kinds), PADDING, np.int8)
        padded[: len(kinds)] = kinds
        # A fresh pinned block each step: the copy of the step before may still be on its way.
        host = torch.from_numpy(padded)
        self._kinds.copy_(host if self._kinds.device.type == "cpu" else host.pin_memory(), non_blocking=True)
        column = self._kinds.unsqueeze(1)
        torch.ne(column, DECODE, out=self._silent)
        torch.ne(column, PADDING, out=self._real)
        self._mixed.copy_((self._kinds == PREFILL).any())
        self.counted.copy_(~self._silent.all() & ~self._mixed)
        self.written.set()

    def first(self, T: int) -> RowKinds:
        """The kinds of the step's first T rows; views, nothing is launched."""
        return RowKinds(self._silent[:T], self._real[:T], self._mixed)


def kinds_of_requests(decodes: NDArray[np.bool_], lengths: NDArray) -> NDArray[np.int8]:
    """Kinds of the rows of a batch, int8 [sum of lengths].

    Args:
        decodes: [n], for each request whether its rows decode.
        lengths: int [n], its rows.
    """
    return np.repeat(np.where(decodes, DECODE, PREFILL).astype(np.int8), lengths)


def kinds_in_v1(runner: Any, scheduler_output: Any, lengths: NDArray) -> NDArray[np.int8]:
    """Row kinds of a step of vLLM's first model runner, after its `_prepare_inputs`.

    A request decodes when its prompt is done and it brings one token, beside those that a speculator drafted. A
    preempted request that computes several of its own tokens again counts as prefill, as it does for the scheduler.
    """
    batch = runner.input_batch
    n = len(lengths)
    drafted = scheduler_output.scheduled_spec_decode_tokens
    expected = np.array([1 + len(drafted.get(request, ())) for request in batch.req_ids[:n]])
    decodes = (batch.num_computed_tokens_cpu[:n] >= batch.num_prompt_tokens[:n]) & (lengths == expected)
    return kinds_of_requests(decodes, lengths)


def kinds_in_v2(batch: Any) -> NDArray[np.int8]:
    """Row kinds of a step of vLLM's second model runner, from the `InputBatch` that its `prepare_inputs` returns."""
    n = batch.num_reqs
    return kinds_of_requests(~batch.is_prefilling_np[:n], np.diff(batch.query_start_loc_np[: n + 1]))
