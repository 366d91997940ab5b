"""Closed-form ridge regressions from sufficient statistics, the regularisation by evidence (paper section 6.3).

For one expert, with pairs weighted v (mean 1) and everything centred by its weighted mean:

    log ||E(z)||^2 = mean + a . x + noise,   x = z / ||z||,   noise ~ N(0, s2 / v),   a ~ N(0, s2 / lambda I)

so a = (G + lambda I)^-1 q with the *sum* Gram matrix G = sum v x x^T and q = sum v x y: lambda is on the scale of a sum
over pairs. With the intercept integrated out and s2 profiled, n pairs have

    s2 = (sum v y^2 - q . a) / (n - 1)
    log evidence = -(n - 1) / 2 (log 2 pi s2 + 1) - 1/2 log det(I + G / lambda)

A Gaussian y has E[exp y] = exp(mean + s2 / 2), so s2 / 2 is what the intercept gains for exponentiating.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from base_core import LayerPredictor
from calibrate.statistics import LayerStatistics

RIDGES = np.logspace(-4, 2, 25)
COARSE_STEP = 4

MIN_PAIRS = 16
"""An expert with fewer pairs uses its layer's pooled predictor."""

FIT_BYTES = 256 * 2**20
"""Size of one batch of float64 Gram matrices; a few of them live at once."""


class Centred(NamedTuple):
    """Centred moments of a batch of B regressions, float64; pair weights have mean 1."""

    n: Tensor  # [B]
    gram: Tensor  # [B, d, d]
    cross: Tensor  # [B, d]
    square: Tensor  # [B]
    x_mean: Tensor  # [B, d]
    y_mean: Tensor  # [B]


class Solution(NamedTuple):
    """Of a batch of B regressions at one lambda each."""

    weight: Tensor  # [B, d], a
    noise: Tensor  # [B], s2
    evidence: Tensor  # [B], log; -inf where G + lambda I is not positive within rounding


@dataclass(frozen=True)
class LayerFit:
    """One layer's predictor and how it came about.

    Attributes:
        predictor: what is served.
        pairs: int64 [E].
        ridge: float64 [E], the lambda of each expert.
        fallback: bool [E], experts that use the pooled predictor.
        quality: `r2`, the share of the log-energy's variance within experts that is explained, and `residual_std`
            (natural log), both with s2 as the noise, so not flattered by the fit; `correction`, the pair-weighted mean
            of s2 / 2 that the intercepts gained.
    """

    predictor: LayerPredictor
    pairs: NDArray[np.int64]
    ridge: NDArray[np.float64]
    fallback: NDArray[np.bool_]
    quality: dict[str, float]


def centre(pairs: Tensor, moments: Tensor, first: Tensor, gram: Tensor) -> Centred:
    """Centres a batch of statistics, see `LayerStatistics`; `gram` float64 [B, d, d] is overwritten."""
    n = pairs.double()
    total = moments[:, 0]
    scale = n / total  # makes the mean weight 1
    x_mean = first[:, 0] / total[:, None]
    y_mean = moments[:, 1] / total
    gram.baddbmm_(first[:, 0, :, None], x_mean[:, None], alpha=-1).mul_(scale[:, None, None])
    cross = (first[:, 1] - first[:, 0] * y_mean[:, None]) * scale[:, None]
    square = ((moments[:, 2] - moments[:, 1] * y_mean) * scale).clamp_min(0)
    return Centred(n, gram, cross, square, x_mean, y_mean)


def solve(c: Centred, ridge: Tensor) -> Solution:
    """Ridge solutions at `ridge` [B], float64."""
    d = c.gram.shape[-1]
    shifted = c.gram.clone()
    shifted.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    factor, failed = torch.linalg.cholesky_ex(shifted)
    weight = torch.cholesky_solve(c.cross[..., None], factor)[..., 0]
    degrees = (c.n - 1).clamp_min(1)
    noise = ((c.square - (c.cross * weight).sum(1)) / degrees).clamp_min(1e-12)
    log_det = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1) - d * ridge.log()
    evidence = -degrees / 2 * ((2 * math.pi * noise).log() + 1) - log_det / 2
    # Rounding of the float32 Gram leaves slightly negative eigenvalues: a smaller lambda than those is not resolved.
    unresolved = (failed > 0) | ~evidence.isfinite()
    return Solution(weight, noise, evidence.masked_fill(unresolved, -torch.inf))


def choose_ridge(c: Centred) -> tuple[Tensor, Solution]:
    """The lambda of `RIDGES` with the largest evidence for each regression, float64 [B], and its solution.

    The evidence is a sum of terms in s / (s + lambda), each a decade wide, so it has no peak between the steps of a
    coarse search: 11 Cholesky factorisations do, which a GPU runs many times faster than one eigendecomposition.
    """
    grid = torch.as_tensor(RIDGES, device=c.gram.device)
    tried = torch.full((len(c.n), len(grid)), -torch.inf, dtype=torch.float64, device=c.gram.device)

    def attempt(index: Tensor) -> None:
        index = index.clamp(0, len(grid) - 1)
        tried.scatter_(1, index[:, None], solve(c, grid[index]).evidence[:, None])

    for i in range(0, len(grid), COARSE_STEP):
        attempt(torch.full_like(c.n, i, dtype=torch.int64))
    step = COARSE_STEP // 2
    while step:
        best = tried.argmax(1)
        attempt(best - step)
        attempt(best + step)
        step //= 2
    ridge = grid[tried.argmax(1)]
    return ridge, solve(c, ridge)


def pooled(statistics: LayerStatistics) -> Centred:
    """All pairs of the layer as one regression (B = 1)."""
    d = statistics.hidden_size
    gram = torch.zeros(1, d, d, dtype=torch.float64, device=statistics.pairs.device)
    for experts in _batches(statistics):
        gram += statistics.full_gram(experts).sum(0)
    sums = [part.sum(0, keepdim=True) for part in (statistics.pairs, statistics.moments, statistics.first)]
    return centre(sums[0], sums[1], sums[2], gram)


def fit_layer(statistics: LayerStatistics, min_pairs: int = MIN_PAIRS) -> LayerFit:
    """Fits every expert of a layer.

    Raises:
        ValueError: statistics that are empty or not finite.
    """
    pairs, moments, first = statistics.pairs, statistics.moments, statistics.first
    if not bool(moments.isfinite().all() & first.isfinite().all()):
        raise ValueError("expert outputs that are not finite: load the model in another --model-dtype")
    if int(pairs.sum()) < max(min_pairs, 2) or float(moments[:, 0].sum()) <= 0:
        raise ValueError(f"{int(pairs.sum())} pairs are too few for a layer: give more text")
    mean = pooled(statistics)
    shared_ridge, shared = choose_ridge(mean)
    shared_bias = mean.y_mean - (shared.weight * mean.x_mean).sum(1) + shared.noise / 2
    own = (pairs >= max(min_pairs, 2)) & (moments[:, 0] > 0)

    weight = shared.weight.expand(len(pairs), -1).clone()
    bias, ridge = shared_bias.expand(len(pairs)).clone(), shared_ridge.expand(len(pairs)).clone()
    energy = moments[:, 3].sum() / pairs.sum()
    mean_energy = torch.where(own, moments[:, 3] / pairs.clamp_min(1), energy)
    noise, spread = torch.zeros_like(bias), torch.zeros_like(bias)
    for experts in _batches(statistics):
        chosen = own[experts].nonzero()[:, 0]
        if not len(chosen):
            continue
        at = chosen + experts.start
        c = centre(pairs[at], moments[at], first[at], statistics.full_gram(experts)[chosen])
        ridge[at], solution = choose_ridge(c)
        weight[at] = solution.weight
        bias[at] = c.y_mean - (solution.weight * c.x_mean).sum(1) + solution.noise / 2
        noise[at], spread[at] = solution.noise, c.square / (c.n - 1)
    if not bool(own.any()):
        own_pairs, noise, spread = mean.n, shared.noise, mean.square / (mean.n - 1)
    else:
        own_pairs = torch.where(own, pairs, 0).double()
    unexplained, total = float((own_pairs * noise).sum()), float((own_pairs * spread).sum())
    variance = unexplained / float(own_pairs.sum())
    return LayerFit(
        predictor=LayerPredictor(
            weight=weight.float().cpu().numpy(),
            bias=bias.float().cpu().numpy(),
            mean_energy=mean_energy.float().cpu().numpy(),
        ),
        pairs=pairs.cpu().numpy().copy(),
        ridge=ridge.cpu().numpy(),
        fallback=~own.cpu().numpy(),
        quality={
            "r2": 1 - unexplained / total if total > 0 else 0.0,
            "residual_std": math.sqrt(variance),
            "correction": variance / 2,
        },
    )


def _batches(statistics: LayerStatistics) -> list[slice]:
    """Experts that are fitted together."""
    size = max(1, FIT_BYTES // (8 * statistics.hidden_size**2))
    return [slice(i, min(i + size, statistics.num_experts)) for i in range(0, statistics.num_experts, size)]
