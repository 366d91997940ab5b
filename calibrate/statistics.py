"""Streaming sufficient statistics of the ridge regressions (paper section 6.3), and their checkpoint.

Per expert: everything that the fit of log ||E_e(z)||^2 on z / ||z|| needs, so that no activation is ever kept.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

GRAM_BLOCK = 512
"""The Gram matrix is symmetric: only the lower triangle is kept, in blocks this wide (62 % of it at d = 2048)."""

STATE_KEY = "base_moe_calibration"
FORMAT_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


def gram_rows(hidden_size: int) -> list[tuple[int, int]]:
    """Block rows of the lower triangle: rows first..last, each with the columns 0..last."""
    return [(r, min(r + GRAM_BLOCK, hidden_size)) for r in range(0, hidden_size, GRAM_BLOCK)]


def statistics_bytes(num_experts: int, hidden_size: int) -> int:
    """Memory of one layer's statistics."""
    gram = sum((last - first) * last for first, last in gram_rows(hidden_size))
    return num_experts * (4 * gram + 8 * (2 * hidden_size + 5))


class LayerStatistics:
    """Sums over the routed pairs of one MoE layer with E experts of width d, on any torch device with float64.

    With x = z / ||z||, y = log(||E_e(z)||^2 + eps) and v the weight of a pair in the regression:

    Attributes:
        pairs: int64 [E], number of pairs.
        moments: float64 [E, 4], sums of v, v y, v y^2, and ||E_e(z)||^2 (without v).
        first: float64 [E, 2, d], sums of v x and v y x.
        gram: float32, per block row [E, last - first, last], sum of v x x^T; see `gram_rows`.
    """

    def __init__(self, num_experts: int, hidden_size: int, device: torch.device | str = "cpu") -> None:
        E, d = num_experts, hidden_size
        self.num_experts, self.hidden_size = E, d
        self.pairs = torch.zeros(E, dtype=torch.int64, device=device)
        self.moments = torch.zeros(E, 4, dtype=torch.float64, device=device)
        self.first = torch.zeros(E, 2, d, dtype=torch.float64, device=device)
        self.gram = [torch.zeros(E, last - first, last, device=device) for first, last in gram_rows(d)]

    @torch.no_grad()
    def add(
        self,
        z: Tensor | NDArray,
        ids: Tensor | NDArray,
        energy: Tensor | NDArray,
        weights: Tensor | NDArray,
        eps: float,
    ) -> None:
        """Takes T rows in. One matrix product per expert and block row, whatever the number of rows.

        Args:
            z: float [T, d], router inputs.
            ids: int [T, k], routed experts.
            energy: float [T, k], ||E_e(z)||^2 of each pair.
            weights: float [T, k], non-negative weight of each pair.
            eps: added to the energy before the logarithm.
        """
        device = self.pairs.device
        z, ids, energy, weights = (torch.as_tensor(array, device=device) for array in (z, ids, energy, weights))
        z = z.float()
        x = z / torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        order = ids.flatten().long().argsort(stable=True)
        counts = ids.flatten().long().bincount(minlength=self.num_experts)
        v, e = weights.flatten()[order].double(), energy.flatten()[order].double()
        y = (e + eps).log()
        self.pairs += counts
        self.moments += torch.segment_reduce(
            torch.stack((v, v * y, v * y * y, e), dim=1), "sum", lengths=counts, initial=0
        )
        root = v.sqrt()
        factors = torch.stack((root, root * y))  # [2, T k]
        start = 0
        for expert, count in enumerate(counts.tolist()):
            if not count:
                continue
            own = slice(start, start + count)
            start += count
            r = x.index_select(0, order[own] // ids.shape[1]) * root[own, None].float()  # [n, d]
            self.first[expert] += factors[:, own] @ r.double()
            for block, (first, last) in zip(self.gram, gram_rows(self.hidden_size), strict=True):
                block[expert].addmm_(r[:, first:last].mT, r[:, :last])

    def full_gram(self, experts: slice) -> Tensor:
        """The whole Gram matrices of some experts, float64 [n, d, d]."""
        d = self.hidden_size
        full = torch.empty(len(self.pairs[experts]), d, d, dtype=torch.float64, device=self.pairs.device)
        for block, (first, last) in zip(self.gram, gram_rows(d), strict=True):
            full[:, first:last, :last] = block[experts]
            full[:, :first, first:last] = block[experts, :, :first].mT
        return full

    def tensors(self) -> dict[str, Tensor]:
        """Everything by name, for a checkpoint. Not copies."""
        named = {"pairs": self.pairs, "moments": self.moments, "first": self.first}
        return named | {f"gram.{i}": block for i, block in enumerate(self.gram)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes back what `tensors` gave.

        Raises:
            ValueError: a tensor that is missing or of another shape.
        """
        for name, own in self.tensors().items():
            if name not in tensors or tensors[name].shape != own.shape or tensors[name].dtype != own.dtype:
                raise ValueError(f"statistics: {name!r} is missing or not {own.dtype} {tuple(own.shape)}")
            own.copy_(tensors[name])


def write_checkpoint(path: Path, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file, whole or not at all; one tensor at a time comes to the host.

    Args:
        state: what JSON can hold; goes into the metadata.
        tensors: float32, float64 or int64, on any device.
    """
    header: dict[str, Any] = {"__metadata__": {STATE_KEY: json.dumps(state, sort_keys=True)}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": FORMAT_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # A fixed name: what a killed process left behind is overwritten by the next checkpoint.
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                file.write(tensor.detach().cpu().contiguous().numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_state(path: Path) -> dict[str, Any]:
    """The state that `write_checkpoint` stored, without its tensors.

    Raises:
        ValueError: not a whole checkpoint.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {})[STATE_KEY])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is no whole calibration checkpoint: remove it and start again") from error


def read_tensors(path: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names start with `prefix`, by the rest of their names."""
    with safe_open(path, framework="pt") as file:
        return {name.removeprefix(prefix): file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118
