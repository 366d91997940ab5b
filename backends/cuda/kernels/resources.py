"""Compiles every kernel for every supported GPU, without one, and reports registers, spills and shared memory.

    python -m backends.cuda.kernels.resources            # writes docs/kernel-resources.md
    python -m backends.cuda.kernels.resources --arch sm_90 --print

A kernel that spills, or takes more than it may, fails the command.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from backends.cuda.kernels.collect import collect_kernel
from backends.cuda.kernels.experts import down_kernel, down_shape, gate_up_kernel, tile
from backends.cuda.kernels.front import (
    BK,
    BN,
    MAX_REGISTERS,
    MAX_ROWS,
    NORMALISE,
    NUM_STAGES,
    NUM_WARPS,
    fill_kernel,
    front_kernel,
    front_shape,
)
from backends.cuda.shapes import SHAPES

KILOBYTE = 1024
ARCHITECTURES = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_MEMORY = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
"""The most one program may have, in KB."""

REGISTERS = {
    "front": MAX_REGISTERS,
    "front two-launch": MAX_REGISTERS,
    "fill": MAX_REGISTERS,
    "collect": MAX_REGISTERS,
    "gate_up": 128,
    "down": 128,
}
"""The most one thread may take: two programs of `gate_up` and `down` fit one multiprocessor; the others run alone.

AMD's registers are twice as many, so its limit is twice as high.
"""
RESIDENT = 2
"""Programs of `gate_up` and `down` that must fit one sm_90 multiprocessor's shared memory."""


ROWS = (16, 32, 64)


@dataclass(frozen=True)
class Build:
    """One kernel to compile."""

    kernel: str
    shape: str
    rows: int
    function: Any
    constants: dict[str, Any]
    warps: int
    stages: int
    fp16: bool = False


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        registers: of a thread.
        spills: instructions that move registers to local memory and back (bytes of it on AMD).
        shared: bytes of shared memory of a program.
        copies16, copies: asynchronous copies to shared memory of 16 bytes, and of any size; 0 on AMD, which has none.
        matrix: the matrix instructions found: HGMMA (warpgroup), UTCMMA (Blackwell), HMMA, MFMA.
    """

    registers: int
    spills: int
    shared: int
    copies16: int
    copies: int
    matrix: dict[str, int]


POINTERS = {
    "*fp32": "energy_bias correction budget partial norms costs logits_out logits_in combine cost_out",
    "*i32": "rows tickets unions active active_out count count_out",
    "*i64": "counters ids_out ids",
    "half": "z weight bias hidden out weights_out weights",
    "i32": "T ROWS BLOCKS",
}


def builds(shape_name: str, *, hip: bool = False, fp16: bool = False) -> Iterator[Build]:
    """Every kernel that a model of this shape runs, at the largest batch of each block size."""
    shape = SHAPES[shape_name]
    (E, k, H, I), gpt_oss = shape.widths, shape.gpt_oss  # noqa: E741
    rule = dict(
        E=E,
        K=k,
        SIGMOID=False,
        NORMALISE=NORMALISE["softmax_selected" if gpt_oss else "selected"],
        SCALE=1.0,
        CORRECTED=False,
    )
    for T in ROWS:
        s = front_shape(T, E, k, H)
        blocks = dict(rule, BT=s.BT, BE=s.BE, KP=s.KP)
        one = s.blocks == 1
        constants = dict(blocks, H=H, BIASED=gpt_oss, ONE_LAUNCH=one, BN=BN, BK=BK, SPLIT=s.SPLIT, UP=False)
        name = "front" if one else "front two-launch"
        yield Build(name, shape_name, T, front_kernel, constants, NUM_WARPS, NUM_STAGES, fp16)
        if not one:
            yield Build("fill", shape_name, T, fill_kernel, dict(blocks, ALL=MAX_ROWS), NUM_WARPS, NUM_STAGES, fp16)
        yield Build(
            "collect", shape_name, T, collect_kernel, dict(E=E, K=k, BT=T, BE=s.BE), NUM_WARPS, NUM_STAGES, fp16
        )
        t = tile(T, hip=hip)
        common = dict(H=H, I=I, TRANSPOSED=gpt_oss, BIASED=gpt_oss, BT=t.BT, BM=t.BM, BK=t.BK, UP=False)
        swiglu = dict(common, INTERLEAVED=gpt_oss, CLAMPED=gpt_oss, ALPHA=1.702, LIMIT=7.0)
        yield Build("gate_up", shape_name, T, gate_up_kernel, swiglu, t.warps, t.stages, fp16)
        d = down_shape(H, I, t)
        constants = dict(common, SPLIT=d.split, CHUNKS=d.chunks)
        yield Build("down", shape_name, T, down_kernel, constants, t.warps, d.stages, fp16)


def compile_kernel(build: Build, arch: str) -> Resources:
    """Compiles one kernel for `arch` as a launch would: pointers are aligned to 16 bytes, sizes are not."""
    types = {name: kind for kind, names in POINTERS.items() for name in names.split()}
    half = "*fp16" if build.fp16 else "*bf16"
    signature, attributes = {}, {}
    for i, name in enumerate(build.function.arg_names):
        if name in build.constants:
            signature[name] = "constexpr"
            continue
        signature[name] = half if types[name] == "half" else types[name]
        if signature[name].startswith("*"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {"num_warps": build.warps, "num_stages": build.stages}
    if build.kernel not in ("gate_up", "down") and not arch.startswith("gfx"):
        options["maxnreg"] = MAX_REGISTERS
    compiled = triton.compile(
        ASTSource(fn=build.function, signature=signature, constexprs=build.constants, attrs=attributes),
        target=ARCHITECTURES[arch],
        options=options,
    )
    return _read_amd(compiled) if arch.startswith("gfx") else _read_nvidia(compiled)


def _read_amd(compiled: Any) -> Resources:
    text = compiled.asm["amdgcn"]

    def figure(name: str) -> int:
        found = re.search(rf"{name}:\s*(\d+)", text)
        assert found, f"the compiler's output does not tell {name}"
        return int(found[1])

    spills = figure(r"\.vgpr_spill_count") + figure(r"ScratchSize")
    matrix = {"MFMA": len(re.findall(r"\bv_mfma", text))} if "v_mfma" in text else {}
    return Resources(figure(r"\.vgpr_count"), spills, compiled.metadata.shared, 0, 0, matrix)


def _read_nvidia(compiled: Any) -> Resources:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _output(tools / "cuobjdump", "-res-usage", cubin)
        code = _output(tools / "nvdisasm", cubin)

    def count(pattern: str) -> int:
        return len(re.findall(pattern, code))

    registers = re.search(r"REG:(\d+)", usage)
    assert registers, usage
    matrix = {name: n for name in ("HGMMA", "UTCHMMA", "HMMA") if (n := count(rf"\b{name}\b"))}
    copies = count(r"\bLDGSTS\b")
    return Resources(
        int(registers[1]),
        count(r"\b(?:LDL|STL)\b"),
        compiled.metadata.shared,
        count(r"\bLDGSTS[.\w]*\.128"),
        copies,
        matrix,
    )


def _output(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def faults(build: Build, arch: str, found: Resources) -> list[str]:
    """What this kernel may not do but does; empty when all is well."""
    amd = arch.startswith("gfx")
    registers = REGISTERS[build.kernel] * (2 if amd else 1)
    reads_experts = build.kernel in ("gate_up", "down")
    checks = [
        (found.spills == 0, f"spills ({found.spills})"),
        (found.registers <= registers, f"takes {found.registers} registers, may take {registers}"),
        (found.shared <= SHARED_MEMORY[arch] * KILOBYTE, f"takes {found.shared} bytes of shared memory"),
    ]
    if reads_experts:
        checks.append((bool(found.matrix), "has no matrix instructions"))
    if reads_experts and arch == "sm_90":
        limit = SHARED_MEMORY[arch] * KILOBYTE // RESIDENT
        checks += [
            (found.shared <= limit, f"takes {found.shared} bytes of shared memory: {RESIDENT} programs do not fit"),
            ("HGMMA" in found.matrix, "has no warpgroup matrix instructions"),
            # The lookup of the expert is the only small copy.
            (0 < found.copies <= found.copies16 + build.stages, "copies in pieces below 16 bytes"),
        ]
    return [text for ok, text in checks if not ok]


HEADER = """# Kernel resources

What the compiler gives each Triton kernel of the CUDA backend, for every supported GPU and the shapes of four models.
No GPU is needed to make this table and no figure in it is a time: **on a GPU the kernels are not yet measured**.
`base-moe gpu-check` measures them in one run of six minutes; [gpu.md](gpu.md) has its targets.

Made with Triton {version} by `python -m backends.cuda.kernels.resources`; every test run holds a part of it to the
limits (`tests/backends/cuda/kernels/test_resources.py`). bfloat16; fp16 takes the same instructions.

- **rows**: the largest batch of the block size. `front` takes it in one launch, `front two-launch` with `fill` in two.
- **registers** of a thread: at most {front} in `front`, `fill` and `collect`, {experts} in `gate_up` and `down`; twice
  that on gfx942.
- **spills**: instructions that move registers to memory and back. None are allowed.
- **shared memory** of a program: two of `gate_up` and `down` must fit one sm_90 multiprocessor ({half} KB each).
- **16-byte copies** of all asynchronous copies. The few others in `down` look the expert up.
- **matrix**: HGMMA is the warpgroup instruction of sm_90, UTCHMMA that of sm_100, MFMA that of gfx942.
"""


def table(results: list[tuple[Build, str, Resources]]) -> str:
    """The Markdown table, one block per architecture."""
    lines = [
        HEADER.format(
            version=triton.__version__,
            front=REGISTERS["front"],
            experts=REGISTERS["gate_up"],
            half=SHARED_MEMORY["sm_90"] // RESIDENT,
        )
    ]
    for arch in dict.fromkeys(arch for _, arch, _ in results):
        lines += [
            f"\n## {arch}\n",
            "| kernel | shape | rows | warps | stages | registers | spills | shared memory | 16-byte copies | matrix |",
            "|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
        ]
        lines += [row(build, found) for build, a, found in results if a == arch]
    return "\n".join(lines) + "\n"


def row(build: Build, found: Resources) -> str:
    """One line of the table."""
    copies = f"{found.copies16} of {found.copies}" if found.copies else "-"
    kernel = f"{build.kernel} | {build.shape} | {build.rows} | {build.warps} | {build.stages}"
    memory = f"{found.registers} | {found.spills} | {found.shared / KILOBYTE:.1f} KB"
    return f"| {kernel} | {memory} | {copies} | {', '.join(found.matrix) or '-'} |"


def _compile_one(arch: str, shape: str, i: int) -> tuple[Build, Resources, list[str]]:
    build = list(builds(shape, hip=arch.startswith("gfx")))[i]
    found = compile_kernel(build, arch)
    return replace(build, function=None), found, faults(build, arch, found)


def main(arguments: list[str] | None = None) -> int:
    """Writes the table, or prints it; 1 when a kernel is at fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", choices=list(ARCHITECTURES), action="append", help="only this one; may be repeated")
    parser.add_argument("--shape", choices=list(SHAPES), action="append", help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("docs/kernel-resources.md"), help="file to write")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="kernels compiled at a time (default %(default)s)"
    )
    parser.add_argument("--print", action="store_true", help="print the table instead of writing it")
    args = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set: unset it, nothing is compiled under it")

    results, bad = [], 0
    work = [
        (arch, shape, i)
        for arch in args.arch or ARCHITECTURES
        for shape in args.shape or SHAPES
        for i in range(len(list(builds(shape, hip=arch.startswith("gfx")))))
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        for (arch, shape, _), (build, found, wrong) in zip(
            work, pool.map(_compile_one, *zip(*work, strict=True)), strict=True
        ):
            results.append((build, arch, found))
            bad += len(wrong)
            print(f"{arch:7s} {row(build, found)}", file=sys.stderr, flush=True)
            for fault in wrong:
                print(f"{arch}: {build.kernel} of {shape} at {build.rows} rows {fault}", file=sys.stderr)
    if args.print:
        print(table(results))
    elif not bad:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(table(results), encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
