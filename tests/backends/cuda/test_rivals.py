"""The rivals' twins in torch against base_core.policies."""

import numpy as np
import pytest
import torch

from backends.cuda.families import RoutingTerms, find_moe_layers
from backends.cuda.rivals import Oea, Sere, XShare, rival
from base_core.policies import RivalCalibration, Step, run_policy
from base_core.routing import RouterRule, route
from base_core.selection import DECODE
from tests.backends.cuda.no_sync import NoSync
from tests.backends.cuda.tiny import B, generate, hooks_of, make_model, spy

E, K = 24, 4


def made(seed, T=8):
    rng = np.random.default_rng(seed)
    routing = route(rng.normal(size=(T, E)).astype(np.float32), RouterRule(K))
    similarity = rng.random((E, E)).astype(np.float32)
    similarity = (similarity + similarity.T) / 2 + np.eye(E, dtype=np.float32)
    step = Step(routing, np.full(T, DECODE), calibration=RivalCalibration(similarity=similarity))
    terms = RoutingTerms(torch.from_numpy(routing.scores), torch.from_numpy(routing.preference))
    shuffled = np.argsort(rng.random((T, K)), axis=1)  # some routers leave the order of a row's experts open
    ids = np.take_along_axis(routing.ids, shuffled, 1)
    weights = np.take_along_axis(routing.weights, shuffled, 1)
    return step, terms, torch.from_numpy(ids), torch.from_numpy(weights), torch.from_numpy(similarity)


def table(ids, weights):
    out = torch.zeros(len(ids), E)
    return out.scatter_add_(1, torch.as_tensor(ids), torch.as_tensor(weights))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("make", "name", "options", "budget"),
    [
        (lambda _: Oea(1), "oea", {"k0": 1}, "off"),
        (lambda _: Oea(3), "oea", {"k0": 3}, "off"),
        (lambda _: XShare(9), "xshare", {"k0": 1}, 9),
        (lambda _: XShare(2, k0=0), "xshare", {"k0": 0}, 2),
        (lambda _: XShare(2, k0=2), "xshare", {"k0": 2}, 2),
        (lambda similarity: Sere(1, similarity), "sere", {"primary": 1}, "off"),
        (lambda similarity: Sere(2, similarity), "sere", {"primary": 2}, "off"),
    ],
    ids=["oea1", "oea3", "xshare", "xshare without warm-up", "xshare of warm-up alone", "sere1", "sere2"],
)
def test_equals_the_reference(seed, make, name, options, budget):
    step, terms, ids, weights, similarity = made(seed)
    rule = make(similarity)
    with NoSync():
        new_ids, new_weights = rule(terms, ids, weights)
    expected = run_policy(name, step, budget, **options)
    torch.testing.assert_close(table(new_ids, new_weights), table(expected.ids, expected.weights), rtol=1e-5, atol=1e-6)
    assert expected.active[new_ids.numpy()].all()


def test_in_a_model():
    model = make_model()
    stock = generate(model)
    with rival(model, Oea(1)), spy(model) as calls:
        assert hooks_of(model) == 2 * len(find_moe_layers(model))
        restricted = generate(model)
    assert hooks_of(model) == 0
    assert max(len(ids.unique()) for _, ids, _ in calls[2:]) <= B
    assert not torch.equal(restricted, stock) and torch.equal(generate(model), stock)
