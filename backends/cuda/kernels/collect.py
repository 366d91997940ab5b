"""Collect: turns ids and weights [T, k] of any router into what the experts kernels read, in one launch.

`front` writes the same tensors itself; this is for batches that another router, or selection in torch, has routed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 64
NUM_WARPS, NUM_STAGES = 8, 2
MAX_REGISTERS = 224  # said aloud, since ptxas otherwise prefers two spills to 65 registers
OPTIONS = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES} | ({} if torch.version.hip else {"maxnreg": MAX_REGISTERS})


class Collected(NamedTuple):
    """`active` int32 [E], ascending; `count` int32 [1]; `combine` float32 [E, T], of which `count` rows are written."""

    active: Tensor
    count: Tensor
    combine: Tensor


@triton.jit(do_not_specialize=["T"])
def collect_kernel(
    ids, weights, active, count, combine, T,
    E: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Grid (1,)."""
    t = tl.arange(0, BT)
    col = tl.arange(0, BE)
    here = t < T
    table = tl.zeros([BT, BE], tl.float32)
    for j in range(K):
        e = tl.load(ids + t * K + j, mask=here, other=0).to(tl.int32)
        w = tl.load(weights + t * K + j, mask=here, other=0.0).to(tl.float32)
        table += tl.where(col[None, :] == e[:, None], w[:, None], 0.0)
    runs = tl.max((table != 0).to(tl.int32), 0)
    place = tl.cumsum(runs, 0) - 1
    tl.store(active + place, col, mask=runs > 0)
    tl.store(count, tl.sum(runs, 0))
    tl.store(combine + place[None, :] * T + t[:, None], table, mask=(runs > 0)[None, :] & here[:, None])


def collect(ids: Tensor, weights: Tensor, num_experts: int) -> Collected:
    """The active experts of ids, integer [T, k] below E, and weights, float [T, k], for T <= 64.

    An expert whose weights are all 0 is left out.
    """
    T = len(ids)
    assert weights.shape == ids.shape and 1 <= T <= MAX_ROWS, (
        f"collect takes [T <= {MAX_ROWS}, k], got {list(ids.shape)}"
    )
    return Collected(*torch.ops.base_moe.collect(ids.contiguous(), weights.contiguous(), num_experts))


def _outputs(ids: Tensor, E: int) -> Collected:
    return Collected(
        ids.new_empty(E, dtype=torch.int32),
        ids.new_empty(1, dtype=torch.int32),
        ids.new_empty(E, len(ids), dtype=torch.float32),
    )


@torch.library.custom_op(
    "base_moe::collect", mutates_args=(), schema="(Tensor ids, Tensor weights, int E) -> (Tensor, Tensor, Tensor)"
)
def _collect(ids, weights, E):
    T, k = ids.shape
    out = _outputs(ids, E)
    BT, BE = max(16, triton.next_power_of_2(T)), max(16, triton.next_power_of_2(E))
    collect_kernel[(1,)](ids, weights, *out, T, E=E, K=k, BT=BT, BE=BE, **OPTIONS)
    return tuple(out)


@_collect.register_fake
def _(ids, weights, E):
    return tuple(_outputs(ids, E))


def naive_collect(ids: Tensor, weights: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The twin of `collect`: the active experts, int64 [count], and their rows of `combine`, float32 [count, T]."""
    table = torch.zeros(num_experts, len(ids), device=ids.device)
    for t, (row_ids, row_weights) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for e, weight in zip(row_ids, row_weights, strict=True):
            table[e, t] += weight
    active = (table != 0).any(1).nonzero()[:, 0]
    return active, table[active]
