"""The report's plots, as SVG text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from calibrate.evaluation.matching import is_fixed_base
from calibrate.evaluation.paper import TABLE_1
from calibrate.evaluation.units import Row
from calibrate.evaluation.variants import UNION

STYLES = {
    "dense": ("#555555", "*"),
    "base": ("#0b5fa5", "o"),
    "oracle": ("#111111", "s"),
    "static_energy": ("#6a994e", "^"),
    "squared_weight": ("#b08900", "v"),
    "weight_sum": ("#8e6bbf", "D"),
    "top1_union": ("#a0a0a0", "P"),
    "top_k": ("#9c755f", "X"),
    "oea": ("#e07a1f", "<"),
    "sere": ("#c03a3a", ">"),
    "lynx": ("#2a9d8f", "p"),
    "exfold": ("#d4679c", "h"),
    "xshare": ("#5b7c99", "d"),
}
EXACT = 1e-9
SETTINGS: Any = {"svg.fonttype": "none", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def _svg(figure: plt.Figure, name: str) -> str:
    """The figure as SVG without the XML prologue; the same figure always gives the same text."""
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, **SETTINGS}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = stream.getvalue()
    return "\n".join(line.rstrip() for line in text[text.index("<svg") :].splitlines())


def curves(rows: Sequence[Row], name: str) -> str:
    """Accuracy, KL to dense and layer error of every policy against active experts: fixed budgets, and own sizes."""
    rows = [row for row in rows if not (row["budget"].startswith(UNION) or row["options"].get("raw_logits"))]
    metrics = [("kl", "KL to dense, nats a token"), ("layer_error", "squared error of the layer's output / dense")]
    if rows[0]["accuracy"] is not None:
        metrics.insert(0, ("accuracy", "right answers, %"))
    with matplotlib.rc_context(SETTINGS):
        figure, axes = plt.subplots(1, len(metrics), figsize=(4.6 * len(metrics), 4.6), constrained_layout=True)
        for policy in dict.fromkeys(row["policy"] for row in rows if row["policy"] != "dense"):
            points = sorted(
                (row for row in rows if row["policy"] == policy and (policy != "base" or is_fixed_base(row))),
                key=lambda row: row["active_mean"],
            )
            color, marker = STYLES[policy]
            joined = policy in ("base", "oracle", "static_energy", "squared_weight", "weight_sum", "exfold", "top_k")
            for axis, (metric, _) in zip(axes, metrics, strict=True):
                axis.plot(
                    [row["active_mean"] for row in points],
                    [_shown(row, metric) for row in points],
                    color=color, marker=marker, ms=5, lw=2.2 if policy == "base" else 1,
                    ls="-" if joined else "", label=policy, zorder=3 if policy == "base" else 2,
                )  # fmt: skip
        dense = next((row for row in rows if row["policy"] == "dense"), None)
        for axis, (metric, label) in zip(axes, metrics, strict=True):
            axis.set_ylabel(label)
            axis.set_xlabel("active experts a layer (mean)")
            axis.grid(alpha=0.25)
            if metric == "accuracy":
                if dense is not None:
                    axis.axhline(100 * dense["accuracy"], color="#777777", ls=":", lw=1)
            else:
                axis.set_yscale("log")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return _svg(figure, name)


def _shown(row: Row, metric: str) -> float:
    """In percent, or for a logarithmic axis, on which what is exact has no place."""
    if metric == "accuracy":
        return 100 * row[metric]
    return row[metric] if row[metric] > EXACT else float("nan")


def trade_off(tables: dict[str, Sequence[Row]], name: str) -> str:
    """The paper's figure 1 beside ours: quality relative to dense against cost, a column for each architecture.

    Args:
        tables: the rows of each model's table 1, by the architecture's model_type.
    """
    with matplotlib.rc_context(SETTINGS):
        figure, axes = plt.subplots(
            2, len(tables), figsize=(4.6 * len(tables), 7.6), constrained_layout=True, squeeze=False
        )
        for (model_type, rows), above, below in zip(tables.items(), *axes, strict=True):
            dense = next(row for row in rows if row["policy"] == "dense")
            for row in rows:
                color, marker = STYLES[row["policy"]]
                x, y = row["active_mean"] / dense["active_mean"], 100 * row["accuracy"] / dense["accuracy"]
                above.plot(x, y, color=color, marker=marker, ms=8, ls="")
            above.set_title(model_type)
            above.set_xlabel("experts read, share of dense (less is faster)")
            above.set_ylabel("accuracy, % of dense (ours)")
            above.invert_xaxis()
            paper = TABLE_1.get(model_type)
            if paper is None:
                below.set_visible(False)
                continue
            for line in (paper.dense, *(row for regime in paper.regimes.values() for row in regime)):
                color, marker = STYLES[line.policy]
                below.plot(
                    line.tokens_per_s / paper.dense.tokens_per_s, 100 * line.average / paper.dense.average,
                    color=color, marker=marker, ms=8, ls="",
                )  # fmt: skip
            below.set_title(paper.name)
            below.set_xlabel("tokens/s, times dense (more is faster)")
            below.set_ylabel("average score, % of dense (paper)")
        for axis in axes.flat:
            axis.grid(alpha=0.25)
        shown = dict.fromkeys(row["policy"] for rows in tables.values() for row in rows)
        handles = [plt.Line2D([], [], color=STYLES[p][0], marker=STYLES[p][1], ls="", label=p) for p in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return _svg(figure, name)


def sweep(rows: Sequence[Row], name: str) -> str:
    """Experts read, accuracy and KL to dense against batch size."""
    metrics = [("active_mean", "active experts a layer", 1), ("kl", "KL to dense, nats a token", 1)]
    if rows[0]["accuracy"] is not None:
        metrics.insert(1, ("accuracy", "right answers, %", 100))
    with matplotlib.rc_context(SETTINGS):
        figure, axes = plt.subplots(1, len(metrics), figsize=(4.6 * len(metrics), 4.4), constrained_layout=True)
        for policy in dict.fromkeys(row["policy"] for row in rows):
            points = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["batch"])
            color, marker = STYLES[policy]
            for axis, (metric, _, factor) in zip(axes, metrics, strict=True):
                if metric == "kl" and policy == "dense":
                    continue
                axis.plot(
                    [row["batch"] for row in points], [factor * row[metric] for row in points],
                    color=color, marker=marker, ms=5, lw=2.2 if policy == "base" else 1, label=policy,
                )  # fmt: skip
        for axis, (metric, label, _) in zip(axes, metrics, strict=True):
            axis.set_xscale("log", base=2)
            axis.set_xticks(batches := sorted({row["batch"] for row in rows}), [str(batch) for batch in batches])
            axis.set_xlabel("batch size")
            axis.set_ylabel(label)
            axis.grid(alpha=0.25)
            if metric == "kl":
                axis.set_yscale("log")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return _svg(figure, name)
