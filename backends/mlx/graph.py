"""Graph nodes and launches of a function, counted without running it, on any machine."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

VIEWS = frozenset(
    (
        *("AsStrided", "Broadcast", "Depends", "ExpandDims", "Flatten", "Reshape"),
        *("Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten"),
    )
)
"""Primitives that move no data (where the next one takes strides, as it usually does)."""


def graph_nodes(function: Callable[..., Any], *inputs: mx.array) -> Counter[str]:
    """How often each primitive occurs in the graph of `function(*inputs)`, what MLX compiles into one counted in parts.

    Args:
        function: of arrays, returns an array or a list of them; it is traced, so it must not read values.
    """
    with tempfile.TemporaryDirectory() as folder:
        dot = Path(folder) / "graph.dot"

        def traced(*arrays: mx.array) -> Any:
            outputs = function(*arrays)
            mx.export_to_dot(str(dot), *(outputs if isinstance(outputs, list) else [outputs]))
            return outputs

        mx.export_function(str(Path(folder) / "function.mlxfn"), traced, *inputs)
        return Counter(re.findall(r'\[label ="([^"]*)", shape=rectangle\]', dot.read_text()))


def count_launches(nodes: Counter[str]) -> int:
    """Nodes that run something on the device."""
    return sum(count for name, count in nodes.items() if name not in VIEWS)
