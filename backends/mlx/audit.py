"""Audit: the true energies of executed experts beside the predicted ones, while decoding.

Every so many decode steps a step runs in MLX operations, where the experts' outputs exist before they are weighted, and
these are measured. Sums are lazy arrays, evaluated with the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from backends.mlx.selection import sum_by_expert
from base_core.audit import CORRECTION_RATE, SUMS, AuditStats
from base_core.selection import DECODE, LOG_ENERGY_RANGE, PREFILL


def output_energy(outputs: mx.array) -> mx.array:
    """||E_e(z)||^2 of experts' outputs [..., k, d] before the routing weight: float32 [..., k]."""
    return mx.square(outputs.astype(mx.float32)).sum(axis=-1)


class Audit:
    """Sums of an audit over layers.

    Attributes:
        sums: by layer index, float32 [2, 6]: `base_core.audit.SUMS` sums, and what rounding has lost of each.

    Args:
        folded: by layer index, what calibration added to the intercepts for exponentiating.
        every: audits the first decode step and each `every`-th after it.
        correct: `observe` also says how the intercepts move.
    """

    def __init__(self, folded: Mapping[int, float], every: int, correct: bool) -> None:
        self.folded, self.every, self.correct = dict(folded), every, correct
        self.reset()

    def reset(self) -> None:
        """Sets the sums to zero; the next decode step is the first."""
        self.due = False
        self._passes = 0
        self.sums = {layer: mx.zeros((2, SUMS)) for layer in self.folded}
        mx.eval(self.sums)

    def begin(self, decodes: bool) -> None:
        """At a forward pass's first layer under a budget: decides for all of them whether the pass is audited.

        Args:
            decodes: by its shapes it is a decode step. Whether a row decodes, the device knows.
        """
        self.due = decodes and self._passes % self.every == 0
        self._passes += decodes

    def observe(
        self,
        layer: int,
        executed: mx.array,
        energies: mx.array,
        ids: mx.array,
        weights: mx.array,
        predicted: mx.array,
        active: mx.array,
        rows: mx.array | None,
    ) -> mx.array | None:
        """Takes one layer of an audited step in, without waiting for the device.

        Args:
            layer: its index.
            executed: int [T, k], what the rows execute.
            energies: float32 [T, k], true log-energies of those pairs.
            ids, weights: [T, k], native choice and its weights.
            predicted: float32 [T, E], log-energies as in force.
            active: bool [E].
            rows: int [T], 0 padding, 1 decode, 2 prefill; None is all decode. Only decode rows count, and none beside
                a prefill row.

        Returns:
            With `correct` what to add to the intercepts, float32 [E]: `CORRECTION_RATE` times each expert's mean drift
            in this step, an exponential average. Otherwise None.
        """
        rows = mx.full((len(ids),), DECODE) if rows is None else rows
        counted = ((rows == DECODE) & mx.logical_not((rows == PREFILL).any()))[:, None]
        true = mx.take_along_axis(
            mx.put_along_axis(mx.zeros_like(predicted), executed, energies.astype(mx.float32), axis=1), ids, axis=1
        )
        guess = mx.clip(mx.take_along_axis(predicted, ids, axis=1), *LOG_ENERGY_RANGE)
        ran = active[ids]
        # An output of zero or beyond float32 has no log-energy to compare.
        seen = counted & ran & mx.isfinite(true)
        true = mx.where(seen, mx.clip(true, *LOG_ENERGY_RANGE), guess)
        drift = mx.where(seen, true - (guess - self.folded[layer]), 0)
        cost = mx.where(counted, mx.square(weights.astype(mx.float32)) * mx.exp(true), 0)
        self._add(
            layer,
            mx.stack(
                [
                    counted.any().astype(mx.float32),
                    seen.sum().astype(mx.float32),
                    drift.sum(),
                    mx.square(drift).sum(),
                    mx.where(ran, cost, 0).sum(),
                    cost.sum(),
                ]
            ),
        )
        if not self.correct:
            return None
        E = predicted.shape[1]
        pairs = sum_by_expert(ids, mx.ones_like(drift), seen, E)
        return CORRECTION_RATE * sum_by_expert(ids, drift, seen, E) / mx.maximum(pairs, 1)

    def _add(self, layer: int, step: mx.array) -> None:
        # Kahan's sum: a GPU has no float64.
        total, lost = self.sums[layer]
        step = step - lost
        grown = total + step
        self.sums[layer] = mx.stack([grown, (grown - total) - step])

    def stats(self) -> AuditStats:
        """What was found so far. Waits for the device."""
        sums = [np.array(self.sums[layer]).astype(np.float64) for layer in self.folded]
        return AuditStats.of_sums(tuple(self.folded), [(total - lost).tolist() for total, lost in sums])
