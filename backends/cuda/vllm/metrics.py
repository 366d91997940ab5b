"""The budget's counters in the engine's metrics endpoint.

They live on the device of a worker, the endpoint in the API server's process. The server makes a folder named after the
engine; a thread of the first worker writes the counters there as JSON, whole or not at all, whenever they changed.
Without a server there is no folder and nothing is written.
"""

from __future__ import annotations

import json
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from torch import Tensor
from vllm import envs
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from backends.cuda.vllm import options_of
from base_core.files import write_atomically

logger = init_logger("vllm.base_moe")

INTERVAL = 0.25
"""Seconds between two looks at the counters."""

TOTALS = ("steps", "active", "union", "fallbacks")


def folder_of(vllm_config: Any) -> Path:
    """Where an engine's counters are written; beside vLLM's own sockets."""
    return Path(envs.VLLM_RPC_BASE_PATH) / f"base-moe-{vllm_config.instance_id}"


def publish(counters: Tensor, serving: threading.Event, vllm_config: Any) -> None:
    """Starts the thread that writes `counters`, int64 [L, 5], for as long as the process runs.

    Args:
        serving: set with the first step. Before it the engine may be capturing CUDA graphs, which no other thread may
            disturb by looking at the device.
    """
    arguments = (counters, serving, folder_of(vllm_config))
    threading.Thread(target=_write_changes, args=arguments, name="base-moe-counters", daemon=True).start()


def _write_changes(counters: Tensor, serving: threading.Event, folder: Path) -> None:
    written: list[list[int]] | None = None
    table = [[0] * counters.shape[1]] * len(counters)
    pause = threading.Event()
    stream = None
    while True:
        pause.wait(INTERVAL)
        if not folder.is_dir():
            continue
        if serving.is_set():
            if stream is None and counters.device.type == "cuda":
                # On a stream of its own, the copy neither waits for the model's work nor disturbs it.
                stream = torch.cuda.Stream(counters.device)
            with torch.cuda.stream(stream):
                table = counters.tolist()
        if table != written:
            try:
                write_atomically(folder / "counters.json", json.dumps(table).encode())
            except OSError:  # the server is gone, and its folder with it
                continue
            written = table


class Collector:
    """What Prometheus asks; reads the file at each scrape.

    Args:
        folder: of the engine.
        labels: of every metric, by name.
    """

    def __init__(self, folder: Path, labels: dict[str, str]) -> None:
        self._file, self._labels = folder / "counters.json", labels

    def describe(self) -> list[Metric]:
        """Nothing: the metrics exist only once there is an engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The totals over layers and decode steps, the mean, and the most experts of one layer and step."""
        try:
            table = json.loads(self._file.read_text())
        except FileNotFoundError:
            return
        names, values = list(self._labels), list(self._labels.values())
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


class CounterExport(StatLoggerBase):
    """vLLM's stat logger interface, of which only the beginning is needed: it runs where the endpoint is."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        if options_of(vllm_config) is None:
            return
        if vllm_config.parallel_config._api_process_count > 1:
            logger.warning("BASE's counters are not in /metrics with several API servers; use collective_rpc")
            return
        folder = folder_of(vllm_config)
        folder.mkdir(mode=0o700)
        labels = {"model_name": vllm_config.model_config.served_model_name, "engine": str(engine_index)}
        collector = Collector(folder, labels)
        REGISTRY.register(collector)
        weakref.finalize(self, _remove, collector, folder)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: scrapes read the worker's file."""

    def log_engine_initialized(self) -> None:
        """Nothing to do: the worker has logged."""


def _remove(collector: Collector, folder: Path) -> None:
    REGISTRY.unregister(collector)
    shutil.rmtree(folder, ignore_errors=True)
