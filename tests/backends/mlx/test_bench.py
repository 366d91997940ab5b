"""The MLX benchmark: whole at tiny size, and the parts that only a Mac runs, with the kernels in the harness."""

from __future__ import annotations

import importlib
import json
from contextlib import ExitStack

import pytest

mx = pytest.importorskip("mlx.core")

from backends.mlx import bench as command  # noqa: E402
from backends.mlx.families import describe, find_moe_layers  # noqa: E402
from backends.mlx.random_model import SHAPES  # noqa: E402
from base_core import Budget  # noqa: E402
from base_core.embedded import model_path, predictor_path  # noqa: E402
from base_core.predictor import random_predictor  # noqa: E402
from calibrate.cli import main  # noqa: E402
from tests.metal import harness  # noqa: E402

TABLES = {
    "Decode steps": ("ms_per_step", "tokens_per_s", "active_mean"),
    "One layer's parts": ("us_per_layer", "active_mean"),
    "Stock gathered product by distinct experts": ("us_per_layer", "gb_per_s", "roof_fraction", "pairs"),
    "Graph nodes and launches of one MoE layer": ("graph_nodes", "launches"),
}


def test_runs_take_turns_and_the_first_round_is_a_warm_up():
    order = []
    runs = [lambda i=i: order.append(i) or mx.zeros(1) for i in range(3)]
    prepare = [lambda i=i: order.append(-i) for i in range(3)]
    times = command.interleaved(runs, 2, prepare)
    assert order == [0, 0, -1, 1, -2, 2, -1, 1, -2, 2, 0, 0, -2, 2, 0, 0, -1, 1]
    assert len(times) == 3 and min(times) > 0


def test_whole_script(tmp_path, capsys):
    result, tables = tmp_path / "bench.json", tmp_path / "bench.md"
    argv = ["--layers", "2", "--repetitions", "1", "--batches", "1,4", "--json", str(result), "--markdown", str(tables)]
    assert main(["bench", "--backend", "mlx", *argv]) == 0
    printed = capsys.readouterr().out
    assert ("say nothing about a Mac" in printed) != mx.metal.is_available()
    document = json.loads(result.read_text())
    assert {row["table"] for row in document["rows"]} == set(TABLES)
    for row in document["rows"]:
        assert all(row[name] > 0 for name in TABLES[row["table"]]), row
    steps = {(row["batch"], row["budget"]): row for row in document["rows"] if row["table"] == "Decode steps"}
    assert steps[4, "4"]["active_mean"] <= 4 < steps[4, None]["active_mean"]
    launches = {row["policy"]: row["launches"] for row in document["rows"] if "launches" in row}
    assert launches["base, kernels"] <= launches["stock"]
    assert document["settings"]["copy_gb_per_s"] > 0 and "mlx" in document["versions"]
    text = tables.read_text()
    assert all(f"## {title}" in text and title in printed for title in TABLES)


def test_a_model_of_ones_own(tmp_path):
    result = tmp_path / "bench.json"
    argv = ["--model", str(model_path()), "--predictor", str(predictor_path()), "--budgets", "6"]
    argv += ["--batches", "2", "--repetitions", "1", "--json", str(result)]
    assert main(["bench", "--backend", "mlx", *argv]) == 0
    assert {row["model"] for row in json.loads(result.read_text())["rows"]} == {"qwen3_moe"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batches", "4,none"], "--batches '4,none'"),
        (["--batches", "0"], "from 1"),
        (["--budgets", "off"], "--budgets 'off'"),
        (["--budgets", "33"], "1..32"),
        (["--layers", "0"], "--layers 0"),
        (["--tables", "steps,speed"], "steps,parts,gathers,graphs"),
        (["--json", "/nowhere/at/all.json"], "folder does not exist"),
        (["--predictor", "/nowhere.safetensors"], "/nowhere.safetensors"),
    ],
)
def test_bad_input(argv, message, capsys):
    assert main(["bench", "--backend", "mlx", "--shape", "tiny", *argv]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(
    not harness.AVAILABLE, reason="the harness needs Linux and g++; on a Mac the whole script runs this"
)
def test_what_a_mac_measures(monkeypatch):
    model = SHAPES["tiny"].build(2, 4)
    predictor = random_predictor(**describe(model))
    bench = command.Bench(model, predictor, "tiny", 1)
    stock = [type(layer.block) for layer in find_moe_layers(model)]
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    selection, experts = (importlib.import_module(f"backends.mlx.kernels.{n}") for n in ("selection", "experts"))
    with ExitStack() as stack:
        launches = stack.enter_context(harness.simulated(selection))
        launches |= stack.enter_context(harness.simulated(experts, partial=["_gate_up_kernel"]))
        parts = bench.parts(2, [Budget.parse("4")])
        assert [row["policy"] for row in parts] == [
            "selection, operations",
            "experts, operations",
            "selection, kernel",
            "experts, kernel",
        ]
        assert launches["_select_and_list_kernel"].launches and launches["_down_kernel"].launches
        steps = bench.decode(2, [Budget.parse("4")])
    assert [(row["policy"], row["budget"]) for row in steps] == [
        ("stock", None),
        ("base, kernels", "100%"),
        ("base, kernels", "4"),
        ("stock", None),
        ("base, operations", "4"),
    ]
    assert steps[2]["active_mean"] == steps[4]["active_mean"] == 4
    assert [type(layer.block) for layer in find_moe_layers(model)] == stock
