"""The budget's counters in the engine's metrics endpoint.

They live on the device of a worker, the endpoint in the main process. That one names a folder in the environment that
its children inherit; a thread of the first worker writes the counters there as JSON, whole or not at all, whenever they
changed. vLLM's own interface for such things, stat logger plugins, would not do: the mere presence of one overrules
`--disable-log-stats` for every engine.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from torch import Tensor
from vllm import envs
from vllm.logger import init_logger

from base_core.files import write_atomically

logger = init_logger("vllm.base_moe")

FOLDER_VARIABLE = "BASE_MOE_COUNTERS"
"""Environment variable with the folder; beside vLLM's own sockets."""

FILE = "counters.json"

INTERVAL = 0.25
"""Seconds between two looks at the counters."""

TOTALS = ("steps", "active", "union", "fallbacks")


def export() -> None:
    """Makes this process the one whose metrics hold the counters, unless vLLM made it. Writes nothing itself."""
    if multiprocessing.parent_process() is not None:
        return
    folder = Path(envs.VLLM_RPC_BASE_PATH) / f"base-moe-{os.getpid()}-{os.urandom(4).hex()}"
    os.environ[FOLDER_VARIABLE] = str(folder)
    REGISTRY.register(Collector(folder))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def publish(counters: Tensor, serving: threading.Event, labels: dict[str, str]) -> None:
    """Starts the thread that writes `counters`, int64 [L, 5], for as long as the process runs.

    Args:
        labels: of every metric, by name.
        serving: set with the first step. Before it the engine may be capturing CUDA graphs, which no other thread may
            disturb by looking at the device.
    """
    if FOLDER_VARIABLE not in os.environ:
        logger.warning("BASE's counters are not in the metrics: this worker did not inherit %s", FOLDER_VARIABLE)
        return
    folder = Path(os.environ[FOLDER_VARIABLE])
    folder.mkdir(mode=0o700, exist_ok=True)
    arguments = (counters, serving, labels, folder / FILE)
    threading.Thread(target=_write_changes, args=arguments, name="base-moe-counters", daemon=True).start()


def _write_changes(counters: Tensor, serving: threading.Event, labels: dict[str, str], file: Path) -> None:
    written: list[list[int]] | None = None
    table = [[0] * counters.shape[1]] * len(counters)
    pause = threading.Event()
    stream = None
    while True:
        if serving.is_set():
            if stream is None and counters.device.type == "cuda":
                # On a stream of its own, the copy neither waits for the model's work nor disturbs it.
                stream = torch.cuda.Stream(counters.device)
            with torch.cuda.stream(stream):
                table = counters.tolist()
        if table != written:
            try:
                write_atomically(file, json.dumps({"labels": labels, "counters": table}).encode())
            except OSError:  # the main process is gone, and the folder with it
                return
            written = table
        pause.wait(INTERVAL)


class Collector:
    """What Prometheus asks; reads the worker's file at each scrape. Without one there are no metrics."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE

    def describe(self) -> list[Metric]:
        """Nothing: the metrics exist only once there is an engine with a budget."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The totals over layers and decode steps, the mean, and the most experts of one layer and step."""
        try:
            document = json.loads(self._file.read_text())
        except OSError:
            return
        table = document["counters"]
        names, values = list(document["labels"]), list(document["labels"].values())
        sums = {name: sum(row[column] for row in table) for column, name in enumerate(TOTALS)}
        texts = {
            "steps": ("layer_steps", "MoE layers run in decode steps under an expert budget"),
            "active": ("active_experts", "Experts read in those"),
            "union": ("union_experts", "Experts that the rows of those had chosen"),
            "fallbacks": ("fallbacks", "Those that kept native routing because a removal cost was not finite"),
        }
        for key, (name, text) in texts.items():
            counter = CounterMetricFamily(f"base_moe:{name}", text, labels=names)
            counter.add_metric(values, sums[key])
            yield counter
        mean = GaugeMetricFamily(
            "base_moe:mean_active_experts", "Mean experts read in one layer and step", labels=names
        )
        mean.add_metric(values, sums["active"] / sums["steps"] if sums["steps"] else 0.0)
        yield mean
        most = GaugeMetricFamily("base_moe:max_active_experts", "Most experts of one layer and step", labels=names)
        most.add_metric(values, max(row[-1] for row in table))
        yield most
