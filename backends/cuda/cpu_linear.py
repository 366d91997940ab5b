"""Groups of rows times expert matrices on a CPU, every matrix read from memory once.

torch multiplies bfloat16 at about 10 GFLOP/s a core on a CPU without bfloat16 units, and reads a matrix for a few rows
at a third of memory speed or less. Where g++ is present, narrow groups run through a small kernel that is compiled on
first use; everywhere else, and for wide groups, through torch. `cpu_path` says which.
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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

logger = logging.getLogger(__name__)

# Groups of more rows than this are a matrix product of torch's, on a copy of the matrix widened to float32.
WIDE_ROWS = 96
# From this many rows on, widening a bfloat16 matrix costs torch less than multiplying it as it is.
WIDEN_ROWS = 5
# Rows are then padded to a multiple of this, for which torch's float32 product is up to twice as fast.
PAD_MULTIPLE = 16
# Matrix rows widened at a time: the copy stays in the cache.
CHUNK_ROWS = 256
# The kernel takes matrices of whole tiles only.
TILE_ROWS, TILE_COLUMNS = 4, 32

SOURCE = r"""
#include <atomic>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

// Elements that a tile sums over at a time: of three or six input rows, what the first cache holds.
constexpr long LONG_BLOCK = 2048, BLOCK = 1024;
constexpr int TALL = 6;  // input rows of a tile; with two matrix rows their sums fill the 16 registers

// One half of 16 matrix elements. bfloat16 ones split into even and odd, the order in which `pack` lays out the input.
static inline __m256 load(const uint16_t* w, int half) {
    __m256i pairs = _mm256_loadu_si256((const __m256i*)w);
    return _mm256_castsi256_ps(half ? _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000))
                                    : _mm256_slli_epi32(pairs, 16));
}
static inline __m256 load(const float* w, int half) { return _mm256_loadu_ps(w + 8 * half); }

// Not the intrinsic: g++ folds its loads into the products, once for each, and the load ports then set the pace.
static inline void fma(__m256& sum, __m256 v, __m256 u) {
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(v), "x"(u));
}

static inline void store(float* y, float value) { *y = value; }
static inline void store(uint16_t* y, float value) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, 4);
    *y = value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

static const float* pack(const uint16_t* x, float* packed, long begin, long end) {
    for (long k = begin; k < end; k += 16)
        for (int half = 0; half < 2; half++) _mm256_storeu_ps(packed + k + 8 * half, load(x + k, half));
    return packed;
}
static const float* pack(const float* x, float*, long, long) { return x; }

// sums[I * j + i] += w[i] . x[j] over one block. From step `wait` on, every `every`th step fetches from `ahead`.
template <int I, int J, class W>
static __attribute__((noinline)) void tile(const W* w, long K, long length, const float* const* x, __m256* sums,
                                           bool first, const W* ahead, int wait, int every) {
    __m256 a[I][J];
#pragma GCC unroll 8
    for (int j = 0; j < J; j++)
#pragma GCC unroll 8
        for (int i = 0; i < I; i++) a[i][j] = first ? _mm256_setzero_ps() : sums[I * j + i];
    for (long k = 0; k < length; k += 32) {
        if (wait-- == 0) {
            wait = every - 1;
            for (unsigned line = 0; line < 32 * sizeof(W); line += 64)
#pragma GCC unroll 8
                for (int i = 0; i < I; i++) __builtin_prefetch((const char*)(ahead + i * K + k) + line);
        }
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++) {
            __m256 v[I];
#pragma GCC unroll 8
            for (int i = 0; i < I; i++) v[i] = load(w + i * K + k + h / 2 * 16, h % 2);
#pragma GCC unroll 8
            for (int j = 0; j < J; j++) {
                __m256 u = _mm256_loadu_ps(x[j] + k + 8 * h);
#pragma GCC unroll 8
                for (int i = 0; i < I; i++) fma(a[i][j], v[i], u);
            }
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < J; j++)
#pragma GCC unroll 8
        for (int i = 0; i < I; i++) sums[I * j + i] = a[i][j];
}

template <class W>
static void run(const W* weight, const W* x, float* packed, W* y, const int64_t* rows, const int64_t* slots,
                const int64_t* experts, const int64_t* starts, const int64_t* counts, long G, long N, long K, long T,
                int threads) {
    constexpr long PANEL = 128 / sizeof(W);  // matrix rows a thread takes at a time; two blocks of them fit a cache
    constexpr decltype(&tile<2, 3, W>) tiles[] = {tile<4, 1, W>, tile<4, 2, W>, tile<2, 3, W>,
                                                  tile<2, 4, W>, tile<2, 5, W>, tile<2, 6, W>};
    const long panels = (N + PANEL - 1) / PANEL, items = G * panels;
    auto panel = [=](long item) { return weight + (experts[item / panels] * N + item % panels * PANEL) * K; };
    const float* input = pack(x, packed, 0, 0);
    std::atomic<long> next(0);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (long t = 0; t < T; t++) pack(x, packed, t * K, t * K + K);
        __m256 sums[PANEL * MAX_ROWS];
        // The following panel is claimed early, so that its first rows can be fetched while this one ends.
        for (long item = next++, following; item < items; item = following) {
            following = next++;
            const W *w = panel(item), *after = following < items ? panel(following) : w;
            const long start = starts[item / panels], n = counts[item / panels], o = item % panels * PANEL;
            const long end = N - o < PANEL ? N - o : PANEL;
            const int I = n > 2 ? 2 : 4, passes = (n + TALL - 1) / TALL;
            const long most = n > 3 ? BLOCK : LONG_BLOCK;
            for (long k = 0; k < K; k += most) {
                const long length = K - k < most ? K - k : most;
                const W* block = k + most < K ? w + k + most : after;
                const float* xs[MAX_ROWS];
                for (long j = 0; j < n; j++) xs[j] = input + rows[start + j] * K + k;
                for (int pass = 0, j = 0, J; pass < passes; pass++, j += J) {
                    J = (n - j + passes - pass - 1) / (passes - pass);
                    for (long i = 0; i < end; i += I) {
                        // One pass fetches the rows that follow. The later ones of several have the matrix in the
                        // cache, and fetch the next block.
                        const W* ahead = passes > 1 ? block + i * K : i + I < end ? w + k + (i + I) * K : block;
                        int wait = passes == 1 ? 0 : pass ? pass - 1 : 1 << 30, every = passes > 1 ? passes - 1 : 1;
                        tiles[J - 1](w + k + i * K, K, length, xs + j, sums + i * n + I * j, k == 0, ahead, wait,
                                     every);
                    }
                }
            }
            for (long j = 0; j < n; j++)
                for (long i = 0; i < end; i += 2) {
                    const __m256* pair = sums + i / I * I * n + I * j + i % I;
                    __m256 fourths = _mm256_hadd_ps(pair[0], pair[1]), halves = _mm256_hadd_ps(fourths, fourths);
                    __m128 both = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
                    store(y + slots[start + j] * N + o + i, both[0]);
                    store(y + slots[start + j] * N + o + i + 1, both[1]);
                }
        }
    }
}

#define DEFINE(name, W) \
    extern "C" void name(const W* weight, const W* x, float* packed, W* y, const int64_t* rows, const int64_t* slots, \
                         const int64_t* experts, const int64_t* starts, const int64_t* counts, long G, long N, long K, \
                         long T, int threads) { \
        run(weight, x, packed, y, rows, slots, experts, starts, counts, G, N, K, T, threads); \
    }
DEFINE(grouped_linear_float32, float)
DEFINE(grouped_linear_bfloat16, uint16_t)
"""


class Groups(NamedTuple):
    """Which rows of the input meet which matrix, and where the results go; every matrix appears once.

    NumPy, whose operations on so little data take a tenth of the time of torch's.

    Attributes:
        rows, slots: int64 [S], a row of the input and a row of the output, group after group.
        experts: int64 [G], the matrix of each group.
        starts, counts: int64 [G], where each group begins in `rows` and `slots`, and its length.
    """

    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    experts: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]


def cpu_path() -> str:
    """What multiplies narrow groups on this machine: `kernel`, or `torch` and why."""
    try:
        _kernel()
    except _NoKernelError as error:
        return f"torch ({error})"
    return "kernel"


def grouped_linear(x: Tensor, weight: Tensor, groups: Groups, num_slots: int, *, transposed: bool = False) -> Tensor:
    """Each group's rows times its expert's matrix, reading only those matrices, each one once.

    Sums are float32 and in a fixed order. Through the kernel a result does not depend on the other rows or on threads.

    Args:
        x: [T, K], of the weight's dtype.
        weight: bfloat16 or float32 [E, N, K]; [E, K, N] if `transposed`.
        groups: see `Groups`.
        num_slots: rows of the output; those that no group writes are zero.

    Returns:
        [num_slots, N], of the weight's dtype.
    """
    allocate = x.new_empty if len(groups.slots) == num_slots else x.new_zeros
    out = allocate(num_slots, weight.shape[1 + transposed])
    wide = np.ones_like(groups.counts, dtype=bool)
    if not transposed and _fits_kernel(weight):
        wide = groups.counts > WIDE_ROWS
        _run_kernel(x, weight, groups, ~wide, out)
    rows, slots = torch.from_numpy(groups.rows), torch.from_numpy(groups.slots)
    chunk = torch.empty(CHUNK_ROWS if wide.any() else 0, weight.shape[2])
    for expert, start, count in zip(groups.experts[wide], groups.starts[wide], groups.counts[wide], strict=True):
        group = slice(start, start + count)
        picked = x.index_select(0, rows[group])  # copies whole rows, which indexing does not
        product = linear_float32(picked, weight[expert], chunk, transposed=transposed)
        out[slots[group]] = product.to(out.dtype)
    return out


def linear_float32(x: Tensor, matrix: Tensor, chunk: Tensor, *, transposed: bool = False) -> Tensor:
    """The twin of the kernel for one matrix: x [n, K] times [N, K] (or [K, N] if `transposed`), float32 [n, N].

    A bfloat16 matrix is widened a chunk at a time, which torch multiplies up to 5 times faster than bfloat16 itself on
    a CPU without such units. `chunk`, float32 [any, columns of the matrix], is where.
    """
    n = len(x)
    few = n < WIDEN_ROWS and not transposed
    if matrix.dtype == torch.float32 or few or _has_bfloat16_units():
        return (x @ matrix if transposed else functional.linear(x, matrix)).float()
    padding = -n % PAD_MULTIPLE
    columns = functional.pad(x.float(), (0, 0, 0, padding)).T  # [K, n]
    N = matrix.shape[1 if transposed else 0]
    out = torch.zeros(N, n + padding) if transposed else torch.empty(N, n + padding)
    for start in range(0, len(matrix), len(chunk)):
        span = slice(start, min(start + len(chunk), len(matrix)))
        widened = chunk[: span.stop - start].copy_(matrix[span])
        if transposed:
            out.addmm_(widened.T, columns[span])
        else:
            torch.mm(widened, columns, out=out[span])
    return out[:, :n].T


class _NoKernelError(Exception):
    """Why narrow groups go through torch on this machine."""


def _has_bfloat16_units() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _fits_kernel(weight: Tensor) -> bool:
    if weight.shape[1] % TILE_ROWS or weight.shape[2] % TILE_COLUMNS or not weight.is_contiguous():
        return False
    if weight.dtype == torch.bfloat16 and _has_bfloat16_units():
        return False
    return _has_kernel()


@functools.cache
def _has_kernel() -> bool:
    try:
        _kernel()
    except _NoKernelError as error:
        logger.warning("experts run through plain torch, several times slower for a decode batch: %s", error)
        return False
    return True


def _run_kernel(x: Tensor, weight: Tensor, groups: Groups, chosen: NDArray[np.bool_], out: Tensor) -> None:
    assert x.dtype == weight.dtype == out.dtype
    assert all(field.dtype == np.int64 and field.flags.c_contiguous for field in groups)
    function = getattr(_kernel(), f"grouped_linear_{str(weight.dtype).removeprefix('torch.')}")
    x = x.contiguous()
    packed = torch.empty(0 if weight.dtype == torch.float32 else x.numel())
    arrays = (groups.rows, groups.slots, *(f[chosen] for f in (groups.experts, groups.starts, groups.counts)))
    pointers = [t.data_ptr() for t in (weight, x, packed, out)] + [array.ctypes.data for array in arrays]
    function(*pointers, len(arrays[2]), *weight.shape[1:], len(x), torch.get_num_threads())


@functools.cache
def _kernel() -> Any:
    if platform.system() != "Linux" or not torch.cpu._is_avx2_supported():
        raise _NoKernelError("the kernel needs Linux and AVX2")
    try:
        library = ctypes.CDLL(str(_build()))
    except (OSError, subprocess.SubprocessError) as error:
        raise _NoKernelError(f"the kernel could not be built: {error}") from error
    for function in (library.grouped_linear_float32, library.grouped_linear_bfloat16):
        function.argtypes = [ctypes.c_void_p] * 9 + [ctypes.c_long] * 4 + [ctypes.c_int]
        function.restype = None
    return library


def _build() -> Path:
    """The compiled kernel, from the user's cache. It runs on torch's own OpenMP threads, so none are started beside."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise FileNotFoundError("no C++ compiler: install g++, or name one in CXX")
    command = [compiler, "-O3", "-march=native", "-fPIC", "-fopenmp", f"-DMAX_ROWS={WIDE_ROWS}"]
    # A cache may be shared by machines whose processors differ.
    processor = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("model n", "flags"))
    ]
    key = hashlib.sha256("\n".join([SOURCE, *command, *processor[:2]]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "base-moe"
    library = cache / f"grouped_linear-{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            source, compiled, linked = (Path(folder) / name for name in ("kernel.cpp", "kernel.o", "kernel.so"))
            source.write_text(SOURCE)
            _execute([*command, "-c", str(source), "-o", str(compiled)])
            # Linked without -fopenmp: the library of that name that torch has loaded provides the threads.
            _execute([compiler, "-shared", str(compiled), "-o", str(linked)])
            linked.replace(library)
    return library


def _execute(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{command[0]} failed: {error.stderr.strip()[-500:]}") from error
