"""Kernel A: log-energies, removal cost, ranking, active set, refill, weights, counters and row lists in one launch.

`backends.mlx.selection.select_no_sync` is its twin, `base_core.select` the reference of both (paper sections 6.1, 6.2).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from backends.mlx.kernels.lists import LIST_NAMES, RowLists, list_shapes, list_source
from backends.mlx.selection import SHARE_UNIT, SMALLEST, LogEnergy, MlxSelection, Predicted
from base_core.selection import DECODE, LOG_ENERGY_RANGE, PADDING, PREFILL, Denominator, Fill, Ranking

MAX_EXPERTS, MAX_ROWS, MAX_SLOTS = 512, 256, 16
SPLIT_ROWS = 128
"""From here on rows are filled by a second launch, over all cores instead of one."""
LISTED_ROWS = 32
"""Up to here the launch also lists each active expert's rows, for the experts' kernel."""
NO_ENERGY, ENERGY_BY_EXPERT, ENERGY_BY_ROW, ENERGY_PREDICTED = range(4)

_HEAD = f"""
    constexpr int PADDING = {PADDING}, DECODE = {DECODE}, PREFILL = {PREFILL};
    constexpr int R = (E + 31) / 32;
    const int T = ids_shape[0];
    const uint lane = thread_index_in_simdgroup;
"""

# One threadgroup; thread e owns expert e. No float is added by a simd reduction: Apple states no order for them, and a
# near-tie would then be decided differently from chip to chip.
_ACTIVE = f"""
    constexpr int SG = TG / 32;
    threadgroup float pair_cost[PAIRS];
    threadgroup ushort4 pair_expert[PAIRS / 4];
    threadgroup float4 cost_by_expert[R * 8];
    threadgroup float ranked[R * 32];
    threadgroup bool is_active[R * 32];
    threadgroup uint any_prefill[SG], any_bad[SG], union_count[SG], active_count[SG], lowest[SG];
    threadgroup float all_cost[SG], kept_cost[SG];
    threadgroup uint kept;
    threadgroup float norm[NORMS];
    const uint e = thread_index_in_threadgroup;
    const uint sg = simdgroup_index_in_threadgroup;
    auto expert_of = reinterpret_cast<threadgroup ushort*>(pair_expert);
    auto cost_of = reinterpret_cast<threadgroup float*>(cost_by_expert);

    if (ENERGY == {ENERGY_PREDICTED}) {{
        for (int row = sg; row < T; row += SG) {{
            float sum = 0.0f;
            for (int i = lane; i < D; i += 32) {{
                const float value = x[row * D + i];
                sum += value * value;
            }}
            #pragma unroll
            for (uint step = 16; step > 0; step /= 2) {{
                sum += simd_shuffle_xor(sum, ushort(step));
            }}
            if (lane == 0) {{
                norm[row] = max(metal::precise::sqrt(sum), {SMALLEST}f);
            }}
        }}
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }}

    const int quads = (T * K + 3) / 4;
    bool prefill = false;
    for (int p = e; p < 4 * quads; p += TG) {{
        ushort chosen = 0xffff;
        float c = 0.0f;
        if (p < T * K) {{
            const int kind = rows[p / K];
            prefill = prefill || kind == PREFILL;
            if (kind != PADDING) {{
                chosen = ids[p];
            }}
            if (kind == DECODE) {{
                const float w = weights[p];
                c = w * w;
                if (ENERGY > 0) {{
                    const int row = p / K, id = ids[p];
                    float s = log_energy[(ENERGY == {ENERGY_BY_EXPERT} ? 0 : row * P + FIRST) + id];
                    if (ENERGY == {ENERGY_PREDICTED}) {{
                        s = s / norm[row] + bias[id];
                    }}
                    // Comparisons keep NaN, clamp() may not.
                    s = s < {LOG_ENERGY_RANGE[0]}f ? {LOG_ENERGY_RANGE[0]}f : s;
                    s = s > {LOG_ENERGY_RANGE[1]}f ? {LOG_ENERGY_RANGE[1]}f : s;
                    c = c * metal::precise::exp(s);
                }}
            }}
        }}
        pair_cost[p] = c;
        expert_of[p] = chosen;
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float cost_e = 0.0f;
    bool in_union = false;
    if (e < E) {{
        for (int q = 0; q < quads; q++) {{
            const ushort4 four = pair_expert[q];
            #pragma unroll
            for (int i = 0; i < 4; i++) {{
                if (four[i] == e) {{
                    cost_e += pair_cost[4 * q + i];
                    in_union = true;
                }}
            }}
        }}
        cost[e] = cost_e;
    }}
    if (e < R * 32) {{
        cost_of[e] = e < E ? cost_e : -1.0f;
        ranked[e] = 0.0f;
    }}
    const bool bad = (as_type<uint>(cost_e) & 0x7f800000u) == 0x7f800000u;
    const bool some_prefill = simd_any(prefill);
    const bool some_bad = simd_any(bad);
    const uint in_unions = simd_sum(uint(in_union));
    if (lane == 0) {{
        any_prefill[sg] = some_prefill;
        any_bad[sg] = some_bad;
        union_count[sg] = in_unions;
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);

    bool fell_back = false, untouched = false;
    uint union_size = 0;
    for (int i = 0; i < SG; i++) {{
        fell_back = fell_back || any_bad[i];
        untouched = untouched || any_bad[i] || any_prefill[i];
        union_size += union_count[i];
    }}
    uint rank = 0;
    if (e < E && !untouched) {{
        for (int q = 0; q < R * 8; q++) {{
            const float4 four = cost_by_expert[q];
            #pragma unroll
            for (uint i = 0; i < 4; i++) {{
                rank += four[i] > cost_e || (four[i] == cost_e && 4 * q + i < e);
            }}
        }}
        ranked[rank] = cost_e;
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // A share below 1 keeps the ranks before which less than that share of the total lies.
    const bool by_share = tau > 0.0f && tau < 1.0f;
    if (by_share && sg == 0) {{
        float before[R], sum = 0.0f;
        #pragma unroll
        for (int i = 0; i < R; i++) {{
            before[i] = sum;
            sum += ranked[lane * R + i];
        }}
        for (uint step = 1; step < 32; step *= 2) {{
            const float lower = simd_shuffle_up(sum, ushort(step));
            sum += lane >= step ? lower : 0.0f;
        }}
        const float total = simd_broadcast(sum, ushort(31));
        const float left = simd_shuffle_up(sum, ushort(1));
        const float start = lane > 0 ? left : 0.0f;
        uint n = 0;
        #pragma unroll
        for (int i = 0; i < R; i++) {{
            n += start + before[i] < tau * total;
        }}
        n = simd_sum(n);
        if (lane == 0) {{
            kept = n;
        }}
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const uint most = limit;
    bool keep = cost_e > 0.0f && rank < most && (!by_share || rank < kept);
    keep = keep || (tau <= 0.0f && union_size <= most);
    const bool reads_e = in_union && (untouched || keep);
    const uint reads = simd_sum(uint(reads_e));
    const uint low = simd_min(reads_e ? e : uint(E));
    const float costs = simd_sum(cost_e);
    const float kept_costs = simd_sum(reads_e ? cost_e : 0.0f);
    if (e < E) {{
        is_active[e] = reads_e;
        active[e] = reads_e;
        in_union_out[e] = in_union;
    }}
    if (lane == 0) {{
        active_count[sg] = reads;
        lowest[sg] = low;
        all_cost[sg] = costs;
        kept_cost[sg] = kept_costs;
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);

    uint lowest_active = E;
    for (int i = 0; i < SG; i++) {{
        lowest_active = min(lowest_active, lowest[i]);
    }}
    lowest_active = lowest_active < E ? lowest_active : 0;
    if (e == 0) {{
        uint n = 0;
        float total = 0.0f, held = 0.0f;
        for (int i = 0; i < SG; i++) {{
            n += active_count[i];
            total += all_cost[i];
            held += kept_cost[i];
        }}
        const int share = !fell_back && total > 0.0f ? int(held / total * {float(SHARE_UNIT)}f + 0.5f) : {SHARE_UNIT};
        const bool counted = union_size > 0;
        new_counters[0] = counters[0] + (counted ? 1 : 0);
        new_counters[1] = counters[1] + (counted ? n : 0);
        new_counters[2] = counters[2] + union_size;
        new_counters[3] = counters[3] + (counted ? share : 0);
        new_counters[4] = counters[4] + (counted && fell_back ? 1 : 0);
        fallback[0] = fell_back;
        first_active[0] = lowest_active;
    }}
"""

# One simdgroup a row, lane j owns slot j; a row's experts lie over the lanes.
_FILL = """
    for (int row = first_row; row < T; row += row_step) {
        const int kind = rows[row];
        const int slot = row * K + int(lane);
        uint native = 0;
        float w = 0.0f;
        if (lane < K) {
            native = ids[slot];
            w = weights[slot];
        }
        const bool runs_native = lane < K && is_active[native];
        if (simd_all(lane >= K || runs_native) && kind != PADDING) {
            if (lane < K) {
                out_ids[slot] = ids[slot];
                out_weights[slot] = weights[slot];
            }
        } else if (kind == PADDING) {
            if (lane < K) {
                out_ids[slot] = lowest_active;
                out_weights[slot] = static_cast<W>(0.0f);
            }
        } else {
            uint chosen = runs_native ? native : uint(E);
            if (BACKFILL) {
                float liked[R];
                #pragma unroll
                for (int i = 0; i < R; i++) {
                    const uint e = lane + 32 * i;
                    liked[i] = -INFINITY;
                    if (e < E && is_active[e]) {
                        liked[i] = preference[row * E + int(e)];
                    }
                }
                for (uint j = 0; j < K; j++) {
                    float best = -INFINITY;
                    uint best_e = E;
                    #pragma unroll
                    for (int i = 0; i < R; i++) {
                        if (liked[i] > best) {
                            best = liked[i];
                            best_e = lane + 32 * i;
                        }
                    }
                    const float top = simd_max(best);
                    const uint winner = simd_min(best == top ? best_e : uint(E));
                    chosen = lane == j ? winner : chosen;
                    #pragma unroll
                    for (int i = 0; i < R; i++) {
                        liked[i] = lane + 32 * i == winner ? -INFINITY : liked[i];
                    }
                }
            }
            const bool filled = lane < K && chosen < E;
            const float executed = filled ? float(scores[row * E + int(chosen)]) : 0.0f;
            float base = executed;
            if (!RENORMALISE) {
                base = lane < K ? float(scores[row * E + int(native)]) : 0.0f;
            }
            float total = 0.0f, mass = 0.0f;
            #pragma unroll
            for (uint j = 0; j < K; j++) {
                total += simd_broadcast(w, ushort(j));
                mass += simd_broadcast(base, ushort(j));
            }
            const float scale = mass > 0.0f ? total / mass : 0.0f;
            const uint first = simd_min(filled ? lane : 32u);
            const uint own = simd_shuffle(chosen, ushort(min(first, 31u)));
            const uint spare = first < 32 ? own : lowest_active;
            if (lane < K) {
                out_ids[slot] = filled ? chosen : spare;
                out_weights[slot] = static_cast<W>(executed * scale);
            }
        }
    }
"""

_ROUTED = ["ids", "weights", "rows"]
_COSTED = ["log_energy", "x", "bias", "limit", "tau", "counters"]
_COUNTED = ["active", "in_union_out", "cost", "new_counters", "fallback", "first_active"]
_FILLED = ["out_ids", "out_weights"]
_FILL_ROWS = "    const int first_row = sg, row_step = SG;\n" + _FILL

_select_kernel: Any = mx.fast.metal_kernel(
    name="base_select",
    input_names=[*_ROUTED, *_COSTED, "scores", "preference"],
    output_names=[*_COUNTED, *_FILLED],
    source=_HEAD + _ACTIVE + _FILL_ROWS,
)

_select_and_list_kernel: Any = mx.fast.metal_kernel(
    name="base_select_and_list",
    input_names=[*_ROUTED, *_COSTED, "scores", "preference"],
    output_names=[*_COUNTED, *_FILLED, *LIST_NAMES],
    source=_HEAD
    + _ACTIVE
    + _FILL_ROWS
    + "    threadgroup_barrier(mem_flags::mem_device);\n"
    + list_source("out_ids", "out_weights"),
)

_active_kernel: Any = mx.fast.metal_kernel(
    name="base_active",
    input_names=[*_ROUTED, *_COSTED],
    output_names=_COUNTED,
    source=_HEAD + _ACTIVE,
)

_fill_kernel: Any = mx.fast.metal_kernel(
    name="base_fill",
    input_names=[*_ROUTED, "is_active", "lowest", "scores", "preference"],
    output_names=_FILLED,
    source=_HEAD
    + """
    const int first_row = thread_position_in_grid.x / 32, row_step = T;
    const uint lowest_active = lowest[0];
"""
    + _FILL,
)


@lru_cache
def _constant(value: float, dtype: mx.Dtype) -> mx.array:
    return mx.array(value, dtype)


@lru_cache
def _no_counts() -> mx.array:
    counts = mx.zeros((5,), mx.int64)
    mx.eval(counts)
    return counts


@lru_cache
def _all_decode(T: int) -> mx.array:
    rows = mx.full((T,), DECODE, mx.int32)
    mx.eval(rows)
    return rows


def select(
    scores: mx.array,
    ids: mx.array,
    weights: mx.array,
    log_energy: LogEnergy,
    limit: int | mx.array,
    *,
    tau: float | mx.array | None = None,
    floor: float | mx.array | None = None,
    preference: mx.array | None = None,
    rows: mx.array | None = None,
    counters: mx.array | None = None,
    ranking: Ranking = "removal_cost",
    fill: Fill = "backfill",
    denominator: Denominator = "native",
) -> MlxSelection | None:
    """`select_no_sync` as one Metal launch, two from SPLIT_ROWS rows on.

    Args:
        scores: float [T, E], positive router scores; E up to 512, T up to 256.
        ids: int [T, k], distinct in each row; k up to 16.
        weights: float [T, k].
        log_energy: as in `select_no_sync`; ignored by `squared_weight`.
        limit: most experts, an int or an int array [].
        tau: share of the cost to keep, in (0, 1], a float or a float array []; None for a plain limit.
        floor: of a share budget, which the kernel leaves to the operations.
        preference: float [T, E], -inf where a row may not go; `scores` when None.
        rows: int [T], 0 padding, 1 decode, 2 prefill; all decode when None.
        counters: int64 [5] that the step is added to; zeros when None.

    Returns:
        MlxSelection with its counters, up to LISTED_ROWS rows with row lists. None where the kernel has no answer:
        other rankings, share budgets, more experts, rows or slots.

    Raises:
        ValueError: an energy ranking without `log_energy`.
    """
    T, K = ids.shape
    E = scores.shape[1]
    if floor is not None or ranking not in ("removal_cost", "static_energy", "squared_weight"):
        return None
    if E > MAX_EXPERTS or K > MAX_SLOTS or not 1 <= T <= MAX_ROWS:
        return None
    energy, costed = _energy_inputs(ranking, log_energy)
    preference = scores if preference is None else preference
    rows = _all_decode(T) if rows is None else rows
    limit = limit.reshape(()) if isinstance(limit, mx.array) else _constant(limit, mx.int32)
    tau = tau.reshape(()) if isinstance(tau, mx.array) else _constant(0.0 if tau is None else tau, mx.float32)
    costed += [limit, tau, _no_counts() if counters is None else counters]

    threads = 512 if E > 256 or T * K > 512 else 256
    shape = [("E", E), ("K", K)]
    active = [*shape, ("TG", threads), ("PAIRS", 1024 if T * K <= 1024 else 4096), *energy]
    active.append(("NORMS", MAX_ROWS if T >= SPLIT_ROWS else SPLIT_ROWS))
    refill = [("W", weights.dtype), ("BACKFILL", fill == "backfill"), ("RENORMALISE", denominator == "renormalise")]
    counted_shapes = [(E,), (E,), (E,), (5,), (1,), (1,)]
    counted_types = [mx.bool_, mx.bool_, mx.float32, mx.int64, mx.bool_, mx.uint32]
    filled_shapes, filled_types = [(T, K), (T, K)], [ids.dtype, weights.dtype]
    routed = [ids, weights, rows]
    one_group = {"grid": (threads, 1, 1), "threadgroup": (threads, 1, 1)}
    lists = None
    if T <= LISTED_ROWS:
        outputs = _select_and_list_kernel(
            inputs=[*routed, *costed, scores, preference],
            template=[*active, *refill, ("LISTED", LISTED_ROWS * K)],
            **one_group,
            output_shapes=counted_shapes + filled_shapes + list_shapes(T, K, E),
            output_dtypes=counted_types + filled_types + [mx.uint32] * len(LIST_NAMES),
        )
        outputs, lists = outputs[: -len(LIST_NAMES)], RowLists(*outputs[-len(LIST_NAMES) :])
    elif T < SPLIT_ROWS:
        outputs = _select_kernel(
            inputs=[*routed, *costed, scores, preference],
            template=active + refill,
            **one_group,
            output_shapes=counted_shapes + filled_shapes,
            output_dtypes=counted_types + filled_types,
        )
    else:
        outputs = _active_kernel(
            inputs=[*routed, *costed],
            template=active,
            **one_group,
            output_shapes=counted_shapes,
            output_dtypes=counted_types,
        )
        outputs += _fill_kernel(
            inputs=[*routed, outputs[0], outputs[-1], scores, preference],
            template=shape + refill,
            grid=(32 * T, 1, 1),
            threadgroup=(128, 1, 1),
            output_shapes=filled_shapes,
            output_dtypes=filled_types,
        )
    in_active, in_union, cost, counted, fell_back, _, new_ids, new_weights = outputs
    return MlxSelection(
        new_ids, new_weights, in_active, cost, in_union, fell_back.reshape(()), counters=counted, lists=lists
    )


def _energy_inputs(ranking: Ranking, log_energy: LogEnergy) -> tuple[list[tuple[str, int]], list[mx.array]]:
    """Template constants, and the kernels' inputs log_energy, x and bias; what a kind does not read is a stand-in."""
    kind, inputs = NO_ENERGY, [_all_decode(1)] * 3
    d, row_length, first = 1, 0, 0
    if ranking == "squared_weight":
        pass
    elif log_energy is None:
        raise ValueError(f"ranking {ranking!r} needs log_energy, got None: pass the predictor's log-energies")
    elif isinstance(log_energy, Predicted):
        kind, d, first = ENERGY_PREDICTED, log_energy.x.shape[1], log_energy.first
        row_length, inputs = log_energy.product.shape[1], [log_energy.product, log_energy.x, log_energy.bias]
    else:
        kind, inputs = log_energy.ndim, [log_energy, *inputs[1:]]
        row_length = log_energy.shape[-1]
    return [("ENERGY", kind), ("D", d), ("P", row_length), ("FIRST", first)], inputs
