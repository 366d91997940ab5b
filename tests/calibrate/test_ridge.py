"""Ridge solutions, evidence and fallback against literal NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate import ridge
from calibrate.ridge import MIN_PAIRS, RIDGES, Centred, centre, choose_ridge, fit_layer, solve
from calibrate.statistics import LayerStatistics

EPS = 1e-12


def unit(z):
    return z / np.linalg.norm(z, axis=-1, keepdims=True)


def make_problem(seed, n=40, d=6, noise=0.3, scale=2.0):
    """One expert's pairs: directions x [n, d], log-energies y [n], weights v [n]."""
    rng = np.random.default_rng(seed)
    x = unit(rng.normal(size=(n, d)) + 1.0)
    y = x @ rng.normal(size=d) * scale - 3 + rng.normal(size=n) * noise
    return x, y, rng.random(n) + 0.1


def feed(statistics, expert, x, y, v):
    """x as router inputs, y as log-energies, all pairs of one expert."""
    ids = np.full((len(x), 1), expert)
    statistics.add(x.astype(np.float32), ids, np.exp(y)[:, None], v[:, None], EPS)


def centred(x, y, v):
    """As `centre` has it, in float64 throughout."""
    x, y, v = x[None], y[None], v[None]
    moments = np.stack([v.sum(1), (v * y).sum(1), (v * y * y).sum(1), np.exp(y).sum(1)], axis=1)
    first = np.stack([(v[..., None] * x).sum(1), ((v * y)[..., None] * x).sum(1)], axis=1)
    gram = np.einsum("bn,bni,bnj->bij", v, x, x)
    pairs = np.array([x.shape[1]])
    return centre(*(torch.from_numpy(a) for a in (pairs, moments, first, gram)))


def literal_solution(x, y, v, lam):
    v = v / v.mean()
    x_mean, y_mean = v @ x / v.sum(), v @ y / v.sum()
    xc, yc = x - x_mean, y - y_mean
    a = np.linalg.solve(xc.T @ (v[:, None] * xc) + lam * np.eye(x.shape[1]), xc.T @ (v * yc))
    return a, y_mean - a @ x_mean


@pytest.mark.parametrize("lam", [1e-4, 0.1, 100.0])
@pytest.mark.parametrize("n", [4, 40])
def test_solution_is_the_literal_one(n, lam):
    x, y, v = make_problem(0, n)
    c = centred(x, y, v)
    a, b = literal_solution(x, y, v, lam)
    solution = solve(c, torch.tensor([lam], dtype=torch.float64))
    np.testing.assert_allclose(solution.weight[0], a, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(c.y_mean[0] - solution.weight[0] @ c.x_mean[0], b, rtol=1e-6)


@pytest.mark.parametrize("lam", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("n", [3, 12])
def test_evidence_is_the_gaussian_likelihood(n, lam):
    """Brute force: without their mean, y is Gaussian with covariance s2 (I + x x^T / lambda)."""
    x, y, _ = make_problem(1, n, d=5)
    solution = solve(centred(x, y, np.ones(n)), torch.tensor([lam], dtype=torch.float64))
    contrast = np.linalg.svd(np.eye(n) - 1 / n)[0][:, : n - 1].T  # rows orthogonal to the constant
    r, covariance = contrast @ y, contrast @ (np.eye(n) + x @ x.T / lam) @ contrast.T

    def log_likelihood(s2):
        _, log_det = np.linalg.slogdet(2 * np.pi * s2 * covariance)
        return -0.5 * (log_det + r @ np.linalg.solve(s2 * covariance, r))

    s2 = float(solution.noise[0])
    np.testing.assert_allclose(float(solution.evidence[0]), log_likelihood(s2), rtol=1e-7)
    assert log_likelihood(s2) > max(log_likelihood(s2 * 1.05), log_likelihood(s2 / 1.05))


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(3, 120),
    d=st.integers(1, 12),
    noise=st.sampled_from([1e-3, 0.1, 1.0, 10.0]),
    scale=st.sampled_from([0.0, 0.5, 5.0]),
)
@settings(max_examples=60, deadline=None)
def test_search_finds_the_largest_evidence_of_the_grid(seed, n, d, noise, scale):
    c = centred(*make_problem(seed, n, d, noise, scale))
    chosen, solution = choose_ridge(c)
    assert float(chosen) in RIDGES
    # One eigendecomposition, every lambda.
    s, vectors = np.linalg.eigh(c.gram[0].numpy())
    s, p = np.maximum(s, 0)[:, None], (vectors.T @ c.cross[0].numpy())[:, None]
    s2 = np.maximum((c.square[0].numpy() - (p**2 / (s + RIDGES)).sum(0)) / (n - 1), 1e-12)
    evidence = -(n - 1) / 2 * (np.log(2 * np.pi * s2) + 1) - 0.5 * np.log1p(s / RIDGES).sum(0)
    assert float(solution.evidence) >= evidence.max() - 1e-3


def test_batches_are_independent():
    problems = [centred(*make_problem(seed, noise=noise)) for seed, noise in enumerate([1e-3, 0.1, 3.0])]
    together = Centred(*(torch.cat(parts) for parts in zip(*problems, strict=True)))
    lams, solution = choose_ridge(together)
    assert len(set(lams.tolist())) > 1
    for i, problem in enumerate(problems):
        lam, alone = choose_ridge(problem)
        assert lam == lams[i]
        torch.testing.assert_close(alone.weight[0], solution.weight[i])


@pytest.fixture
def layer():
    """Experts 0 and 2 with many pairs, 1 with too few, 3 with none."""
    statistics = LayerStatistics(4, 6)
    problems = {0: make_problem(0, 300), 1: make_problem(1, MIN_PAIRS - 1), 2: make_problem(2, 300, noise=0.8)}
    for expert, problem in problems.items():
        feed(statistics, expert, *problem)
    return statistics, problems


@pytest.mark.parametrize("fit_bytes", [1, 2 * 8 * 36, ridge.FIT_BYTES])
def test_layer(layer, monkeypatch, fit_bytes):
    monkeypatch.setattr(ridge, "FIT_BYTES", fit_bytes)
    statistics, problems = layer
    fit = fit_layer(statistics)
    assert fit.fallback.tolist() == [False, True, False, True]
    assert fit.pairs.tolist() == [300, MIN_PAIRS - 1, 300, 0]
    for expert in (0, 2):
        x, y, v = problems[expert]
        a, b = literal_solution(x, y, v, fit.ridge[expert])
        s2 = float(solve(centred(x, y, v), torch.tensor(fit.ridge[[expert]])).noise[0])
        np.testing.assert_allclose(fit.predictor.weight[expert], a, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(fit.predictor.bias[expert], b + s2 / 2, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(fit.predictor.mean_energy[expert], np.exp(y).mean(), rtol=1e-5)

    x, y, v = (np.concatenate(parts) for parts in zip(*problems.values(), strict=True))
    a, b = literal_solution(x, y, v, fit.ridge[1])
    s2 = float(solve(centred(x, y, v), torch.tensor(fit.ridge[[1]])).noise[0])
    for expert in (1, 3):
        np.testing.assert_allclose(fit.predictor.weight[expert], a, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(fit.predictor.bias[expert], b + s2 / 2, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(fit.predictor.mean_energy[expert], np.exp(y).mean(), rtol=1e-5)


def test_known_noise_is_found(layer):
    quality = fit_layer(layer[0]).quality
    assert quality["residual_std"] == pytest.approx(np.sqrt((0.3**2 + 0.8**2) / 2), rel=0.1)
    assert quality["correction"] == pytest.approx(quality["residual_std"] ** 2 / 2)
    assert 0 < quality["r2"] < 1


@pytest.mark.parametrize("noise", [0.3, 1.2])
def test_predicted_energies_have_the_right_mean(noise):
    """Without the correction the mean would be low by exp(noise^2 / 2): 5 % and a factor of two."""
    x, y, _ = make_problem(5, 20_000, noise=noise)
    statistics = LayerStatistics(1, 6)
    feed(statistics, 0, x, y, np.ones(len(x)))
    predicted = np.exp(fit_layer(statistics).predictor.log_energy(x)[:, 0])
    assert predicted.mean() == pytest.approx(np.exp(y).mean(), rel=0.03)


def test_light_pairs_hardly_pull():
    x, y, v = make_problem(3, 200, noise=0.1)
    y[:20] += 4
    residual = {}
    for weight in (1.0, 1e-6):
        v[:], v[:20] = 1, weight
        statistics = LayerStatistics(1, 6)
        feed(statistics, 0, x, y, v)
        residual[weight] = fit_layer(statistics).quality["residual_std"]
    assert residual[1e-6] < 0.2
    assert residual[1.0] > 1


def test_fewer_pairs_than_dimensions():
    statistics = LayerStatistics(1, 64)
    feed(statistics, 0, *make_problem(0, 20, d=64))
    predictor = fit_layer(statistics).predictor
    assert np.isfinite(predictor.weight).all() and np.isfinite(predictor.bias).all()


def test_constant_energies():
    x, _, v = make_problem(0)
    statistics = LayerStatistics(1, 6)
    feed(statistics, 0, x, np.full(len(x), -2.0), v)
    fit = fit_layer(statistics)
    np.testing.assert_allclose(fit.predictor.log_energy(x), -2.0, atol=1e-3)
    assert fit.ridge[0] == RIDGES[-1]


def test_only_the_pooled_predictor():
    statistics = LayerStatistics(3, 6)
    for expert in range(3):
        feed(statistics, expert, *make_problem(0, 6))
    fit = fit_layer(statistics)
    assert fit.fallback.all()
    assert (fit.predictor.weight == fit.predictor.weight[0]).all()
    assert np.isfinite(list(fit.quality.values())).all()


def test_bad_statistics():
    with pytest.raises(ValueError, match="0 pairs are too few"):
        fit_layer(LayerStatistics(3, 6))
    statistics = LayerStatistics(1, 6)
    x, y, v = make_problem(0)
    y[3] = np.inf
    feed(statistics, 0, x, y, v)
    with pytest.raises(ValueError, match="not finite"):
        fit_layer(statistics)
