"""The experts implementation against transformers' eager one, and what it reads."""

import importlib
import logging
import threading

import pytest
import torch
from transformers import AutoConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from backends.cuda import cpu_linear
from backends.cuda.cpu_linear import cpu_path, grouped_linear, linear_float32
from backends.cuda.experts import EXPERTS_IMPLEMENTATION, group_slots, register_experts
from backends.cuda.families import FAMILIES

D, I, E, K = 64, 96, 12, 3  # noqa: E741 -- as the shapes are called
WIDTHS = {"hidden_size": D, "moe_intermediate_size": I, "num_experts": E, "num_experts_per_tok": K}
OVERRIDES = {
    "mixtral": {"intermediate_size": I, "num_local_experts": E},
    "olmoe": {"intermediate_size": I},
    "gpt_oss": {"intermediate_size": I, "num_local_experts": E},
    "deepseek_v2": {"n_routed_experts": E},
    "glm4_moe": {"n_routed_experts": E},
}
DTYPES = [torch.float32, torch.bfloat16]

needs_kernel = pytest.mark.skipif(cpu_path() != "kernel", reason=f"experts run through {cpu_path()}")


@pytest.fixture(params=[pytest.param("kernel", marks=needs_kernel), "torch"], autouse=True)
def path(request, monkeypatch):
    """Every test runs with the kernel and without it."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_linear, "_has_kernel", lambda: False)
    return request.param


@pytest.fixture(autouse=True)
def poisoned():
    """No gradients; uninitialised memory holds NaN, so that an unwritten output shows."""
    register_experts()
    torch.manual_seed(0)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(deterministic)


def make_experts(model_type="qwen3_moe", dtype=torch.float32, **overrides):
    family = next(family for family in FAMILIES if family.model_type == model_type)
    config = AutoConfig.for_model(model_type, **{**WIDTHS, **OVERRIDES.get(model_type, {}), **overrides})
    modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    experts = getattr(modeling, family.experts)(config)
    for parameter in experts.parameters():
        parameter.normal_(std=0.1)
    assert experts.gate_up_proj.shape[0] == E
    return experts.to(dtype)


def make_batch(T, dtype=torch.float32, *, among=E):
    """Hidden rows, distinct random ids below `among`, and weights that sum to one."""
    ids = torch.rand(T, among).topk(K).indices
    return torch.randn(T, D).to(dtype), ids, torch.rand(T, K).softmax(-1).to(dtype)


def run(experts, implementation, *batch):
    experts.config._experts_implementation = implementation
    return experts(*batch)


def error(reference, out):
    """Root mean square of the difference, relative to the reference's."""
    reference, out = reference.double(), out.double()
    return ((out - reference).square().mean() / reference.square().mean()).sqrt().item()


@pytest.mark.parametrize("T", [1, 2, 5, 16, 33, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES])
def test_equals_eager(model_type, dtype, T):
    experts = make_experts(model_type, dtype)
    batch = make_batch(T, dtype)
    out = run(experts, EXPERTS_IMPLEMENTATION, *batch)
    assert out.dtype == dtype
    assert out.shape == (T, D)
    if dtype == torch.float32:
        assert error(run(experts, "eager", *batch), out) < 1e-6
        return
    stock = run(experts, "grouped_mm", *batch)
    hidden, ids, weights = batch
    exact = run(experts.float(), "eager", hidden.float(), ids, weights.float())
    assert error(exact, out) < 1.05 * error(exact, stock) + 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 40, 160])
def test_odd_widths(size, dtype):
    experts = make_experts(dtype=dtype, moe_intermediate_size=size)
    batch = make_batch(5, dtype)
    assert error(run(experts, "eager", *batch), run(experts, EXPERTS_IMPLEMENTATION, *batch)) < (
        1e-6 if dtype == torch.float32 else 1e-2
    )


@pytest.mark.parametrize("T", [1, 16, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_inactive_experts_are_not_read(model_type, dtype, T):
    experts = make_experts(model_type, dtype)
    batch = make_batch(T, dtype, among=4)
    before = run(experts, EXPERTS_IMPLEMENTATION, *batch)
    for parameter in experts.parameters():
        parameter[4:] = torch.nan
    assert torch.equal(run(experts, EXPERTS_IMPLEMENTATION, *batch), before)
    assert before.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_of_weight_zero_change_nothing(dtype):
    experts = make_experts(dtype=dtype)
    hidden, ids, weights = make_batch(16, dtype)
    weights[::2, 1:] = 0
    before = run(experts, EXPERTS_IMPLEMENTATION, hidden, ids, weights)
    duplicated = torch.where(weights == 0, ids[:, :1], ids)
    after = run(experts, EXPERTS_IMPLEMENTATION, hidden, duplicated, weights)
    assert torch.equal(before, after)
    assert error(run(experts, "grouped_mm", hidden, duplicated, weights), after) < 1e-2
    nothing = run(experts, EXPERTS_IMPLEMENTATION, hidden, ids, torch.zeros_like(weights))
    assert torch.equal(nothing, torch.zeros_like(hidden))


def test_expert_with_only_zero_weights_is_not_read():
    experts = make_experts()
    hidden, ids, weights = make_batch(4, among=E - 1)
    ids[:, 0], weights[:, 0] = E - 1, 0
    experts.gate_up_proj[E - 1] = torch.nan
    assert run(experts, EXPERTS_IMPLEMENTATION, hidden, ids, weights).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_input_need_not_be_contiguous(dtype):
    experts = make_experts(dtype=dtype)
    hidden, ids, weights = make_batch(16, dtype)
    wide = torch.full((D, 32), torch.nan, dtype=dtype)
    wide[:, ::2] = hidden.T
    views = wide[:, ::2].T, ids.T.contiguous().T, weights.T.contiguous().T
    assert not views[0].is_contiguous()
    expected = run(experts, EXPERTS_IMPLEMENTATION, hidden, ids, weights)
    assert torch.equal(run(experts, EXPERTS_IMPLEMENTATION, *views), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_need_not_be_aligned(dtype):
    weight = torch.randn(E * I * D + 1).to(dtype)[1:].view(E, I, D)
    groups = group_slots(torch.tensor([[3, 5]]), torch.ones(1, 2), E)
    x = torch.randn(1, D).to(dtype)
    expected = torch.stack([weight[3] @ x[0], weight[5] @ x[0]])
    assert error(expected, grouped_linear(x, weight, groups, 2)) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_does_not_depend_on_threads_or_batch(dtype, path):
    experts = make_experts(dtype=dtype)
    hidden, ids, weights = make_batch(16, dtype, among=5)
    together = run(experts, EXPERTS_IMPLEMENTATION, hidden, ids, weights)
    assert torch.equal(run(experts, EXPERTS_IMPLEMENTATION, hidden, ids, weights), together)
    if path == "torch":
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = [
        run(experts, EXPERTS_IMPLEMENTATION, hidden[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(16)
    ]
    torch.set_num_threads(threads)
    assert torch.equal(torch.cat(alone), together)


def test_concurrent_callers():
    experts = make_experts()
    batches = [make_batch(T) for T in (1, 3, 16, 60)]
    expected = [run(experts, EXPERTS_IMPLEMENTATION, *batch) for batch in batches]
    found = {}

    def work(i):
        with torch.no_grad():
            found[i] = [experts(*batches[i]) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, outs in found.items():
        assert len(outs) == 20
        assert all(error(expected[i], out) < 1e-6 for out in outs)


def test_each_active_expert_is_multiplied_once(monkeypatch):
    """A step's traffic: one product per projection and active expert, however many rows it has."""
    experts = make_experts(dtype=torch.bfloat16)
    hidden, ids, weights = make_batch(400, torch.bfloat16, among=7)
    seen, products = [], []

    def counting_linear(x, weight, groups, num_slots, **options):
        seen.append(groups.experts.tolist())
        assert groups.counts.sum() == ids.numel()
        return grouped_linear(x, weight, groups, num_slots, **options)

    def counting_product(x, matrix, chunk, **options):
        products.append(matrix.data_ptr())
        return linear_float32(x, matrix, chunk, **options)

    monkeypatch.setattr("backends.cuda.experts.grouped_linear", counting_linear)
    monkeypatch.setattr(cpu_linear, "linear_float32", counting_product)
    run(experts, EXPERTS_IMPLEMENTATION, hidden, ids, weights)
    assert seen == [list(range(7))] * 2
    assert len(products) == len(set(products)) == 14  # about 170 rows an expert: all are wide


@needs_kernel
def test_kernel_reads_each_matrix_of_a_group_once(path):
    """Every group of at most WIDE_ROWS rows is one group of one kernel call."""
    if path == "torch":
        pytest.skip("the kernel is what is tested")
    calls = []

    class Library:
        @staticmethod
        def grouped_linear_bfloat16(*args):
            calls.append(args[9])

    hidden, ids, weights = make_batch(64, torch.bfloat16, among=7)
    groups = group_slots(ids, weights, E)
    weight = torch.randn(E, I, D).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_linear, "_kernel", Library)
        patch.setattr(cpu_linear, "_has_kernel", lambda: True)
        patch.setattr(cpu_linear, "_has_bfloat16_units", lambda: False)  # with them torch multiplies instead
        grouped_linear(hidden, weight, groups, ids.numel())
    assert calls == [7]


def test_group_slots():
    ids = torch.tensor([[4, 1], [1, 0], [4, 4]])
    weights = torch.tensor([[0.5, 0.5], [1.0, 0.0], [1.0, 0.0]])
    groups = group_slots(ids, weights, 6)
    assert {name: field.tolist() for name, field in groups._asdict().items()} == {
        "rows": [0, 1, 0, 2],
        "slots": [1, 2, 0, 4],
        "experts": [1, 4],
        "starts": [0, 2],
        "counts": [2, 2],
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [4, 100, 192])
@pytest.mark.parametrize("size", [32, 1024, 2080])
def test_every_tile_of_the_kernel(dtype, N, size):
    """All counts of rows up to the widest group and beyond, in panels and blocks that do not divide evenly."""
    counts = [*range(1, 20), 95, 96, 97]
    ids = torch.repeat_interleave(torch.tensor(counts)).unsqueeze(1)
    ids = ids[torch.randperm(len(ids))]
    x, weight = torch.randn(len(ids), size).to(dtype), torch.randn(len(counts), N, size).to(dtype)
    out = grouped_linear(x, weight, group_slots(ids, torch.ones(ids.shape), len(counts)), len(ids))
    exact = torch.stack([weight[e].double() @ row for e, row in zip(ids.flatten(), x.double(), strict=True)])
    assert out.dtype == dtype
    assert error(exact, out) < (1e-6 if dtype == torch.float32 else 2.5e-3)  # bfloat16: one rounding of the result


def test_rounding_and_special_values():
    weight = torch.zeros(1, 8, 32, dtype=torch.bfloat16)
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, torch.inf, -torch.inf, torch.nan, -0.0, 3.0e38])
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, :2] = 1.0
    weight[0, :, 0] = values  # the odd 2**-8 comes from a second product
    weight[0, 1, 1] = weight[0, 2, 1] = 2**-8
    weight[0, 1, 0], weight[0, 2, 0] = 1.0, 1 + 2**-7
    out = grouped_linear(x, weight, group_slots(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), 1), 1)
    expected = (weight[0, :, :2].float().sum(-1)).bfloat16()
    torch.testing.assert_close(out[0], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [1, 3, 70])
def test_widening_in_chunks(n, transposed, monkeypatch):
    monkeypatch.setattr(cpu_linear, "_has_bfloat16_units", lambda: False)  # with them nothing is widened
    x, matrix = torch.randn(n, D).bfloat16(), torch.randn(D, I).bfloat16()
    given = matrix if transposed else matrix.T.contiguous()
    out = linear_float32(x, given, torch.full((28, given.shape[1]), torch.nan), transposed=transposed)
    assert out.dtype == torch.float32
    assert error(x.double() @ matrix.double(), out) < (5e-3 if n < 5 and not transposed else 1e-6)


def test_training_goes_through_stock():
    experts = make_experts()
    hidden, ids, weights = make_batch(5)
    with torch.enable_grad():
        run(experts, EXPERTS_IMPLEMENTATION, hidden, ids, weights).sum().backward()
    assert experts.down_proj.grad.abs().sum() > 0


def test_registering_twice(path):
    register_experts()
    register_experts()
    assert EXPERTS_IMPLEMENTATION in ALL_EXPERTS_FUNCTIONS


def test_without_a_compiler(monkeypatch, caplog, path):
    if path == "torch":
        pytest.skip("this test takes the kernel away itself")
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpu_linear._kernel.cache_clear()
    cpu_linear._has_kernel.cache_clear()
    try:
        experts, batch = make_experts(), make_batch(5)
        with caplog.at_level(logging.WARNING):
            out = run(experts, EXPERTS_IMPLEMENTATION, *batch)
            run(experts, EXPERTS_IMPLEMENTATION, *batch)
        assert error(run(experts, "eager", *batch), out) < 1e-6
        assert cpu_path().startswith("torch (")
        assert [record.getMessage().count("install g++") for record in caplog.records] == [1]
    finally:
        cpu_linear._kernel.cache_clear()
        cpu_linear._has_kernel.cache_clear()


def test_broken_compiler(monkeypatch, tmp_path, path):
    if path == "torch":
        pytest.skip("this test takes the kernel away itself")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    cpu_linear._kernel.cache_clear()
    try:
        assert cpu_path().startswith("torch (")
        assert not list(tmp_path.glob("**/*.so"))
    finally:
        cpu_linear._kernel.cache_clear()
