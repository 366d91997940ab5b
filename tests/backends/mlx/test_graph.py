"""Graph nodes and launches of a layer: with the kernels a budget takes no more launches than the stock block."""

from __future__ import annotations

import pytest

mx = pytest.importorskip("mlx.core")

from backends.mlx import Policy, base_budget  # noqa: E402
from backends.mlx.families import find_moe_layers  # noqa: E402
from backends.mlx.graph import count_launches, graph_nodes  # noqa: E402


def test_counts_what_a_function_does():
    nodes = graph_nodes(lambda a, b: [mx.exp(a @ b.T), a.reshape(-1)], mx.ones((2, 3)), mx.ones((4, 3)))
    assert {name: nodes[name] for name in ("Matmul", "Exp", "Transpose")} == {"Matmul": 1, "Exp": 1, "Transpose": 1}
    assert count_launches(nodes) == 2


def launches(model, layer, x, predictor):
    with base_budget(model, predictor, "2", Policy(kernels="always")):
        nodes = graph_nodes(layer.block, x)
        assert nodes["CustomKernel"] == 3
        return count_launches(nodes)


@pytest.mark.parametrize("quantisation", [None, "affine4"])
@pytest.mark.parametrize("rows", [2, 16, 32])
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "qwen3_next", "qwen2_moe", "olmoe", "mixtral", "deepseek_v2", "glm4_moe"]
)
def test_no_more_launches_than_stock(name, rows, quantisation, build):
    model, predictor = build(name, quantisation)
    layer = find_moe_layers(model)[-1]
    x = mx.random.normal((rows, 1, 64))
    compiled = 2  # mlx-lm's SwiGLU is three nodes here and one launch
    assert launches(model, layer, x, predictor) <= count_launches(graph_nodes(layer.block, x)) - compiled
