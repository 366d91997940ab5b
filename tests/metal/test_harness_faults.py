"""The harness catches what it claims to catch, and computes what Metal would."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from tests.metal import harness  # noqa: E402

pytestmark = pytest.mark.skipif(not harness.AVAILABLE, reason="the harness needs Linux and g++")
needs_clang = pytest.mark.skipif(harness.clang() is None, reason="no clang: install ziglang")
DTYPES = {"float32": (mx.float32, 2e-6), "float16": (mx.float16, 2e-3), "bfloat16": (mx.bfloat16, 1.6e-2)}


def launch_of(source, inputs=(), *, threads=64, groups=1, shape=None, dtype=mx.float32, header=""):
    kernel = mx.fast.metal_kernel(
        name="probe",
        input_names=[chr(ord("a") + i) for i in range(len(inputs))],
        output_names=["out"],
        source=source,
        header=header,
    )
    inputs = tuple(map(mx.array, inputs))
    shape = shape or (threads * groups,)
    call = dict(
        grid=(threads * groups, 1, 1), threadgroup=(threads, 1, 1), output_shapes=[shape], output_dtypes=[dtype]
    )
    text = harness.generated_source(kernel, inputs, template=[("T", dtype)], **call)
    return harness.Launch(text, inputs, call["grid"], call["threadgroup"], (shape,), (dtype,))


REVERSE = """
    threadgroup float values[64];
    uint i = thread_position_in_threadgroup.x;
    values[i] = a[i];
    {barrier}
    out[i] = values[63 - i];
"""
NUMBERS = np.arange(64, dtype=np.float32)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def test_correct_kernel_passes():
    launch = launch_of(REVERSE.format(barrier=BARRIER), [NUMBERS])
    np.testing.assert_array_equal(np.array(harness.run_checked(launch)[0]), NUMBERS[::-1])


FAULTS = {
    "missing barrier": (REVERSE.format(barrier=""), "differs"),
    "barrier orders no memory of other threads": (
        REVERSE.format(barrier="simdgroup_barrier(mem_flags::mem_threadgroup);"),
        "differs",
    ),
    "divergent simd operation": (
        "uint i = thread_position_in_threadgroup.x; float v = a[i]; if (i % 32 < 16) { v = simd_sum(v); } out[i] = v;",
        "divergent simd operation",
    ),
    "different simd operations": (
        "uint i = thread_position_in_threadgroup.x; out[i] = i % 2 ? simd_sum(a[i]) : simd_max(a[i]);",
        "divergent simd operation",
    ),
    "early return before a barrier": (
        "uint i = thread_position_in_threadgroup.x; if (i > 40) { return; } " + BARRIER + " out[i] = a[i];",
        "early return before a barrier",
    ),
    "barrier in a branch": (
        f"uint i = thread_position_in_threadgroup.x; if (i < 32) {{ {BARRIER} }} else {{\n {BARRIER} }} out[i] = a[i];",
        "barrier in divergent control flow",
    ),
    "too much threadgroup memory": (
        "threadgroup float big[8193]; uint i = thread_position_in_threadgroup.x; big[i] = a[i]; out[i] = big[i];",
        "threadgroup memory: 32784 bytes",
    ),
    "too much threadgroup memory, unused": (
        "threadgroup float big[4096], more[4097]; uint i = thread_position_in_threadgroup.x; out[i] = a[i];",
        "threadgroup memory: 32784 bytes",
    ),
    "uninitialised threadgroup memory": (
        "threadgroup int seen[2]; uint i = thread_position_in_threadgroup.x; if (i == 0) { seen[0] = 1; } "
        + BARRIER
        + " out[i] = seen[0] + (seen[1] > 0 ? 1 : 0);",
        "differs",
    ),
    "lane order": ("uint i = thread_position_in_threadgroup.x; out[i] = 0; out[i / 32] = a[i];", "differs"),
    "unwritten output": ("uint i = thread_position_in_threadgroup.x; if (i > 0) { out[i] = a[i]; }", "differs"),
    "read out of bounds": (
        "uint i = thread_position_in_threadgroup.x; out[i] = a[i] + a[5000 + i];",
        "invalid memory access",
    ),
    "read one element too far": (
        "uint i = thread_position_in_threadgroup.x; out[i] = a[i + 1];",
        "invalid memory access",
    ),
    "read before the start": (
        "uint i = thread_position_in_threadgroup.x; out[i] = a[int(i) - 1];",
        "invalid memory access",
    ),
    "array index out of bounds": (
        "float own[4] = {}; uint i = thread_position_in_threadgroup.x; own[i % 5] = a[i]; out[i] = own[i % 4];",
        "array index out of bounds",
    ),
    "misaligned vector": (
        "uint i = thread_position_in_threadgroup.x; out[i] = (*(const device float4*)(a + (i == 3))).x;",
        "misaligned access",
    ),
    "input written": (
        "uint i = thread_position_in_threadgroup.x; ((device float*)a)[i] = 0; out[i] = 1;",
        "writes to an input",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    source, message = FAULTS[name]
    with pytest.raises(harness.KernelError, match=message):
        harness.run_checked(launch_of(source, [NUMBERS]))


def test_order_of_threadgroups_is_caught():
    launch = launch_of("if (thread_position_in_threadgroup.x == 0) { out[0] = a[threadgroup_position_in_grid.x]; }",
                       [NUMBERS], groups=3, shape=(1,))  # fmt: skip
    with pytest.raises(harness.KernelError, match="differs"):
        harness.run_checked(launch)
    assert harness.races(launch)


TWICE = f"""
    threadgroup float sums[2];
    uint i = thread_position_in_threadgroup.x;
    uint sg = simdgroup_index_in_threadgroup;
    float s = simd_sum(a[i]);
    if (i % 32 == 0) {{
        sums[sg] = s;
    }}
    {BARRIER}
    float total = sums[0] + sums[1];
    {{second}}
    s = simd_max(a[i]);
    if (i % 32 == 0) {{
        sums[sg] = s;
    }}
    {BARRIER}
    out[i] = total + max(sums[0], sums[1]);
"""


def test_races():
    clean = launch_of(TWICE.replace("{second}", BARRIER), [NUMBERS])
    assert harness.races(clean) == []
    np.testing.assert_array_equal(np.array(harness.run_checked(clean)[0]), np.full(64, NUMBERS.sum() + 63))
    racy = launch_of(TWICE.replace("{second}", ""), [NUMBERS])
    assert "kernel.metal:15 / kernel.metal:11" in harness.races(racy)
    assert harness.races(launch_of(REVERSE.format(barrier=""), [NUMBERS]))
    assert harness.races(launch_of(REVERSE.format(barrier="threadgroup_barrier(mem_flags::mem_none);"), [NUMBERS]))
    assert harness.races(launch_of(REVERSE.format(barrier=BARRIER), [NUMBERS])) == []


def test_simd_operation_orders_no_memory():
    source = """
    threadgroup float values[32];
    uint i = thread_position_in_threadgroup.x;
    values[i] = a[i];
    {meeting}
    out[i] = values[31 - i];
"""
    numbers = [NUMBERS[:32]]
    assert harness.races(launch_of(source.format(meeting="simd_sum(1.0f);"), numbers, threads=32))
    meeting = "simdgroup_barrier(mem_flags::mem_threadgroup);"
    assert harness.races(launch_of(source.format(meeting=meeting), numbers, threads=32)) == []


SPACES = {
    "correct": (
        f"threadgroup float s[64]; uint i = thread_position_in_grid.x; fill(s, a[i], i); {BARRIER} out[i] = s[i];",
        "",
    ),
    "device passed as threadgroup": ("fill(out, 1.0f, thread_position_in_grid.x);", "no matching function"),
    "threadgroup kept as device": (
        "threadgroup float s[64]; const device float* p = s; out[0] = p[0];",
        "cannot initialize a variable",
    ),
    "input written": ("a[0] = 1.0f;", "read-only"),
    "constant kept as device": ("const device float* p = b; out[0] = p[0];", "cannot initialize a variable"),
}


@needs_clang
@pytest.mark.parametrize("name", SPACES)
def test_address_spaces(name):
    source, error = SPACES[name]
    header = "inline void fill(threadgroup float* s, float value, uint i) { s[i] = value; }\n"
    launch = launch_of(source, [NUMBERS, NUMBERS[:4]], header=header)
    errors = harness.address_space_errors(launch.source)
    assert (error in errors[0]) if error else errors == []


def test_comments_are_not_rewritten():
    source = """
    // threadgroup float values[9000];
    /* threadgroup float more[9000]; */ uint i = thread_position_in_grid.x;
    out[i] = a[i];
"""
    np.testing.assert_array_equal(np.array(harness.run_checked(launch_of(source, [NUMBERS]))[0]), NUMBERS)


def test_what_is_not_understood_is_refused():
    with pytest.raises(ValueError, match="use of threadgroup"):
        harness.to_cpp(harness.parse(launch_of("threadgroup float (*p)[4]; out[0] = 1;", [NUMBERS]).source))
    with pytest.raises(ValueError, match="does not know the attribute"):
        harness.parse(launch_of("out[0] = quadgroup_index_in_threadgroup;", [NUMBERS]).source)
    with pytest.raises(harness.KernelError, match="does not compile"):
        harness.run_checked(launch_of("out[0] = undeclared;", [NUMBERS]))


SIMD = """
    uint i = thread_index_in_simdgroup;
    uint t = thread_position_in_grid.x;
    float v = a[t];
    device float* row = out + t * 12;
    row[0] = simd_sum(v);
    row[1] = simd_max(v);
    row[2] = simd_min(v);
    row[3] = simd_prefix_exclusive_sum(v);
    row[4] = simd_shuffle(v, ushort(31 - i));
    row[5] = simd_shuffle_xor(v, ushort(5));
    float up = simd_shuffle_up(v, ushort(3));
    row[6] = i >= 3 ? up : 0.0f;
    float down = simd_shuffle_down(v, ushort(3));
    row[7] = i < 29 ? down : 0.0f;
    row[8] = simd_broadcast(v, ushort(7));
    row[9] = simd_any(v > 60.0f) + 2 * simd_all(v >= 0.0f);
    row[10] = simd_or(uint(v)) + 256 * simd_and(uint(v) | 1u);
    row[11] = as_type<float>(as_type<uint>(v));
"""


def test_simd_operations_are_metals():
    rng = np.random.default_rng(0)
    numbers = rng.permutation(NUMBERS)
    got = np.array(harness.run_checked(launch_of(SIMD, [numbers], threads=32, groups=2, shape=(64, 12)))[0])
    for v, row in zip(numbers.reshape(2, 32), got.reshape(2, 32, 12), strict=True):
        lanes, bits = np.arange(32), v.astype(np.uint32)
        zero = np.zeros(3)
        expected = [
            np.full(32, v.sum()),
            np.full(32, v.max()),
            np.full(32, v.min()),
            np.cumsum(v) - v,
            v[::-1],
            v[lanes ^ 5],
            np.concatenate([zero, v[:-3]]),
            np.concatenate([v[3:], zero]),
            np.full(32, v[7]),
            np.full(32, (v > 60).any() + 2 * (v >= 0).all()),
            np.full(32, np.bitwise_or.reduce(bits) + 256 * np.bitwise_and.reduce(bits | 1)),
            v,
        ]
        np.testing.assert_array_equal(row, np.stack(expected, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_floats_round_like_mlx(dtype):
    dtype = DTYPES[dtype][0]
    rng = np.random.default_rng(1)
    a, b = (mx.array(rng.normal(scale=100, size=256).astype(np.float32)).astype(dtype) for _ in range(2))
    source = "uint i = thread_position_in_grid.x; T s = a[i] * b[i] + a[i]; s += b[i]; out[i] = s / T(3.0f);"
    got = harness.run_checked(launch_of(source, [a, b], threads=256, dtype=dtype))[0]
    assert mx.array_equal(got, (a * b + a + b) / mx.array(3.0, dtype))


def test_last_threadgroup_may_be_partial():
    kernel = mx.fast.metal_kernel(
        name="partial",
        input_names=[],
        output_names=["out"],
        source="out[thread_position_in_grid.x] = simd_sum(1) + 100 * threads_per_threadgroup.x;",
    )
    out = harness.Simulated(kernel)(
        inputs=[], grid=(80, 1, 1), threadgroup=(48, 1, 1), output_shapes=[(80,)], output_dtypes=[mx.int32]
    )[0]
    np.testing.assert_array_equal(np.array(out), [4832] * 32 + [4816] * 16 + [3232] * 32)


@pytest.mark.parametrize("E", [60, 128])
def test_guard_expert_routing_of_mlx_lm(E):
    module = importlib.import_module("mlx_lm.kernels.expert_routing")
    rng = np.random.default_rng(E)
    logits, bias = rng.normal(size=(9, E)).astype(np.float32), rng.normal(scale=0.1, size=E).astype(np.float32)
    with harness.simulated(module) as kernels:
        ids, weights = module.expert_routing(
            mx.array(logits), mx.array(bias), top_k=4, multiplier=1.5, score_eps=1e-6, route_scale=2.0
        )
        launch = kernels["_routing_kernel"].launches[-1]
    scores = 1 / (1 + np.exp(-1.5 * logits.astype(np.float64)))
    expected = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :4]
    np.testing.assert_array_equal(np.array(ids), expected)
    chosen = np.take_along_axis(scores, expected, axis=1)
    np.testing.assert_allclose(np.array(weights), 2 * chosen / chosen.sum(1, keepdims=True), rtol=1e-5)
    assert harness.races(launch) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_guard_expert_combine_of_mlx_lm(dtype):
    module = importlib.import_module("mlx_lm.kernels.post_expert_norm_combine")
    dtype, tolerance = DTYPES[dtype]
    rng = np.random.default_rng(3)
    x, w, norm = (mx.array(rng.normal(size=s).astype(np.float32)).astype(dtype) for s in ((3, 4, 300), (3, 4), (300,)))
    with harness.simulated(module) as kernels:
        got = module.post_expert_norm_combine(x, w, norm_weight=norm, eps=1e-5)
        launch = kernels["_expert_combine_kernel"].launches[-1]
    v = np.array(x.astype(mx.float32)) * np.array(norm.astype(mx.float32))
    v = v / np.sqrt(np.square(v).mean(-1, keepdims=True) + 1e-5)
    expected = (v * np.array(w.astype(mx.float32))[..., None]).sum(1)
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), expected, atol=tolerance * np.abs(expected).max())
    assert harness.races(launch) == []
