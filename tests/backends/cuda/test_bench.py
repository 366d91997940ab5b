"""The benchmark on shapes so small that it takes seconds: what it builds, measures, prints and writes."""

import argparse
import json

import pytest
import torch

from backends.cuda import bench, roof
from backends.cuda.bench import RoutedStack, Samples, Shape, Variant, parse_budgets, predictor_for, rows_by_expert
from backends.cuda.cpu_linear import cpu_path
from backends.cuda.experts import register_experts
from base_core import Budget
from base_core.report import ROW_KEYS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_roof(monkeypatch):
    monkeypatch.setattr(roof, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(roof, "CACHED_BYTES", 1 << 16)


def run(tmp_path, *options):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    file = tmp_path / "bench.json"
    bench.run(parser.parse_args([*options, "--repetitions", "2", "--json", str(file)]))
    return json.loads(file.read_text())


def tiny_stack(model_type="qwen3_moe", dtype=torch.float32):
    register_experts()
    torch.manual_seed(0)
    return RoutedStack(Shape("tiny", model_type, 64, 32, 16, 4), 2, dtype, CPU)


def test_report(tmp_path, capsys):
    report = run(tmp_path, "--shape", "64x32x16x4", "--batch", "8", "--budgets", "5,50%", "--layers", "3")
    rows = report["rows"]
    assert [(row["policy"], row["budget"]) for row in rows] == [
        ("stock", None),
        ("dense", None),
        ("base", "5"),
        ("base", "50%"),
        ("oea", "k0=1"),
        ("sere", "primary=1"),
        ("xshare", "5, k0=1"),
    ]
    for row in rows:
        assert tuple(row)[: len(ROW_KEYS)] == ROW_KEYS
        assert row["model"] == "64x32x16x4"
        assert row["batch"] == 8
        assert row["accuracy"] is row["retained_energy"] is row["tokens_per_s"] is None
        assert row["ms_per_step"] == pytest.approx(3 * row["ms_per_layer"])
        assert row["gb_per_s"] > 0
        assert row["ratio_to_dense"] == pytest.approx(rows[1]["ms_per_step"] / row["ms_per_step"])
        assert row["ratio_to_stock"] == pytest.approx(rows[0]["ms_per_step"] / row["ms_per_step"])
    assert rows[0]["active_mean"] == rows[1]["active_mean"] > 8
    assert [row["active_mean"] for row in rows[2:4]] == [5, 8]
    assert rows[0]["selection_ms_per_layer"] is None
    assert rows[2]["selection_share_of_dense"] == pytest.approx(
        rows[2]["selection_ms_per_layer"] / rows[1]["ms_per_layer"]
    )
    settings = report["settings"]
    assert settings["layers"] == 3
    assert settings["budgets"] == ["5", "50%"]
    assert settings["shape"]["num_experts"] == 16
    assert settings["experts_path"] == cpu_path()
    assert settings["limits"].keys() == {"dense", "base 5", "base 50%"}
    assert "torch" in report["versions"]
    output = capsys.readouterr().out
    assert output.index("Dense decoding is bound by") < output.index("ms/layer")


def test_rates_follow_from_time_and_bytes():
    shape = Shape("tiny", "qwen3_moe", 64, 32, 16, 4)
    expert_bytes = 3 * 64 * 32 * 4
    results = {
        Variant("stock"): Samples([8.0] * 3, [0.4] * 3, [0.01] * 3),
        Variant("dense"): Samples([8.0, 10.0, 9.0], [0.2, 0.2, 0.2], [0.01, 0.01, 0.5]),
        Variant("base", Budget.parse("4")): Samples([4.0] * 3, [0.1, 0.05, 9.0], [0.02] * 3),
    }
    stock, dense, base = bench.to_rows(shape, 8, 2, torch.float32, 1e9, results)
    assert dense["gb_per_s"] == pytest.approx(9 * 2 * expert_bytes / 0.2 / 1e9)
    assert dense["roof_fraction"] == pytest.approx(dense["gb_per_s"])
    assert (dense["active_mean"], dense["ms_per_step"], dense["ms_per_layer"]) == pytest.approx((9, 200, 100))
    assert (stock["ratio_to_dense"], dense["ratio_to_dense"], base["ratio_to_dense"]) == pytest.approx((0.5, 1, 2))
    assert base["ratio_to_stock"] == pytest.approx(4)
    assert base["gb_per_s"] == pytest.approx(4 * 2 * expert_bytes / 0.1 / 1e9)
    assert base["selection_ms_per_layer"] == pytest.approx(5)
    assert base["selection_share_of_dense"] == pytest.approx(0.05)
    assert dense["selection_share_of_dense"] is None


@pytest.mark.parametrize("model_type", [shape.model_type for shape in bench.SHAPES.values()])
@torch.inference_mode()
def test_stock_and_dense_agree_and_budgets_leave_no_trace(model_type):
    stack = tiny_stack(model_type)
    predictor = predictor_for(stack, 0)
    x = torch.randn(8, 64)
    outputs = {}
    for variant in (Variant("stock"), Variant("dense"), Variant("base", Budget.parse("4")), Variant("dense")):
        with variant.applied(stack, predictor):
            outputs.setdefault(variant.label, []).append(stack(x))
    torch.testing.assert_close(outputs["stock"][0], outputs["dense"][0])
    assert torch.equal(*outputs["dense"])
    assert not torch.allclose(outputs["base 4"][0], outputs["dense"][0])


@torch.inference_mode()
def test_rivals_are_timed_with_their_selection():
    """As the reference reads: OEA and SERE the union of favourites, XShare at least its budget."""
    stack = tiny_stack()
    predictor = predictor_for(stack, 0)
    x = torch.randn(8, 64)
    favourites = [len(set(layer.gate(x)[0].argmax(1).tolist())) for layer in stack.layers]
    found = {}
    for variant in bench.rival_variants(16, 5):
        with variant.applied(stack, predictor):
            found[variant.label] = [len(layer) for layer in rows_by_expert(stack, lambda: stack(x))]
        assert variant.selects
    oea, sere, xshare = found.values()
    assert list(found) == ["oea k0=1", "sere primary=1", "xshare 5, k0=1"]
    assert oea == sere == favourites and xshare == [max(5, n) for n in favourites]


@torch.inference_mode()
def test_rows_by_expert():
    stack = tiny_stack()
    predictor = predictor_for(stack, 0)
    x = torch.randn(8, 64)
    with Variant("dense").applied(stack, predictor):
        dense = rows_by_expert(stack, lambda: stack(x))
    assert [sum(layer) for layer in dense] == [8 * 4] * 2
    assert dense == [_counts(layer, x) for layer in stack.layers]
    with Variant("base", Budget.parse("5")).applied(stack, predictor):
        assert [len(layer) for layer in rows_by_expert(stack, lambda: stack(x))] == [5, 5]


def _counts(layer, x):
    counts = torch.bincount(layer.gate(x)[2].flatten())
    return counts[counts > 0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_roof(dtype):
    assert roof.bandwidth_probe(CPU)() > 0
    assert roof.cached_seconds(CPU, dtype, 64, [1, 5, 3]) > 0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("llama", "DxIxExK"),
        ("64x32x16", "DxIxExK"),
        ("64x32x4x8", "at most E"),
        ("0x32x4x2", "at least 1"),
    ],
)
def test_wrong_shapes(text, named, tmp_path):
    with pytest.raises(ValueError, match=f"{text}.*{named}"):
        run(tmp_path, "--shape", text)
    assert not list(tmp_path.iterdir())


def test_known_shapes():
    assert Shape.parse("qwen3-30b-a3b").expert_bytes(torch.bfloat16) == 9_437_184
    assert Shape.parse("128x96x8x2") == Shape("128x96x8x2", "qwen3_moe", 128, 96, 8, 2)


@pytest.mark.parametrize("text", ["", "off", "0", "17", "x"])
def test_wrong_budgets(text, tmp_path):
    with pytest.raises(ValueError, match="budget"):
        run(tmp_path, "--shape", "64x32x16x4", "--budgets", text)
    assert not list(tmp_path.iterdir())


def test_budgets():
    assert [str(budget) for budget in parse_budgets("10, 12.5%", 128)] == ["10", "12.5%"]
