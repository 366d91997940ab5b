"""Experts: SwiGLU and down projection of the active experts only, each one's weights read once, in two launches.

The whole batch is one tile, so that no row is sorted or aligned, and the weights lie on the wide side of the product:
a tile of weight rows by all tokens. Membership comes as `combine`, zero where a row does not run an expert. No sum
depends on timing: `down` splits I over programs, and the last one of a column tile adds their parts in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 64
MAX_TILES = 1024
WANTED_WARPS = 1024  # of `down` on the device, and 768 with large tiles, whose partial sums weigh more
PROGRAMS_PER_PROCESSOR = 2
INTERPRETED = triton.knobs.runtime.interpret
INTERPRETED_PROGRAMS = 3  # programs take several tiles each, as they do on a device


@dataclass(frozen=True)
class ExpertsLayout:
    """How a family stores its experts.

    Attributes:
        transposed: weights are [E, H, 2I] and [E, I, H] (gpt-oss), not [E, 2I, H] and [E, H, I].
        interleaved: gate and up columns alternate (gpt-oss); otherwise all gates come first.
        clamp: None for silu(gate) * up; (alpha, limit) for gpt-oss's (up + 1) * gate * sigmoid(alpha * gate), clamped.
    """

    transposed: bool = False
    interleaved: bool = False
    clamp: tuple[float, float] | None = None


class Tile(NamedTuple):
    """Block sizes: BT rows of the batch, BM rows of weights, BK columns of those; a program's warps and stages."""

    BT: int
    BM: int
    BK: int
    warps: int
    stages: int


class DownShape(NamedTuple):
    """`down` divides I into `split` parts of `chunks` times BK columns, one program each, for every tile of H."""

    split: int
    chunks: int
    stages: int


def tile(T: int, *, hip: bool = torch.version.hip is not None) -> Tile:
    """Block sizes for T rows. 64 rows of weights are what one warpgroup multiplies at once, 128 what two do."""
    if T <= 16:
        return Tile(16, 64, 128, 4, 2 if hip else 4)
    if T <= 32:
        return Tile(32, 64, 128, 4, 2 if hip else 3)
    return Tile(64, 128, 64, 8, 2 if hip else 4)


def down_shape(H: int, I: int, t: Tile) -> DownShape:  # noqa: E741
    """How `down` is shared out, so that a small H still keeps a large device busy."""
    total = triton.cdiv(I, t.BK)
    wanted = (WANTED_WARPS if t.warps == 4 else WANTED_WARPS * 3 // 4) // t.warps
    chunks = max(1, total * triton.cdiv(H, t.BM) // max(1, wanted))
    # With one chunk an expert, the lookup of the expert is pipelined too and takes stages away from its weights.
    stages = 2 * t.stages - 1 if chunks == 1 and t.stages > 2 else t.stages
    return DownShape(triton.cdiv(total, chunks), chunks, stages)


@triton.jit(do_not_specialize=["T"])
def gate_up_kernel(
    z, weight, bias, active, count, combine, hidden, T,
    H: tl.constexpr, I: tl.constexpr,  # noqa: E741
    TRANSPOSED: tl.constexpr, INTERLEAVED: tl.constexpr, BIASED: tl.constexpr,
    CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """hidden[a, t] = combine[a, t] * swiglu(z_t of expert active[a]), [count, T, I]. Grid: any number of programs."""
    BN: tl.constexpr = BM // 2
    TILES: tl.constexpr = (I + BN - 1) // BN
    WHOLE: tl.constexpr = H % BK == 0
    t = tl.arange(0, BT)
    r = tl.arange(0, BM)
    here = t < T
    for unit in tl.range(tl.program_id(0), tl.load(count) * TILES, tl.num_programs(0)):
        a = unit // TILES
        start = (unit % TILES) * BN
        n = start + tl.arange(0, BN)
        # Gate and up rows of the same columns share one tile: [gate; up], or alternating as they are stored.
        if INTERLEAVED:
            row = 2 * start + r
            inside = row < 2 * I
        else:
            row = (r // BN) * I + start + r % BN
            inside = start + r % BN < I
        e = tl.load(active + a).to(tl.int64)
        base = weight + e * (2 * I * H)
        acc = tl.zeros([BM, BT], tl.float32)
        for k0 in range(0, H, BK):
            k = k0 + tl.arange(0, BK)
            w_mask = inside[:, None]
            x_mask = here[None, :]
            if not WHOLE:
                w_mask = w_mask & (k < H)[None, :]
                x_mask = x_mask & (k < H)[:, None]
            w_at = base + row[:, None] * H + k[None, :]
            if TRANSPOSED:
                w_at = base + k[None, :] * (2 * I) + row[:, None]
            if I % BN == 0 and WHOLE:
                w = tl.load(w_at, eviction_policy="evict_first")  # [BM, BK]
            else:
                w = tl.load(w_at, mask=w_mask, other=0.0, eviction_policy="evict_first")  # [BM, BK]
            x = tl.load(z + t[None, :] * H + k[:, None], mask=x_mask, other=0.0)  # [BK, BT]
            if UP:
                w, x = w.to(tl.float32), x.to(tl.float32)
            acc = tl.dot(w, x, acc, input_precision="ieee")
        if INTERLEAVED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BN, 2, BT)), (0, 2, 1)))  # [BN, BT] each
        else:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BN, BT)), (1, 2, 0)))
        if BIASED:
            gate_at = n
            up_at = I + n
            if INTERLEAVED:
                gate_at = 2 * n
                up_at = 2 * n + 1
            gate += tl.load(bias + e * (2 * I) + gate_at, mask=n < I, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + e * (2 * I) + up_at, mask=n < I, other=0.0).to(tl.float32)[:, None]
        if CLAMPED:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
            value = gate * up / (1.0 + tl.exp(-ALPHA * gate))
        else:
            value = gate * up / (1.0 + tl.exp(-gate))
        share = tl.load(combine + a * T + t, mask=here, other=0.0)[None, :]
        value = tl.where(share != 0, value * share, 0.0)  # a row that does not run the expert never sees its overflow
        at = (a * T + t[None, :]) * I + n[:, None]
        tl.store(hidden + at, value.to(hidden.dtype.element_ty), mask=here[None, :] & (n < I)[:, None])


@triton.jit(do_not_specialize=["T"])
def down_kernel(
    hidden, weight, bias, active, count, combine, partial, tickets, out, T,
    H: tl.constexpr, I: tl.constexpr, TRANSPOSED: tl.constexpr, BIASED: tl.constexpr,  # noqa: E741
    BT: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, CHUNKS: tl.constexpr,
    UP: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over active experts of down(hidden[a, t]), [T, H]. Grid (tiles of H, SPLIT)."""
    WHOLE: tl.constexpr = I == BK * SPLIT * CHUNKS
    part = tl.program_id(1)
    t = tl.arange(0, BT)
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    here = t < T
    experts = tl.load(count)
    acc = tl.zeros([BM, BT], tl.float32)
    for a in tl.range(0, experts, flatten=True):
        e = tl.load(active + a).to(tl.int64)
        for c in range(CHUNKS):
            k = (part * CHUNKS + c) * BK + tl.arange(0, BK)
            w_mask = (n < H)[:, None]
            x_mask = here[None, :]
            if not WHOLE:
                w_mask = w_mask & (k < I)[None, :]
                x_mask = x_mask & (k < I)[:, None]
            w_at = weight + e * (I * H) + n[:, None] * I + k[None, :]
            if TRANSPOSED:
                w_at = weight + e * (I * H) + k[None, :] * H + n[:, None]
            if H % BM == 0 and WHOLE:
                w = tl.load(w_at, eviction_policy="evict_first")  # [BM, BK]
            else:
                w = tl.load(w_at, mask=w_mask, other=0.0, eviction_policy="evict_first")  # [BM, BK]
            x = tl.load(hidden + (a * T + t[None, :]) * I + k[:, None], mask=x_mask, other=0.0)  # [BK, BT]
            if UP:
                w, x = w.to(tl.float32), x.to(tl.float32)
            acc = tl.dot(w, x, acc, input_precision="ieee")
    if BIASED and part == 0:
        for a in range(experts):
            e = tl.load(active + a).to(tl.int64)
            share = tl.load(combine + a * T + t, mask=here, other=0.0)
            acc += tl.load(bias + e * H + n, mask=n < H, other=0.0).to(tl.float32)[:, None] * share[None, :]
    mask = here[None, :] & (n < H)[:, None]
    at = t[None, :] * H + n[:, None]
    if SPLIT == 1:
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(partial + part * T * H + at, acc, mask=mask)
        tl.debug_barrier()  # every thread has stored before one of them draws the ticket
        ticket = tl.atomic_add(tickets + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        if ticket == SPLIT - 1:
            tl.store(tickets + tl.program_id(0), 0)
            total = tl.zeros([BM, BT], tl.float32)
            for s in range(SPLIT):
                total += tl.load(partial + s * T * H + at, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def gate_up(
    z: Tensor,
    weight: Tensor,
    active: Tensor,
    count: Tensor,
    combine: Tensor,
    layout: ExpertsLayout,
    bias: Tensor | None = None,
) -> Tensor:
    """What every active expert computes before its down projection, times its combine weight.

    Args:
        z: [T, H], T <= 64.
        weight: [E, 2I, H], or [E, H, 2I] when transposed, of z's dtype.
        active: int32 [E]; the first `count` entries are read.
        count: int32 [1].
        combine: float32 [E, T], row a for expert `active[a]`.
        layout: of the weights.
        bias: [E, 2I].

    Returns:
        [E, T, I] of z's dtype; entries from `count` on are not written.
    """
    T, H = z.shape
    E, I = weight.shape[0], weight.shape[2 if layout.transposed else 1] // 2  # noqa: E741
    _check(z, weight, (E, H, 2 * I) if layout.transposed else (E, 2 * I, H), active, count, combine, bias, 2 * I)
    hidden = z.new_empty(E, T, I)
    t = tile(T)
    most = E * triton.cdiv(I, t.BM // 2)
    programs = _processors(z.device) * PROGRAMS_PER_PROCESSOR if z.is_cuda else INTERPRETED_PROGRAMS
    alpha, limit = layout.clamp or (1.0, 0.0)
    gate_up_kernel[(min(most, programs),)](
        z, weight, z if bias is None else bias, active, count, combine, hidden, T,
        H=H, I=I, TRANSPOSED=layout.transposed, INTERLEAVED=layout.interleaved, BIASED=bias is not None,
        CLAMPED=layout.clamp is not None, ALPHA=alpha, LIMIT=limit, BT=t.BT, BM=t.BM, BK=t.BK, UP=INTERPRETED,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return hidden


def down(
    hidden: Tensor,
    weight: Tensor,
    active: Tensor,
    count: Tensor,
    combine: Tensor,
    tickets: Tensor,
    layout: ExpertsLayout,
    bias: Tensor | None = None,
) -> Tensor:
    """The layer's output: the sum over active experts of their down projections.

    Args:
        hidden: [E, T, I], of `gate_up`, so already weighted.
        weight: [E, H, I], or [E, I, H] when transposed, of hidden's dtype.
        active, count, combine: as for `gate_up`.
        tickets: int32 [MAX_TILES], zero between launches; one per CUDA stream.
        layout: of the weights.
        bias: [E, H].

    Returns:
        [T, H] of hidden's dtype; zeros when nothing is active.
    """
    _, T, I = hidden.shape  # noqa: E741
    E, H = weight.shape[0], weight.shape[2 if layout.transposed else 1]
    _check(hidden[0], weight, (E, I, H) if layout.transposed else (E, H, I), active, count, combine, bias, H)
    t = tile(T)
    tiles, shape = triton.cdiv(H, t.BM), down_shape(H, I, t)
    assert tickets.dtype == torch.int32 and len(tickets) >= tiles, f"down needs {tiles} tickets, got {len(tickets)}"
    out = hidden.new_empty(T, H)
    partial = hidden.new_empty(shape.split, T, H, dtype=torch.float32)
    down_kernel[(tiles, shape.split)](
        hidden, weight, hidden if bias is None else bias, active, count, combine, partial, tickets, out, T,
        H=H, I=I, TRANSPOSED=layout.transposed, BIASED=bias is not None, BT=t.BT, BM=t.BM, BK=t.BK, SPLIT=shape.split,
        CHUNKS=shape.chunks, UP=INTERPRETED, num_warps=t.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out


def _check(z, weight, weight_shape, active, count, combine, bias, bias_size) -> None:
    T, E = len(z), len(weight)
    assert 1 <= T <= MAX_ROWS, f"the experts kernels take 1..{MAX_ROWS} rows, got {T}"
    assert weight.shape == weight_shape, f"weight is {list(weight.shape)}, the layout says {list(weight_shape)}"
    assert weight.dtype == z.dtype and weight.is_contiguous() and z.is_contiguous()
    assert active.shape == (E,) and active.dtype == torch.int32 and count.shape == (1,) and count.dtype == torch.int32
    assert combine.shape == (E, T) and combine.dtype == torch.float32 and combine.is_contiguous()
    assert bias is None or (bias.shape == (E, bias_size) and bias.is_contiguous())


def experts(
    z: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    active: Tensor,
    count: Tensor,
    combine: Tensor,
    tickets: Tensor,
    layout: ExpertsLayout,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The routed experts of one layer for T <= 64 rows, [T, H]: two launches, no host synchronisation.

    See `gate_up` and `down` for the arguments. Works under `torch.compile` and inside CUDA graphs.
    """
    alpha, limit = layout.clamp or (None, None)
    return torch.ops.base_moe.experts(
        z, gate_up_weight, down_weight, active, count, combine, tickets, gate_up_bias, down_bias,
        layout.transposed, layout.interleaved, alpha, limit,
    )  # fmt: skip


@torch.library.custom_op(
    "base_moe::experts",
    mutates_args=("tickets",),
    schema="(Tensor z, Tensor gate_up_weight, Tensor down_weight, Tensor active, Tensor count, Tensor combine,"
    " Tensor(a!) tickets, Tensor? gate_up_bias, Tensor? down_bias, bool transposed, bool interleaved, float? alpha,"
    " float? limit) -> Tensor",
)
def _experts(
    z, gate_up_weight, down_weight, active, count, combine, tickets, gate_up_bias, down_bias, transposed, interleaved,
    alpha,
    limit,
):  # fmt: skip
    layout = ExpertsLayout(transposed, interleaved, None if alpha is None else (alpha, limit))
    hidden = gate_up(z, gate_up_weight, active, count, combine, layout, gate_up_bias)
    return down(hidden, down_weight, active, count, combine, tickets, layout, down_bias)


@_experts.register_fake
def _(z, *others):
    return torch.empty_like(z)


def naive_experts(
    z: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    ids: Tensor,
    weights: Tensor,
    layout: ExpertsLayout,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The twin of `experts`, float64 [T, H]: a loop over the rows and slots of a router's ids and weights [T, k]."""
    out = torch.zeros(z.shape, dtype=torch.float64, device=z.device)
    for t, (row_ids, row_weights) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
        for e, weight in zip(row_ids, row_weights, strict=True):
            if weight == 0:
                continue
            first, second = gate_up_weight[e].double(), down_weight[e].double()
            if layout.transposed:
                first, second = first.T, second.T
            inner = first @ z[t].double() + (0 if gate_up_bias is None else gate_up_bias[e].double())
            gate, up = (inner[::2], inner[1::2]) if layout.interleaved else inner.chunk(2)
            if layout.clamp is None:
                inner = gate * gate.sigmoid() * up
            else:
                alpha, limit = layout.clamp
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                inner = (up + 1) * gate * (alpha * gate).sigmoid()
            out[t] += weight * (second @ inner + (0 if down_bias is None else down_bias[e].double()))
    return out


class Traffic(NamedTuple):
    """Bytes that the kernels of one stage load, by tensor, from their block structure.

    Attributes:
        weights: each loaded once.
        z, hidden, partial: loads of activations. Each tile of weights loads them again, from the cache.
        memory: what must come from memory: weights, and every other tensor once.
    """

    weights: int
    z: int
    hidden: int
    partial: int
    memory: int


def layer_traffic(T: int, H: int, I: int, active: int, item: int) -> Traffic:  # noqa: E741
    """Of `gate_up` and `down` together, with `active` experts and weights of `item` bytes."""
    t = tile(T)
    up_tiles, down_tiles, split = triton.cdiv(I, t.BM // 2), triton.cdiv(H, t.BM), down_shape(H, I, t).split
    weights = active * 3 * H * I * item
    partial = split * T * H * 4 if split > 1 else 0
    memory = weights + (T * H + active * T * I) * item + partial
    return Traffic(weights, active * up_tiles * T * H * item, active * down_tiles * T * I * item, partial, memory)
