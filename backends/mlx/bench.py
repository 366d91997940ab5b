"""`base-moe bench --backend mlx`: decode speed by budget on a Mac, and what it is made of.

Everything that is compared runs in turn in one session. Four tables: whole decode steps; layers through the kernels and
through MLX's operations; stock `gather_qmm` by distinct experts at the same number of pairs; graph nodes and launches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from tqdm import tqdm

from backends.mlx.families import MoELayer, describe, find_moe_layers
from backends.mlx.generate import load
from backends.mlx.graph import count_launches, graph_nodes
from backends.mlx.integration import Kernels, Policy, base_budget, weighted_experts
from backends.mlx.random_model import SHAPES
from backends.mlx.selection import MlxSelection, select_no_sync
from base_core import Budget, Predictor, load_predictor
from base_core.embedded import resolve_model
from base_core.files import write_atomically
from base_core.predictor import random_predictor
from base_core.report import format_table, installed_versions, markdown_table, report_row, write_report

DESCRIPTION = "Time decode steps on MLX, stock and under budgets, and the kernels behind them."
DEFAULT_SHAPE = "qwen3-30b-a3b"
DEFAULT_LAYERS = 8
DEFAULT_BATCHES = "1,4,8,16"
DEFAULT_BUDGETS = "8,12,16,32"
DEFAULT_REPETITIONS = 9
PROMPT_TOKENS = 32
STEPS = 8  # in one sample, dispatched ahead as in generation
COPY_BYTES = {True: 1 << 29, False: 1 << 24}  # with and without a Metal device
NO_METAL = (
    "[WARNING] no Metal device: MLX's CPU backend is bound by arithmetic, so these times say nothing about a Mac, "
    "and the Metal kernels do not run. This is a test of the script; take it to a Mac."
)

WAYS: dict[Kernels, str] = {"auto": "base, kernels", "always": "base, kernels", "off": "base, operations"}

TABLES = {
    "steps": "Decode steps",
    "parts": "One layer's parts",
    "gathers": "Stock gathered product by distinct experts",
    "graphs": "Graph nodes and launches of one MoE layer",
}

Run = Callable[[], Any]


def interleaved(runs: Sequence[Run], repetitions: int, prepare: Sequence[Run] | None = None) -> list[float]:
    """Median seconds of each; they take turns, and the order rotates so that none always follows the same one.

    Args:
        runs: each returns the arrays to evaluate. The first round is not counted.
        prepare: called before each run, outside its time.
    """
    samples: list[list[float]] = [[] for _ in runs]
    for repetition in range(repetitions + 1):
        for shift in range(len(runs)):
            i = (repetition + shift) % len(runs)
            if prepare is not None:
                prepare[i]()
            started = time.perf_counter()
            mx.eval(runs[i]())
            mx.synchronize()
            samples[i].append(time.perf_counter() - started)
    return [statistics.median(own[1:]) for own in samples]


def copy_bandwidth(repetitions: int) -> float:
    """Bytes a second of an elementwise copy, read and written."""
    source = mx.zeros((COPY_BYTES[mx.metal.is_available()] // 4,), mx.float32)
    mx.eval(source)
    return 2 * source.nbytes / interleaved([lambda: source + 1], repetitions)[0]


def expert_bytes(layer: MoELayer) -> int:
    """Bytes of one expert's weights, scales and biases included."""
    switch = layer.block[layer.family.experts]
    return sum(
        a.nbytes for name in ("gate_proj", "up_proj", "down_proj") for a in switch[name].parameters().values()
    ) // (layer.num_experts)


class Bench:
    """A model under measurement.

    Attributes:
        model, predictor: on the default device.
        name: for the tables.
        repetitions: samples of each run.
        bytes_per_s: of a copy, what percentages refer to.
    """

    def __init__(self, model: nn.Module, predictor: Predictor, name: str, repetitions: int) -> None:
        self.model, self.predictor, self.name, self.repetitions = model, predictor, name, repetitions
        self.layers = find_moe_layers(model)
        self.bytes_per_s = copy_bandwidth(repetitions)

    def _row(self, policy: str, budget: Budget | None, **values: Any) -> dict[str, Any]:
        label = None if budget is None or budget.is_off else str(budget)
        return report_row(model=self.name, policy=policy, budget=label, **values)

    def decode(self, batch: int, budgets: Sequence[Budget]) -> list[dict[str, Any]]:
        """Whole decode steps of `batch` sequences: ms a step, tokens/s, and the ratio to the stock model."""
        prompt = mx.random.randint(0, self.model.args.vocab_size, (batch, PROMPT_TOKENS), key=mx.random.key(batch))
        cache = make_prompt_cache(self.model)
        first = self.model(prompt, cache=cache)[:, -1].argmax(axis=-1)
        if not can_trim_prompt_cache(cache):
            raise ValueError(f"{self.name}: its caches cannot be trimmed, so steps cannot repeat; take another model")

        def steps() -> mx.array:
            tokens = first
            for _ in range(STEPS):
                tokens = self.model(tokens[:, None], cache=cache)[:, -1].argmax(axis=-1)
                mx.async_eval(tokens)
            mx.eval(tokens)
            trim_prompt_cache(cache, STEPS)
            return tokens

        rows = []
        kernels: tuple[Kernels, ...] = ("auto", "off") if mx.metal.is_available() else ("off",)
        for kernel in kernels:
            with base_budget(self.model, self.predictor, "off", Policy(kernels=kernel, count_all=True)) as session:
                # All experts under the kernels tells their share of the gain from the budget's.
                all_experts = [Budget.parse("100%")] if kernel == "auto" else []
                options = [Budget(), *all_experts, *budgets]
                prepare = [partial(session.set_budget, budget) for budget in options]
                times = interleaved([steps] * len(options), self.repetitions, prepare)
                for budget, seconds in zip(options, times, strict=True):
                    session.set_budget("100%" if budget.is_off else budget)
                    session.reset_stats()
                    steps()
                    rows.append(
                        self._row(
                            "stock" if budget.is_off else WAYS[kernel],
                            budget,
                            batch=batch,
                            active_mean=session.stats().active_mean,
                            ms_per_step=1e3 * seconds / STEPS,
                            tokens_per_s=batch * STEPS / seconds,
                            ratio_to_dense=times[0] / seconds,
                        )
                    )
        return rows

    def parts(self, batch: int, budgets: Sequence[Budget]) -> list[dict[str, Any]]:
        """Selection and experts of one MoE layer, each through a kernel (with Metal) and through operations."""
        x = self._hidden(batch)
        metal = mx.metal.is_available()
        rows = []
        for budget in budgets:
            with base_budget(self.model, self.predictor, budget, Policy(kernels="off")):
                routed = [layer.block._base.routed(x) for layer in self.layers]
            ways: dict[str, tuple[Callable[..., Any], Callable[..., Any]]]
            ways = {"operations": (select_no_sync, weighted_experts)}
            if metal:
                kernels = import_module("backends.mlx.kernels")
                ways["kernel"] = kernels.select, kernels.experts
            runs: dict[str, Run] = {}
            for way, (select, experts) in ways.items():
                chosen = [select(**arguments) for arguments in routed]
                mx.eval([(own.ids, own.weights, own.active, own.lists) for own in chosen])
                runs[f"selection, {way}"] = partial(_selections, select, routed)
                runs[f"experts, {way}"] = partial(self._experts, experts, x, chosen)
            active = statistics.mean(int(own.active.sum().item()) for own in chosen)
            for name, seconds in zip(runs, interleaved(list(runs.values()), self.repetitions), strict=True):
                read = active * expert_bytes(self.layers[0]) if name.startswith("experts") else None
                rows.append(self._part(name, budget, batch, active, seconds, read))
        return rows

    def _hidden(self, batch: int) -> mx.array:
        """Rows [batch, 1, d] in the dtype that the experts take."""
        gate = self.layers[0].block[self.layers[0].family.experts].gate_proj
        x = mx.random.normal((batch, 1, self.layers[0].hidden_size), key=mx.random.key(batch))
        return x.astype(gate.scales.dtype if "scales" in gate else gate.weight.dtype)

    def _part(
        self,
        policy: str,
        budget: Budget | None,
        batch: int,
        experts: float,
        seconds: float,
        read: float | None,
        **more: Any,
    ) -> dict[str, Any]:
        """A row of what takes `seconds` in all layers and reads so many bytes in each."""
        each = seconds / len(self.layers)
        return self._row(
            policy,
            budget,
            batch=batch,
            active_mean=float(experts),
            us_per_layer=1e6 * each,
            gb_per_s=None if read is None else read / each / 1e9,
            roof_fraction=None if read is None else read / each / self.bytes_per_s,
            **more,
        )

    def _experts(
        self, function: Callable[..., mx.array], x: mx.array, chosen: Sequence[MlxSelection]
    ) -> list[mx.array]:
        return [
            function(
                layer.block[layer.family.experts],
                x,
                own.ids.reshape(*x.shape[:-1], -1),
                own.weights.reshape(*x.shape[:-1], -1),
                True,
                own.lists,
            )
            for layer, own in zip(self.layers, chosen, strict=True)
        ]

    def gathers(self, batch: int) -> list[dict[str, Any]]:
        """One stock gathered product of every layer, the same pairs spread over more and more experts."""
        first = self.layers[0]
        k, E = first.experts_per_token, first.num_experts
        pairs, rng = batch * k, np.random.default_rng(batch)
        x = self._hidden(batch)[:, :, None]
        runs: dict[tuple[int, bool], Run] = {}
        for n in (2**i for i in range(12)):
            if not k <= n <= min(E, pairs):
                continue
            ids = rng.permutation(E)[:n][np.arange(pairs) % n].astype(np.uint32)
            order = np.argsort(ids, kind="stable")
            runs[n, False] = partial(self._gather, x, mx.array(ids.reshape(batch, k)), False)
            runs[n, True] = partial(self._gather, x.flatten(0, 1)[mx.array(order // k)], mx.array(ids[order]), True)
        matrix = expert_bytes(first) / 3
        times = interleaved(list(runs.values()), self.repetitions)
        return [
            self._part("gather, sorted" if ordered else "gather", None, batch, n, seconds, n * matrix, pairs=pairs)
            for (n, ordered), seconds in zip(runs, times, strict=True)
        ]

    def _gather(self, x: mx.array, ids: mx.array, ordered: bool) -> list[mx.array]:
        gates = (layer.block[layer.family.experts].gate_proj for layer in self.layers)
        return [gate(x, ids, sorted_indices=ordered) for gate in gates]

    def graphs(self, batch: int, budget: Budget) -> list[dict[str, Any]]:
        """Graph nodes and launches of one MoE layer; the kernels' too, which are recorded without a device."""
        block, x = self.layers[-1].block, mx.zeros((batch, 1, self.layers[-1].hidden_size))
        counted = {"stock": graph_nodes(block, x)}
        kernels: tuple[Kernels, ...] = ("always", "off")
        for kernel in kernels:
            with base_budget(self.model, self.predictor, budget, Policy(kernels=kernel)):
                counted[WAYS[kernel]] = graph_nodes(block, x)
        return [
            self._row(
                policy,
                None if policy == "stock" else budget,
                batch=batch,
                graph_nodes=nodes.total(),
                launches=count_launches(nodes),
            )
            for policy, nodes in counted.items()
        ]


def _selections(select: Callable[..., MlxSelection], routed: Sequence[dict[str, Any]]) -> list[mx.array]:
    return [select(**arguments).weights for arguments in routed]


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "policy": ("", str),
    "budget": ("budget", str),
    "batch": ("batch", str),
    "pairs": ("pairs", str),
    "active_mean": ("experts", "{:.1f}".format),
    "ms_per_step": ("ms/step", "{:.2f}".format),
    "tokens_per_s": ("tokens/s", "{:.1f}".format),
    "ratio_to_dense": ("x stock", "{:.2f}".format),
    "us_per_layer": ("us/layer", "{:.1f}".format),
    "gb_per_s": ("GB/s", "{:.1f}".format),
    "roof_fraction": ("of copy", "{:.0%}".format),
    "graph_nodes": ("graph nodes", str),
    "launches": ("launches", str),
}


def to_cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A table of the columns that any of the rows has, its header first."""
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    body = [["-" if row.get(name) is None else COLUMNS[name][1](row[name]) for name in names] for row in rows]
    return [[COLUMNS[name][0] for name in names], *body]


def parse_batches(text: str) -> list[int]:
    """Comma-separated numbers of sequences.

    Raises:
        ValueError: something else.
    """
    try:
        batches = [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ValueError(f"--batches {text!r}: give numbers as {DEFAULT_BATCHES}") from error
    if not batches or min(batches) < 1:
        raise ValueError(f"--batches {text!r}: give numbers from 1 as {DEFAULT_BATCHES}")
    return batches


def parse_budgets(text: str, num_experts: int) -> list[Budget]:
    """Comma-separated budgets, each checked against the number of experts.

    Raises:
        ValueError: none, `off`, or one that does not fit.
    """
    budgets = [Budget.parse(part) for part in text.split(",") if part.strip()]
    if not budgets or any(budget.is_off for budget in budgets):
        raise ValueError(f"--budgets {text!r}: give some as {DEFAULT_BUDGETS}; stock is always measured")
    for budget in budgets:
        budget.limit(num_experts)
    return budgets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `base-moe bench --backend mlx`."""
    parser.add_argument("--model", metavar="PATH_OR_ID", help="measure this model instead of random weights")
    parser.add_argument(
        "--predictor", metavar="PATH_OR_ID", help="of the model (default: random, which costs the same)"
    )
    parser.add_argument(
        "--shape", choices=SHAPES, help=f"of random weights (default: {DEFAULT_SHAPE}, without a Metal device tiny)"
    )
    parser.add_argument("--layers", type=int, default=DEFAULT_LAYERS, help="of random weights (%(default)s)")
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), default=4, help="of random weights (%(default)s)")
    parser.add_argument("--batches", default=DEFAULT_BATCHES, help="sequences decoded together (%(default)s)")
    parser.add_argument("--budgets", help=f"comma-separated, as 10,16,12.5%% ({DEFAULT_BUDGETS})")
    parser.add_argument("--tables", default=",".join(TABLES), help="what to measure (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=DEFAULT_REPETITIONS, help="samples of each (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write rows, settings and versions")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables")


def run(args: argparse.Namespace) -> None:
    """Measures and prints, and writes the files.

    Raises:
        ValueError: options, model or predictor that do not fit.
    """
    for name in ("layers", "repetitions"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    batches = parse_batches(args.batches)
    for name in ("json", "markdown"):
        path = getattr(args, name)
        if path and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"--{name} {path!r}: its folder does not exist")
    wanted = [name.strip() for name in args.tables.split(",")]
    if not set(wanted) <= set(TABLES):
        raise ValueError(f"--tables {args.tables!r}: choose from {','.join(TABLES)}")
    metal = mx.metal.is_available()
    if not metal:
        print(NO_METAL)
    shape = args.shape or (DEFAULT_SHAPE if metal else "tiny")
    if args.model:
        source, args.predictor = resolve_model(args.model, args.predictor)
        model, name = load(source)[0], Path(source).name
    else:
        print(f"making {args.layers} layers of {shape}, {args.bits} bits")
        model, name = SHAPES[shape].build(args.layers, args.bits), f"{shape}, {args.layers} layers, {args.bits} bits"
    facts = describe(model)
    budgets = parse_budgets(args.budgets or (DEFAULT_BUDGETS if metal or args.model else "4,8"), facts["num_experts"])
    predictor = load_predictor(args.predictor) if args.predictor else random_predictor(**facts)
    bench = Bench(model, predictor, name, args.repetitions)

    device = mx.device_info().get("device_name", "unknown device")
    print(f"{name} on {device}; an elementwise copy moves {bench.bytes_per_s / 1e9:.1f} GB/s")
    several = [batch for batch in batches if batch > 1] or batches
    makers: dict[str, list[Run]] = {
        "steps": [partial(bench.decode, batch, budgets) for batch in batches],
        "parts": [partial(bench.parts, batch, budgets) for batch in batches],
        "gathers": [partial(bench.gathers, batch) for batch in several],
        "graphs": [partial(bench.graphs, batch, budgets[0]) for batch in several],
    }
    work = {TABLES[name]: makers[name] for name in wanted}
    tables: dict[str, list[dict[str, Any]]] = {}
    with tqdm(total=sum(map(len, work.values())), unit="table", leave=False) as progress:
        for title, parts in work.items():
            progress.set_postfix_str(title)
            tables[title] = []
            for part in parts:
                tables[title] += part()
                progress.update()
    for title, rows in tables.items():
        print(f"\n{title}\n{format_table(to_cells(rows))}")

    settings = {**vars(args), "model": name, "budgets": [str(b) for b in budgets], "metal": metal, "device": device}
    settings["copy_gb_per_s"] = bench.bytes_per_s / 1e9
    if args.json:
        write_report(args.json, [{"table": title, **row} for title, rows in tables.items() for row in rows], settings)
    if args.markdown:
        write_atomically(args.markdown, to_markdown(tables, settings).encode())


def to_markdown(tables: dict[str, list[dict[str, Any]]], settings: dict[str, Any]) -> str:
    """The tables with what they were measured on."""
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    parts = [
        "# base-moe bench --backend mlx",
        f"{settings['model']} on {settings['device']}; an elementwise copy moves {settings['copy_gb_per_s']:.1f} GB/s. "
        f"Medians of {settings['repetitions']} samples, variants in turn. {versions}.",
    ]
    if not settings["metal"]:
        parts.append(NO_METAL.removeprefix("[WARNING] ").capitalize())
    for title, rows in tables.items():
        parts += [f"## {title}", markdown_table(to_cells(rows))]
    return "\n\n".join(parts) + "\n"
