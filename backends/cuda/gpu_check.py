"""Everything that needs a GPU, in one command of at most six minutes: are the kernels right, race-free, and how fast?

    base-moe gpu-check --json gpu.json --markdown gpu.md --plot gpu.png
    base-moe gpu-check --dry            # the same steps at toy size, in the Triton interpreter on a CPU

Correctness is against float64 on inputs drawn afresh on every run; what follows is `base-moe bench --device cuda`.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from backends.cuda.command import command_line, require_triton, run_interpreted
from backends.cuda.experts import INTERPRETED
from backends.cuda.graphs import capture
from backends.cuda.shapes import SHAPES, Shape
from base_core.budget import Budget

if TYPE_CHECKING:
    from backends.cuda.gpu_layers import Layer

DESCRIPTION = "check the CUDA kernels against float64, look for races, and run the GPU bench (needs a GPU, or --dry)"
MODULE = "backends.cuda.gpu_check"
DEFAULT_MINUTES = 6.0
DEFAULT_SEED = 0
REPEATS = 5  # launches that must agree in every bit
SANITIZED_SHAPE = "qwen3-30b-a3b"
SANITIZER_SECONDS = 45.0  # for each tool
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
FRONT_ROWS = (16, 32, 40)  # one for every variant of the front


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags."""
    parser.add_argument("--dry", action="store_true", help="toy sizes in the Triton interpreter on the CPU; no times")
    parser.add_argument(
        "--minutes", type=float, default=DEFAULT_MINUTES, help="stop timing after this long (default %(default)s)"
    )
    parser.add_argument("--json", help="write the full results here")
    parser.add_argument("--markdown", help="write the tables here")
    parser.add_argument("--plot", help="write the picture here, PNG")
    parser.add_argument(
        "--step", choices=("all", "correctness", "launch", "warm"), default="all", help="only this part"
    )
    parser.add_argument("--shape", choices=list(SHAPES), help="only this shape")


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0 when everything that was checked is right.

    Raises:
        ValueError: no GPU, or no Triton.
    """
    require_triton()
    if args.dry and not INTERPRETED:
        return run_interpreted(MODULE, args)
    from backends.cuda.gpu_bench import gpu_device, measure
    from backends.cuda.gpu_layers import all_shapes
    from backends.cuda.gpu_report import Findings, check_line, gpu_settings, markdown, write_findings

    device = gpu_device(args.dry)
    deadline = time.monotonic() + args.minutes * 60
    shapes = [shape for shape in all_shapes(args.dry) if args.shape in (None, shape.name)]
    if args.step in ("launch", "warm"):
        for shape in shapes:
            _launch(shape, device, every_size=args.step == "warm")
        return 0
    findings = Findings(gpu_settings(device))
    if not args.dry and args.step == "all":
        _warm_in_parallel(shapes)
    print("correctness against float64", flush=True)
    for shape in shapes:
        for check in correctness(shape, device, dry=args.dry):
            findings.checks.append(check)
            print(check_line(check), flush=True)
    if args.step == "all":
        findings.sanitizer = dict.fromkeys(TOOLS, "dry") if args.dry else sanitize(deadline)
        print(", ".join(f"{tool}: {found}" for tool, found in findings.sanitizer.items()), flush=True)
        measure(
            findings, device, shapes=shapes, parts=("layers", "model"), batch=None, budgets=None,
            deadline=deadline, seed=DEFAULT_SEED,
        )  # fmt: skip
    print(markdown(findings))
    write_findings(findings, json=args.json, text=args.markdown, plot=args.plot)
    return 0 if findings.ok else 1


@torch.no_grad()
def correctness(shape: Shape, device: torch.device, *, dry: bool) -> Iterator[dict[str, Any]]:
    """Compares every kernel of one shape with float64."""
    from backends.cuda.gpu_layers import Layer

    dtypes = (torch.float32,) if dry else (torch.bfloat16, torch.float16)
    for dtype in dtypes:
        layer = Layer.random(shape, device, dtype)
        for T in (3,) if dry else (1, 5, 16, 33, 64):
            for budget in (2,) if dry else (2, 10, shape.num_experts):
                yield from _check_batch(shape, layer, T, budget, dtype)
    if not dry:
        yield _check_graph(shape, layer)


def _check_batch(shape: Shape, layer: Layer, T: int, budget: int, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    from backends.cuda.kernels.collect import collect, naive_collect
    from backends.cuda.kernels.experts import MAX_TILES, experts, naive_experts
    from backends.cuda.kernels.front import FrontState, budget_value, naive_front
    from backends.cuda.kernels.module import experts_layout

    def row(what: str, error: float, tolerance: float) -> dict[str, Any]:
        return {
            "what": what, "shape": shape.name, "batch": T, "budget": budget, "dtype": str(dtype).removeprefix("torch."),
            "error": error if math.isfinite(error) else sys.float_info.max, "tolerance": tolerance,
            "ok": bool(error <= tolerance),
        }  # fmt: skip

    device, E = layer.weight.device, shape.num_experts
    rows = torch.ones(T, dtype=torch.int32, device=device)
    state = FrontState.zeros(device)
    for _ in range(20):  # a draw where float32 could rightly decide otherwise than float64 proves nothing
        z = torch.randn(T, shape.hidden_size, device=device).to(dtype)
        exact = naive_front(
            z, layer.weight, layer.energy_bias, rows, Budget(experts=budget), shape.rule, router_bias=layer.router_bias
        )
        if _margin(exact, shape.experts_per_token, budget) > 1e-4:
            break
    out = layer.front(z, rows, budget_value(Budget(experts=budget), E, device), state, shape)
    repeats = [
        layer.front(z, rows, budget_value(Budget(experts=budget), E, device), state, shape) for _ in range(REPEATS)
    ]
    count = int(out.count)
    active = torch.zeros(E, dtype=torch.bool, device=device)
    active[out.active[:count].long()] = True
    yield row("front: logits", _relative(out.logits, exact.logits), 1e-5)
    yield row("front: rows with another choice", int((out.ids != exact.ids).any(1).sum()), 0)
    yield row("front: experts active elsewhere", int((active != exact.active).sum()), 0)
    if count == int(exact.active.sum()):
        yield row("front: combine weights", _relative(out.combine[:count], exact.combine[exact.active]), 1e-4)
    yield row("front: runs that differ in a bit", sum(not _same(out, again) for again in repeats), 0)
    if state.tickets.any():
        yield row("front: tickets left", int(state.tickets.abs().sum()), 0)

    collected = collect(out.ids, out.weights, E)
    where, combine = naive_collect(out.ids, out.weights, E)
    same = torch.equal(collected.active[: len(where)].long(), where) and int(collected.count) == len(where)
    yield row("collect: combine weights", _relative(collected.combine[: len(where)], combine) if same else math.inf, 0)

    tickets = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
    weights = (layer.experts.gate_up_proj, layer.experts.down_proj)
    args = (z, *weights, out.active, out.count, out.combine, tickets, experts_layout(layer.experts))
    y = experts(*args, **layer.biases)
    expected = naive_experts(z, *weights, out.ids, out.weights, experts_layout(layer.experts), **layer.biases)
    yield row("experts: output", _relative(y, expected), TOLERANCE[dtype])
    again = sum(not torch.equal(y, experts(*args, **layer.biases)) for _ in range(REPEATS))
    yield row("experts: runs that differ in a bit", again, 0)


def _margin(exact: Any, k: int, budget: int) -> float:
    """How far the nearest decision is from going the other way: relative for costs, absolute for logits."""

    def gap(values: Tensor, n: int) -> float:
        ranked = values.sort(dim=-1, descending=True).values
        if n >= values.shape[-1]:
            return math.inf
        edge = ranked[..., n - 1] - ranked[..., n]
        return float(torch.where(edge.isfinite(), edge, math.inf).min())

    logits = exact.logits
    inside = torch.where(exact.active, logits, -math.inf)
    cost = exact.cost.double()
    return min(
        gap(logits, k),
        gap(inside, k),
        gap(cost.clamp_min(1e-30).log(), budget) if int((cost > 0).sum()) > budget else math.inf,
    )


def _relative(found: Tensor, exact: Tensor) -> float:
    norm = float(exact.double().norm())
    return float((found.double() - exact.double()).norm()) / norm if norm else float(found.double().norm())


def _same(a: Any, b: Any) -> bool:
    count = int(a.count)
    return all(
        torch.equal(x[:count], y[:count]) if name == "combine" else torch.equal(x, y)
        for name, x, y in zip(a._fields, a, b, strict=True)
    )


def _check_graph(shape: Shape, layer: Layer) -> dict[str, Any]:
    """One captured layer, replayed on new inputs, rows and budgets, against the same launches outside a graph."""
    from backends.cuda.gpu_layers import one_layer
    from backends.cuda.kernels.front import FrontState, budget_value

    T, device, E = 16, layer.weight.device, shape.num_experts
    z = torch.randn(T, shape.hidden_size, device=device).to(layer.weight.dtype)
    rows = torch.ones(T, dtype=torch.int32, device=device)
    value, state = budget_value(Budget(experts=8), E, device), FrontState.zeros(device)
    step = one_layer(shape, layer, z, rows, value, state)
    graph, held = capture(step)
    differing = 0
    for budget in (4, 10, 16, E):
        z.copy_(torch.randn_like(z))
        rows[budget % T] = 0
        value.copy_(budget_value(Budget(experts=budget), E))
        graph.replay()
        differing += not torch.equal(held, step())
    return {
        "what": "graph: replays that differ", "shape": shape.name, "batch": T, "budget": "several",
        "dtype": str(layer.weight.dtype).removeprefix("torch."), "error": differing, "tolerance": 0,
        "ok": differing == 0,
    }  # fmt: skip


TOOLS = ("racecheck", "memcheck")


def sanitize(deadline: float) -> dict[str, str]:
    """Runs one launch of every front variant under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    found = {}
    step = command_line(MODULE, Namespace(step="launch", shape=SANITIZED_SHAPE))
    for check in TOOLS:
        if tool is None:
            found[check] = "absent"
            continue
        command = [tool, "--tool", check, "--error-exitcode", "9", *step]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        seconds = min(SANITIZER_SECONDS, max(10.0, deadline - time.monotonic()))
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            found[check] = f"not finished in {seconds:.0f} s"
            continue
        found[check] = "clean" if done.returncode == 0 else (done.stdout + done.stderr)[-1000:]
    return found


@torch.no_grad()
def _launch(shape: Shape, device: torch.device, *, every_size: bool) -> None:
    """Launches every front variant once, or every variant of a layer (which fills the compiler's cache)."""
    from backends.cuda.gpu_layers import Layer, one_layer
    from backends.cuda.kernels.collect import collect
    from backends.cuda.kernels.front import FrontState, budget_value

    dtypes = [torch.float32] if device.type == "cpu" else [torch.bfloat16, torch.float16][: 1 + every_size]
    for dtype in dtypes:
        layer = Layer.random(shape if every_size else replace(shape, expert_size=16), device, dtype)
        state, value = FrontState.zeros(device), budget_value(Budget(experts=4), shape.num_experts, device)
        for T in FRONT_ROWS:
            z = torch.randn(T, shape.hidden_size, device=device, dtype=dtype)
            rows = torch.ones(T, dtype=torch.int32, device=device)
            out = layer.front(z, rows, value, state, shape)
            if every_size:
                one_layer(shape, layer, z, rows, value, state)()
                collect(out.ids, out.weights, shape.num_experts)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _warm_in_parallel(shapes: list[Shape]) -> None:
    """Compiles all shapes at once in processes of their own, for the compiler works on one processor."""
    print("compiling", flush=True)
    commands = [command_line(MODULE, Namespace(step="warm", shape=shape.name)) for shape in shapes]
    for process in [subprocess.Popen(command) for command in commands]:
        process.wait()
