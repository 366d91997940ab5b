import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base_core import RouterRule, route
from base_core.routing import sigmoid, softmax


def loop_route(logits, rule, bias):
    ids, weights = [], []
    for row in logits.astype(np.float64):
        scores = (
            np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            if rule.score == "softmax"
            else 1 / (1 + np.exp(-row))
        )
        wish = (row if rule.normalise == "softmax_selected" else scores) + bias
        size = len(row) // rule.num_groups
        groups = [wish[g * size : (g + 1) * size] for g in range(rule.num_groups)]
        worth = [g.max() if rule.group_score == "max" else np.sort(g)[-2:].sum() for g in groups]
        open_groups = sorted(range(rule.num_groups), key=lambda g: (-worth[g], g))[: rule.top_groups]
        able = [e for e in range(len(row)) if e // size in open_groups]
        chosen = sorted(able, key=lambda e: (-wish[e], e))[: rule.k]
        w = scores[chosen]
        if rule.normalise == "selected":
            w = w / w.sum()
        elif rule.normalise == "softmax_selected":
            w = np.exp(row[chosen] - row[chosen].max())
            w = w / w.sum()
        ids.append(chosen)
        weights.append(w * rule.scale)
    return np.array(ids), np.array(weights)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_equals_the_loop(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rule = RouterRule(
        k=data.draw(st.integers(1, 4)),
        score=data.draw(st.sampled_from(["softmax", "sigmoid"])),
        normalise=data.draw(st.sampled_from(["none", "selected", "softmax_selected"])),
        scale=data.draw(st.sampled_from([1.0, 16.0])),
        num_groups=data.draw(st.sampled_from([1, 2, 4])),
        group_score=data.draw(st.sampled_from(["max", "top2_sum"])),
    )
    rule = RouterRule(**{**rule.__dict__, "top_groups": 1 if rule.num_groups == 1 else 2})
    bias = rng.normal(size=16) if data.draw(st.booleans()) else None
    logits = rng.normal(size=(5, 16)).astype(np.float32)
    got = route(logits, rule, bias)
    ids, weights = loop_route(logits, rule, 0 if bias is None else bias.astype(np.float32))
    np.testing.assert_array_equal(got.ids, ids)
    np.testing.assert_allclose(got.weights, weights, rtol=2e-6)
    assert (np.isfinite(got.preference).sum(1) == 16 * rule.top_groups // rule.num_groups).all()


def test_extreme_logits_stay_finite():
    logits = np.array([[1e4, -1e4, 0.0, 88.0]])
    assert np.isfinite(softmax(logits)).all() and np.isfinite(sigmoid(logits)).all()
    assert sigmoid(logits)[0].tolist()[:3] == [1.0, 0.0, 0.5]


@pytest.mark.parametrize(("shape", "k"), [((4,), 1), ((2, 4), 5), ((2, 4), 0)])
def test_shapes_are_checked(shape, k):
    with pytest.raises(ValueError, match=r"expected \[T, E\] with E >= k"):
        route(np.zeros(shape), RouterRule(k))


def test_groups_must_divide_the_experts():
    with pytest.raises(ValueError, match="num_groups 3"):
        route(np.zeros((1, 4)), RouterRule(1, num_groups=3))
