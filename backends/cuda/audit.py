"""Audit: the true energies of executed experts beside the predicted ones, while decoding.

Every so many decode steps the executed experts run once more, before the routing weights. Sums stay on the device until
they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backends.cuda.selection import RowKinds
from base_core.audit import CORRECTION_RATE, DRIFT_BOUND, SUMS, AuditStats, LayerAudit
from base_core.selection import LOG_ENERGY_RANGE

__all__ = ["CORRECTION_RATE", "DRIFT_BOUND", "Audit", "AuditStats", "LayerAudit"]


class Audit:
    """Sums of an audit over L layers.

    Args:
        layers: indices, in slot order.
        folded: of each layer, what calibration added to the intercepts for exponentiating.
        every: audits the first decode step and each `every`-th after it.
        correct: also moves the intercepts, see `observe`.
    """

    def __init__(
        self, layers: Sequence[int], folded: Sequence[float], every: int, correct: bool, device: torch.device
    ) -> None:
        self.layers, self.every, self.correct, self.folded = tuple(layers), every, correct, tuple(folded)
        self.due = False
        self._passes = 0
        self.sums = torch.zeros(len(self.layers), SUMS, dtype=torch.float64, device=device)

    def begin(self, decodes: bool) -> None:
        """Before a forward pass: decides whether it is audited.

        Args:
            decodes: by its shapes it is a decode step. Whether a row decodes, the device knows.

        Raises:
            ValueError: the pass is being compiled or captured, so that the decision would be made once for all.
        """
        if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            raise ValueError(
                "audit chooses its steps on the host: set audit=0, or decode without compiling or capturing"
            )
        self.due = decodes and self._passes % self.every == 0
        self._passes += decodes

    @torch.no_grad()
    def observe(
        self,
        slot: int,
        executed: Tensor,
        energies: Tensor,
        ids: Tensor,
        weights: Tensor,
        predicted: Tensor,
        active: Tensor,
        rows: RowKinds,
        offsets: Sequence[Tensor],
    ) -> None:
        """Takes one layer of an audited step in, without waiting for the device.

        Args:
            slot: of the layer.
            executed: int64 [T, k], what the rows execute.
            energies: float32 [T, k], true log-energies of those pairs.
            ids, weights: [T, k], native choice and its weights.
            predicted: float32 [T, E], log-energies as in force.
            active: bool [E].
            rows: only decode rows count, and none beside a prefill row.
            offsets: float32 [E], the intercepts in force, wherever they are held. With `correct` each moves by
                `CORRECTION_RATE` times its expert's mean drift in this step, an exponential average.
        """
        true = torch.zeros_like(predicted).scatter_(1, executed, energies.float()).gather(1, ids)
        guess = predicted.gather(1, ids).clamp(*LOG_ENERGY_RANGE)
        counted = ~rows.silent & ~rows.mixed  # [T, 1]
        # An output of zero or beyond float32 has no log-energy to compare.
        seen = counted & active[ids] & true.isfinite()
        true = torch.where(seen, true.clamp(*LOG_ENERGY_RANGE), guess)
        drift = torch.where(seen, true - (guess - self.folded[slot]), 0.0)
        cost = torch.where(counted, weights.float().square() * true.exp(), 0.0).double()
        step = torch.stack(
            (
                counted.any().double(),
                seen.sum().double(),
                drift.double().sum(),
                drift.double().square().sum(),
                torch.where(active[ids], cost, 0.0).sum(),
                cost.sum(),
            )
        )
        self.sums[slot] += step.to(self.sums.device)
        if self.correct:
            total = torch.zeros_like(predicted[0]).scatter_add_(0, ids.flatten(), drift.flatten())
            pairs = torch.zeros_like(total).scatter_add_(0, ids.flatten(), seen.flatten().to(total.dtype))
            for offset in offsets:
                offset.add_(total / pairs.clamp_min(1), alpha=CORRECTION_RATE)

    def stats(self) -> AuditStats:
        """What was found so far. Waits for the device."""
        return AuditStats.of_sums(self.layers, self.sums.tolist())
