"""Kernel B: the active experts on all their rows, each weight read and dequantised once a step.

Stock `gather_qmm` runs one matrix-vector product per (row, expert) pair at decode sizes. Two launches replace it: gate
and up with SwiGLU, and down with the weighted sum over experts. They go by each expert's list of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchLinear

from backends.mlx.kernels.lists import LIST_NAMES, RowLists, list_rows

MAX_ROWS = 32
"""In the down product lane t of a simdgroup sums up row t."""
MAX_EXPERTS = 512
SLOTS_AT_ONCE = 32
SIMDGROUPS = 4

_PRODUCT_HEADER = """
template <int BITS>
inline void unpack8(uint4 raw, int chunk, float scale, float bias, thread float* out) {
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint word = BITS == 4 ? raw[chunk] : raw[(2 * chunk + i / 4) % 4];
        const uint q = BITS == 4 ? (word >> (4 * i)) & 15u : (word >> (8 * (i % 4))) & 255u;
        out[i] = scale * float(q) + bias;
    }
}

template <typename V>
inline void load8(const device V* from, thread float* out) {
    auto four = reinterpret_cast<const device vec<V, 4>*>(from);
    const vec<V, 4> low = four[0], high = four[1];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        out[i] = float(low[i]);
        out[4 + i] = float(high[i]);
    }
}
"""

# For each of N outputs a lane loads 16 bytes of weights (float32: 32) and applies them to all of the expert's rows
# before it loads more. A lane's values never straddle a quantisation group.
_PRODUCT_HEAD = """
    constexpr int V = BITS == 4 ? 32 : BITS == 8 ? 16 : 8;
    constexpr int WORDS = BITS < 16 ? IN * BITS / 32 : IN;
    constexpr int GROUPS = BITS < 16 ? IN / GROUP : 1;
    const uint lane = thread_index_in_simdgroup;
    const uint sg = simdgroup_index_in_threadgroup;
    const uint slots = used[0];
"""


def _load(name: str) -> str:
    return f"""
                uint4 {name}_raw[N];
                float {name}_scale[N], {name}_bias[N];
                #pragma unroll
                for (int n = 0; n < N; n++) {{
                    const size_t out_row = size_t(e) * OUT + first_out + n;
                    if (BITS < 16) {{
                        auto words = {name} + out_row * WORDS + i0 * BITS / 32;
                        {name}_raw[n] = *reinterpret_cast<const device uint4*>(words);
                        {name}_scale[n] = {name}_scales[out_row * GROUPS + i0 / GROUP];
                        {name}_bias[n] = {name}_biases[out_row * GROUPS + i0 / GROUP];
                    }}
                }}
"""


def _dequantise(name: str) -> str:
    return f"""
                    float {name}_values[N][8];
                    #pragma unroll
                    for (int n = 0; n < N; n++) {{
                        if (BITS < 16) {{
                            unpack8<BITS>({name}_raw[n], chunk, {name}_scale[n], {name}_bias[n], {name}_values[n]);
                        }} else {{
                            const size_t out_row = size_t(e) * OUT + first_out + n;
                            load8({name} + out_row * WORDS + i0, {name}_values[n]);
                        }}
                    }}
"""


_GATE_UP_SOURCE = (
    _PRODUCT_HEAD
    + """
    const int first_out = (threadgroup_position_in_grid.x * SG + sg) * N;
    for (uint slot = threadgroup_position_in_grid.y; slot < slots && first_out < OUT; slot += SLOTS) {
        const uint e = experts[slot];
        const int end = starts[slot + 1];
        for (int first = starts[slot]; first < end; first += R) {
            const int rows = min(end - first, R);
            auto own = pairs + first;
            float gate_sum[R][N] = {}, up_sum[R][N] = {};
            for (int i0 = int(lane) * V; i0 < IN; i0 += 32 * V) {
"""
    + _load("gate")
    + _load("up")
    + """
                #pragma unroll
                for (int chunk = 0; chunk < V / 8; chunk++) {
"""
    + _dequantise("gate")
    + _dequantise("up")
    + """
                    #pragma unroll
                    for (int r = 0; r < R; r++) {
                        if (r < rows) {
                            float values[8];
                            load8(x + size_t(own[r] / K) * IN + i0 + 8 * chunk, values);
                            #pragma unroll
                            for (int n = 0; n < N; n++) {
                                #pragma unroll
                                for (int i = 0; i < 8; i++) {
                                    gate_sum[r][n] += values[i] * gate_values[n][i];
                                    up_sum[r][n] += values[i] * up_values[n][i];
                                }
                            }
                        }
                    }
                }
            }
            #pragma unroll
            for (int r = 0; r < R; r++) {
                if (r < rows) {
                    #pragma unroll
                    for (int n = 0; n < N; n++) {
                        const float g = simd_sum(gate_sum[r][n]);
                        const float u = simd_sum(up_sum[r][n]);
                        if (lane == 0) {
                            const float y = g / (1.0f + metal::precise::exp(-g)) * u;
                            hidden[size_t(own[r]) * OUT + first_out + n] = static_cast<T>(y);
                        }
                    }
                }
            }
        }
    }
"""
)

# A threadgroup owns N outputs of every row; its simdgroups share out the experts and add up in their order.
_DOWN_SOURCE = (
    _PRODUCT_HEAD
    + """
    threadgroup float sums[SG][32][N];
    const int first_out = threadgroup_position_in_grid.x * N;
    float mine[N] = {};
    for (uint slot = sg; slot < slots; slot += SG) {
        const uint e = experts[slot];
        const int end = starts[slot + 1];
        for (int first = starts[slot]; first < end; first += R) {
            const int rows = min(end - first, R);
            auto own = pairs + first;
            float down_sum[R][N] = {};
            for (int i0 = int(lane) * V; i0 < IN; i0 += 32 * V) {
"""
    + _load("down")
    + """
                #pragma unroll
                for (int chunk = 0; chunk < V / 8; chunk++) {
"""
    + _dequantise("down")
    + """
                    #pragma unroll
                    for (int r = 0; r < R; r++) {
                        if (r < rows) {
                            float values[8];
                            load8(hidden + size_t(own[r]) * IN + i0 + 8 * chunk, values);
                            #pragma unroll
                            for (int n = 0; n < N; n++) {
                                #pragma unroll
                                for (int i = 0; i < 8; i++) {
                                    down_sum[r][n] += values[i] * down_values[n][i];
                                }
                            }
                        }
                    }
                }
            }
            #pragma unroll
            for (int r = 0; r < R; r++) {
                if (r < rows) {
                    const float w = weights[own[r]];
                    #pragma unroll
                    for (int n = 0; n < N; n++) {
                        const float y = simd_sum(down_sum[r][n]);
                        mine[n] += lane == own[r] / K ? w * y : 0.0f;
                    }
                }
            }
        }
    }
    #pragma unroll
    for (int n = 0; n < N; n++) {
        sums[sg][lane][n] = mine[n];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (sg == 0 && int(lane) < hidden_shape[0] / K) {
        #pragma unroll
        for (int n = 0; n < N; n++) {
            float y = 0.0f;
            #pragma unroll
            for (int i = 0; i < SG; i++) {
                y += sums[i][lane][n];
            }
            out[size_t(lane) * OUT + first_out + n] = static_cast<T>(y);
        }
    }
"""
)

_gate_up_kernel: Any = mx.fast.metal_kernel(
    name="base_gate_up",
    input_names=["x", *LIST_NAMES, "gate", "gate_scales", "gate_biases", "up", "up_scales", "up_biases"],
    output_names=["hidden"],
    source=_GATE_UP_SOURCE,
    header=_PRODUCT_HEADER,
)

_down_kernel: Any = mx.fast.metal_kernel(
    name="base_down",
    input_names=["hidden", "weights", *LIST_NAMES, "down", "down_scales", "down_biases"],
    output_names=["out"],
    source=_DOWN_SOURCE,
    header=_PRODUCT_HEADER,
)


@dataclass(frozen=True)
class Projection:
    """One of an expert layer's three matrices, for all experts.

    Attributes:
        weight: [E, out, in], float; or uint32 [E, out, in * bits / 32], affine.
        scales, biases: float [E, out, in / group_size] when quantised.
        bits: 4 or 8 when quantised.
        group_size: a multiple of 32 when quantised.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group_size: int = 0

    @classmethod
    def of(cls, layer: nn.Module) -> Projection | None:
        """The projection of an mlx-lm layer, or None where this kernel has no answer to it."""
        if "bias" in layer:
            return None
        if type(layer) is SwitchLinear:
            return cls(layer.weight) if mx.issubdtype(layer.weight.dtype, mx.floating) else None
        if type(layer) is not QuantizedSwitchLinear or layer.mode != "affine" or layer.bits not in (4, 8):
            return None
        return cls(layer.weight, layer.scales, layer.biases, layer.bits, layer.group_size)

    @property
    def input_dims(self) -> int:
        return self.weight.shape[2] * 32 // self.bits if self.bits else self.weight.shape[2]

    @property
    def output_dims(self) -> int:
        return self.weight.shape[1]

    @property
    def arrays(self) -> list[mx.array]:
        """weight, scales, biases; the weight stands in for what an unquantised matrix lacks."""
        return [self.weight, *(self.weight if a is None else a for a in (self.scales, self.biases))]

    @property
    def template(self) -> list[tuple[str, int]]:
        bits = self.bits or 8 * self.weight.dtype.size
        return [("BITS", bits), ("GROUP", max(self.group_size, 1)), ("IN", self.input_dims), ("OUT", self.output_dims)]

    def dense(self, expert: int) -> mx.array:
        """float [out, in], one expert's matrix."""
        if not self.bits:
            return self.weight[expert]
        assert self.scales is not None and self.biases is not None
        return mx.dequantize(
            self.weight[expert], self.scales[expert], self.biases[expert], group_size=self.group_size, bits=self.bits
        )


def grouped_experts(
    x: mx.array,
    ids: mx.array,
    weights: mx.array,
    *,
    gate: Projection,
    up: Projection,
    down: Projection,
    lists: RowLists | None = None,
    out_dtype: mx.Dtype | None = None,
) -> mx.array:
    """sum_j weights[t, j] * down(silu(gate x_t) * up x_t) of expert ids[t, j], in two launches.

    Sums are float32 and run in a fixed order; a slot of weight 0 costs nothing and its expert is not read for it.

    Args:
        x: float [T, d], T up to 32, d a multiple of 8 (of the group when quantised).
        ids: int [T, k].
        weights: float [T, k].
        gate, up, down: alike in kind, E up to 512.
        lists: of ids and weights; made in a third launch when None.
        out_dtype: of the result; that of x when None.

    Returns:
        [T, d].

    Raises:
        ValueError: shapes outside these.
    """
    T, K = ids.shape
    E, H = gate.weight.shape[:2]
    d = x.shape[1]
    for name, projection, dims in (("gate", gate, (d, H)), ("up", up, (d, H)), ("down", down, (H, d))):
        own = (projection.input_dims, projection.output_dims)
        if own != dims or len(projection.weight) != E:
            raise ValueError(f"{name} maps {own} in {len(projection.weight)} experts: expected {dims} in {E}")
        if (projection.bits, projection.group_size) != (gate.bits, gate.group_size):
            raise ValueError(
                f"{name} has {projection.bits} bits in groups of {projection.group_size}, gate another kind"
            )
        if dims[0] % 8 or (projection.bits and projection.group_size % 32):
            raise ValueError(
                f"{name} has {dims[0]} inputs, groups of {projection.group_size}: expected multiples of 8, 32"
            )
    if not 1 <= T <= MAX_ROWS or E > MAX_EXPERTS:
        raise ValueError(f"{T} rows and {E} experts: this kernel takes up to {MAX_ROWS} and {MAX_EXPERTS}")

    P, slots = T * K, min(E, T * K)
    lists = list_rows(ids, weights, E) if lists is None else lists
    rows = 1 << (T - 1).bit_length()
    common = [("K", K), ("R", rows), ("T", x.dtype)]
    tile = 4 if rows <= 4 else 2 if rows == 8 else 1
    columns = -(-H // (tile * SIMDGROUPS))
    hidden = _gate_up_kernel(
        inputs=[x, *lists, *gate.arrays, *up.arrays],
        template=[*common, ("N", tile), ("SG", SIMDGROUPS), ("SLOTS", SLOTS_AT_ONCE), *gate.template],
        grid=(32 * SIMDGROUPS * columns, min(slots, SLOTS_AT_ONCE), 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(P, H)],
        output_dtypes=[x.dtype],
    )[0]
    out_dtype = out_dtype or x.dtype
    tile = 4 if rows <= 8 else 2
    return _down_kernel(
        inputs=[hidden, weights, *lists, *down.arrays],
        template=[("K", K), ("R", rows), ("T", out_dtype), ("N", tile), ("SG", SIMDGROUPS), *down.template],
        grid=(32 * SIMDGROUPS * d // tile, 1, 1),
        threadgroup=(32 * SIMDGROUPS, 1, 1),
        output_shapes=[(T, d)],
        output_dtypes=[out_dtype],
    )[0]


def grouped_experts_naive(
    x: mx.array, ids: mx.array, weights: mx.array, *, gate: Projection, up: Projection, down: Projection
) -> mx.array:
    """The twin of `grouped_experts`, expert by expert; reads values back. float32 [T, d]."""
    x, weights = x.astype(mx.float32), weights.astype(mx.float32)
    out = mx.zeros((x.shape[0], down.output_dims))
    for e in range(len(gate.weight)):
        g, u, w = (p.dense(e).astype(mx.float32) for p in (gate, up, down))
        share = mx.where(ids == e, weights, 0).sum(axis=1)
        y = (nn.silu(x @ g.T) * (x @ u.T)) @ w.T
        out = out + mx.where(share[:, None] != 0, share[:, None] * y, 0)
    return out


def experts(
    switch: nn.Module, x: mx.array, ids: mx.array, weights: mx.array, keeps_dtype: bool, lists: RowLists | None = None
) -> mx.array | None:
    """The weighted sum of a SwitchGLU's outputs through `grouped_experts`.

    Args:
        switch: mlx-lm's SwitchGLU.
        x: float [..., d].
        ids, weights: [..., k].
        keeps_dtype: return the dtype of x, else what x and weights promote to.
        lists: the rows of each expert, where the selection has made them.

    Returns:
        [..., d], or None where the kernel has no answer: over 32 rows, another activation, biases, other formats.
    """
    *leading, d = x.shape
    T = x.size // d
    if not 1 <= T <= MAX_ROWS or type(switch.activation) is not SwiGLU:
        return None
    gate, up, down = (Projection.of(switch[name]) for name in ("gate_proj", "up_proj", "down_proj"))
    if gate is None or up is None or down is None:
        return None
    kinds = {(p.bits, p.group_size, p.weight.dtype) for p in (gate, up, down)}
    if len(kinds) > 1 or len(gate.weight) > MAX_EXPERTS or d % 8 or gate.output_dims % 8 or gate.group_size % 32:
        return None
    out_dtype = x.dtype if keeps_dtype or x.dtype == weights.dtype else mx.float32
    K = ids.shape[-1]
    y = grouped_experts(
        x.reshape(T, d),
        ids.reshape(T, K),
        weights.reshape(T, K),
        gate=gate,
        up=up,
        down=down,
        lists=lists,
        out_dtype=out_dtype,
    )
    return y.reshape(*leading, d)
