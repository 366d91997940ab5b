"""Times on a GPU: what is timed is captured once and replayed, so that no launch waits for the host."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

COPIED_BYTES = 1 << 30
ROUNDS = 7
REPLAYS = 4  # a round


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `step`, and what it returns: tensors that every replay overwrites. Runs it once before."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    return graph, held


def microseconds(
    works: Mapping[str, Callable[[], Any]], *, rounds: int = ROUNDS, before: Callable[[str], Any] = lambda name: None
) -> dict[str, float]:
    """Median device time of one call of each work; they take turns, so that the clock's drift meets all alike.

    Args:
        works: replays of graphs, or anything else that is launched.
        rounds: timed rounds of `REPLAYS` calls each, after one that is not counted.
        before: gets a work's name ahead of each of its rounds, untimed.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            before(name)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(REPLAYS):
                work()
            end.record()
            end.synchronize()
            if turn:
                taken[name].append(start.elapsed_time(end) * 1e3 / REPLAYS)
    return {name: statistics.median(values) for name, values in taken.items()}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of copying 1 GiB, reads and writes together: the roof that everything is measured against."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    graph, _ = capture(lambda: target.copy_(source))
    return 2 * COPIED_BYTES / microseconds({"copy": graph.replay})["copy"] * 1e6
