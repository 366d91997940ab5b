"""What parity cannot show: selection never asks the host for a value, and takes its budget from tensors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from backends.cuda.selection import RowKinds, TorchSelection, select_no_sync
from tests.backends.cuda.no_sync import NoSync

T, E, K = 16, 60, 4
VARIANTS = {
    "base": {},
    "energy": {"tau": 0.9},
    "share": {"floor": 0.02},
    "share by group": {"groups": torch.arange(E) % 3, "floor": 0.02},
    "groups": {"groups": torch.arange(E) % 3},
    "energy by group": {"groups": torch.arange(E) % 3, "tau": 0.9},
    "drop": {"ranking": "weight_sum", "fill": "drop"},
    "renormalise": {"ranking": "top1_union", "denominator": "renormalise"},
}


def arguments(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(T, E, generator=generator).softmax(-1)
    weights, ids = scores.topk(K)
    return scores, ids, weights, torch.randn(T, E, generator=generator)


def assert_same(first: TorchSelection, second: TorchSelection) -> None:
    for name, a, b in zip(TorchSelection._fields, first, second, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_no_host_synchronisation(variant):
    with NoSync():
        select_no_sync(*arguments(), 8, rows=torch.tensor([0, 1, 1, 2] * 4), **variant)


def test_the_guard_sees_synchronisation():
    ids = arguments()[1]
    for sync in (lambda: ids.max().item(), lambda: ids[ids > 3], ids.unique, lambda: bool(ids.any())):
        with NoSync(), pytest.raises(AssertionError, match=r"synchronises$"):
            sync()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_shapes_follow_from_shapes_alone(variant):
    with FakeTensorMode() as mode:
        variant = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in variant.items()}
        inputs = [mode.from_tensor(a) for a in arguments()]
        out = select_no_sync(*inputs, 8, rows=torch.ones(T, dtype=torch.int32), **variant)
    assert [tuple(a.shape) for a in out] == [(T, K), (T, K), (E,), (E,), (E,), ()]


def test_compiles_into_one_graph():
    compiled = torch.compile(select_no_sync, fullgraph=True, backend="eager")
    rows = torch.tensor([0, 1, 1, 1] * 4)
    for seed in range(3):
        assert_same(compiled(*arguments(seed), 8, rows=rows), select_no_sync(*arguments(seed), 8, rows=rows))


def test_budget_from_tensors():
    for seed in range(5):
        for limit in (1, 8, E):
            assert_same(select_no_sync(*arguments(seed), torch.tensor(limit)), select_no_sync(*arguments(seed), limit))
        tau = torch.tensor(0.9, dtype=torch.float64)
        assert_same(select_no_sync(*arguments(seed), 8, tau=tau), select_no_sync(*arguments(seed), 8, tau=0.9))


def test_row_kinds_are_shared_between_layers():
    rows = torch.tensor([0, 1, 1, 1] * 4)
    assert_same(select_no_sync(*arguments(), 8, rows=RowKinds.of(rows)), select_no_sync(*arguments(), 8, rows=rows))


def test_narrow_ids_and_one_energy_for_all_rows():
    scores, ids, weights, log_energy = arguments()
    out = select_no_sync(scores, ids.int(), weights, log_energy[0], 8)
    expected = select_no_sync(scores, ids, weights, log_energy[0].expand(T, E), 8)
    assert out.ids.dtype == torch.int32
    assert_same(out._replace(ids=out.ids.long()), expected)


def test_fallback_is_reported():
    scores, ids, weights, log_energy = arguments()
    assert not select_no_sync(scores, ids, weights, log_energy, 8).fell_back
    out = select_no_sync(scores, ids, weights, torch.full_like(log_energy, torch.nan), 8)
    assert out.fell_back
    assert torch.equal(out.ids, ids)


def test_energy_ranking_needs_energies():
    scores, ids, weights, _ = arguments()
    with pytest.raises(ValueError, match=r"removal_cost.*log_energy"):
        select_no_sync(scores, ids, weights, None, 8)
