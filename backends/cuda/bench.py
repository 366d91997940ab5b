"""`base-moe bench`: MoE layers of a real model's width and random weights, decoding a batch, stock, dense and budgeted.

`--device cuda` goes to `backends.cuda.gpu_bench`, whose kernels and questions are others; here is the CPU's bench.
Weights and hidden rows are random, so routing is close to uniform and the native union is as large as it gets; real
text routes to fewer experts. Shared experts are left out: they cost the same in every row of the table.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig

from backends.cuda.command import require_triton, run_interpreted
from backends.cuda.cpu_linear import cpu_path
from backends.cuda.experts import EXPERTS_IMPLEMENTATION, INTERPRETED, register_experts
from backends.cuda.families import FAMILIES, find_moe_layers, fingerprint
from backends.cuda.integration import base_budget
from backends.cuda.rivals import Oea, Rule, Sere, XShare, rival
from backends.cuda.roof import bandwidth_probe, cached_seconds, seconds
from backends.cuda.shapes import SHAPES, Shape
from base_core import Budget, Predictor
from base_core.predictor import random_predictor
from base_core.report import format_table, report_row, write_report

DESCRIPTION = (
    "Time MoE layers of a model's true width, random weights, one decode step: stock, dense, under budgets, and "
    "rivals. On a GPU also a whole model of random weights."
)

DEFAULT_SHAPE = "qwen3-30b-a3b"
DEFAULT_PARTS = "layers,model,rivals"
DEFAULT_MINUTES = 6.0
DEFAULT_LAYERS = 2
DEFAULT_BATCH = 16
DEFAULT_BUDGETS = "10,16,32"
DEFAULT_DEVICE = "cpu"
DEFAULT_DTYPE = "bfloat16"
DEFAULT_REPETITIONS = 15
DEFAULT_SEED = 0
INPUTS = 4  # different batches, taken in turn
PROBES = 5  # reads of memory before the first step
WEIGHT_STD = 0.02
WARM_UP_SECONDS = 0.12
CONFIG_NAMES = {
    "deepseek_v2": ("n_routed_experts", "moe_intermediate_size"),
    "gpt_oss": ("num_local_experts", "intermediate_size"),
}
"""What a family's config calls E and I, where it is not as qwen3_moe's."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


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
        experts_name, width_name = CONFIG_NAMES.get(shape.model_type, ("num_experts", "moe_intermediate_size"))
        self.config = AutoConfig.for_model(
            shape.model_type,
            hidden_size=shape.hidden_size,
            num_experts_per_tok=shape.experts_per_token,
            num_hidden_layers=num_layers,
            **{experts_name: shape.num_experts, width_name: shape.expert_size},
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
    """One row of the table: `stock`, `dense` (our experts, native routing), `base` under a budget, or a rival."""

    policy: str
    budget: Budget | None = None
    rule: Rule | None = None
    setting: str | None = None

    @property
    def shown_budget(self) -> str | None:
        """The budget, or the rival's own number."""
        return self.setting if self.budget is None else str(self.budget)

    @property
    def label(self) -> str:
        """As the table names it."""
        return self.policy if self.shown_budget is None else f"{self.policy} {self.shown_budget}"

    @property
    def selects(self) -> bool:
        """Whether it chooses experts anew after the router."""
        return self.budget is not None or self.rule is not None

    @contextlib.contextmanager
    def applied(self, stack: RoutedStack, predictor: Predictor) -> Iterator[None]:
        """The stack runs as this variant inside the context."""
        stack.config._experts_implementation = "grouped_mm" if self.policy == "stock" else EXPERTS_IMPLEMENTATION
        if self.budget is not None:
            with base_budget(stack, predictor, self.budget):
                yield
        elif self.rule is not None:
            with rival(stack, self.rule):
                yield
        else:
            yield


def rival_variants(num_experts: int, budget: int) -> list[Variant]:
    """OEA and SERE at their most restricted and XShare at `budget`, for what their selection takes."""
    similarity = torch.rand(num_experts, num_experts)
    return [
        Variant("oea", rule=Oea(1), setting="k0=1"),
        Variant("sere", rule=Sere(1, similarity), setting="primary=1"),
        Variant("xshare", rule=XShare(budget, 1), setting=f"{budget}, k0=1"),
    ]


@dataclass(frozen=True)
class Limits:
    """What one layer's experts cannot be faster than on this machine.

    Attributes:
        counts: rows of every active expert, one list a layer and batch.
        reading_ms: its active experts at the measured read bandwidth.
        arithmetic_ms: the same products with weights that stay in the cache.
    """

    counts: list[list[int]]
    reading_ms: float
    arithmetic_ms: float

    @property
    def active(self) -> float:
        """Mean active experts."""
        return statistics.mean(map(len, self.counts))

    @property
    def bound_by(self) -> str:
        """The larger of the two."""
        return "reading" if self.reading_ms > self.arithmetic_ms else "arithmetic"


def predictor_for(model: Any, seed: int) -> Predictor:
    """A random predictor for a stack or model."""
    layers = find_moe_layers(model)
    return random_predictor(
        seed,
        model_type=model.config.model_type,
        layers=tuple(layer.index for layer in layers),
        num_experts=layers[0].num_experts,
        experts_per_token=layers[0].experts_per_token,
        hidden_size=layers[0].hidden_size,
        fingerprint=fingerprint(model),
    )


def rows_by_expert(model: nn.Module, step: Callable[[], object]) -> list[list[int]]:
    """How many rows each active expert of `model` runs during one `step`, one list a layer."""
    counts: list[list[int]] = []

    def count(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        _, ids, weights = args
        counts.append(ids[weights != 0].unique(return_counts=True)[1].tolist())

    hooks = [layer.experts.register_forward_pre_hook(count) for layer in find_moe_layers(model)]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    return counts


def find_limits(
    stack: RoutedStack,
    predictor: Predictor,
    variant: Variant,
    batches: Sequence[Tensor],
    shape: Shape,
    bytes_per_s: float,
) -> Limits:
    """Runs `variant` once on every batch to see its groups, and times the first of them on cached weights."""
    device, dtype = batches[0].device, batches[0].dtype
    with variant.applied(stack, predictor):
        counts = [layer for batch in batches for layer in rows_by_expert(stack, lambda: stack(batch))]  # noqa: B023
    expert_bytes = shape.expert_bytes(dtype)
    reading = statistics.mean(map(len, counts)) * expert_bytes / bytes_per_s
    arithmetic = cached_seconds(device, dtype, shape.hidden_size, counts[0]) * expert_bytes / dtype.itemsize
    return Limits(counts, reading * 1e3, arithmetic * 1e3)


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
    stack: RoutedStack,
    predictor: Predictor,
    variants: Sequence[Variant],
    batches: Sequence[Tensor],
    repetitions: int,
    probe: Callable[[], float],
) -> tuple[list[Samples], float]:
    """Steps every variant in turn on the same rows; the order rotates, so that none always follows the same one.

    Returns:
        What each variant took, and the median read bandwidth between the steps.
    """
    device = batches[0].device
    routers = [layer.router for layer in find_moe_layers(stack)]
    samples = [Samples([], [], []) for _ in variants]
    bandwidths = []
    for repetition in tqdm(range(repetitions), desc="steps", leave=False):
        batch = batches[repetition % len(batches)]
        bandwidths.append(probe())
        for shift in range(len(variants)):
            v = (repetition + shift) % len(variants)
            with variants[v].applied(stack, predictor):
                samples[v].active.append(statistics.mean(map(len, rows_by_expert(stack, lambda: stack(batch)))))  # noqa: B023
                warm_up(stack, batch, device)
                samples[v].seconds.append(seconds(lambda: stack(batch), device))  # noqa: B023
                samples[v].router_seconds.append(seconds(lambda: [r(batch) for r in routers], device))  # noqa: B023
    return samples, statistics.median(bandwidths)


def warm_up(stack: RoutedStack, batch: Tensor, device: torch.device) -> None:
    """Untimed steps: the threads of what puts a budget in force still spin during the first ones."""
    spent = 0.0
    while spent < WARM_UP_SECONDS:
        spent += seconds(lambda: stack(batch), device)


def to_rows(
    shape: Shape,
    batch: int,
    num_layers: int,
    dtype: torch.dtype,
    bytes_per_s: float,
    results: dict[Variant, Samples],
) -> list[dict[str, Any]]:
    """Report rows; times are medians over the steps."""
    dense = results[Variant("dense")]
    dense_seconds, dense_router = statistics.median(dense.seconds), statistics.median(dense.router_seconds)
    stock_seconds = statistics.median(results[Variant("stock")].seconds)
    rows = []
    for variant, samples in results.items():
        step = statistics.median(samples.seconds)
        rate = (
            shape.expert_bytes(dtype)
            * num_layers
            * statistics.median(a / s for a, s in zip(samples.active, samples.seconds, strict=True))
        )
        selection = None
        if variant.selects:
            selection = statistics.median(samples.router_seconds) - dense_router
        rows.append(
            report_row(
                model=shape.name,
                policy=variant.policy,
                budget=variant.shown_budget,
                batch=batch,
                active_mean=statistics.mean(samples.active),
                ms_per_step=step * 1e3,
                gb_per_s=rate / 1e9,
                roof_fraction=rate / bytes_per_s,
                ratio_to_dense=dense_seconds / step,
                ratio_to_stock=stock_seconds / step,
                layers=num_layers,
                ms_per_layer=step * 1e3 / num_layers,
                selection_ms_per_layer=None if selection is None else selection * 1e3 / num_layers,
                selection_share_of_dense=None if selection is None else selection / dense_seconds,
            )
        )
    return rows


def print_limits(batch: int, bytes_per_s: float, limits: dict[str, Limits], pair_flop: int) -> None:
    """Says whether reading or arithmetic bounds this machine, dense and under each budget."""
    body = [
        (
            label,
            f"{limit.active:.1f}",
            f"{limit.reading_ms:.2f}",
            f"{limit.arithmetic_ms:.2f}",
            f"{sum(limit.counts[0]) * pair_flop / limit.arithmetic_ms / 1e6:.0f}",
            limit.bound_by,
        )
        for label, limit in limits.items()
    ]
    print(f"This machine reads {bytes_per_s / 1e9:.1f} GB/s. What limits one layer's experts with {batch} rows:")
    print(format_table([("", "experts", "reading ms", "arithmetic ms", "GFLOP/s", "bound by"), *body]))
    dense = limits["dense"]
    floor = min(max(limit.reading_ms, limit.arithmetic_ms) for limit in limits.values())
    print(f"Dense decoding is bound by {dense.bound_by}.", end=" ")
    if dense.bound_by == "arithmetic":
        print("A budget gains little: every row runs as many experts as before.")
    else:
        print(f"These budgets can gain a factor of {dense.reading_ms / floor:.1f} at most.")
    if any(limit.bound_by == "arithmetic" for limit in limits.values()):
        print("Where arithmetic binds, reading still fewer experts gains nothing more.")


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
        "x stock",
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
            f"{row['ratio_to_stock']:.2f}",
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
    parser.add_argument(
        "--shape", help=f"{shapes}, or on a CPU DxIxExK as 2048x768x128x8 (CPU: {DEFAULT_SHAPE}; GPU: layers of all)"
    )
    parser.add_argument(
        "--batch", type=positive, help=f"rows in a step ({DEFAULT_BATCH}; on a GPU layers of 1 to 128 rows as well)"
    )
    parser.add_argument(
        "--budgets", help=f"comma-separated (CPU: {DEFAULT_BUDGETS}, also as 12.5%%; GPU: 4 to 32, numbers only)"
    )
    parser.add_argument("--device", default=DEFAULT_DEVICE, help="cpu or cuda (%(default)s)")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="of weights and rows (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write rows, settings and versions")
    cpu = parser.add_argument_group("on a CPU")
    cpu.add_argument("--layers", type=positive, default=DEFAULT_LAYERS, help="MoE layers in a step (%(default)s)")
    cpu.add_argument("--dtype", choices=DTYPES, default=DEFAULT_DTYPE, help="of the weights (%(default)s)")
    cpu.add_argument("--threads", type=positive, help="CPU threads (all)")
    cpu.add_argument(
        "--repetitions", type=positive, default=DEFAULT_REPETITIONS, help="steps of each variant (%(default)s)"
    )
    gpu = parser.add_argument_group("on a GPU")
    gpu.add_argument("--part", default=DEFAULT_PARTS, help="what to measure (%(default)s)")
    gpu.add_argument("--minutes", type=float, default=DEFAULT_MINUTES, help="stop timing after this long (%(default)s)")
    gpu.add_argument("--markdown", metavar="FILE", help="write the tables")
    gpu.add_argument("--plot", metavar="FILE", help="write the picture, PNG")
    gpu.add_argument(
        "--dry", action="store_true", help="no GPU: the same steps at toy size in the Triton interpreter, no times"
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints the roofline estimate and the tables, and writes the files asked for.

    Raises:
        ValueError: an unknown shape, device or budget, or no GPU.
    """
    if args.device not in ("cpu", "cuda"):
        raise ValueError(f"--device {args.device!r} is unknown: choose cpu or cuda")
    if args.dry and not INTERPRETED:
        return run_interpreted("backends.cuda.bench", args)
    if args.dry or args.device == "cuda":
        require_triton()
        from backends.cuda.gpu_bench import run_on_gpu

        run_on_gpu(args)
    else:
        _run_on_cpu(args)
    return 0


@torch.inference_mode()
def _run_on_cpu(args: argparse.Namespace) -> None:
    shape = Shape.parse(args.shape or DEFAULT_SHAPE)
    budgets = parse_budgets(DEFAULT_BUDGETS if args.budgets is None else args.budgets, shape.num_experts)
    batch = args.batch or DEFAULT_BATCH
    device, dtype = torch.device("cpu"), DTYPES[args.dtype]
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    register_experts()

    gigabytes = args.layers * shape.num_experts * shape.expert_bytes(dtype) / 1e9
    print(f"{shape.name}: {args.layers} layers, {gigabytes:.1f} GB of {args.dtype} experts on {device}; {batch} rows")
    stack = RoutedStack(shape, args.layers, dtype, device)
    predictor = predictor_for(stack, args.seed)
    batches = [torch.randn(batch, shape.hidden_size, dtype=dtype, device=device) for _ in range(INPUTS)]
    own = [Variant("stock"), Variant("dense"), *(Variant("base", budget) for budget in budgets)]
    variants = [*own, *rival_variants(shape.num_experts, budgets[0].limit(shape.num_experts))]

    probe = bandwidth_probe(device)
    bytes_per_s = statistics.median(probe() for _ in range(PROBES))
    limits = {v.label: find_limits(stack, predictor, v, batches, shape, bytes_per_s) for v in own[1:]}
    pair_flop = 2 * shape.expert_bytes(dtype) // dtype.itemsize
    print_limits(batch, bytes_per_s, limits, pair_flop)
    path = cpu_path()
    print(f"Experts run through: {path}; threads: {torch.get_num_threads()}\n")

    samples, bytes_per_s = measure(stack, predictor, variants, batches, args.repetitions, probe)
    rows = to_rows(shape, batch, args.layers, dtype, bytes_per_s, dict(zip(variants, samples, strict=True)))
    print_rows(rows)
    print(f"The roof is the median read bandwidth between the steps: {bytes_per_s / 1e9:.1f} GB/s.")
    if args.json:
        settings = {
            **{name: getattr(args, name) for name in ("layers", "device", "dtype", "repetitions", "seed")},
            "batch": batch,
            "budgets": [str(budget) for budget in budgets],
            "shape": asdict(shape),
            "threads": torch.get_num_threads(),
            "experts_path": path,
            "roof_gb_per_s": bytes_per_s / 1e9,
            "limits": {
                label: {"reading_ms": limit.reading_ms, "arithmetic_ms": limit.arithmetic_ms}
                for label, limit in limits.items()
            },
        }
        write_report(args.json, rows, settings)
