"""What this machine can do: how fast it reads memory, and how fast it multiplies when the weights are in the cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

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


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second when every thread reads a buffer that no cache holds: the best of several repetitions and sums."""
    buffer = torch.ones(READ_BYTES // 8, dtype=torch.int64, device=device)
    views = (buffer, buffer.view(torch.float32))
    return READ_BYTES / min(seconds(view.sum, device) for view in views for _ in range(REPETITIONS))


def arithmetic_rate(device: torch.device, dtype: torch.dtype, hidden_size: int, rows: int) -> float:
    """FLOP a second of `rows` rows times a matrix [N, hidden_size] that stays in the cache, as the experts compute it."""
    N = max(64, CACHED_BYTES // (hidden_size * dtype.itemsize))
    matrix = torch.ones(1, N, hidden_size, dtype=dtype, device=device)
    x = torch.ones(rows, hidden_size, dtype=dtype, device=device)
    work = _product(x, matrix)
    work()
    return 2 * rows * matrix.numel() / statistics.median(seconds(work, device) for _ in range(5 * REPETITIONS))


def _product(x: Tensor, matrix: Tensor) -> Callable[[], Tensor]:
    if x.device.type != "cpu":
        return lambda: x @ matrix[0].T
    one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    groups = Groups(torch.arange(len(x)), zero, zero, one * len(x))
    return lambda: grouped_linear(x, matrix, groups)
