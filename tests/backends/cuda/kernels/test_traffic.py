"""What the kernels read, counted load by load in the Triton interpreter, and what a layer launches."""

from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import numpy as np  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from backends.cuda.experts import EXPERTS_IMPLEMENTATION, register_experts  # noqa: E402
from backends.cuda.families import find_moe_layers  # noqa: E402
from backends.cuda.integration import base_budget  # noqa: E402
from backends.cuda.kernels.collect import collect  # noqa: E402
from backends.cuda.kernels.experts import MAX_TILES, ExpertsLayout, down, experts, gate_up, layer_traffic  # noqa: E402
from backends.cuda.kernels.front import FrontState, budget_value, front, front_traffic  # noqa: E402
from base_core.budget import Budget  # noqa: E402
from base_core.routing import RouterRule  # noqa: E402
from tests.backends.cuda.tiny import make_model, make_predictor  # noqa: E402

pytestmark = pytest.mark.interpreter


class Loads:
    """Counts how often each byte of the given tensors is loaded."""

    def __init__(self, monkeypatch, **tensors):
        self.ranges = {
            name: (t.data_ptr(), t.numel() * t.element_size(), t.element_size()) for name, t in tensors.items()
        }
        self.times = {name: np.zeros(t.numel(), np.int64) for name, t in tensors.items()}
        original = interpreter.InterpreterBuilder.create_masked_load

        def counted(builder, ptrs, mask, *others):
            addresses = np.asarray(ptrs.data)[np.broadcast_to(mask.data, np.shape(ptrs.data))].astype(np.int64)
            for name, (start, size, item) in self.ranges.items():
                inside = addresses[(addresses >= start) & (addresses < start + size)]
                np.add.at(self.times[name], (inside - start) // item, 1)
            return original(builder, ptrs, mask, *others)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", counted)

    def bytes(self, name):
        return int(self.times[name].sum()) * self.ranges[name][2]


class Launches(TorchDispatchMode):
    """Counts kernel launches of Triton and operators of torch that would be launches."""

    FREE = (
        "empty",
        "new_empty",
        "empty_like",
        "view",
        "detach",
        "alias",
        "select",
        "as_strided",
        "_unsafe_view",
        "slice",
    )

    def __init__(self, monkeypatch):
        super().__init__()
        self.kernels, self.operators = [], Counter()
        original = interpreter.GridExecutor.__call__

        def counted(executor, *args, **kwargs):
            self.kernels.append(executor.fn.__name__)
            return original(executor, *args, **kwargs)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name not in self.FREE:
            self.operators[name] += 1
        return func(*args, **(kwargs or {}))


GPT_OSS = ExpertsLayout(transposed=True, interleaved=True, clamp=(1.702, 7.0))


def make(T, E, k, H, I, layout):  # noqa: E741
    generator = torch.Generator().manual_seed(T)
    first, second = torch.randn(E, 2 * I, H, generator=generator), torch.randn(E, H, I, generator=generator)
    if layout.transposed:
        first, second = first.mT.contiguous(), second.mT.contiguous()
    ids = torch.stack(
        [torch.randperm(E // 2, generator=generator)[:k] * 2 for _ in range(T)]
    )  # odd experts stay unused
    return torch.randn(T, H, generator=generator), first, second, collect(ids, torch.rand(T, k, generator=generator), E)


@pytest.mark.parametrize("layout", [ExpertsLayout(), GPT_OSS], ids=["plain", "gpt-oss"])
@pytest.mark.parametrize(("T", "H", "I"), [(1, 128, 96), (16, 192, 160), (33, 136, 72)])
def test_each_active_weight_is_loaded_once(monkeypatch, T, H, I, layout):  # noqa: E741
    z, first, second, routed = make(T, 8, 3, H, I, layout)
    tickets = torch.zeros(MAX_TILES, dtype=torch.int32)
    loads = Loads(monkeypatch, first=first, second=second, z=z)
    hidden = gate_up(z, first, *routed, layout)
    loads.ranges["hidden"], loads.times["hidden"] = (
        (hidden.data_ptr(), hidden.nbytes, 4),
        np.zeros(hidden.numel(), np.int64),
    )
    down(hidden, second, *routed, tickets, layout)

    active = routed.active[: int(routed.count)].tolist()
    for name, tensor in (("first", first), ("second", second)):
        times = loads.times[name].reshape(len(tensor), -1)
        assert (times[active] == 1).all()
        assert times.sum() == times[active].size
    expected = layer_traffic(T, H, I, len(active), 4)
    assert loads.bytes("first") + loads.bytes("second") == expected.weights
    assert loads.bytes("z") == expected.z and loads.bytes("hidden") == expected.hidden


@pytest.mark.parametrize(("T", "E", "H"), [(1, 60, 128), (16, 128, 256), (40, 64, 100)])
def test_front_loads_router_and_predictor_once_a_block(monkeypatch, T, E, H):
    generator = torch.Generator().manual_seed(T)
    z, weight = torch.randn(T, H, generator=generator), torch.randn(2 * E, H, generator=generator)
    loads = Loads(monkeypatch, weight=weight, z=z)
    rows = torch.ones(T, dtype=torch.int32)
    front(z, weight, torch.zeros(E), rows, budget_value(Budget(experts=8), E), FrontState.zeros("cpu"), RouterRule(4))
    expected = front_traffic(T, E, 4, H, 4)
    assert loads.bytes("weight") == expected.weights and loads.bytes("z") == expected.z
    assert len(set(loads.times["weight"].tolist())) == 1


@pytest.mark.parametrize("T", [1, 16, 32, 64])
@pytest.mark.parametrize("M", [10, 16])
@pytest.mark.parametrize(
    ("E", "k", "H", "I"),
    [(128, 8, 2048, 768), (60, 4, 2048, 1408), (64, 6, 2048, 1408), (128, 4, 2880, 2880)],
    ids=["qwen3-30b-a3b", "qwen1.5-moe", "deepseek-v2-lite", "gpt-oss-120b"],
)
def test_memory_traffic_is_one_read_of_the_active_weights(E, k, H, I, M, T):  # noqa: E741
    experts_bytes, front_bytes = layer_traffic(T, H, I, M, 2), front_traffic(T, E, k, H, 2)
    weights = M * 3 * H * I * 2
    assert experts_bytes.weights == weights
    assert experts_bytes.memory <= 1.05 * weights
    if T <= 32:
        assert front_bytes.memory <= 0.02 * weights


@pytest.mark.parametrize(("T", "launches"), [(1, 3), (16, 3), (32, 3), (48, 4)])
def test_launches_of_a_layer(monkeypatch, T, launches):
    E, H, I = 16, 64, 32  # noqa: E741
    z, first, second, _ = make(T, E, 4, H, I, ExpertsLayout())
    weight, rows = torch.randn(2 * E, H), torch.ones(T, dtype=torch.int32)
    value, state, tickets = (
        budget_value(Budget(experts=6), E),
        FrontState.zeros("cpu"),
        torch.zeros(MAX_TILES, dtype=torch.int32),
    )
    bias = torch.zeros(E)
    with Launches(monkeypatch) as counted:
        routed = front(z, weight, bias, rows, value, state, RouterRule(4))
        experts(z, first, second, routed.active, routed.count, routed.combine, tickets, ExpertsLayout())
    assert len(counted.kernels) == launches, counted.kernels
    assert not counted.operators


@pytest.mark.parametrize("T", [1, 16, 32])
@torch.no_grad()
def test_launches_of_a_layer_in_a_model(monkeypatch, T):
    """transformers' own block under a budget: three launches, and nothing of torch between them."""
    (block,) = (layer.mlp for layer in make_model(num_hidden_layers=1).model.layers)
    find_moe_layers(block)[0].experts.config._experts_implementation = EXPERTS_IMPLEMENTATION
    register_experts()
    with base_budget(block, make_predictor(block), 3) as session:
        session.set_rows(torch.ones(T, dtype=torch.int32))
        z = torch.randn(T, 1, 32)
        block(z)
        with Launches(monkeypatch) as counted:
            block(z)
    assert counted.kernels == ["front_kernel", "gate_up_kernel", "down_kernel"]
    assert not counted.operators
