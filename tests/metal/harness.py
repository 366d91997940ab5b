"""Runs the Metal kernels of `mx.fast.metal_kernel` on a machine without Metal, and checks what a GPU would not report.

MLX itself generates the source. It is compiled as C++ against `metal_shim.h`, every GPU thread is a fiber, and
`metal_runtime.cpp` lets them meet at simd operations and barriers. A launch runs several times, in other thread orders,
with other contents of uninitialised memory, its buffers flush with inaccessible memory at either end; the results must
agree bit for bit. `races` adds ThreadSanitizer, `address_space_errors` a real clang (`ziglang`).

Not covered: speed, registers, occupancy, the order of Apple's own reductions, and what only Apple's compiler rejects.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("BASE_METAL_CACHE", Path.home() / ".cache" / "base-moe" / "metal"))
CXX = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O1", "-g1", "-w", "-fPIC", "-ffp-contract=off", "-fno-tree-loop-distribute-patterns"]
UNDEFINED = ["-fsanitize=bounds,alignment,shift,integer-divide-by-zero"]
FORWARD, REVERSE = 0, 1
ATTRIBUTES = {
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_grid",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
}


class KernelError(AssertionError):
    """A kernel does what Metal forbids or leaves undefined."""


@dataclass(frozen=True)
class Launch:
    """One call of a kernel: the keyword arguments of `mx.fast.metal_kernel`'s result, and the generated source."""

    source: str
    inputs: tuple[mx.array, ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]
    init_value: float | None = None


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: `buffer` is its index, None for an attribute such as the thread's position."""

    type: str
    name: str
    buffer: int | None


@dataclass(frozen=True)
class Program:
    """A kernel without its template: constants first, then the plain function."""

    name: str
    header: str
    constants: str
    parameters: tuple[Parameter, ...]
    body: str


@contextmanager
def _captured_stdout() -> Iterator[list[str]]:
    # MLX prints from C++, below sys.stdout.
    text: list[str] = []
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield text
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(saved, 1)
            os.close(saved)
        file.seek(0)
        text.append(file.read().decode())


def generated_source(kernel: Callable, inputs: Sequence[mx.array], **launch: Any) -> str:
    """The Metal source that MLX generates for a call, exactly; exporting a function records it without a GPU."""
    with tempfile.TemporaryDirectory() as folder, _captured_stdout() as text:
        mx.export_function(
            str(Path(folder) / "kernel.mlxfn"),
            lambda *arrays: kernel(inputs=list(arrays), verbose=True, **launch),
            *inputs,
        )
    found = re.search(r"Generated source code for `[^`]*`:\n```\n(.*)```", text[0], re.S)
    if not found:
        raise RuntimeError(f"MLX printed no kernel source: {text[0]!r}")
    return found.group(1)


def strip_comments(source: str) -> str:
    """Blanks comments, keeping line numbers: a keyword inside one must not be rewritten."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), source, flags=re.S)


def _split(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += c in "(<[{"
        depth -= c in ")>]}"
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _close(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += text[i] in "({"
        depth -= text[i] in ")}"
        if depth == 0:
            return i
    raise ValueError("unbalanced brackets in the kernel source")


def parse(source: str) -> Program:
    """Takes a generated source apart and replaces its template parameters by constants."""
    source = strip_comments(source)
    head = re.search(r"(template <(?P<template>[^>]*)>\s*)?\[\[kernel\]\] void (?P<name>\w+)\(", source)
    if not head:
        raise ValueError("no [[kernel]] function in the source")
    close = _close(source, head.end() - 1)
    parameters = []
    for text in _split(source[head.end() : close]):
        found = re.fullmatch(r"(.*?[\s*&])(\w+)\s*\[\[(\w+)(?:\((\d+)\))?\]\]", text, re.S)
        if not found:
            raise ValueError(f"kernel parameter not understood: {text!r}")
        kind, name, attribute, index = found.groups()
        if attribute != "buffer" and attribute not in ATTRIBUTES:
            raise ValueError(f"the harness does not know the attribute {attribute!r}")
        parameters.append(Parameter(kind.strip(), name, int(index) if attribute == "buffer" else None))
    opening = source.index("{", close)
    end = _close(source, opening)
    constants = ""
    if head["template"]:
        values = re.search(r"\[\[kernel\]\]\s*decltype\(\w+<([^()]*)>\)", source[end:])
        if not values:
            raise ValueError("the template is never instantiated")
        for declared, value in zip(_split(head["template"]), _split(values.group(1)), strict=True):
            kind, name = declared.split()
            constants += f"using {name} = {value}; " if kind == "typename" else f"constexpr {kind} {name} = {value}; "
    return Program(head["name"], source[: head.start()], constants, tuple(parameters), source[opening : end + 1])


def _threadgroup_variables(body: str, declare: Callable[[str, str, str, int], str]) -> str:
    # A declaration is `threadgroup T a[n], b;`; `threadgroup T*` only qualifies a pointer.
    slots = 0

    def replace(found: re.Match) -> str:
        nonlocal slots
        text = ""
        for declarator in _split(found[2]):
            parts = re.fullmatch(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)", declarator)
            if not parts:
                raise ValueError(f"threadgroup declaration not understood: {found[0]!r}")
            text += declare(found[1], parts[1], parts[2].strip(), slots)
            slots += 1
        return text + "\n" * found[0].count("\n")

    kind = r"(?!const\b)\w+(?:<[^;<>]*>)?"
    rewritten = re.sub(rf"\bthreadgroup\s+({kind})\s+(\w[^;]*);", replace, body)
    qualified = rf"(?<!static )\bthreadgroup\b(?!\s+(?:const\s+)?{kind}\s*[*&])"
    if rest := re.search(rf"{qualified}[^\n]*", rewritten):
        raise ValueError(f"use of threadgroup not understood: {rest[0]!r}")
    return rewritten


def to_cpp(program: Program) -> str:
    """The kernel as a translation unit for the shim; `kernel.metal` in messages begins with the kernel's brace."""
    body = _threadgroup_variables(
        program.body,
        lambda kind, name, shape, slot: (
            f"using shim_type_{slot} = {kind}{shape}; auto& {name} = shim_threadgroup<shim_type_{slot}>({slot});"
        ),
    )
    declared = ", ".join(f"{p.type} {p.name}" for p in program.parameters)
    passed = []
    for p in program.parameters:
        if p.buffer is None:
            passed.append(f"attributes.{p.name}")
        elif p.type.endswith("&"):
            passed.append(f"*({p.type[:-1]}*)buffers[{p.buffer}]")
        else:
            passed.append(f"({p.type})buffers[{p.buffer}]")
    return (
        f'#include "metal_shim.h"\n{program.constants}\n#line 1 "header.metal"\n{program.header}\n'
        f'#line 1 "kernel.metal"\nvoid {program.name}({declared}) {body}\n'
        f'#line 1 "harness"\nextern "C" void shim_kernel(void* const* buffers, const shim_attributes& attributes) '
        f"{{ {program.name}({', '.join(passed)}); }}\n"
    )


def _compile(command: list[str], output: Path, text: str) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        source, made = Path(folder) / "kernel.cpp", Path(folder) / output.name
        source.write_text(text)
        done = subprocess.run(
            [part.format(source=source, output=made) for part in command], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise KernelError(f"the kernel does not compile:\n{done.stderr[:4000]}")
        os.replace(made, output)


def build(source: str, *, races: bool = False) -> Path:
    """Compiles a generated source: a shared library, or with `races` a ThreadSanitizer program. Cached by content."""
    text = to_cpp(parse(source))
    runtime = HERE / "metal_runtime.cpp"
    parts = (text, (HERE / "metal_shim.h").read_text(), runtime.read_text(), CXX, " ".join(FLAGS + UNDEFINED))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    runtime_digest = hashlib.sha256("\0".join(parts[1:]).encode()).hexdigest()[:24]
    include = f"-I{HERE}"
    define = ["-DSHIM_RACES"] if races else []
    kind = "races" if races else "lanes"
    object_file = CACHE / f"runtime-{kind}-{runtime_digest}.o"
    if not object_file.exists():
        _compile([CXX, *FLAGS, *define, include, "-c", "{source}", "-o", "{output}"], object_file, parts[2])
    output = CACHE / f"{kind}-{digest}"
    if not output.exists():
        sanitize = ["-fsanitize=thread", "-fno-pie", "-no-pie"] if races else ["-shared", *UNDEFINED]
        _compile([CXX, *FLAGS, *sanitize, include, "{source}", str(object_file), "-o", "{output}"], output, text)
    return output


@cache
def _library(path: Path) -> Callable:
    run = ctypes.CDLL(str(path)).shim_run
    run.restype = ctypes.c_char_p
    return run


def _bytes(array: mx.array) -> NDArray[np.uint8]:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.frombuffer(np.ascontiguousarray(np.array(array)).tobytes(), np.uint8)


def _array(data: NDArray[np.uint8], shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bfloat16:
        return mx.array(data.view(np.uint16).reshape(shape)).view(mx.bfloat16)
    name = "bool" if dtype == mx.bool_ else str(dtype).removeprefix("mlx.core.")
    return mx.array(data.view(name).reshape(shape))


def _buffers(launch: Launch, fill: int) -> tuple[list[NDArray[np.uint8]], int]:
    # In the order of the generated signature: every input, followed by its shape, strides and ndim where they are used.
    names = [p.name for p in parse(launch.source).parameters if p.buffer is not None]
    buffers: list[NDArray[np.uint8]] = []
    position = 0
    for array in launch.inputs:
        owner = names[position]
        buffers.append(_bytes(array))
        position += 1
        strides = np.cumprod([1, *array.shape[:0:-1]])[::-1] if array.ndim else np.zeros(0)
        for suffix, value in (
            ("shape", np.array(array.shape, np.int32)),
            ("strides", np.asarray(strides, np.int64)),
            ("ndim", np.array([array.ndim], np.int32)),
        ):
            if position < len(names) and names[position] == f"{owner}_{suffix}":
                buffers.append(value.view(np.uint8))
                position += 1
    first_output = len(buffers)
    for shape, dtype in zip(launch.output_shapes, launch.output_dtypes, strict=True):
        size = int(np.prod(shape)) * dtype.size
        buffers.append(
            np.full(size, fill, np.uint8)
            if launch.init_value is None
            else _bytes(mx.full(shape, launch.init_value, dtype)).copy()
        )
    if len(buffers) != len(names):
        raise ValueError(f"{len(names)} buffers in the signature, {len(buffers)} in the call")
    return buffers, first_output


def run(
    launch: Launch, *, order: int = FORWARD, reduction: int = FORWARD, fill: int = 0xFF, at_end: bool = True
) -> list[NDArray[np.uint8]]:
    """Runs a launch once and returns the bytes of its outputs.

    Args:
        launch: what to run.
        order: of lanes, simdgroups and threadgroups: 0 forward, 1 reverse, else the seed of a shuffle.
        reduction: the same for the order in which simd reductions combine lanes.
        fill: the byte that uninitialised threadgroup memory and outputs hold.
        at_end: buffers end at the inaccessible page, else they begin after it.

    Raises:
        KernelError: what the runtime saw.
    """
    buffers, first_output = _buffers(launch, fill)
    count = len(buffers)
    kept = [np.array(b) for b in buffers]
    fault = _library(build(launch.source))(
        (ctypes.c_void_p * count)(*(b.ctypes.data for b in kept)),
        (ctypes.c_size_t * count)(*(b.size for b in kept)),
        count,
        (ctypes.c_uint * 3)(*launch.grid),
        (ctypes.c_uint * 3)(*launch.threadgroup),
        order,
        reduction,
        fill,
        int(at_end),
    )
    if fault:
        raise KernelError(fault.decode())
    for before, after in zip(buffers[:first_output], kept[:first_output], strict=True):
        if not np.array_equal(before, after):
            raise KernelError("the kernel writes to an input")
    return kept[first_output:]


AVAILABLE = sys.platform == "linux" and shutil.which(CXX) is not None

CHECKS: tuple[dict[str, Any], ...] = (
    {"order": FORWARD, "fill": 0xFF, "at_end": True},
    {"order": REVERSE, "fill": 0x00, "at_end": False},
    {"order": 7, "fill": 0x55, "at_end": True},
)


def _differs(one: NDArray, other: NDArray, size: int, fills: tuple[int, int] | None) -> NDArray[np.bool_]:
    one, other = one.reshape(-1, size), other.reshape(-1, size)
    differs = (one != other).any(axis=1)
    if fills is not None:
        differs &= ~((one == fills[0]).all(axis=1) & (other == fills[1]).all(axis=1))
    return differs


def run_checked(launch: Launch, *, partial: bool = False) -> list[mx.array]:
    """Runs a launch under every entry of CHECKS and returns its outputs.

    Args:
        launch: what to run.
        partial: some elements of the outputs are rightly never written; they come back as NaN or all bits set.

    Raises:
        KernelError: also where two runs differ: uninitialised memory was used, an output was not written, or the
            result depends on the order of threads.
    """
    results = [run(launch, **check) for check in CHECKS]
    for check, result in zip(CHECKS[1:], results[1:], strict=True):
        fills = (CHECKS[0]["fill"], check["fill"]) if partial else None
        for i, (one, other) in enumerate(zip(results[0], result, strict=True)):
            differs = _differs(one, other, launch.output_dtypes[i].size, fills)
            if differs.any():
                raise KernelError(
                    f"output {i} differs at element {differs.argmax()} between {CHECKS[0]} and {check}: thread order, "
                    f"uninitialised threadgroup memory, or an unwritten output"
                )
    return [
        _array(data, shape, dtype)
        for data, shape, dtype in zip(results[0], launch.output_shapes, launch.output_dtypes, strict=True)
    ]


class Simulated:
    """Stands in for a kernel object; calls run on the CPU and are kept in `launches`."""

    def __init__(self, kernel: Callable, *, partial: bool = False) -> None:
        self.kernel = kernel
        self.partial = partial
        self.launches: list[Launch] = []
        self.sources: dict[Any, str] = {}

    def __call__(
        self, *, inputs, grid, threadgroup, output_shapes, output_dtypes, template=None, init_value=None
    ) -> list[mx.array]:
        arrays = tuple(mx.array(x) for x in inputs)
        call = {
            "template": template or [],
            "grid": grid,
            "threadgroup": threadgroup,
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
        }
        key = (str(template), tuple((a.dtype, a.ndim, a.size < 8) for a in arrays), tuple(output_dtypes))
        if key not in self.sources:
            self.sources[key] = generated_source(self.kernel, arrays, **call)
        launch = Launch(
            self.sources[key],
            arrays,
            tuple(grid),
            tuple(threadgroup),
            tuple(tuple(s) for s in output_shapes),
            tuple(output_dtypes),
            init_value,
        )
        self.launches.append(launch)
        return run_checked(launch, partial=self.partial)


@contextmanager
def simulated(module: ModuleType, partial: Sequence[str] = ()) -> Iterator[dict[str, Simulated]]:
    """Replaces the kernel objects of a module, attributes named `_..._kernel`, while the context lasts.

    Args:
        module: with kernels made at import.
        partial: those that rightly leave parts of their outputs unwritten.

    Yields:
        The stand-ins by attribute name.
    """
    kernels = {name: value for name, value in vars(module).items() if re.fullmatch(r"_\w+_kernel", name)}
    stand_ins = {name: Simulated(kernel, partial=name in partial) for name, kernel in kernels.items()}
    vars(module).update(stand_ins)
    try:
        yield stand_ins
    finally:
        vars(module).update(kernels)


def runnable(module: ModuleType, partial: Sequence[str] = ()) -> AbstractContextManager[dict[str, Simulated]]:
    """`simulated` where there is no Metal device; where there is one, the kernels stay as they are."""
    return nullcontext({}) if mx.metal.is_available() else simulated(module, partial)


def without_barriers(launch: Launch) -> Iterator[Launch]:
    """The launch with one threadgroup barrier removed, for each of them."""
    for found in re.finditer(r"threadgroup_barrier\([^)]*\);", launch.source):
        yield replace(launch, source=launch.source[: found.start()] + launch.source[found.end() :])


def races(launch: Launch) -> list[str]:
    """Data races that ThreadSanitizer finds, as `kernel.metal:12 / kernel.metal:17`, sorted.

    Only a barrier orders two threads, and a simdgroup barrier those of one simdgroup; meeting in a simd operation does
    not order memory. A barrier without memory flags orders nothing.
    """
    program = build(launch.source, races=True)
    buffers, _ = _buffers(launch, 0xFF)
    with tempfile.NamedTemporaryFile(suffix=".launch") as file:
        np.array([len(buffers), *launch.grid, *launch.threadgroup], np.uint64).tofile(file)
        np.array([b.size for b in buffers], np.uint64).tofile(file)
        for b in buffers:
            b.tofile(file)
        file.flush()
        done = subprocess.run(
            [str(program), file.name],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TSAN_OPTIONS": "exitcode=0 history_size=0 report_bugs=1 report_thread_leaks=0"},
            # The runtime of g++ 12 gives up on the address layout that newer Linux kernels randomise to.
            preexec_fn=lambda: ctypes.CDLL(None).personality(0x0040000),
        )
    if done.returncode or "FATAL" in done.stderr:
        raise RuntimeError(f"the race check did not run (exit {done.returncode}): {done.stderr[:2000]}")
    if done.stdout:
        raise KernelError(done.stdout)
    found = set()
    for report in done.stderr.split("WARNING: ThreadSanitizer: ")[1:]:
        accesses = re.split(r"\n  (?=\S)", report)
        lines = [m[0] for a in accesses if (m := re.search(r"(?:kernel|header)\.metal:\d+", a))]
        found.add(" / ".join(lines[:2]) or report[:500])
    return sorted(found)


@lru_cache(maxsize=1)
def clang() -> list[str] | None:
    """The command of a real clang, or None where the `ziglang` package is not installed."""
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "clang", "-x", "c++"]
    return [found] if (found := shutil.which("clang++")) else None


def address_space_errors(source: str) -> list[str]:
    """What clang says about device, constant and threadgroup pointers in a generated source, one string an error."""
    program = parse(source)
    body = _threadgroup_variables(
        program.body, lambda kind, name, shape, slot: f"static threadgroup {kind} {name}{shape};"
    )
    declared = ", ".join(f"{p.type} {p.name}" for p in program.parameters)
    text = (
        f'#include "metal_spaces.h"\n{program.constants}\n#line 1 "header.metal"\n{program.header}\n'
        f'#line 1 "kernel.metal"\nvoid {program.name}({declared}) {body}\n'
    )
    command = clang()
    if command is None:
        raise RuntimeError("no clang: install ziglang")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cpp"
        file.write_text(text)
        done = subprocess.run(
            [*command, "-std=c++17", "-fsyntax-only", "-Wno-everything", f"-I{HERE}", str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
    errors = re.findall(r"^.*error: .*$", done.stderr, re.M)
    if done.returncode and not errors:
        raise RuntimeError(done.stderr[:2000])
    return errors
