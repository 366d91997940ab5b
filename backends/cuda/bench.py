"""`base-moe bench`: MoE layers of a real model's width and random weights, decoding a batch, stock, dense and budgeted.

Weights and hidden rows are random, so routing is close to uniform and the native union is as large as it gets; real
text routes to fewer experts. Shared experts are left out: they cost the same in every row of the table.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig

from backends.cuda.cpu_linear import cpu_path
from backends.cuda.experts import EXPERTS_IMPLEMENTATION, register_experts
from backends.cuda.families import FAMILIES, find_moe_layers, fingerprint
from backends.cuda.integration import base_budget
from backends.cuda.roof import arithmetic_rate, read_bandwidth, seconds
from base_core import Budget, Card, LayerPredictor, Predictor
from base_core.report import format_table, report_row, write_report

DESCRIPTION = (
    "Time MoE layers of a model's true width, random weights, one decode step: stock, dense, and under budgets."
)

DEFAULT_SHAPE = "qwen3-30b-a3b"
DEFAULT_LAYERS = 2
DEFAULT_BATCH = 16
DEFAULT_BUDGETS = "10,16,32"
DEFAULT_DEVICE = "cpu"
DEFAULT_DTYPE = "bfloat16"
DEFAULT_REPETITIONS = 15
DEFAULT_SEED = 0
INPUTS = 4  # different batches, taken in turn
WEIGHT_STD = 0.02
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """Routed experts of one MoE layer.

    Attributes:
        name: as on the command line.
        model_type: the transformers family whose router and experts are built.
        hidden_size, expert_size, num_experts, experts_per_token: d, I, E, k.
    """

    name: str
    model_type: str
    hidden_size: int
    expert_size: int
    num_experts: int
    experts_per_token: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """A known model's name, or `DxIxExK`: hidden size, expert width, experts, experts per token.

        Raises:
            ValueError: neither, or a width of zero, or more experts per token than experts.
        """
        if text in SHAPES:
            return SHAPES[text]
        if not re.fullmatch(r"\d+x\d+x\d+x\d+", text):
            raise ValueError(
                f"shape {text!r} is unknown: give one of {', '.join(SHAPES)}, or DxIxExK as 2048x768x128x8"
            )
        widths = [int(part) for part in text.split("x")]
        if min(widths) < 1 or widths[3] > widths[2]:
            raise ValueError(f"shape {text!r}: D, I, E and K are at least 1, and K at most E")
        return cls(text, "qwen3_moe", *widths)

    def expert_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one expert's three matrices."""
        return 3 * self.hidden_size * self.expert_size * dtype.itemsize


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", "qwen3_moe", 2048, 768, 128, 8),
        Shape("qwen1.5-moe", "qwen2_moe", 2048, 1408, 60, 4),
        Shape("deepseek-v2-lite", "deepseek_v2", 2048, 1408, 64, 6),
    )
}


class RoutedBlock(nn.Module):
    """A family's own router and experts, wired as in its MoE block, without shared experts."""

    def __init__(self, config: Any, router: type[nn.Module], experts: type[nn.Module]) -> None:
        super().__init__()
        self.gate = router(config)
        self.experts = experts(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[T, d] to [T, d]."""
        _, weights, ids = self.gate(hidden_states)
        return self.experts(hidden_states, ids, weights)


class RoutedStack(nn.Module):
    """MoE layers alone. Every layer sees the same hidden rows: stacked without norms they would not stay in range."""

    def __init__(self, shape: Shape, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        family = next(family for family in FAMILIES if family.model_type == shape.model_type)
        modeling = importlib.import_module(f"transformers.models.{shape.model_type}.modeling_{shape.model_type}")
        self.config = AutoConfig.for_model(
            shape.model_type,
            hidden_size=shape.hidden_size,
            moe_intermediate_size=shape.expert_size,
            num_experts_per_tok=shape.experts_per_token,
            num_hidden_layers=num_layers,
            **{"n_routed_experts" if shape.model_type == "deepseek_v2" else "num_experts": shape.num_experts},
        )
        router, experts = getattr(modeling, family.router), getattr(modeling, family.experts)
        with torch.device("meta"):
            self.layers = nn.ModuleList(RoutedBlock(self.config, router, experts) for _ in range(num_layers))
        self.to(dtype).to_empty(device=device).requires_grad_(False)
        for parameter in tqdm(list(self.parameters()), desc="random weights", unit="matrix", leave=False):
            parameter.normal_(std=WEIGHT_STD)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[T, d] to [T, d], the sum over the layers."""
        return torch.stack([layer(hidden_states) for layer in self.layers]).sum(0)


@dataclass(frozen=True)
class Variant:
    """One row of the table: `stock`, `dense` (our experts, native routing) or `base` under a budget."""

    policy: str
    budget: Budget | None = None

    @property
    def label(self) -> str:
        """As the table names it."""
        return self.policy if self.budget is None else f"{self.policy} {self.budget}"

    @contextlib.contextmanager
    def applied(self, stack: RoutedStack, predictor: Predictor) -> Iterator[None]:
        """The stack runs as this variant inside the context."""
        stack.config._experts_implementation = "grouped_mm" if self.policy == "stock" else EXPERTS_IMPLEMENTATION
        if self.budget is None:
            yield
        else:
            with base_budget(stack, predictor, self.budget):
                yield


@dataclass(frozen=True)
class Roof:
    """The machine's limits, and what they allow this layer.

    Attributes:
        bytes_per_s: read bandwidth.
        flops: arithmetic rate with the weights in the cache, by rows an expert.
    """

    bytes_per_s: float
    flops: dict[int, float]

    def estimate_ms(self, active: float, pairs: int, expert_bytes: int, expert_size: int) -> tuple[float, float]:
        """Lower limits of one layer from reading and from arithmetic, for `pairs` row-expert pairs on `active` experts."""
        rows = min(self.flops, key=lambda n: abs(n - pairs / active))
        return active * expert_bytes / self.bytes_per_s * 1e3, 2 * pairs * expert_size / self.flops[rows] * 1e3


def random_predictor(stack: RoutedStack, seed: int) -> Predictor:
    """A predictor of the stack's shape and fingerprint whose log-energies spread by about 1."""
    layers = find_moe_layers(stack)
    E, k, d = layers[0].num_experts, layers[0].experts_per_token, layers[0].hidden_size
    generator = np.random.default_rng(seed)
    card = Card("random", stack.config.model_type, tuple(layer.index for layer in layers), E, k, d, fingerprint(stack))
    fits = {
        i: LayerPredictor(
            generator.standard_normal((E, d), np.float32),
            generator.standard_normal(E, np.float32),
            np.ones(E, np.float32),
        )
        for i in card.layers
    }
    return Predictor(card, fits)


def active_experts(stack: RoutedStack, hidden_states: Tensor) -> float:
    """Distinct experts a layer runs for these rows, mean over the layers."""
    counts: list[int] = []

    def count(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        _, ids, weights = args
        counts.append(len(ids[weights != 0].unique()))

    hooks = [layer.experts.register_forward_pre_hook(count) for layer in find_moe_layers(stack)]
    try:
        stack(hidden_states)
    finally:
        for hook in hooks:
            hook.remove()
    return statistics.mean(counts)


@dataclass
class Samples:
    """What was measured of one variant, one entry a step.

    Attributes:
        active: mean active experts a layer.
        seconds: of the step, all layers.
        router_seconds: of the layers' routers alone, selection included.
    """

    active: list[float]
    seconds: list[float]
    router_seconds: list[float]


def measure(
    stack: RoutedStack, predictor: Predictor, variants: Sequence[Variant], batches: Sequence[Tensor], repetitions: int
) -> list[Samples]:
    """Steps every variant in turn on the same rows; the order rotates, so that none always follows the same one."""
    device = batches[0].device
    routers = [layer.router for layer in find_moe_layers(stack)]
    samples = [Samples([], [], []) for _ in variants]
    active: dict[tuple[int, int], float] = {}
    for repetition in tqdm(range(repetitions), desc="steps", leave=False):
        batch = batches[repetition % len(batches)]
        for shift in range(len(variants)):
            v = (repetition + shift) % len(variants)
            with variants[v].applied(stack, predictor):
                key = (v, repetition % len(batches))
                if key not in active:
                    active[key] = active_experts(stack, batch)  # warms up as well
                samples[v].active.append(active[key])
                samples[v].seconds.append(seconds(lambda: stack(batch), device))  # noqa: B023
                samples[v].router_seconds.append(seconds(lambda: [r(batch) for r in routers], device))  # noqa: B023
    return samples


def to_rows(
    shape: Shape, batch: int, num_layers: int, dtype: torch.dtype, roof: Roof, results: dict[Variant, Samples]
) -> list[dict[str, Any]]:
    """Report rows; times are medians over the steps."""
    dense = results[Variant("dense")]
    dense_seconds, dense_router = statistics.median(dense.seconds), statistics.median(dense.router_seconds)
    rows = []
    for variant, samples in results.items():
        step = statistics.median(samples.seconds)
        rate = (
            shape.expert_bytes(dtype)
            * num_layers
            * statistics.median(a / s for a, s in zip(samples.active, samples.seconds, strict=True))
        )
        selection = None
        if variant.budget is not None:
            selection = statistics.median(samples.router_seconds) - dense_router
        rows.append(
            report_row(
                model=shape.name,
                policy=variant.policy,
                budget=None if variant.budget is None else str(variant.budget),
                batch=batch,
                active_mean=statistics.mean(samples.active),
                ms_per_step=step * 1e3,
                gb_per_s=rate / 1e9,
                roof_fraction=rate / roof.bytes_per_s,
                ratio_to_dense=dense_seconds / step,
                layers=num_layers,
                ms_per_layer=step * 1e3 / num_layers,
                selection_ms_per_layer=None if selection is None else selection * 1e3 / num_layers,
                selection_share_of_dense=None if selection is None else selection / dense_seconds,
            )
        )
    return rows


def print_roof(shape: Shape, roof: Roof, batch: int, unions: dict[str, float], dtype: torch.dtype) -> None:
    """Says whether reading or arithmetic bounds this machine, dense and under each budget."""
    rates = ", ".join(f"{rate / 1e9:.0f} with {n} rows an expert" for n, rate in sorted(roof.flops.items()))
    print(f"This machine reads {roof.bytes_per_s / 1e9:.1f} GB/s and computes, from the cache, in GFLOP/s: {rates}.")
    pairs = batch * shape.experts_per_token
    parameters = 3 * shape.hidden_size * shape.expert_size
    limits = {
        name: roof.estimate_ms(active, pairs, shape.expert_bytes(dtype), parameters) for name, active in unions.items()
    }
    body = [
        (name, f"{unions[name]:.1f}", f"{read:.2f}", f"{work:.2f}", "reading" if read > work else "arithmetic")
        for name, (read, work) in limits.items()
    ]
    print(f"Limits of one layer, {batch} rows:")
    print(format_table([("", "experts", "reading ms", "arithmetic ms", "bound by"), *body]))
    read, work = limits["dense"]
    if read > work:
        print(f"Dense decoding is bandwidth-bound: fewer experts can make it up to {read / work:.1f} times faster.")
    else:
        print(
            "Dense decoding is compute-bound here: every row runs as many experts as before, so a budget gains little."
        )


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """The table on the terminal."""
    header = (
        "policy",
        "budget",
        "experts",
        "ms/layer",
        "ms/step",
        "GB/s",
        "roof",
        "x dense",
        "selection ms",
        "of dense",
    )
    body = [
        (
            row["policy"],
            row["budget"] or "-",
            f"{row['active_mean']:.1f}",
            f"{row['ms_per_layer']:.2f}",
            f"{row['ms_per_step']:.2f}",
            f"{row['gb_per_s']:.1f}",
            f"{100 * row['roof_fraction']:.0f} %",
            f"{row['ratio_to_dense']:.2f}",
            "-" if row["selection_ms_per_layer"] is None else f"{row['selection_ms_per_layer']:.2f}",
            "-" if row["selection_share_of_dense"] is None else f"{100 * row['selection_share_of_dense']:.1f} %",
        )
        for row in rows
    ]
    print(format_table([header, *body]))


def parse_budgets(text: str, num_experts: int) -> list[Budget]:
    """Comma-separated budgets, each checked against the number of experts.

    Raises:
        ValueError: no budget in it, `off`, or one that does not fit.
    """
    budgets = [Budget.parse(part) for part in text.split(",") if part.strip()]
    if not budgets or any(budget.is_off for budget in budgets):
        raise ValueError(
            f"--budgets {text!r}: give numbers or percentages as {DEFAULT_BUDGETS}; dense is always measured"
        )
    for budget in budgets:
        budget.limit(num_experts)
    return budgets


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `base-moe bench`."""
    shapes = ", ".join(SHAPES)
    parser.add_argument("--shape", default=DEFAULT_SHAPE, help=f"{shapes}, or DxIxExK as 2048x768x128x8 (%(default)s)")
    parser.add_argument("--layers", type=positive, default=DEFAULT_LAYERS, help="MoE layers in a step (%(default)s)")
    parser.add_argument("--batch", type=positive, default=DEFAULT_BATCH, help="rows in a step (%(default)s)")
    parser.add_argument("--budgets", default=DEFAULT_BUDGETS, help="comma-separated, as 10,16,12.5%% (%(default)s)")
    parser.add_argument("--device", default=DEFAULT_DEVICE, help="cpu or cuda (%(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default=DEFAULT_DTYPE, help="of the weights (%(default)s)")
    parser.add_argument("--threads", type=positive, help="CPU threads (all)")
    parser.add_argument(
        "--repetitions", type=positive, default=DEFAULT_REPETITIONS, help="steps of each variant (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="of weights and rows (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write rows, settings and versions")


@torch.inference_mode()
def run(args: argparse.Namespace) -> None:
    """Measures, prints the roofline estimate and the table, and writes the JSON file.

    Raises:
        ValueError: an unknown shape, or a budget that does not fit it.
    """
    shape = Shape.parse(args.shape)
    budgets = parse_budgets(args.budgets, shape.num_experts)
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    register_experts()

    gigabytes = args.layers * shape.num_experts * shape.expert_bytes(dtype) / 1e9
    print(
        f"{shape.name}: {args.layers} layers, {gigabytes:.1f} GB of {args.dtype} experts, {args.batch} rows, on {device}"
    )
    stack = RoutedStack(shape, args.layers, dtype, device)
    predictor = random_predictor(stack, args.seed)
    batches = [torch.randn(args.batch, shape.hidden_size, dtype=dtype, device=device) for _ in range(INPUTS)]
    variants = [Variant("stock"), Variant("dense"), *(Variant("base", budget) for budget in budgets)]

    unions = {}
    for variant in variants[1:]:
        with variant.applied(stack, predictor):
            unions[variant.label] = statistics.mean(active_experts(stack, batch) for batch in batches)
    pairs = args.batch * shape.experts_per_token
    rows_per_expert = sorted({max(1, round(pairs / union)) for union in unions.values()})
    rates = {n: arithmetic_rate(device, dtype, shape.hidden_size, n) for n in rows_per_expert}
    roof = Roof(read_bandwidth(device), rates)
    print_roof(shape, roof, args.batch, unions, dtype)
    path = cpu_path() if device.type == "cpu" else "grouped_mm"
    print(f"Experts run through: {path}; threads: {torch.get_num_threads()}\n")

    samples = measure(stack, predictor, variants, batches, args.repetitions)
    rows = to_rows(shape, args.batch, args.layers, dtype, roof, dict(zip(variants, samples, strict=True)))
    print_rows(rows)
    if args.json:
        settings = {
            **{name: getattr(args, name) for name in ("layers", "batch", "device", "dtype", "repetitions", "seed")},
            "budgets": [str(budget) for budget in budgets],
            "shape": asdict(shape),
            "threads": torch.get_num_threads(),
            "experts_path": path,
            "roof_gb_per_s": roof.bytes_per_s / 1e9,
            "gflops_by_rows_per_expert": {str(n): rate / 1e9 for n, rate in roof.flops.items()},
        }
        write_report(args.json, rows, settings)
