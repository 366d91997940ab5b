"""Row lists: for every active expert the pairs (row, slot) that run it, in order. Kernel A makes them, B reads them.

| array | uint32 | holds |
|---|---|---|
| experts | [slots] | ids of the experts in use, ascending; E behind the last |
| starts | [slots + 1] | where each expert's pairs begin; the number of pairs behind the last |
| pairs | [T * k] | pair numbers row * k + slot, expert by expert; T * k behind the last |
| used | [1] | experts in use |

slots = min(E, T * k). A pair of weight 0 is an empty slot and in no list.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

LIST_NAMES = ["experts", "starts", "pairs", "used"]


class RowLists(NamedTuple):
    """The four arrays."""

    experts: mx.array
    starts: mx.array
    pairs: mx.array
    used: mx.array


def list_shapes(T: int, K: int, E: int) -> list[tuple[int, ...]]:
    """Their shapes, in order; the dtype is uint32."""
    slots = min(E, T * K)
    return [(slots,), (slots + 1,), (T * K,), (1,)]


def list_source(ids: str, weights: str) -> str:
    """Metal source that fills them, for one threadgroup whose thread e owns expert e.

    It expects an input `ids` [T, k], E, TG (threads, at least E, in whole simdgroups), LISTED >= T * k, e, lane, sg.

    Args:
        ids, weights: names of the arrays [T, k] to read.
    """
    return f"""
    threadgroup ushort listed_expert[LISTED];
    threadgroup uint slots_of[TG / 32], pairs_of[TG / 32];
    const uint P_all = ids_shape[0] * ids_shape[1];
    for (uint p = e; p < P_all; p += TG) {{
        listed_expert[p] = float({weights}[p]) != 0.0f ? ushort({ids}[p]) : ushort(0xffff);
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);

    uint own_pairs = 0;
    for (uint p = 0; p < P_all; p++) {{
        own_pairs += listed_expert[p] == e;
    }}
    uint own_slot = simd_prefix_exclusive_sum(uint(own_pairs > 0));
    uint next_pair = simd_prefix_exclusive_sum(own_pairs);
    if (lane == 31) {{
        slots_of[sg] = own_slot + uint(own_pairs > 0);
        pairs_of[sg] = next_pair + own_pairs;
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);

    uint used_slots = 0, used_pairs = 0;
    for (uint i = 0; i < TG / 32; i++) {{
        own_slot += i < sg ? slots_of[i] : 0;
        next_pair += i < sg ? pairs_of[i] : 0;
        used_slots += slots_of[i];
        used_pairs += pairs_of[i];
    }}
    if (own_pairs > 0) {{
        experts[own_slot] = e;
        starts[own_slot] = next_pair;
        for (uint p = 0; p < P_all; p++) {{
            if (listed_expert[p] == e) {{
                pairs[next_pair++] = p;
            }}
        }}
    }}
    const uint all_slots = min(uint(E), P_all);
    for (uint i = used_slots + e; i <= all_slots; i += TG) {{
        starts[i] = used_pairs;
        if (i < all_slots) {{
            experts[i] = E;
        }}
    }}
    for (uint i = used_pairs + e; i < P_all; i += TG) {{
        pairs[i] = P_all;
    }}
    if (e == 0) {{
        used[0] = used_slots;
    }}
"""


_list_kernel: Any = mx.fast.metal_kernel(
    name="base_list_rows",
    input_names=["ids", "weights"],
    output_names=LIST_NAMES,
    source="""
    const uint e = thread_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;
    const uint sg = simdgroup_index_in_threadgroup;
"""
    + list_source("ids", "weights"),
)


def list_rows(ids: mx.array, weights: mx.array, num_experts: int) -> RowLists:
    """The lists in a launch of their own, for a selection that came without them.

    Args:
        ids: int [T, k].
        weights: float [T, k].
        num_experts: E, up to 1024.
    """
    T, K = ids.shape
    threads = -(-num_experts // 32) * 32
    return RowLists(
        *_list_kernel(
            inputs=[ids, weights],
            template=[("E", num_experts), ("TG", threads), ("LISTED", 1 << (T * K - 1).bit_length())],
            grid=(threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=list_shapes(T, K, num_experts),
            output_dtypes=[mx.uint32] * 4,
        )
    )
