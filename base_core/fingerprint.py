"""Fingerprint of a model's router weights, so that a predictor cannot silently serve another model.

Each layer's router matrix W [E, d] is projected on 16 fixed random sign matrices R_k: sketch_k = <W, R_k> / ||W||.
Because E[<D, R_k>^2] = ||D||^2, two sketches tell how far two routers are apart, relative to their size, without
either of them. A rounded or quantised copy stays close; another model lies at about sqrt(2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

SKETCH_SIZE = 16

FINGERPRINT_TOLERANCE = 0.2
"""Largest relative distance that still counts as the same model.

4-bit affine quantisation with groups of 64 moves a Gaussian matrix by about 0.1, bf16 by 0.002; another model by 1.4.
"""


@lru_cache(maxsize=2)
def _signs(num_experts: int, hidden_size: int) -> NDArray[np.float32]:
    """Fixed +-1 matrices [16, E * d]: bits of the SplitMix64 hash of each entry's position."""
    with np.errstate(over="ignore"):
        x = (np.arange(num_experts * hidden_size, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    bits = (x >> np.arange(SKETCH_SIZE, dtype=np.uint64)[:, None]) & np.uint64(1)
    return bits.astype(np.float32) * 2 - 1


def router_fingerprint(weight: ArrayLike) -> list[float]:
    """Sketch of one layer's router weights: 16 numbers.

    Args:
        weight: float [E, d], the dequantised router matrix.

    Raises:
        ValueError: not a finite, non-zero matrix.
    """
    weight = np.asarray(weight, np.float32)
    norm = float(np.linalg.norm(weight)) if weight.ndim == 2 else 0.0
    if not np.isfinite(norm) or norm == 0:
        raise ValueError(f"router weight of shape {weight.shape} is not a finite, non-zero [E, d] matrix")
    return [round(float(v), 6) for v in _signs(*weight.shape) @ weight.ravel() / np.float32(norm)]


def fingerprint_distance(first: Mapping[int, Sequence[float]], second: Mapping[int, Sequence[float]]) -> float:
    """Largest relative distance between two models' routers over their layers; infinite when the layers differ."""
    if first.keys() != second.keys() or not first:
        return float("inf")
    return max(float(np.sqrt(np.mean(np.square(np.subtract(first[i], second[i]))))) for i in first)
