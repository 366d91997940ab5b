"""A guard under which nothing may wait for the device."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NoSync(TorchDispatchMode):
    """Refuses every operation that waits for the device or whose output size depends on data."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in {"_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "bincount", "equal"}:
            raise AssertionError(f"{name} synchronises")
        if name.startswith("index") and any(
            isinstance(a, torch.Tensor) and a.dtype == torch.bool for a in tree_leaves(args[1:])
        ):
            raise AssertionError(f"{name} with a mask synchronises")
        return func(*args, **(kwargs or {}))
