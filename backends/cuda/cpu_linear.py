"""Row groups times expert matrices on a CPU, every matrix read from memory once.

torch multiplies bfloat16 at about 10 GFLOP/s a core on a CPU without bfloat16 units, and one core reads a narrow
float32 product at a third of memory speed. Where a C++ compiler is present, narrow groups run through a small kernel
compiled on first use; everywhere else, and for wide groups, through torch. `cpu_path` says which.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

logger = logging.getLogger(__name__)

# Groups of more rows than this leave the kernel for a float32 matrix product on a widened copy of the matrix.
WIDE_ROWS = 48
# Matrix rows widened to float32 at a time: the copy stays in the cache.
CHUNK_ROWS = 256
# The kernel steps through 32 elements of a row.
KERNEL_STEP = 32

SOURCE = r"""
#include <atomic>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

typedef float f8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t u8 __attribute__((vector_size(32), aligned(2), may_alias));

constexpr int WR = 3;      // matrix rows of a register tile: WR x XR accumulators fill the 16 AVX2 registers
constexpr int XR = 4;      // input rows of a register tile
constexpr int PANEL = 48;  // matrix rows handed to a thread at a time

// One of the two halves of 16 matrix elements: bfloat16 ones split into even and odd, as the input is packed.
static inline f8 load(const uint16_t* w, int half) {
    u8 pair = *(const u8*)w;
    return (f8)(half ? pair & 0xffff0000u : pair << 16);
}
static inline f8 load(const float* w, int half) { return *(const f8*)(w + 8 * half); }

static inline float sum(f8 v) {
    float s[8];
    memcpy(s, &v, sizeof s);
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

// y[j][i] = w[i] . x[j]. Of `passes` tiles over the same matrix rows, each prefetches its share of the following rows.
template <int I, int J, class W>
static void tile(const W* w, const float* const* x, float* const* y, long K, int pass, int passes) {
    f8 acc[I][J] = {};
    for (long k = 0; k < K; k += 32) {
        if (pass == 0) {
            for (int i = 0; i < I; i++)
                for (unsigned line = 0; line < 32 * sizeof(W); line += 64)
                    __builtin_prefetch((const char*)(w + (I + i) * K + k) + line, 0, 3);
            pass = passes;
        }
        pass--;
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++) {
            f8 v[I];
            for (int i = 0; i < I; i++) v[i] = load(w + i * K + k + h / 2 * 16, h % 2);
            for (int j = 0; j < J; j++) {
                f8 u = *(const f8*)(x[j] + k + h * 8);
                for (int i = 0; i < I; i++) acc[i][j] = _mm256_fmadd_ps(v[i], u, acc[i][j]);
            }
        }
    }
    for (int i = 0; i < I; i++)
        for (int j = 0; j < J; j++) y[j][i] = sum(acc[i][j]);
}

template <int I, class W>
static void tiles(const W* w, const float* const* x, float* const* y, long K, long n) {
    int passes = (n + XR - 1) / XR;
    for (int pass = 0; pass < passes; pass++) {
        int left = passes - pass, rows = (n + left - 1) / left;
        if (rows == 1) tile<I, 1>(w, x, y, K, pass, passes);
        if (rows == 2) tile<I, 2>(w, x, y, K, pass, passes);
        if (rows == 3) tile<I, 3>(w, x, y, K, pass, passes);
        if (rows == 4) tile<I, 4>(w, x, y, K, pass, passes);
        x += rows, y += rows, n -= rows;
    }
}

template <class W>
static void run(const W* weight, const float* x, const int64_t* rows, float* y, const int64_t* experts,
                const int64_t* starts, const int64_t* counts, long G, long N, long K, int threads) {
    long panels = (N + PANEL - 1) / PANEL;
    std::atomic<long> next(0);
#pragma omp parallel num_threads(threads)
    for (long item; (item = next.fetch_add(1, std::memory_order_relaxed)) < G * panels;) {
        long g = item / panels, o = item % panels * PANEL, end = o + PANEL < N ? o + PANEL : N;
        long n = counts[g];
        const float* xs[MAX_ROWS];
        float* ys[MAX_ROWS];
        for (long i = 0; i < n; i++) {
            xs[i] = x + rows[starts[g] + i] * K;
            ys[i] = y + (starts[g] + i) * N + o;
        }
        const W* w = weight + (experts[g] * N + o) * K;
        int step;
        for (; o < end; o += step, w += step * K) {
            step = o + WR <= end ? WR : 1;
            if (step == WR) tiles<WR>(w, xs, ys, K, n);
            else tiles<1>(w, xs, ys, K, n);
            for (long i = 0; i < n; i++) ys[i] += step;
        }
    }
}

extern "C" void grouped_linear(const void* weight, int bf16, const float* x, const int64_t* rows, float* y,
                               const int64_t* experts, const int64_t* starts, const int64_t* counts, long G, long N,
                               long K, int threads) {
    if (bf16) run((const uint16_t*)weight, x, rows, y, experts, starts, counts, G, N, K, threads);
    else run((const float*)weight, x, rows, y, experts, starts, counts, G, N, K, threads);
}
"""


class Groups(NamedTuple):
    """Which rows of the input meet which matrix; every matrix appears once.

    Attributes:
        rows: int64 [S], a row of the input for every row of the output, group after group.
        experts: int64 [G], the matrix of each group.
        starts, counts: int64 [G], where each group begins in `rows`, and its length.
    """

    rows: Tensor
    experts: Tensor
    starts: Tensor
    counts: Tensor


def cpu_path() -> str:
    """What multiplies narrow groups on this machine: `kernel`, or `torch` and why."""
    try:
        _kernel()
    except _NoKernelError as error:
        return f"torch ({error})"
    return "kernel"


def grouped_linear(x: Tensor, weight: Tensor, groups: Groups, *, transposed: bool = False) -> Tensor:
    """Each group's rows times its expert's matrix, reading only those matrices, each one once.

    Sums are float32 and in a fixed order. Through the kernel a row's result does not depend on the other rows.

    Args:
        x: [T, K], of the weight's dtype.
        weight: bfloat16 or float32 [E, N, K]; [E, K, N] if `transposed`.
        groups: see `Groups`.

    Returns:
        float32 [S, N].
    """
    out = x.new_empty(len(groups.rows), weight.shape[1 + transposed], dtype=torch.float32)
    narrow = groups.counts <= WIDE_ROWS
    if not transposed and _fits_kernel(weight):
        _kernel()(x, weight, groups, narrow, out)
        wide = ~narrow
    else:
        wide = torch.ones_like(narrow)
    fields = (groups.experts[wide].tolist(), groups.starts[wide].tolist(), groups.counts[wide].tolist())
    for expert, start, count in zip(*fields, strict=True):
        rows = slice(start, start + count)
        out[rows] = linear_float32(x[groups.rows[rows]], weight[expert], transposed=transposed)
    return out


def linear_float32(x: Tensor, matrix: Tensor, *, transposed: bool = False) -> Tensor:
    """The twin of the kernel for one matrix: x [n, K] times [N, K] (or [K, N] if `transposed`), float32 [n, N].

    A bfloat16 matrix is widened a chunk at a time, which torch multiplies 3 to 5 times faster than bfloat16 itself on
    a CPU without such units.
    """
    if matrix.dtype == torch.float32 or len(x) == 1 or _has_bfloat16_units():
        return (x @ matrix if transposed else F.linear(x, matrix)).float()
    x = x.float()
    buffer = torch.empty(min(CHUNK_ROWS, len(matrix)), matrix.shape[1])
    out = x.new_zeros(len(x), matrix.shape[1]) if transposed else x.new_empty(len(x), len(matrix))
    for start in range(0, len(matrix), CHUNK_ROWS):
        chunk = matrix[start : start + CHUNK_ROWS]
        widened = buffer[: len(chunk)].copy_(chunk)
        span = slice(start, start + len(chunk))
        if transposed:
            out.addmm_(x[:, span], widened)
        else:
            out[:, span] = x @ widened.T
    return out


class _NoKernelError(Exception):
    """Why narrow groups go through torch on this machine."""


def _fits_kernel(weight: Tensor) -> bool:
    if weight.shape[2] % KERNEL_STEP or not weight.is_contiguous():
        return False
    if weight.dtype == torch.bfloat16 and _has_bfloat16_units():
        return False
    return _has_kernel()


def _has_bfloat16_units() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@functools.cache
def _has_kernel() -> bool:
    try:
        _kernel()
    except _NoKernelError as error:
        logger.warning("the experts run through plain torch, several times slower for a decode batch: %s", error)
        return False
    return True


@functools.cache
def _kernel() -> Callable[[Tensor, Tensor, Groups, Tensor, Tensor], None]:
    if platform.system() != "Linux" or not torch.cpu._is_avx2_supported():
        raise _NoKernelError("the kernel needs Linux and AVX2")
    try:
        function = ctypes.CDLL(str(_build())).grouped_linear
    except (OSError, subprocess.SubprocessError) as error:
        raise _NoKernelError(f"the kernel could not be built: {error}") from error
    pointer, long = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [pointer, ctypes.c_int, *[pointer] * 6, long, long, long, ctypes.c_int]
    function.restype = None

    def call(x: Tensor, weight: Tensor, groups: Groups, chosen: Tensor, out: Tensor) -> None:
        experts, starts, counts = (field[chosen] for field in groups[1:])
        half = weight.dtype == torch.bfloat16
        if half:  # even elements, then odd ones, of every 16: as the kernel unpacks the matrix
            x = x.float().view(len(x), x.shape[1] // 16, 8, 2).transpose(2, 3)
        x, rows = x.contiguous(), groups.rows.contiguous()
        pointers = [tensor.data_ptr() for tensor in (x, rows, out, experts, starts, counts)]
        function(weight.data_ptr(), half, *pointers, len(experts), *weight.shape[1:], torch.get_num_threads())

    return call


def _build() -> Path:
    """The compiled kernel, from the user's cache; torch's own OpenMP threads run it, so none are started beside them."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise FileNotFoundError("no C++ compiler: install g++, or name one in CXX")
    command = [compiler, "-O3", "-march=native", "-fPIC", "-fopenmp", f"-DMAX_ROWS={WIDE_ROWS}"]
    processor = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("model name", "flags"))
    ][:2]
    key = hashlib.sha256("\n".join([SOURCE, *command, *processor]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "base-moe"
    library = cache / f"grouped_linear-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            source, compiled, linked = (Path(folder) / name for name in ("kernel.cpp", "kernel.o", "kernel.so"))
            source.write_text(SOURCE)
            _run([*command, "-c", str(source), "-o", str(compiled)])
            _run([compiler, "-shared", str(compiled), "-o", str(linked)])  # without -fopenmp: torch's is loaded already
            linked.replace(library)
    return library


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{command[0]} failed: {error.stderr.strip()[-500:]}") from error
