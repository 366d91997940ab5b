"""`base-moe bench --device cuda`: the layer table, the whole model, and rivals at equal active experts.

With `--dry` everything runs at toy size in the Triton interpreter on a CPU, and no time is taken.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch

from backends.cuda.gpu_layers import BATCHES, BUDGETS, DRY_BATCHES, DRY_BUDGETS, all_shapes, bench_layers
from backends.cuda.gpu_model import bench_model
from backends.cuda.gpu_report import Findings, gpu_settings, markdown, write_findings
from backends.cuda.graphs import copy_bandwidth
from backends.cuda.shapes import Shape
from base_core import Budget
from base_core.report import format_table

MODEL_SECONDS = 110
"""Kept for the whole model, from what the layers may take."""
DEFAULT_BATCH = 16
DRY_MODEL_BUDGETS = (4, 6, 8)


def run_on_gpu(args: argparse.Namespace) -> None:
    """The command, with the arguments of `backends.cuda.bench`.

    Raises:
        ValueError: no GPU, an unknown shape, or budgets that are no numbers.
    """
    device = gpu_device(args.dry)
    shapes = [shape for shape in all_shapes(args.dry) if args.shape in (None, shape.name)]
    if not shapes:
        names = ", ".join(shape.name for shape in all_shapes(args.dry))
        raise ValueError(f"shape {args.shape!r} is not among {names}: choose one of them, or leave --shape out")
    findings = Findings(gpu_settings(device, batch=args.batch or DEFAULT_BATCH, seed=args.seed))
    measure(
        findings,
        device,
        shapes=shapes,
        parts=args.part.split(","),
        batch=args.batch,
        budgets=None if args.budgets is None else _numbers(args.budgets),
        deadline=time.monotonic() + 60 * args.minutes,
        seed=args.seed,
    )
    print(markdown(findings))
    write_findings(findings, json=args.json, text=args.markdown, plot=args.plot)


def gpu_device(dry: bool) -> torch.device:
    """The GPU, or the CPU for a dry run.

    Raises:
        ValueError: there is no GPU.
    """
    if not dry and not torch.cuda.is_available():
        raise ValueError("no GPU here: the kernels are not yet measured. --dry runs the same steps in the interpreter")
    return torch.device("cpu" if dry else "cuda")


def measure(
    findings: Findings,
    device: torch.device,
    *,
    shapes: Sequence[Shape],
    parts: Sequence[str],
    batch: int | None,
    budgets: Sequence[int] | None,
    deadline: float,
    seed: int,
) -> None:
    """Adds the parts asked for to `findings`. A CPU stands for a dry run.

    Args:
        parts: `layers`, `model`, `rivals`; the last one implies the model.
        batch: of both; None takes every batch for the layers and 16 for the model.
        budgets: numbers of experts; None takes the default ones.
        deadline: of `time.monotonic`.

    Raises:
        ValueError: an unknown part.
    """
    unknown = set(parts) - {"layers", "model", "rivals"}
    if unknown:
        raise ValueError(f"--part {', '.join(sorted(unknown))} is unknown: choose of layers, model, rivals")
    dry = device.type == "cpu"
    torch.manual_seed(seed)
    roof = None if dry else copy_bandwidth(device)
    findings.settings["experts path"] = "triton"
    findings.settings["copy bandwidth GB/s"] = None if roof is None else round(roof / 1e9)
    print(roofline_text(shapes, batch or DEFAULT_BATCH, budgets or BUDGETS, roof), flush=True)
    with_model = "model" in parts or "rivals" in parts
    if "layers" in parts:
        batches = (batch,) if batch else DRY_BATCHES if dry else BATCHES
        limits = budgets or (DRY_BUDGETS if dry else BUDGETS)
        until = deadline - MODEL_SECONDS if with_model and not dry else deadline
        findings.layers, left_out = bench_layers(shapes, batches, limits, device, roof, until)
        findings.skipped += left_out
    if with_model:
        limits = budgets or (DRY_MODEL_BUDGETS if dry else BUDGETS)
        try:
            findings.model = bench_model(
                batch or DEFAULT_BATCH, limits, device, roof, rivals="rivals" in parts, seed=seed
            )
        except RuntimeError as error:  # CUDA's own errors; what was measured before is worth keeping
            if dry:
                raise
            findings.skipped.append(f"the whole model ({error})")


def roofline_text(shapes: Sequence[Shape], batch: int, budgets: Sequence[int], roof: float | None) -> str:
    """What reading alone takes, dense and under each budget, before anything is timed."""
    said = "copy bandwidth: not yet measured" if roof is None else f"This GPU copies {roof / 1e9:.0f} GB/s"
    lines = [f"{said}. What one layer's experts have to read with {batch} rows that route evenly:"]
    rows = [("", "M", "experts", "MB", "us at least")]
    for shape in shapes:
        E, k, _, _ = shape.widths
        union = E * (1 - (1 - k / E) ** batch)
        for budget in (None, *(b for b in budgets if b < union)):
            active = union if budget is None else budget
            read = active * shape.expert_bytes(torch.bfloat16)
            least = "-" if roof is None else f"{read / roof * 1e6:.1f}"
            rows.append((shape.name, str(budget or "dense"), f"{active:.1f}", f"{read / 1e6:.1f}", least))
    return "\n".join([*lines, format_table(rows)])


def _numbers(text: str) -> list[int]:
    limits = [Budget.parse(part) for part in text.split(",") if part.strip()]
    if len(limits) < 2 or any(limit != Budget(experts=limit.experts) or limit.is_off for limit in limits):
        raise ValueError(f"--budgets {text!r}: give two or more numbers on a GPU, as 4,8,16; a line is fitted to them")
    return [limit.experts for limit in limits if limit.experts]
