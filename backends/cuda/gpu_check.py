"""Everything that needs a GPU, in one command of at most six minutes: are the kernels right, race-free, and how fast?

    python -m backends.cuda.gpu_check --json gpu.json --markdown gpu.md
    python -m backends.cuda.gpu_check --dry            # the same steps at toy size, in the Triton interpreter on a CPU

Correctness is against float64 on inputs drawn afresh on every run. Times come from CUDA graphs that hold several layers
of different weights, so that no cache holds what a step reads. The dry run's times mean nothing and are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from base_core.budget import Budget
from base_core.routing import RouterRule

DESCRIPTION = "check the CUDA kernels against float64, look for races, and time a layer (needs a GPU, or --dry)"
DEFAULT_MINUTES = 6.0
BUDGETS = (4, 8, 10, 12, 16, 20, 24, 32)
BATCHES = (16, 1, 2, 4, 8, 32, 64, 128)
EXPERTS_ROWS = 64
BATCHED_MM_ROWS = 16
REPEATS = 5  # launches that must agree in every bit
TARGETS = (
    "front at most 7 us a layer at 16 rows; gate_up and down at least 80 % of the measured copy bandwidth at 16 rows "
    "with M=16 and with M=10; selection at most 2 % of a step; R^2 of t(M) at least 0.99"
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Shape(NamedTuple):
    """One MoE layer: E experts, k a row, width H, expert width I."""

    name: str
    E: int
    k: int
    H: int
    I: int  # noqa: E741
    gpt_oss: bool = False

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights at 2 bytes each."""
        return 3 * self.H * self.I * 2

    @property
    def rule(self) -> RouterRule:
        """The router's rule."""
        return RouterRule(self.k, normalise="softmax_selected" if self.gpt_oss else "selected")


SHAPES = (
    Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
    Shape("qwen1.5-moe", 60, 4, 2048, 1408),
    Shape("deepseek-v2-lite", 64, 6, 2048, 1408),
    Shape("gpt-oss-120b", 128, 4, 2880, 2880, gpt_oss=True),
)
DRY_SHAPES = (Shape("toy", 12, 4, 64, 48), Shape("toy-gpt-oss", 8, 2, 72, 40, gpt_oss=True))


@dataclass
class Report:
    """What the run found; becomes the JSON and the Markdown.

    Attributes:
        settings: hardware, versions, arguments.
        checks: one row per comparison: what, shape, batch, budget, error, tolerance, ok.
        sanitizer: tool -> clean, absent, or what it said.
        rows: one per shape, batch and budget timed.
        skipped: what the time did not suffice for.
    """

    settings: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)
    sanitizer: dict[str, str] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing is wrong. An absent sanitizer is not a fault."""
        return all(c["ok"] for c in self.checks) and all(
            s in ("clean", "absent", "dry") for s in self.sanitizer.values()
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's flags."""
    parser.add_argument("--dry", action="store_true", help="toy sizes in the Triton interpreter on the CPU; no times")
    parser.add_argument(
        "--minutes", type=float, default=DEFAULT_MINUTES, help="stop timing after this long (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the full results here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument(
        "--step", choices=("all", "correctness", "bench", "launch", "warm"), default="all", help="only this part"
    )
    parser.add_argument("--shape", choices=[s.name for s in SHAPES], help="only this shape")


def run(args: argparse.Namespace) -> int:
    """Runs the command; 0 when everything that was checked is right."""
    if args.dry and os.environ.get("TRITON_INTERPRET") != "1":
        return _again(args, {"TRITON_INTERPRET": "1"})
    if not args.dry and not torch.cuda.is_available():
        print(
            "no GPU here: the kernels are not yet measured. --dry runs the same steps in the interpreter.",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu" if args.dry else "cuda")
    shapes = [s for s in (DRY_SHAPES if args.dry else SHAPES) if args.shape in (None, s.name)]
    deadline = time.monotonic() + args.minutes * 60
    report = Report(_settings(args, device))
    if args.step in ("launch", "warm"):
        for shape in shapes:
            _launch(shape, device, every_size=args.step == "warm")
        return 0
    if not args.dry and args.step == "all":
        _warm_in_parallel(shapes)
    if args.step in ("all", "correctness"):
        print("correctness against float64", flush=True)
        for shape in shapes:
            for check in correctness(shape, device, dry=args.dry):
                report.checks.append(check)
                print(_check_line(check), flush=True)
    if args.step == "all":
        report.sanitizer = {"racecheck": "dry", "memcheck": "dry"} if args.dry else sanitize(deadline)
        print(", ".join(f"{tool}: {found}" for tool, found in report.sanitizer.items()), flush=True)
    if args.step in ("all", "bench"):
        bench(report, shapes, device, deadline, dry=args.dry)
    text = markdown(report)
    print(text)
    if args.json:
        args.json.write_text(
            json.dumps({**asdict(report), "ok": report.ok}, indent=2, default=str) + "\n", encoding="utf-8"
        )
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")
    return 0 if report.ok else 1


def _again(args: argparse.Namespace, environment: dict[str, str]) -> int:
    command = [sys.executable, "-m", "backends.cuda.gpu_check", "--minutes", str(args.minutes), "--step", args.step]
    command += ["--dry"] if args.dry else []
    for name in ("json", "markdown", "shape"):
        command += [f"--{name}", str(getattr(args, name))] if getattr(args, name) else []
    return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode


def _settings(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    import transformers
    import triton

    settings = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dry": args.dry,
        "device": "Triton interpreter on a CPU: no figure here is a GPU's"
        if args.dry
        else torch.cuda.get_device_name(device),
    }
    if device.type == "cuda":
        query = [
            "nvidia-smi",
            "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit",
            "--format=csv,noheader",
        ]
        if shutil.which("nvidia-smi"):
            settings["driver, clocks, power"] = subprocess.run(
                query, capture_output=True, text=True, check=False
            ).stdout.strip()
        settings["cuda"] = torch.version.cuda
        settings["multiprocessors"] = torch.cuda.get_device_properties(device).multi_processor_count
    return settings


# Correctness


@dataclass
class Layer:
    """One layer's weights on the device: `[router; predictor]`, intercepts and the experts module of transformers."""

    weight: Tensor
    energy_bias: Tensor
    router_bias: Tensor | None
    experts: Any

    @classmethod
    def random(cls, shape: Shape, device: torch.device, dtype: torch.dtype) -> Layer:
        """Random weights of true size; logits and log-energies have a spread of about 1."""
        weight = torch.randn(2 * shape.E, shape.H, device=device)
        weight[: shape.E] *= shape.H**-0.5
        bias = torch.randn(shape.E, device=device)
        router_bias = torch.randn(shape.E, device=device).to(dtype) if shape.gpt_oss else None
        return cls(weight.to(dtype), bias, router_bias, _experts_module(shape, device, dtype))

    def front(self, z: Tensor, rows: Tensor, budget: Tensor, state: Any, rule: RouterRule) -> Any:
        """The fused front on this layer."""
        from backends.cuda.kernels.front import front

        return front(z, self.weight, self.energy_bias, rows, budget, state, rule, router_bias=self.router_bias)

    @property
    def biases(self) -> dict[str, Any]:
        """The experts' biases, by the names of the kernels' arguments."""
        return {
            "gate_up_bias": getattr(self.experts, "gate_up_proj_bias", None),
            "down_bias": getattr(self.experts, "down_proj_bias", None),
        }

    @property
    def layout(self) -> Any:
        """How the experts are stored."""
        from backends.cuda.kernels.experts import ExpertsLayout

        e = self.experts
        return ExpertsLayout(
            e.is_transposed, not e.is_concatenated or e.is_transposed, (e.alpha, e.limit) if e.has_bias else None
        )


def _experts_module(shape: Shape, device: torch.device, dtype: torch.dtype) -> nn.Module:
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    with torch.device(device):
        if shape.gpt_oss:
            config = GptOssConfig(hidden_size=shape.H, intermediate_size=shape.I, num_local_experts=shape.E)
            module: nn.Module = GptOssExperts(config)
        else:
            moe = Qwen3MoeConfig(hidden_size=shape.H, moe_intermediate_size=shape.I, num_experts=shape.E)
            module = Qwen3MoeExperts(moe)
    for name, parameter in list(module.named_parameters()):
        scale = 1.0 if "bias" in name else 0.02 if shape.H > 1000 else 0.1
        value = torch.empty(parameter.shape, dtype=dtype, device=device).normal_(std=scale)
        setattr(module, name, nn.Parameter(value, requires_grad=False))
    return module


def correctness(shape: Shape, device: torch.device, *, dry: bool) -> Iterator[dict[str, Any]]:
    """Compares every kernel of one shape with float64."""
    dtypes = (torch.float32,) if dry else (torch.bfloat16, torch.float16)
    for dtype in dtypes:
        layer = Layer.random(shape, device, dtype)
        for T in (3,) if dry else (1, 5, 16, 33, 64):
            for budget in (2,) if dry else (2, 10, shape.E):
                yield from _check_batch(shape, layer, T, budget, dtype)
    if not dry:
        yield _check_graph(shape, layer)


def _check_batch(shape: Shape, layer: Layer, T: int, budget: int, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    from backends.cuda.kernels.collect import collect, naive_collect
    from backends.cuda.kernels.experts import MAX_TILES, experts, naive_experts
    from backends.cuda.kernels.front import FrontState, budget_value, naive_front

    def row(what: str, error: float, tolerance: float) -> dict[str, Any]:
        return {
            "what": what, "shape": shape.name, "batch": T, "budget": budget, "dtype": str(dtype).removeprefix("torch."),
            "error": error, "tolerance": tolerance, "ok": bool(error <= tolerance),
        }  # fmt: skip

    device, E = layer.weight.device, shape.E
    rows = torch.ones(T, dtype=torch.int32, device=device)
    state = FrontState.zeros(device)
    for _ in range(20):  # a draw where float32 could rightly decide otherwise than float64 proves nothing
        z = torch.randn(T, shape.H, device=device).to(dtype)
        exact = naive_front(
            z, layer.weight, layer.energy_bias, rows, Budget(experts=budget), shape.rule, router_bias=layer.router_bias
        )
        if _margin(exact, shape.k, budget) > 1e-4:
            break
    out = layer.front(z, rows, budget_value(Budget(experts=budget), E, device), state, shape.rule)
    repeats = [
        layer.front(z, rows, budget_value(Budget(experts=budget), E, device), state, shape.rule) for _ in range(REPEATS)
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
    args = (z, *weights, out.active, out.count, out.combine, tickets, layer.layout)
    y = experts(*args, **layer.biases)
    expected = naive_experts(z, *weights, out.ids, out.weights, layer.layout, **layer.biases)
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
    from backends.cuda.kernels.front import FrontState, budget_value

    T, device = 16, layer.weight.device
    z = torch.randn(T, shape.H, device=device).to(layer.weight.dtype)
    rows = torch.ones(T, dtype=torch.int32, device=device)
    value, state = budget_value(Budget(experts=8), shape.E, device), FrontState.zeros(device)
    step = _step(shape, layer, z, rows, value, state)
    graph, held = _capture(step)
    differing = 0
    for budget in (4, 10, 16, shape.E):
        z.copy_(torch.randn_like(z))
        rows[budget % T] = 0
        value.copy_(budget_value(Budget(experts=budget), shape.E, device))
        graph.replay()
        differing += not torch.equal(held, step())
    return {
        "what": "graph: replays that differ", "shape": shape.name, "batch": T, "budget": "several",
        "dtype": str(layer.weight.dtype).removeprefix("torch."), "error": differing, "tolerance": 0,
        "ok": differing == 0,
    }  # fmt: skip


def _step(shape: Shape, layer: Layer, z: Tensor, rows: Tensor, budget: Tensor, state: Any) -> Callable[[], Tensor]:
    """One MoE layer on our kernels: three launches up to 32 rows."""
    from backends.cuda.kernels.experts import MAX_TILES, experts

    tickets = torch.zeros(MAX_TILES, dtype=torch.int32, device=z.device)
    e = layer.experts

    def step() -> Tensor:
        out = layer.front(z, rows, budget, state, shape.rule)
        if len(z) > EXPERTS_ROWS:
            return _stock("grouped_mm")(e, z, out.ids, out.weights)
        args = (z, e.gate_up_proj, e.down_proj, out.active, out.count, out.combine, tickets, layer.layout)
        return experts(*args, **layer.biases)

    return step


def _stock(name: str) -> Callable[..., Tensor]:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS[name]


# Races


def sanitize(deadline: float) -> dict[str, str]:
    """Runs one launch of every front variant under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    found = {}
    for check in ("racecheck", "memcheck"):
        if tool is None:
            found[check] = "absent"
            continue
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-m", "backends.cuda.gpu_check"]
        command += ["--step", "launch", "--shape", SHAPES[0].name]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        seconds = min(75.0, max(10.0, deadline - time.monotonic()))
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            found[check] = f"not finished in {seconds:.0f} s"
            continue
        found[check] = "clean" if done.returncode == 0 else (done.stdout + done.stderr)[-1000:]
    return found


def _launch(shape: Shape, device: torch.device, *, every_size: bool) -> None:
    """Launches every front variant once, or every variant of a layer (which fills the compiler's cache)."""
    from backends.cuda.kernels.front import FrontState, budget_value

    dtypes = [torch.float32] if device.type == "cpu" else [torch.bfloat16, torch.float16][: 1 + every_size]
    for dtype in dtypes:
        layer = Layer.random(shape if every_size else shape._replace(I=16), device, dtype)
        state, value = FrontState.zeros(device), budget_value(Budget(experts=4), shape.E, device)
        for T in (16, 32, 40):
            z = torch.randn(T, shape.H, device=device, dtype=dtype)
            rows = torch.ones(T, dtype=torch.int32, device=device)
            if every_size:
                _step(shape, layer, z, rows, value, state)()
            else:
                layer.front(z, rows, value, state, shape.rule)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _warm_in_parallel(shapes: list[Shape]) -> None:
    """Compiles all shapes at once in processes of their own, for the compiler works on one processor."""
    print("compiling", flush=True)
    command = [sys.executable, "-m", "backends.cuda.gpu_check", "--step", "warm", "--shape"]
    for process in [subprocess.Popen([*command, shape.name]) for shape in shapes]:
        process.wait()


# Times


def bench(report: Report, shapes: list[Shape], device: torch.device, deadline: float, *, dry: bool) -> None:
    """Times a layer of each shape for every batch and budget; appends to `report.rows`."""
    roof = None if dry else copy_bandwidth(device)
    report.settings["copy bandwidth GB/s"] = roof
    cache = 0 if dry else torch.cuda.get_device_properties(device).L2_cache_size
    for T in (2,) if dry else BATCHES:
        for shape in shapes:
            if time.monotonic() > deadline - 5:
                report.skipped.append(f"{shape.name} at {T} rows")
                continue
            # Even the tightest budget's layers together must be several times larger than the cache.
            count = 2 if dry else min(12, max(4, math.ceil(4 * cache / (min(BUDGETS) * shape.expert_bytes))))
            layers = [Layer.random(shape, device, torch.float32 if dry else torch.bfloat16) for _ in range(count)]
            dense: dict[str, Any] | None = None
            for budget in (None, 3) if dry else (None, *BUDGETS):
                if time.monotonic() > deadline - 5:
                    report.skipped.append(f"{shape.name} at {T} rows, M={budget or 'dense'} and tighter")
                    break
                found = _time_layer(shape, layers, T, budget, roof, dry=dry)
                dense = dense or found
                if found["us_per_layer"]:
                    found["ratio_to_dense"] = dense["us_per_layer"] / found["us_per_layer"]
                report.rows.append(found)
            del layers


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of copying 2 GiB, reads and writes together: the roof that everything is measured against."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    graph, _ = _capture(lambda: target.copy_(source))
    return 2 * source.numel() / _times({"copy": graph}, 1)["copy"] / 1e3


def _time_layer(
    shape: Shape, layers: list[Layer], T: int, budget: int | None, roof: float | None, *, dry: bool
) -> dict[str, Any]:
    from backends.cuda.kernels.experts import MAX_TILES, down, gate_up
    from backends.cuda.kernels.front import FrontState, budget_value

    device = layers[0].weight.device
    z = torch.randn(T, shape.H, device=device, dtype=layers[0].weight.dtype)
    rows = torch.ones(T, dtype=torch.int32, device=device)
    value = budget_value(Budget(experts=min(budget or shape.E, shape.E)), shape.E, device)
    state = FrontState.zeros(device)
    tickets = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
    routed = [layer.front(z, rows, value, state, shape.rule) for layer in layers]
    active = sum(int(r.count) for r in routed) / len(layers)
    steps = [_step(shape, layer, z, rows, value, state) for layer in layers]

    def each(one: Callable[[int], Any]) -> Callable[[], Any]:
        return lambda: [one(i) for i in range(len(layers))]

    variants: dict[str, Callable[[], Any]] = {
        "us_per_layer": each(lambda i: steps[i]()),
        "front_us": each(lambda i: layers[i].front(z, rows, value, state, shape.rule)),
        "grouped_mm_us": each(lambda i: _stock("grouped_mm")(layers[i].experts, z, routed[i].ids, routed[i].weights)),
    }
    if T <= BATCHED_MM_ROWS:
        variants["batched_mm_us"] = each(
            lambda i: _stock("batched_mm")(layers[i].experts, z, routed[i].ids, routed[i].weights)
        )
    if T <= EXPERTS_ROWS:

        def first(i: int) -> Tensor:
            r, layer = routed[i], layers[i]
            bias = layer.biases["gate_up_bias"]
            return gate_up(z, layer.experts.gate_up_proj, r.active, r.count, r.combine, layer.layout, bias)

        hidden = [first(i) for i in range(len(layers))]

        def second(i: int) -> Tensor:
            r, layer = routed[i], layers[i]
            bias = layer.biases["down_bias"]
            return down(hidden[i], layer.experts.down_proj, r.active, r.count, r.combine, tickets, layer.layout, bias)

        variants |= {"gate_up_us": each(first), "down_us": each(second)}

    found: dict[str, Any] = {
        "model": shape.name, "policy": "base" if budget else "dense", "budget": budget, "batch": T,
        "active_mean": active, "layers": len(layers), "us_per_layer": None,
    }  # fmt: skip
    if dry:
        for variant in variants.values():
            variant()
        return found
    graphs = {name: _capture(variant)[0] for name, variant in variants.items()}
    found |= _times(graphs, len(layers))
    if T <= EXPERTS_ROWS:
        experts_us = found["gate_up_us"] + found["down_us"]
        found["gb_per_s"] = active * shape.expert_bytes / experts_us / 1e3
        found["roof_fraction"] = found["gb_per_s"] / roof if roof else None
    return found


def _capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    return graph, held


def _times(graphs: dict[str, torch.cuda.CUDAGraph], layers: int, rounds: int = 7) -> dict[str, float]:
    """Median microseconds a layer of each graph; the variants take turns, so that the clock's drift meets all alike."""
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(rounds + 1):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(4):
                graph.replay()
            end.record()
            end.synchronize()
            if turn:
                taken[name].append(start.elapsed_time(end) * 1e3 / 4 / layers)
    return {name: statistics.median(values) for name, values in taken.items()}


# Output


def _check_line(check: dict[str, Any]) -> str:
    mark = "ok   " if check["ok"] else "WRONG"
    case = f"{check['shape']:18s} T={check['batch']:<3} M={check['budget']:<7} {check['dtype']:9s}"
    return f"  {mark} {case} {check['what']}: {check['error']:.2g} (at most {check['tolerance']:.2g})"


def markdown(report: Report) -> str:
    """The run as Markdown."""
    wrong = [c for c in report.checks if not c["ok"]]
    lines = ["# GPU check", ""]
    if report.settings["dry"]:
        lines += [
            "A dry run: every step ran at toy size in the Triton interpreter. **On a GPU: not yet measured.**",
            "",
        ]
    lines += [f"- {name}: {value}" for name, value in report.settings.items()]
    lines += [f"- targets: {TARGETS}", ""]
    lines += [
        f"Correctness against float64: {len(report.checks) - len(wrong)} of {len(report.checks)} comparisons right.",
        "",
    ]
    lines += [f"- {_check_line(c).strip()}" for c in wrong]
    lines += [f"- compute-sanitizer {tool}: {found}" for tool, found in report.sanitizer.items()]
    names = ["us_per_layer", "front_us", "gate_up_us", "down_us", "grouped_mm_us", "batched_mm_us", "gb_per_s"]
    if report.rows:
        lines += [
            "",
            "Experts only in `grouped_mm` and `batched_mm`, on the same ids; `us_per_layer` is front and experts.",
            "",
            "| model | batch | M | active | " + " | ".join(names) + " | of roof | ratio to dense |",
            "|---|--:|--:|--:|" + "--:|" * (len(names) + 2),
        ]
    for row in report.rows:
        figures = [f"{row[name]:.1f}" if row.get(name) else "-" for name in names]
        figures.append(f"{row['roof_fraction']:.0%}" if row.get("roof_fraction") else "-")
        figures.append(f"{row['ratio_to_dense']:.2f}" if row.get("ratio_to_dense") else "-")
        lines.append(
            f"| {row['model']} | {row['batch']} | {row['budget'] or 'dense'} | {row['active_mean']:.1f} | "
            + " | ".join(figures)
            + " |"
        )
    if report.skipped:
        lines += ["", "Out of time for: " + "; ".join(report.skipped) + "."]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """The command as a script."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    add_arguments(parser)
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
