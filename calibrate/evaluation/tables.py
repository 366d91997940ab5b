"""The report's tables, from rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from calibrate.evaluation import paper
from calibrate.evaluation.document import Table
from calibrate.evaluation.matching import (
    Comparison,
    StepCost,
    compare,
    experts_for,
    is_fixed_base,
    is_plain_base,
    match_every_step,
    match_fixed,
    setting,
)
from calibrate.evaluation.plan import REGIMES, RIVALS
from calibrate.evaluation.units import Row
from calibrate.evaluation.variants import UNION

QUALITY_LOSSES = (0.10, 0.05, 0.02, 0.01)
"""Accuracy given up against dense, for the comparison at equal quality."""
LABELS = {"retained_energy": "energy kept", "layer_error": "layer error", "kl": "KL", "agreement": "agreement"}


def percent(share: float | None, digits: int = 1) -> str:
    """A share as `12.3 %`, or a dash."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def interval(row: Row) -> str:
    """The accuracy's 95 % interval."""
    return "-" if row["accuracy"] is None else f"{100 * row['accuracy_low']:.1f} - {100 * row['accuracy_high']:.1f}"


def closeness(row: Row) -> list[str]:
    """Cells of `CLOSENESS`."""
    return [
        percent(row["retained_energy"], 2),
        percent(row["layer_error"], 2),
        f"{row['kl']:.4f}",
        percent(row["agreement"], 2),
    ]


CLOSENESS = ("energy kept", "layer error", "KL, nats", "agreement")


def all_rows(rows: Sequence[Row]) -> Table:
    """Every row with all that was measured."""
    body = [
        [
            row["label"],
            *([str(row["batch"]), row["arrangement"]]),
            f"{row['active_mean']:.2f}",
            str(row["active_max"]),
            percent(row["accuracy"]),
            interval(row),
            *closeness(row),
        ]
        for row in rows
    ]
    header = ["policy", "batch", "tasks", "experts", "most", "right answers", "95 % interval", *CLOSENESS]
    return Table(header, body, _base_rows(rows))


def _base_rows(rows: Sequence[Row]) -> frozenset[int]:
    return frozenset(i for i, row in enumerate(rows) if is_plain_base(row))


def regime_rows(rows: Sequence[Row], budgets: Mapping[str, int], regime: str) -> list[Row]:
    """The lines of one regime of table 1: each rival as the paper sets it, and BASE at the fixed budget.

    Lynx is the setting that reads most without reading more than OEA; where its rule cannot read as much as the budget,
    the one that is filled up to it stands beside it.
    """
    n, fixed = REGIMES[regime], str(budgets[regime])
    chosen = [
        _one(rows, "sere", options={"primary": n, "threshold": 0.0, "similarity": "frobenius"}),
        _one(rows, "oea", options={"k0": n}),
    ]
    allowed = chosen[1]["active_mean"] * 1.01
    lynx = [r for r in rows if r["policy"] == "lynx" and r["budget"] == "off" and r["active_mean"] <= allowed]
    chosen += sorted(lynx, key=lambda r: r["active_mean"])[-1:]
    chosen += [
        _one(rows, "lynx", fixed),
        _one(rows, "exfold", fixed),
        _one(rows, "xshare", fixed, {"k0": 1}),
        _one(rows, "xshare", fixed, {"k0": 0}),
        _one(rows, "base", fixed, {}),
        _one(rows, "oracle", fixed, {}),
    ]
    return chosen


def _one(rows: Iterable[Row], policy: str, budget: str = "off", options: Mapping | None = None) -> Row:
    return next(
        row
        for row in rows
        if row["policy"] == policy and row["budget"] == budget and (options is None or row["options"] == dict(options))
    )


def table_1(rows: Sequence[Row], budgets: Mapping[str, int]) -> Table:
    """Accuracy by task in both regimes, as the paper's table 1."""
    dense = _one(rows, "dense")
    tasks = list(dense["accuracy_by_task"])
    body, strong = [_task_cells("", dense, tasks)], []
    for regime in REGIMES:
        for row in regime_rows(rows, budgets, regime):
            if is_plain_base(row):
                strong.append(len(body))
            body.append(_task_cells(regime, row, tasks))
    return Table(["policy", "regime", "experts", *tasks, "all", "95 % interval", "KL, nats"], body, frozenset(strong))


def _task_cells(regime: str, row: Row, tasks: Sequence[str]) -> list[str]:
    by_task = [f"{100 * row['accuracy_by_task'][task]:.1f}" for task in tasks]
    return [
        row["label"],
        regime,
        f"{row['active_mean']:.2f}",
        *by_task,
        f"{100 * row['accuracy']:.1f}",
        interval(row),
        f"{row['kl']:.4f}",
    ]


def paper_table_1(rows: Sequence[Row], budgets: Mapping[str, int], model_type: str) -> Table | None:
    """Average scores relative to dense, ours beside the paper's; None for an architecture that the paper lacks."""
    printed = paper.TABLE_1.get(model_type)
    if printed is None:
        return None
    dense = _one(rows, "dense")
    body: list[list[str]] = []
    strong: list[int] = []
    for regime in REGIMES:
        ours = {row["policy"]: row for row in reversed(regime_rows(rows, budgets, regime))}
        for line in printed.regimes[regime]:
            row = ours.get(line.policy)
            if line.policy == "base":
                strong.append(len(body))
            body.append(
                [
                    line.policy,
                    regime,
                    "-" if row is None else row["label"],
                    "-" if row is None else percent(row["active_mean"] / dense["active_mean"]),
                    "-" if row is None else percent(row["accuracy"] / dense["accuracy"]),
                    line.setting,
                    f"{line.tokens_per_s / printed.dense.tokens_per_s:.2f}",
                    percent(line.average / printed.dense.average),
                ]
            )
    header = ["policy", "regime", "ours", "experts of dense", "score of dense"]
    return Table([*header, "the paper's", "tokens/s of dense", "score of dense (paper)"], body, frozenset(strong))


def table_2(rows: Sequence[Row]) -> Table:
    """Ranking rules at the size of the top-1 union, as the paper's table 2."""
    budget = f"{UNION}1"
    found = [_one(rows, policy, budget, {}) for policy in paper.TABLE_2]
    body = [
        [row["policy"], f"{row['active_mean']:.2f}", *closeness(row), percent(row["accuracy"]), interval(row), *printed]
        for row in found
        for printed in [[f"{value:.2f} %" for value in paper.TABLE_2[row["policy"]]]]
    ]
    header = ["ranking", "experts", *CLOSENESS, "right answers", "95 % interval", "energy kept (paper)"]
    return Table([*header, "accuracy (paper)"], body, _base_rows(found))


def table_3(rows: Sequence[Row], budgets: Mapping[str, int]) -> Table:
    """Fill rules on BASE's active set, as the paper's table 3."""
    body = []
    for regime, fixed in budgets.items():
        for fill, printed in paper.TABLE_3.items():
            row = _one(rows, "base", str(fixed), {} if fill == "backfill" else {"fill": fill})
            shown = f"{printed:.2f} %" if regime == "restricted" else ""
            body.append([fill, f"M={fixed}", *closeness(row), percent(row["accuracy"]), interval(row), shown])
    header = ["fill", "budget", *CLOSENESS, "right answers", "95 % interval", "accuracy at M=10 (paper)"]
    return Table(header, body)


def at_every_step(rows: Sequence[Row]) -> list[Comparison]:
    """BASE against every rival's row, with as many experts in every layer and step."""
    return _compared((match_every_step(row, rows), row) for row in rows if row["policy"] in RIVALS)


def on_average(rows: Sequence[Row], cost: StepCost | None = None) -> list[Comparison]:
    """BASE at a fixed budget against every rival's row, with no more experts on average, or no more time for a step."""
    pairs = []
    for row in rows:
        if row["policy"] in RIVALS:
            spared = 0.0 if cost is None else cost.spared(row["policy"])
            pairs.append((match_fixed(row, rows, spared), row))
    return _compared(pairs)


def _compared(pairs: Iterable[tuple[Row | None, Row]]) -> list[Comparison]:
    found = (compare(base, rival) for base, rival in pairs if base is not None)
    return [comparison for comparison in found if comparison is not None]


def comparison_table(found: Sequence[Comparison]) -> Table:
    """One line a comparison; those that the rival wins stand out."""
    body = [
        [
            c.rival["label"],
            f"{c.rival['active_mean']:.2f}",
            percent(c.rival["accuracy"]),
            f"{c.rival['kl']:.4f}",
            c.base["label"].removeprefix("base "),
            f"{c.base['active_mean']:.2f}",
            percent(c.base["accuracy"]),
            f"{c.base['kl']:.4f}",
            f"{100 * c.difference:+.1f} ({100 * c.low:+.1f} to {100 * c.high:+.1f})",
            c.verdict,
        ]
        for c in found
    ]
    header = ["rival", "experts", "right", "KL", "BASE at", "experts", "right", "KL", "difference, points", "ahead"]
    return Table(header, body, frozenset(i for i, c in enumerate(found) if c.verdict == "rival"))


def in_regime(rival: Row, n: int) -> bool:
    """Whether a rival's row reads the union of each row's first `n`, or is Lynx's own choice of less (n = 1)."""
    options = rival["options"]
    if rival["budget"] != "off":
        return rival["budget"] == f"{UNION}{n}"
    if rival["policy"] == "lynx":
        return n == 1
    size = {"oea": "k0", "top_k": "k", "sere": "primary"}[rival["policy"]]
    return options[size] == n and options.get("threshold", 0) == 0


def verdicts(found: Sequence[Comparison]) -> dict[str, int]:
    """How many comparisons each side leads."""
    return {side: sum(c.verdict == side for c in found) for side in ("base", "even", "rival")}


def equal_quality(rows: Sequence[Row]) -> Table:
    """Experts that each policy needs for an accuracy, all its hyperparameters taken together."""
    dense = _one(rows, "dense")
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy and (policy != "base" or is_fixed_base(row))]
        needed = [experts_for(own, dense["accuracy"] - loss) for loss in QUALITY_LOSSES]
        lines.append([policy, *("-" if n is None else f"{n:.1f}" for n in needed)])
    header = ["experts needed for", *(f"dense - {100 * loss:.0f} points" for loss in QUALITY_LOSSES)]
    return Table(header, lines, frozenset(i for i, line in enumerate(lines) if line[0] == "base"))


def equal_time(rows: Sequence[Row], cost: StepCost) -> Table:
    """BASE against each rival at no more time a layer, each with its own selection."""
    found = on_average(rows, cost)
    table = comparison_table(found)
    times = [
        [
            f"{cost.layer_ms(c.rival['policy'], c.rival['active_mean']):.3f}",
            f"{cost.layer_ms('base', c.base['active_mean']):.3f}",
        ]
        for c in found
    ]
    body = [[*line, *time] for line, time in zip(table.rows, times, strict=True)]
    return Table([*table.header, "rival, ms a layer", "BASE, ms a layer"], body, table.strong)


def batches_table(rows: Sequence[Row]) -> Table:
    """Rows of several batch sizes or arrangements, with the native union and the gap to BASE at equal experts."""
    body = []
    for row in rows:
        base = match_every_step(row, rows) if row["policy"] in RIVALS else None
        comparison = None if base is None else compare(base, row)
        gap = "" if comparison is None else f"{100 * comparison.difference:+.1f} ({comparison.verdict})"
        body.append(
            [
                row["label"],
                str(row["batch"]),
                f"{row['active_mean']:.2f}",
                f"{row['union_mean']:.2f}",
                percent(row["accuracy"]),
                interval(row),
                *closeness(row),
                gap,
            ]
        )
    header = [
        "policy",
        "batch",
        "experts",
        "native union",
        "right answers",
        "95 % interval",
        *CLOSENESS,
        "BASE ahead by",
    ]
    return Table(header, body, _base_rows(rows))


def oracle_gap(rows: Sequence[Row]) -> list[Comparison]:
    """BASE against the oracle at every budget that both have."""
    found = []
    for row in rows:
        if row["policy"] != "oracle":
            continue
        base = next(
            (b for b in rows if is_plain_base(b) and b["budget"] == row["budget"] and setting(b) == setting(row)), None
        )
        comparison = None if base is None else compare(base, row)
        if comparison is not None:
            found.append(comparison)
    return found
