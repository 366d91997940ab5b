"""One shape for every measurement: the same row names in the demo, the benchmarks and the evaluation."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from base_core.files import write_atomically

ROW_KEYS = (
    "model",
    "policy",
    "budget",
    "batch",
    "active_mean",
    "accuracy",
    "retained_energy",
    "tokens_per_s",
    "ms_per_step",
    "gb_per_s",
    "roof_fraction",
    "ratio_to_dense",
)
PACKAGES = ("base-moe", "numpy", "torch", "transformers", "triton", "mlx", "mlx-lm", "safetensors")


def report_row(**values: Any) -> dict[str, Any]:
    """A row with every common name, None where nothing was measured; further names follow them."""
    return {**dict.fromkeys(ROW_KEYS), **values}


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a result."""
    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_report(path: str | os.PathLike, rows: Sequence[Mapping], settings: Mapping, **extra: Any) -> None:
    """Writes `{"rows": ..., "settings": ..., "versions": ...}` as JSON, whole or not at all."""
    document = {"rows": list(rows), "settings": dict(settings), "versions": installed_versions(), **extra}
    write_atomically(path, (json.dumps(document, indent=2, allow_nan=False) + "\n").encode())


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns under a ruled header; the first column is left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first row its header; columns behind the first are right-aligned."""
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def wilson_interval(right: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a share of `right` out of `total` (Wilson score)."""
    share = right / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (centre - spread) / (1 + z * z / total), (centre + spread) / (1 + z * z / total)
