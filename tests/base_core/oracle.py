"""DESIGN section 2 as literal loops: the oracle of `base_core.select`, and random cases for it."""

import math

import numpy as np
from hypothesis import strategies as st

from base_core.routing import RouterRule, route


def log_energy_clamped(value):
    return min(max(float(value), -50.0), 50.0)


def loop_cost(ranking, scores, ids, weights, log_energy, preference, rows):
    T, E = scores.shape
    cost = np.zeros(E, np.float32)
    for t in range(T):
        if rows[t] != 1:
            continue
        favourite = min(ids[t], key=lambda e, t=t: (-preference[t, e], e))
        for j, e in enumerate(ids[t]):
            w = np.float32(weights[t, j])
            if ranking in ("removal_cost", "static_energy", "oracle"):
                cost[e] += w * w * np.exp(np.float32(log_energy_clamped(log_energy[t, e])))
            elif ranking == "squared_weight":
                cost[e] += w * w
            elif ranking == "weight_sum" or e == favourite:
                cost[e] += w
    return cost


def loop_active(cost, union, limit_of, tau, groups, floor=None):
    """`limit_of(size)` is the budget of one rank that holds `size` experts."""
    active = set()
    for g in sorted(set(groups)):
        members = [e for e in range(len(cost)) if groups[e] == g]
        limit = limit_of(len(members))
        voted = [e for e in members if union[e]]
        if tau is None and floor is None and len(voted) <= limit:
            active.update(voted)
            continue
        order = [e for e in sorted(members, key=lambda e: (-cost[e], e)) if cost[e] > 0]
        total = sum(float(cost[e]) for e in members)
        kept = 0.0
        for n, e in enumerate(order):
            if n >= limit or (tau is not None and tau < 1 and kept >= tau * total):
                break
            if floor is not None and n > 0 and float(cost[e]) < floor * total:
                break
            active.add(e)
            kept += float(cost[e])
    return active


def loop_select(
    scores,
    ids,
    weights,
    log_energy,
    limit_of,
    tau,
    preference,
    rows,
    groups,
    ranking,
    fill,
    denominator,
    off=False,
    floor=None,
):
    """Returns ids, weights, active (a set) and cost."""
    T, E = scores.shape
    k = ids.shape[1]
    cost = loop_cost(ranking, scores, ids, weights, log_energy, preference, rows)
    if off:
        return ids.copy(), weights.copy(), {int(e) for row in ids for e in row}, cost
    union = np.zeros(E, bool)
    for t in range(T):
        if rows[t] != 0:
            union[ids[t]] = True
    if 2 in rows or not all(math.isfinite(c) for c in cost):
        active = {e for e in range(E) if union[e]}
    else:
        active = loop_active(cost, union, limit_of, tau, groups, floor)
    out_ids, out_weights = ids.copy(), weights.copy()
    for t in range(T):
        if rows[t] == 0:
            out_ids[t], out_weights[t] = (min(active) if active else 0), 0
            continue
        if all(e in active for e in ids[t]):
            continue
        if fill == "backfill":
            able = [e for e in sorted(active) if preference[t, e] > -np.inf]
            chosen = sorted(able, key=lambda e, t=t: (-preference[t, e], e))[:k]
        else:
            chosen = [e for e in ids[t] if e in active]
        # In double precision: the smallest float32 scores keep no digit through a product.
        native_total = sum(float(w) for w in weights[t])
        base = sum(float(scores[t, e]) for e in (chosen if denominator == "renormalise" else ids[t]))
        spare = chosen[0] if chosen else (min(active) if active else 0)
        slots = [(e, float(scores[t, e]) * native_total / base if base > 0 else 0.0) for e in chosen]
        if fill == "drop":
            by_expert = dict(slots)
            slots = [(e, by_expert[e]) if e in by_expert else (spare, 0.0) for e in ids[t]]
        slots += [(spare, 0.0)] * (k - len(slots))
        for j, (e, w) in enumerate(slots):
            out_ids[t, j], out_weights[t, j] = e, w
    return out_ids, out_weights, active, cost


@st.composite
def cases(draw, max_rows=9):
    """One layer's step: router rule, logits with ties and extremes, energies, row kinds, ranks."""
    E = draw(st.sampled_from([2, 4, 8, 12, 60]))
    k = draw(st.integers(1, min(E, 8)))
    T = draw(st.integers(1, max_rows))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(size=(T, E)).astype(np.float32)
    style = draw(st.sampled_from(["plain", "ties", "extreme", "duplicate rows"]))
    if style == "ties":
        logits = np.round(logits)
    elif style == "extreme":
        logits *= 60
    elif style == "duplicate rows":
        logits[:] = logits[0]
    grouped = E % 4 == 0 and k <= E // 2 and draw(st.booleans())
    rule = RouterRule(
        k,
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalise=draw(st.sampled_from(["none", "selected"])),
        scale=draw(st.sampled_from([1.0, 2.5])),
        num_groups=4 if grouped else 1,
        top_groups=2 if grouped else 1,
    )
    if not grouped and draw(st.booleans()):
        rule = RouterRule(k, normalise="softmax_selected")
    kinds = draw(st.sampled_from([[1], [0, 1, 1], [0], [0, 1, 2]]))
    energy = rng.normal(scale=draw(st.sampled_from([0.0, 1.0, 60.0])), size=(T, E)).astype(np.float32)
    if style == "ties":
        energy = np.round(energy)
    return {
        "routing": route(logits, rule),
        "log_energy": energy,
        "rows": rng.choice(kinds, size=T),
        "groups": rng.integers(0, 3, size=E) if draw(st.booleans()) else None,
        "ranking": draw(
            st.sampled_from(
                ["removal_cost", "weight_sum", "squared_weight", "static_energy", "oracle", "top1_union"],
            )
        ),
        "fill": draw(st.sampled_from(["backfill", "drop"])),
        "denominator": draw(st.sampled_from(["native", "renormalise"])),
    }
