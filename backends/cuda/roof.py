"""What this machine can do: how fast it reads memory, and how fast it multiplies what is in the cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from backends.cuda.cpu_linear import Groups, grouped_linear

READ_BYTES = 1 << 30  # far above any cache
CACHED_BYTES = 4 << 20  # weights that stay in a cache, yet large enough for every thread to have work
REPETITIONS = 7


def synchronise(device: torch.device) -> None:
    """Waits for the device's queue; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, the device's queue drained before and after."""
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


def bandwidth_probe(device: torch.device) -> Callable[[], float]:
    """A function that reads a buffer which no cache holds, with every thread, and returns bytes a second."""
    buffer = torch.ones(READ_BYTES // 8, dtype=torch.int64, device=device)
    views = (buffer, buffer.view(torch.float32))  # neither sum is the faster one on every CPU
    return lambda: READ_BYTES / min(seconds(view.sum, device) for view in views)


def cached_seconds(device: torch.device, dtype: torch.dtype, hidden_size: int, counts: Sequence[int]) -> float:
    """Seconds a matrix element for groups of `counts` rows, when the matrix that all of them meet is in the cache.

    What multiplies is what multiplies the experts, so that the rest of their time is waiting for memory.
    """
    N = max(64, CACHED_BYTES // (hidden_size * dtype.itemsize) // 64 * 64)
    matrix = torch.ones(1, N, hidden_size, dtype=dtype, device=device)
    x = torch.ones(sum(counts), hidden_size, dtype=dtype, device=device)
    rows, sizes = np.arange(len(x)), np.asarray(counts, np.int64)
    groups = Groups(rows, rows, np.zeros_like(sizes), sizes.cumsum() - sizes, sizes)

    def work() -> Tensor:
        return grouped_linear(x, matrix, groups, len(x))

    work()
    return statistics.median(seconds(work, device) for _ in range(REPETITIONS)) / matrix.numel()
