"""Front: router, predictor, selection and refill of one MoE layer, in one launch up to 32 rows and two up to 256.

With more than 128 experts one launch takes 16 rows: 32 would not fit one program's registers.

`[router; predictor]` is one product, split along d over many programs. Each leaves its float32 partial sums and draws a
ticket; the program with the last ticket adds the partial sums in a fixed order and selects (paper sections 6.1, 6.2).
For more rows it only adds up the removal costs of its block of rows, and a second launch selects for all blocks.

Results equal `base_core.select` with its defaults, on routers without expert groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.cuda.selection import select_no_sync
from base_core.budget import Budget
from base_core.routing import RouterRule
from base_core.selection import DECODE, LOG_ENERGY_RANGE, PADDING, PREFILL

MAX_ROWS = 256
SMALL_BLOCK, LARGE_BLOCK = 16, 32
NO_TAU = 2.0
"""Stands for a budget without an energy share in the device value `[limit, tau]`."""

BN, BK = 64, 128
NUM_WARPS, NUM_STAGES = 8, 2
MAX_REGISTERS = 224  # said aloud, since ptxas otherwise prefers a few spills to 129 registers
OPTIONS = {"num_warps": NUM_WARPS, "num_stages": NUM_STAGES} | ({} if torch.version.hip else {"maxnreg": MAX_REGISTERS})
MAX_SPLIT = 8
TAIL_BYTES = 128 * 1024  # what the last program reads back: on one multiprocessor, about 1 us

INTERPRETED = triton.knobs.runtime.interpret

LOWEST = tl.constexpr(-3.0e38)
LOG_ENERGY_LIMIT = tl.constexpr(LOG_ENERGY_RANGE[1])
SMALLEST_NORM = tl.constexpr(1.1754943508222875e-38)
PADDING_ROW, DECODE_ROW, PREFILL_ROW = tl.constexpr(PADDING), tl.constexpr(DECODE), tl.constexpr(PREFILL)
NORMALISE = {"none": 0, "selected": 1, "softmax_selected": 2}


class Front(NamedTuple):
    """What one layer executes: T rows, k slots, E experts.

    Attributes:
        ids: int64 [T, k], active experts only; an empty slot repeats one with weight 0.
        weights: [T, k], of the dtype asked for.
        logits: float32 [T, E], of the router.
        active: int32 [E], the active experts, ascending; behind the first `count` the first one is repeated.
        count: int32 [1].
        combine: float32 [E, T]: row a holds the weights of expert `active[a]`. Rows from `count` on are not written.
        cost: float32 [E], the removal cost of each expert.
    """

    ids: Tensor
    weights: Tensor
    logits: Tensor
    active: Tensor
    count: Tensor
    combine: Tensor
    cost: Tensor


class FrontState(NamedTuple):
    """Device memory that outlives a launch. One per CUDA stream: two launches at a time must not share it.

    Attributes:
        tickets: int32 [16], zero between launches.
        counters: int64 [5] over decode steps (a decode row and no prefill row): their number, those that fell back to
            native routing, the sums of active and of native experts, the most active experts.
    """

    tickets: Tensor
    counters: Tensor

    @classmethod
    def zeros(cls, device: torch.device | str) -> FrontState:
        """Fresh state on `device`."""
        return cls(
            torch.zeros(MAX_ROWS // SMALL_BLOCK, dtype=torch.int32, device=device),
            torch.zeros(5, dtype=torch.int64, device=device),
        )


class FrontTraffic(NamedTuple):
    """Bytes that `front` loads: `weights` and `z` by all programs, `partial` by the last; `memory` counts each once."""

    weights: int
    z: int
    partial: int
    memory: int


def budget_value(budget: Budget, num_experts: int, device: torch.device | str = "cpu") -> Tensor:
    """The device form of one layer's budget, float32 [2]: limit and tau. Overwrite it in place to change the budget.

    Raises:
        ValueError: a share budget, which the front does not compute.
    """
    if budget.floor is not None:
        raise ValueError(f"the front does not compute budget {budget}: leave it to select_no_sync")
    tau = NO_TAU if budget.tau is None else budget.tau
    return torch.tensor([budget.limit(num_experts), tau], dtype=torch.float32, device=device)


@triton.jit
def _product(
    z, weight, partial, norms, tile, split, t, T, ROWS,
    E: tl.constexpr, H: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    UP: tl.constexpr,
):  # fmt: skip
    """Partial sums of one tile of `[router; predictor]`; the tile after the last one sums squares of z instead."""
    STEPS: tl.constexpr = (H + BK * SPLIT - 1) // (BK * SPLIT)
    WHOLE: tl.constexpr = H % (BK * SPLIT) == 0
    first = split * (STEPS * BK)
    if tile < (2 * E + BN - 1) // BN:
        n = tile * BN + tl.arange(0, BN)
        acc = tl.zeros([BN, BT], tl.float32)
        for step in range(STEPS):
            k = first + step * BK + tl.arange(0, BK)
            inside = (n < 2 * E)[:, None]
            present = (t < T)[None, :]
            if not WHOLE:
                inside = inside & (k < H)[None, :]
                present = present & (k < H)[:, None]
            w = tl.load(weight + n[:, None] * H + k[None, :], mask=inside, other=0.0)  # [BN, BK]
            x = tl.load(z + t[None, :] * H + k[:, None], mask=present, other=0.0)  # [BK, BT]
            if UP:
                w, x = w.to(tl.float32), x.to(tl.float32)
            acc = tl.dot(w, x, acc, input_precision="ieee")
        tl.store(partial + (split * ROWS + t[None, :]) * (2 * E) + n[:, None], acc, mask=(n < 2 * E)[:, None])
    else:
        squares = tl.zeros([BT], tl.float32)
        for step in range(STEPS):
            k = first + step * BK + tl.arange(0, BK)
            x = tl.load(
                z + t[:, None] * H + k[None, :], mask=(t < T)[:, None] & (k < H)[None, :], other=0.0
            )  # [BT, BK]
            x = x.to(tl.float32)
            squares += tl.sum(x * x, 1)
        tl.store(norms + split * ROWS + t, squares)


@triton.jit
def _gathered(partial, norms, bias, t, ROWS, col, E: tl.constexpr, SPLIT: tl.constexpr, BIASED: tl.constexpr):
    """Router logits and the predictor's products with z / ||z||, both [BT, BE]."""
    logits = tl.zeros([t.shape[0], col.shape[0]], tl.float32)
    energy = tl.zeros([t.shape[0], col.shape[0]], tl.float32)
    square = tl.zeros([t.shape[0]], tl.float32)
    valid = (col < E)[None, :]
    for s in tl.static_range(SPLIT):
        row = partial + (s * ROWS + t[:, None]) * (2 * E) + col[None, :]
        # Written by other multiprocessors a moment ago: .cg passes by this one's own cache.
        logits += tl.load(row, mask=valid, other=0.0, cache_modifier=".cg")
        energy += tl.load(row + E, mask=valid, other=0.0, cache_modifier=".cg")
        square += tl.load(norms + s * ROWS + t, cache_modifier=".cg")
    if BIASED:
        logits += tl.load(bias + col, mask=col < E, other=0.0).to(tl.float32)[None, :]
    norm = tl.sqrt(square)
    return logits, energy / tl.where(norm > SMALLEST_NORM, norm, SMALLEST_NORM)[:, None]


@triton.jit
def _top_slots(ranking, col, K: tl.constexpr):
    """int32 [BT, BE]: 0 for each row's best column, 1 for the next, K for the rest and for whatever is -inf."""
    slot = tl.full(ranking.shape, K, tl.int32)
    for j in range(K):
        value, best = tl.max(ranking, axis=1, return_indices=True)  # ties to the lower index
        hit = (col[None, :] == best[:, None]) & (value > -float("inf"))[:, None]
        slot = tl.where(hit, j, slot)
        ranking = tl.where(hit, -float("inf"), ranking)
    return slot


@triton.jit
def _native(
    logits, correction, col, E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
    SCALE: tl.constexpr, CORRECTED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The router's own choice, all [BT, BE]: scores, ranking (-inf beyond E), slots, weights."""
    valid = (col < E)[None, :]
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(tl.where(valid, logits, -float("inf")), 1)[:, None])
        powers = tl.where(valid, powers, 0.0)
        scores = powers / tl.sum(powers, 1)[:, None]
    ranking = scores
    if NORMALISE == 2:
        ranking = logits
    if CORRECTED:
        ranking = ranking + tl.load(correction + col, mask=col < E, other=0.0).to(tl.float32)[None, :]
    # LOWEST stands for -inf and NaN, so that a row always finds K experts: below it there is only padding.
    ranking = tl.where(valid, tl.where(ranking > LOWEST, ranking, LOWEST), -float("inf"))
    slot = _top_slots(ranking, col, K)
    weights = tl.where(slot < K, scores, 0.0)
    if NORMALISE == 2:
        chosen = tl.where(slot < K, logits, -float("inf"))
        weights = tl.exp(chosen - tl.max(chosen, 1)[:, None])
    if NORMALISE > 0:
        weights = weights / tl.sum(weights, 1)[:, None]
    return scores, ranking, slot, (weights * SCALE).to(DTYPE).to(tl.float32)


@triton.jit
def _cost(slot, weights, energy, energy_bias, kind, col, E: tl.constexpr, K: tl.constexpr):
    """This block's removal cost, float32 [BE], and native union, int32 [BE]."""
    s = energy + tl.load(energy_bias + col, mask=col < E, other=0.0).to(tl.float32)[None, :]
    s = tl.where(
        s > LOG_ENERGY_LIMIT, LOG_ENERGY_LIMIT, tl.where(s < -LOG_ENERGY_LIMIT, -LOG_ENERGY_LIMIT, s)
    )  # keeps NaN
    votes = (slot < K) & (kind == DECODE_ROW)[:, None]
    cost = tl.sum(tl.where(votes, weights * weights * tl.exp(s), 0.0), 0)
    return cost, tl.max(((slot < K) & (kind != PADDING_ROW)[:, None]).to(tl.int32), 0)


@triton.jit
def _step_kind(kind):
    """Whether a prefill row is among them, and whether this is a decode step."""
    prefill = tl.sum((kind == PREFILL_ROW).to(tl.int32), 0) > 0
    decode = tl.sum((kind == DECODE_ROW).to(tl.int32), 0) > 0
    return prefill, decode & (prefill == 0)


@triton.jit
def _active_set(cost, union, prefill, budget, col, BE: tl.constexpr):
    """int32 [BE], and whether a cost was not finite."""
    CHUNK: tl.constexpr = 32 if BE > 32 else BE
    limit = tl.load(budget)
    tau = tl.load(budget + 1)
    rank = tl.zeros([BE], tl.int32)
    before = tl.zeros([BE], tl.float32)
    for start in range(0, BE, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.gather(cost, j, 0)[None, :]
        ahead = (other > cost[:, None]) | ((other == cost[:, None]) & (j[None, :] < col[:, None]))  # [BE, CHUNK]
        rank += tl.sum(ahead.to(tl.int32), 1)
        before += tl.sum(tl.where(ahead, other, 0.0), 1)
    total = tl.sum(cost, 0)
    keep = (rank < limit) & (cost > 0) & (before < tl.where(tau < 1, tau * total, float("inf")))
    broken = tl.sum(tl.where(tl.abs(cost) < float("inf"), 0, 1), 0) > 0
    fits = (tau > 1) & (tl.sum(union, 0) <= limit)
    everything = tl.zeros([BE], tl.int32) + (prefill | broken | fits).to(tl.int32)
    return tl.where((everything > 0) | keep, union, 0), broken


@triton.jit
def _emit(
    scores, ranking, slot, weights, active, kind, t, T, col, ids_out, weights_out, combine,
    E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Refills one block of rows and writes its ids, weights and columns of `combine`."""
    runs = (active > 0)[None, :]
    native = tl.sum(tl.where((slot < K) & (runs == 0), 1, 0), 1) == 0
    mass = tl.sum(tl.where(slot < K, scores, 0.0), 1)
    ratio = tl.where(mass > 0, tl.sum(weights, 1) / mass, 0.0)
    refill = _top_slots(tl.where(runs & (ranking > LOWEST), ranking, -float("inf")), col, K)
    refilled = tl.where(refill < K, scores * ratio[:, None], 0.0).to(DTYPE).to(tl.float32)
    slot = tl.where(native[:, None], slot, refill)
    slot = tl.where((kind != PADDING_ROW)[:, None], slot, K)
    weights = tl.where(slot < K, tl.where(native[:, None], weights, refilled), 0.0)

    here = (t < T)[:, None]
    taken = (slot < K) & here
    at = t[:, None] * K + slot
    tl.store(ids_out + at, tl.zeros_like(slot).to(tl.int64) + col[None, :], mask=taken)
    tl.store(weights_out + at, weights.to(DTYPE), mask=taken)
    filled = tl.sum((slot < K).to(tl.int32), 1)
    first = tl.min(tl.where(active > 0, col, E), 0) % E  # 0 when nothing is active
    spare = tl.where(filled > 0, tl.sum(tl.where(slot == 0, col[None, :], 0), 1), first)
    j = tl.arange(0, KP)
    empty = (j[None, :] >= filled[:, None]) & (j < K)[None, :] & here
    at = t[:, None] * K + j[None, :]
    tl.store(ids_out + at, tl.zeros_like(at).to(tl.int64) + spare[:, None], mask=empty)
    tl.store(weights_out + at, tl.zeros([t.shape[0], KP], DTYPE), mask=empty)
    place = tl.cumsum(active, 0) - 1
    tl.store(combine + place[None, :] * T + t[:, None], weights, mask=runs & here)


@triton.jit
def _emit_active(active, union, broken, counted, cost, active_out, count_out, cost_out, counters, col, E: tl.constexpr):
    """Writes what belongs to the layer and not to a row."""
    count = tl.sum(active, 0)
    first = tl.min(tl.where(active > 0, col, E), 0) % E
    tl.store(active_out + tl.cumsum(active, 0) - 1, col, mask=active > 0)
    tl.store(active_out + col, tl.zeros_like(col) + first, mask=(col >= count) & (col < E))
    tl.store(count_out, count)
    tl.store(cost_out + col, cost, mask=col < E)
    if counted:
        tl.store(counters, tl.load(counters) + 1)
        tl.store(counters + 1, tl.load(counters + 1) + broken.to(tl.int64))
        tl.store(counters + 2, tl.load(counters + 2) + count)
        tl.store(counters + 3, tl.load(counters + 3) + tl.sum(union, 0))
        tl.store(counters + 4, tl.maximum(tl.load(counters + 4), count.to(tl.int64)))


@triton.jit(do_not_specialize=["T", "ROWS"])
def front_kernel(
    z, weight, bias, energy_bias, correction, rows, budget, partial, norms, tickets, costs, unions,
    ids_out, weights_out, logits_out, active_out, count_out, combine, cost_out, counters, T, ROWS,
    E: tl.constexpr, H: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr,
    SCALE: tl.constexpr, BIASED: tl.constexpr, CORRECTED: tl.constexpr, ONE_LAUNCH: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KP: tl.constexpr, SPLIT: tl.constexpr,
    UP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of [router; predictor] + 1, SPLIT, blocks of BT rows)."""
    DTYPE: tl.constexpr = weights_out.dtype.element_ty
    block = tl.program_id(2)
    t = block * BT + tl.arange(0, BT)
    _product(z, weight, partial, norms, tl.program_id(0), tl.program_id(1), t, T, ROWS, E, H, BT, BN, BK, SPLIT, UP)
    tl.debug_barrier()  # every thread has stored before one of them draws the ticket
    ticket = tl.atomic_add(tickets + block, 1, sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) * SPLIT - 1:
        tl.store(tickets + block, 0)
        col = tl.arange(0, BE)
        kind = tl.load(rows + t, mask=t < T, other=PADDING_ROW)
        logits, energy = _gathered(partial, norms, bias, t, ROWS, col, E, SPLIT, BIASED)
        tl.store(logits_out + t[:, None] * E + col[None, :], logits, mask=(t < T)[:, None] & (col < E)[None, :])
        scores, ranking, slot, weights = _native(
            logits, correction, col, E, K, SIGMOID, NORMALISE, SCALE, CORRECTED, DTYPE
        )
        cost, union = _cost(slot, weights, energy, energy_bias, kind, col, E, K)
        if ONE_LAUNCH:
            prefill, counted = _step_kind(kind)
            active, broken = _active_set(cost, union, prefill, budget, col, BE)
            _emit_active(active, union, broken, counted, cost, active_out, count_out, cost_out, counters, col, E)
            _emit(
                scores, ranking, slot, weights, active, kind, t, T, col, ids_out, weights_out, combine, E, K, KP, DTYPE
            )  # fmt: skip
        else:
            tl.store(costs + block * BE + col, cost)
            tl.store(unions + block * BE + col, union)


@triton.jit(do_not_specialize=["T", "BLOCKS"])
def fill_kernel(
    logits_in, correction, rows, budget, costs, unions, ids_out, weights_out, active_out, count_out, combine, cost_out,
    counters, T, BLOCKS,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, SCALE: tl.constexpr,
    CORRECTED: tl.constexpr, ALL: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BT rows): each finds the same active set and refills its own rows."""
    DTYPE: tl.constexpr = weights_out.dtype.element_ty
    block = tl.program_id(0)
    t = block * BT + tl.arange(0, BT)
    col = tl.arange(0, BE)
    cost = tl.zeros([BE], tl.float32)
    union = tl.zeros([BE], tl.int32)
    for b in range(BLOCKS):
        cost += tl.load(costs + b * BE + col)
        union = tl.maximum(union, tl.load(unions + b * BE + col))
    everyone = tl.arange(0, ALL)
    prefill, counted = _step_kind(tl.load(rows + everyone, mask=everyone < T, other=PADDING_ROW))
    active, broken = _active_set(cost, union, prefill, budget, col, BE)
    if block == 0:
        _emit_active(active, union, broken, counted, cost, active_out, count_out, cost_out, counters, col, E)
    kind = tl.load(rows + t, mask=t < T, other=PADDING_ROW)
    here = (t < T)[:, None] & (col < E)[None, :]
    logits = tl.load(logits_in + t[:, None] * E + col[None, :], mask=here, other=0.0)  # [BT, BE]
    scores, ranking, slot, weights = _native(logits, correction, col, E, K, SIGMOID, NORMALISE, SCALE, CORRECTED, DTYPE)
    _emit(scores, ranking, slot, weights, active, kind, t, T, col, ids_out, weights_out, combine, E, K, KP, DTYPE)


class FrontShape(NamedTuple):
    """Block sizes of one call: BT rows a block, BE >= E columns and KP >= k slots (powers of two), SPLIT parts of d."""

    BT: int
    BE: int
    KP: int
    SPLIT: int
    blocks: int
    tiles: int


def front_shape(T: int, E: int, k: int, H: int) -> FrontShape:
    """Block sizes for T rows."""
    BT = SMALL_BLOCK if T <= SMALL_BLOCK or E > 128 else LARGE_BLOCK
    split = MAX_SPLIT
    while split > 1 and (split * BT * 2 * E * 4 > TAIL_BYTES or split * BK > triton.next_power_of_2(H)):
        split //= 2
    return FrontShape(
        BT,
        max(16, triton.next_power_of_2(E)),
        triton.next_power_of_2(k),
        split,
        triton.cdiv(T, BT),
        triton.cdiv(2 * E, BN),
    )


def front_traffic(T: int, E: int, k: int, H: int, item: int) -> FrontTraffic:
    """Of the product, for weights of `item` bytes: `[router; predictor]` once for each block of rows."""
    s = front_shape(T, E, k, H)
    weights, z = 2 * E * H * item, T * H * item
    partial = s.SPLIT * s.blocks * s.BT * (2 * E + 1) * 4
    return FrontTraffic(weights * s.blocks, z * (s.tiles + 1), partial, weights + z + partial)


def front(
    z: Tensor,
    weight: Tensor,
    energy_bias: Tensor,
    rows: Tensor,
    budget: Tensor,
    state: FrontState,
    rule: RouterRule,
    *,
    router_bias: Tensor | None = None,
    correction: Tensor | None = None,
    weight_dtype: torch.dtype = torch.float32,
) -> Front:
    """One MoE layer's routing under a budget: one or two launches (see the module's text), no host synchronisation.

    Args:
        z: [T, H], the router's input.
        weight: [2E, H] of z's dtype, the router's rows and below them the predictor's.
        energy_bias: float32 [E], the predictor's intercepts.
        rows: int32 [T] or longer, 0 padding, 1 decode, 2 prefill.
        budget: float32 [2], see `budget_value`.
        state: tickets and counters.
        rule: the model's router; expert groups are not supported.
        router_bias: [E], added to the logits (gpt-oss).
        correction: [E], added to the scores for ranking only.
        weight_dtype: of the combine weights, which are rounded to it as the model's own router would.

    Raises:
        ValueError: shapes, dtypes or a rule that the kernel does not take.
    """
    T, H = z.shape
    E = weight.shape[0] // 2
    if not 1 <= T <= MAX_ROWS:
        raise ValueError(f"front takes 1..{MAX_ROWS} rows, got {T}: larger batches route with torch")
    if rule.top_groups < rule.num_groups:
        raise ValueError(f"front takes no router with expert groups, got {rule.num_groups}: route with torch")
    if not 1 <= rule.k <= E or weight.shape != (2 * E, H) or weight.dtype != z.dtype:
        needed = f"[2E, {H}] of dtype {z.dtype} with E >= k={rule.k}"
        raise ValueError(f"front needs weight {needed}, got {list(weight.shape)} of {weight.dtype}")
    assert energy_bias.shape == (E,) and budget.shape == (2,) and budget.dtype == torch.float32
    assert rows.ndim == 1 and len(rows) >= T and rows.dtype == torch.int32
    assert z.is_contiguous() and weight.is_contiguous() and rows.is_contiguous()
    assert router_bias is None or router_bias.shape == (E,)
    assert correction is None or correction.shape == (E,)
    return Front(
        *torch.ops.base_moe.front(
            z, weight, energy_bias, rows, budget, state.tickets, state.counters, router_bias, correction,
            rule.k, rule.score, rule.normalise, rule.scale, weight_dtype,
        )
    )  # fmt: skip


def _outputs(z: Tensor, weight: Tensor, k: int, weight_dtype: torch.dtype) -> Front:
    T, E = len(z), weight.shape[0] // 2
    return Front(
        ids=z.new_empty(T, k, dtype=torch.int64),
        weights=z.new_empty(T, k, dtype=weight_dtype),
        logits=z.new_empty(T, E, dtype=torch.float32),
        active=z.new_empty(E, dtype=torch.int32),
        count=z.new_empty(1, dtype=torch.int32),
        combine=z.new_empty(E, T, dtype=torch.float32),
        cost=z.new_empty(E, dtype=torch.float32),
    )


@torch.library.custom_op(
    "base_moe::front",
    mutates_args=("tickets", "counters"),
    schema="(Tensor z, Tensor weight, Tensor energy_bias, Tensor rows, Tensor budget, Tensor(a!) tickets,"
    " Tensor(b!) counters, Tensor? router_bias, Tensor? correction, int k, str score, str normalise, float scale,"
    " ScalarType weight_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _front(
    z, weight, energy_bias, rows, budget, tickets, counters, router_bias, correction, k, score, normalise, scale,
    weight_dtype,
):  # fmt: skip
    T, H = z.shape
    E = weight.shape[0] // 2
    shape = front_shape(T, E, k, H)
    padded = shape.blocks * shape.BT
    out = _outputs(z, weight, k, weight_dtype)
    partial = z.new_empty(shape.SPLIT, padded, 2 * E, dtype=torch.float32)
    norms = z.new_empty(shape.SPLIT, padded, dtype=torch.float32)
    costs = z.new_empty(shape.blocks, shape.BE, dtype=torch.float32)
    unions = z.new_empty(shape.blocks, shape.BE, dtype=torch.int32)
    rule = dict(
        E=E, K=k, SIGMOID=score == "sigmoid", NORMALISE=NORMALISE[normalise], SCALE=scale,
        CORRECTED=correction is not None, BT=shape.BT, BE=shape.BE, KP=shape.KP,
    )  # fmt: skip
    bias, corrected = z if router_bias is None else router_bias, z if correction is None else correction
    front_kernel[(shape.tiles + 1, shape.SPLIT, shape.blocks)](
        z, weight, bias, energy_bias, corrected, rows, budget, partial, norms, tickets, costs, unions,
        out.ids, out.weights, out.logits, out.active, out.count, out.combine, out.cost, counters, T, padded,
        H=H, BIASED=router_bias is not None, ONE_LAUNCH=shape.blocks == 1, BN=BN, BK=BK, SPLIT=shape.SPLIT,
        UP=INTERPRETED, **OPTIONS, **rule,
    )  # fmt: skip
    if shape.blocks > 1:
        fill_kernel[(shape.blocks,)](
            out.logits, corrected, rows, budget, costs, unions, out.ids, out.weights, out.active, out.count,
            out.combine, out.cost, counters, T, shape.blocks, ALL=MAX_ROWS, **OPTIONS, **rule,
        )  # fmt: skip
    return tuple(out)


@_front.register_fake
def _(
    z,
    weight,
    energy_bias,
    rows,
    budget,
    tickets,
    counters,
    router_bias,
    correction,
    k,
    score,
    normalise,
    scale,
    weight_dtype,
):
    return tuple(_outputs(z, weight, k, weight_dtype))


class NaiveFront(NamedTuple):
    """What `naive_front` returns: ids and weights [T, k], logits and log_energy [T, E], active bool [E], cost [E]."""

    ids: Tensor
    weights: Tensor
    logits: Tensor
    log_energy: Tensor
    active: Tensor
    cost: Tensor
    combine: Tensor


def naive_front(
    z: Tensor,
    weight: Tensor,
    energy_bias: Tensor,
    rows: Tensor,
    budget: Budget,
    rule: RouterRule,
    *,
    router_bias: Tensor | None = None,
    correction: Tensor | None = None,
    weight_dtype: torch.dtype = torch.float32,
) -> NaiveFront:
    """The twin of `front` in plain torch, computed in float64 up to the selection; `combine` is [E, T], by expert."""
    x, E = z.double(), weight.shape[0] // 2
    logits = x @ weight[:E].double().T + (0 if router_bias is None else router_bias.double())
    norm = x.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    log_energy = (x / norm) @ weight[E:].double().T + energy_bias.double()
    scores = logits.softmax(1) if rule.score == "softmax" else logits.sigmoid()
    preference = logits if rule.normalise == "softmax_selected" else scores
    if correction is not None:
        preference = preference + correction.double()
    ids = preference.sort(dim=1, descending=True, stable=True).indices[:, : rule.k]
    weights = scores.gather(1, ids)
    if rule.normalise == "softmax_selected":
        weights = logits.gather(1, ids).softmax(1)
    elif rule.normalise == "selected":
        weights = weights / weights.sum(1, keepdim=True)
    weights = (weights * rule.scale).to(weight_dtype)
    limit, tau = budget.limit(E), budget.tau
    s = select_no_sync(scores, ids, weights, log_energy, limit, tau=tau, preference=preference, rows=rows[: len(z)])
    combine = torch.zeros(len(z), E, dtype=torch.float32, device=z.device).scatter_add_(1, s.ids, s.weights.float()).T
    return NaiveFront(s.ids, s.weights, logits, log_energy, s.active, s.cost, combine)
