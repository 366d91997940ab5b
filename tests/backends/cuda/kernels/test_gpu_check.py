"""The GPU script and the GPU bench from end to end: dry, in the Triton interpreter, and what they say without a GPU."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from transformers import Qwen3MoeConfig  # noqa: E402

from backends.cuda import bench, gpu_bench, gpu_check, gpu_model  # noqa: E402
from backends.cuda.command import command_line, main  # noqa: E402
from backends.cuda.gpu_layers import DRY_SHAPES  # noqa: E402
from backends.cuda.gpu_model import Decoder, ModelTimes, bench_model, fit_line, layers_that_fit, model_config  # noqa: E402
from backends.cuda.gpu_report import (  # noqa: E402
    DRY,
    UNMEASURED,
    Findings,
    markdown,
    plot_findings,
    targets_table,
    write_findings,
)
from backends.cuda.integration import base_budget  # noqa: E402
from backends.cuda.rivals import Oea, rival  # noqa: E402
from backends.cuda.shapes import SHAPES  # noqa: E402
from base_core.report import ROW_KEYS, report_row  # noqa: E402
from tests.backends.cuda.no_sync import NoSync  # noqa: E402

CHECK, BENCH = "backends.cuda.gpu_check", "backends.cuda.bench"
DOCS = Path(__file__).parents[4] / "docs"


@pytest.mark.interpreter
def test_dry_run(tmp_path, capsys):
    data, text, plot = (str(tmp_path / name) for name in ("gpu.json", "gpu.md", "gpu.png"))
    assert main([CHECK, "--dry", "--json", data, "--markdown", text, "--plot", plot]) == 0
    report = json.loads(Path(data).read_text())
    assert report["ok"] and report["checks"] and not report["skipped"]
    assert {"front: logits", "experts: output", "collect: combine weights"} <= {c["what"] for c in report["checks"]}
    assert {r["model"] for r in report["rows"]} == {s.name for s in DRY_SHAPES}
    assert {r["policy"] for r in report["model"]["rows"]} == {"stock", "dense", "base"}
    for row in report["rows"] + report["model"]["rows"]:  # no figure without a GPU
        assert tuple(row)[: len(ROW_KEYS)] == ROW_KEYS
        assert all(value is None for name, value in row.items() if name.endswith(("_us", "_ms", "_s", "_step")))
    assert UNMEASURED in Path(text).read_text() and Path(text).read_text() in capsys.readouterr().out
    assert Path(plot).read_bytes().startswith(b"\x89PNG")


@pytest.mark.interpreter
def test_dry_bench(tmp_path, capsys):
    data, text, plot = (str(tmp_path / name) for name in ("b.json", "b.md", "b.png"))
    assert main([BENCH, "--dry", "--json", data, "--markdown", text, "--plot", plot, "--batch", "5"]) == 0
    report = json.loads(Path(data).read_text())
    dense, base = report["rows"][:2]
    assert (dense["policy"], dense["budget"], base["policy"], base["budget"]) == ("dense", None, "base", 3)
    assert base["active_mean"] == 3 < dense["active_mean"] and base["batch"] == 5
    rows = report["model"]["rows"]
    assert [row["active_mean"] for row in rows if row["policy"] == "base"] == [4, 6, 8]
    assert rows[1]["active_mean"] > 8
    rivals = report["model"]["rivals"]
    assert {row["policy"].split()[0] for row in rivals} == {"oea", "sere", "xshare", "weight_sum", "top1_union", "base"}
    for other, beside in zip(rivals[::2], rivals[1::2], strict=True):
        assert beside["policy"] == "base" and beside["budget"] == max(1, round(other["active_mean"]))
        assert beside["active_mean"] <= beside["budget"]
    said = capsys.readouterr().out
    assert said.index("What one layer's experts have to read") < said.index("## One layer")
    assert "At equal active experts" in said and "not offered" in said


@pytest.mark.interpreter
def test_one_part_and_one_shape(tmp_path):
    data = str(tmp_path / "b.json")
    assert main([BENCH, "--dry", "--part", "layers", "--shape", "toy-gpt-oss", "--budgets", "2,3", "--json", data]) == 0
    report = json.loads(Path(data).read_text())
    assert report["model"] is None
    assert [(row["model"], row["budget"]) for row in report["rows"]] == [("toy-gpt-oss", b) for b in (None, 2, 3)]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--part", "layers,engine"], "engine is unknown"),
        (["--shape", "gpt-5"], "not among toy, toy-gpt-oss"),
        (["--budgets", "4,50%"], "two or more numbers"),
        (["--budgets", "4"], "two or more numbers"),
    ],
)
def test_bad_options(options, message, capsys):
    assert main([BENCH, "--dry", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.interpreter
def test_a_wrong_kernel_fails_the_run(monkeypatch):
    from backends.cuda.kernels import experts

    right = experts.down
    monkeypatch.setattr(experts, "down", lambda *args: right(*args) * 1.01)
    assert main([CHECK, "--dry", "--step", "correctness"]) == 1


@pytest.mark.interpreter
@pytest.mark.parametrize("step", ["launch", "warm"])
def test_steps_that_run_in_a_process_of_their_own(step, capsys):
    assert main([CHECK, "--dry", "--step", step]) == 0
    assert not capsys.readouterr().out


@pytest.mark.parametrize("module", [CHECK, BENCH])
def test_without_a_gpu(module, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([module, *(["--device", "cuda"] if module == BENCH else [])]) == 2
    assert UNMEASURED in capsys.readouterr().err


def test_without_triton(monkeypatch, capsys):
    monkeypatch.setattr("backends.cuda.command.HAS_TRITON", False)
    assert main([CHECK]) == 2 and main([BENCH, "--device", "cuda"]) == 2
    assert capsys.readouterr().err.count("Triton is not installed") == 2


def test_the_process_of_its_own_gets_the_same_arguments(monkeypatch):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = parser.parse_args(["--dry", "--batch", "4", "--json", "x y.json", "--device", "cuda"])
    line = command_line(BENCH, argparse.Namespace(**vars(args), backend="torch"))
    assert line[1:4] == ["-m", "backends.cuda.command", BENCH]
    assert parser.parse_args(line[4:]) == args
    monkeypatch.setattr(bench, "INTERPRETED", False)
    seen = []
    monkeypatch.setattr(
        "backends.cuda.command.subprocess.run", lambda *a, **k: seen.append((a, k)) or SimpleNamespace(returncode=7)
    )
    assert bench.run(args) == 7
    (((command,), options),) = seen
    assert command == line and options["env"]["TRITON_INTERPRET"] == "1"


def test_sanitizer(monkeypatch):
    monkeypatch.setattr(gpu_check.shutil, "which", lambda *_, **__: None)
    assert gpu_check.sanitize(1e9) == {"racecheck": "absent", "memcheck": "absent"}
    monkeypatch.setattr(gpu_check.shutil, "which", lambda *_, **__: "/opt/compute-sanitizer")
    codes = {"racecheck": 0, "memcheck": 9}
    commands = []

    def fake(command, **options):
        commands.append(command)
        return SimpleNamespace(returncode=codes[command[2]], stdout="a race", stderr="")

    monkeypatch.setattr(gpu_check.subprocess, "run", fake)
    found = gpu_check.sanitize(1e9)
    assert found == {"racecheck": "clean", "memcheck": "a race"}
    assert not Findings({}, sanitizer=found).ok
    assert commands[0][-4:] == ["--step", "launch", "--shape", "qwen3-30b-a3b"]


def made_findings():
    layer = report_row(
        model="qwen3-30b-a3b", policy="base", budget=16, batch=16, active_mean=16.0, layer_us=50.0, front_us=6.5,
        gate_up_us=None, down_us=None, grouped_mm_us=None, batched_mm_us=None, roof_us=35.0, gb_per_s=3000.0,
        roof_fraction=0.81, ratio_to_dense=4.5,
    )  # fmt: skip
    wrong = {"what": "front: logits", "shape": "x", "batch": 1, "budget": 2, "dtype": "bfloat16"}
    wrong |= {"error": 1.0, "tolerance": 1e-5, "ok": False}
    rows = [
        report_row(
            policy=policy, budget=budget, active_mean=active, ms_per_step=ms, tokens_per_s=16e3 / ms, floor_ms=ms / 2,
            roof_fraction=0.5, selection_share=share, ratio_to_dense=12 / ms, ratio_to_stock=20 / ms,
        )
        for policy, budget, active, ms, share in [
            ("stock", None, 82.0, 20.0, None), ("dense", None, 82.0, 12.0, None), ("base", 16, 16.0, 4.0, 0.013),
        ]
    ]  # fmt: skip
    model = ModelTimes(48, rows, fit=fit_line([4, 8, 16], [3, 4, 6]), router_us=4.0, front_us=6.0, eager_ms=30.0)
    settings = {"device": "NVIDIA H200"}
    return Findings(settings, [wrong], {"racecheck": "clean"}, [layer], model, ["qwen1.5-moe at 128 rows"])


def test_report_with_figures(tmp_path):
    findings = made_findings()
    text = markdown(findings)
    assert not findings.ok and "0 of 1 comparisons right" in text and "WRONG x" in text
    assert "| qwen3-30b-a3b | 16 | 16 | 16.0 | 50.0 | 6.5 | - | - | - | - | 35.0 | 3000 | 81% | 4.50 |" in text
    assert "| base | 16 | 16.0 | 4.00 | 4000 | 2.00 | 50% | 1.3% | 3.00 | 5.00 |" in text
    assert "host-bound" in text and "| this run | 2.00 | 250.0 | 1.0000 |" in text
    assert "| paper, Qwen3-30B-A3B | 8.13 | 278.1 | 0.9967 |" in text
    assert "Left out: qwen1.5-moe at 128 rows." in text
    assert [line.split(" | ")[-1] for line in targets_table(findings).splitlines()[2:]] == [
        "6.5 |", "81% |", "1.3% |", "1.0000 |",
    ]  # fmt: skip
    findings.model = replace(findings.model, eager_ms=12.5)
    assert "host keeps up" in markdown(findings)
    write_findings(findings, json=tmp_path / "g.json", plot=tmp_path / "g.png")
    assert json.loads((tmp_path / "g.json").read_text())["model"]["fit"]["b_us"] == pytest.approx(250)
    plot_findings(Findings({"device": DRY}), tmp_path / "empty.png")
    assert (tmp_path / "g.png").stat().st_size > (tmp_path / "empty.png").stat().st_size > 0


def test_documented_targets_are_those_of_the_script():
    text = (DOCS / "gpu.md").read_text(encoding="utf-8")
    assert targets_table() in text
    assert "base-moe gpu-check --json" in text


def test_line_through_step_times():
    fit = fit_line([4, 8, 12, 16], [9.0, 10.1, 11.0, 11.9])
    assert fit.a_ms == pytest.approx(8.1, abs=0.05) and fit.b_us == pytest.approx(240, abs=5) and 0.99 < fit.r2 < 1


def test_roofline():
    text = gpu_bench.roofline_text([SHAPES["qwen3-30b-a3b"]], 16, [10, 16], 4e12)
    assert "4000 GB/s" in text
    lines = [line.split() for line in text.splitlines()[3:]]
    assert [line[1:] for line in lines] == [
        ["dense", "82.4", "777.8", "194.5"], ["10", "10.0", "94.4", "23.6"], ["16", "16.0", "151.0", "37.7"],
    ]  # fmt: skip


def test_the_model_has_its_true_size_and_fits():
    config = model_config(dry=False)
    assert isinstance(config, Qwen3MoeConfig)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == 30_532_122_624
    assert layers_that_fit(config, torch.bfloat16, 139 * 2**30) == 48
    assert 10 < layers_that_fit(config, torch.bfloat16, 40 * 2**30) < 48
    rest = parameters - 48 * 128 * 3 * 2048 * 768 - 151936 * 2048
    cached = 2 * 16 * 512 * 4 * 128 * 48
    assert gpu_model.read_bytes(model, 16.0, 16, 512) == 2 * (16 * 48 * 3 * 2048 * 768 + rest + cached)


@pytest.mark.interpreter
@torch.no_grad()
def test_a_decode_step_can_be_captured():
    """Nothing in it waits for the device, whatever the variant, and nothing new is allocated for its tokens."""
    from transformers import AutoModelForCausalLM

    from backends.cuda.bench import predictor_for

    model = AutoModelForCausalLM.from_config(model_config(dry=True), dtype=torch.float32).eval()
    decoder = Decoder(model, 4, 6)
    tokens = decoder.tokens
    with NoSync():
        decoder.step()
    with base_budget(model, predictor_for(model, 0), 4) as session:
        decoder.step()
        session.set_budget(6)
        with NoSync():
            decoder.step()
        decoder.rewind()
        assert session.stats().steps == 2
    with rival(model, Oea(1)), NoSync():
        decoder.step()
    assert decoder.tokens is tokens
    assert [int(layer.cumulative_length) for layer in decoder.cache.layers] == [7, 7]


@pytest.mark.interpreter
def test_figures_of_the_whole_model(monkeypatch):
    """On the toy model, with a clock by which variant i takes i + 1 ms."""
    monkeypatch.setattr(gpu_model, "model_config", lambda dry, *layers: model_config(True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(gpu_model, "capture", lambda work: (SimpleNamespace(replay=work), work()))
    routers = {"stock": 10.0, "front": 30.0}

    def clock(works, before=lambda name: None):
        for name, work in works.items():
            before(name)
            work()
        return {name: routers.get(name) or 1e3 * (int(name) + 1) for name in works}

    monkeypatch.setattr(gpu_model, "microseconds", clock)
    times = bench_model(6, (4, 6, 8), torch.device("cpu"), 1e9, rivals=False, seed=0)
    assert times.eager_ms > 0 and (times.router_us, times.front_us) == (5, 15)
    for i, row in enumerate(times.rows):
        assert row["ms_per_step"] == i + 1 and row["tokens_per_s"] == pytest.approx(6000 / (i + 1))
        assert (row["ratio_to_stock"], row["ratio_to_dense"]) == pytest.approx((1 / (i + 1), 2 / (i + 1)))
        assert row["roof_fraction"] == pytest.approx(row["floor_ms"] / (i + 1))
    assert [row["selection_share"] for row in times.rows[:2]] == [None, None]
    assert [row["selection_share"] for row in times.rows[2:]] == pytest.approx([0.02 / 3, 0.005, 0.004])
    assert (times.fit.a_ms, times.fit.b_us, times.fit.r2) == pytest.approx((1, 500, 1))
