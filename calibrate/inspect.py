"""`base-moe inspect`: what a predictor was made for and how well it fits."""

from __future__ import annotations

import argparse

import numpy as np

from base_core import Predictor, load_predictor
from base_core.report import format_table

DESCRIPTION = "Prints a predictor's card: its model, its text, the fit of every layer, and experts that fell back."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("predictor", metavar="PATH_OR_ID", help="a file, a folder with predictor.safetensors, a hub id")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id")


def run(args: argparse.Namespace) -> None:
    """Prints the card.

    Raises:
        PredictorError: nothing there, or not a whole predictor.
    """
    print(describe(load_predictor(args.predictor, args.revision)))


def describe(predictor: Predictor) -> str:
    """The card as text. A fit of a layer: r2 and residual are of the log-energy within experts, natural log."""
    card = predictor.card
    revision = f" at {card.model_revision}" if card.model_revision else ""
    fallbacks = sum(map(len, card.fallback.values()))
    facts = [
        ("model", f"{card.model_id or 'unnamed'}{revision} ({card.model_type})"),
        (
            "layers",
            f"{len(card.layers)} of {card.num_experts} experts, {card.experts_per_token} a token, width "
            f"{card.hidden_size}",
        ),
        ("source", card.source or "unknown"),
        ("tokens", f"{card.tokens:,}"),
        ("versions", ", ".join(f"{name} {value}" for name, value in card.versions.items()) or "unknown"),
        ("fallback", f"{fallbacks} of {len(card.layers) * card.num_experts} experts use their layer's mean predictor"),
    ]
    header = ("layer", "pairs", "fewest", "ridge", "r2", "residual", "correction", "fell back")
    rows = [header, *(_layer_row(predictor, i) for i in card.layers)]
    lines = [f"{name:<10}{value}" for name, value in facts]
    lines += ["", format_table(rows)]
    lines += [f"layer {i} fell back: {', '.join(map(str, experts))}" for i, experts in card.fallback.items() if experts]
    return "\n".join(lines)


def _layer_row(predictor: Predictor, layer: int) -> tuple[str, ...]:
    card = predictor.card
    pairs, ridge, fit = card.pairs.get(layer, ()), card.ridge.get(layer, ()), card.fit.get(layer, {})
    return (
        str(layer),
        f"{sum(pairs):,}" if pairs else "-",
        f"{min(pairs):,}" if pairs else "-",
        f"{np.median(ridge):.2g}" if ridge else "-",
        f"{fit['r2']:.3f}" if "r2" in fit else "-",
        f"{fit['residual_std']:.3f}" if "residual_std" in fit else "-",
        f"{fit['correction']:.3f}" if "correction" in fit else "-",
        str(len(card.fallback.get(layer, ()))),
    )
