"""The GPU script from end to end: dry, in the Triton interpreter, and what it says without a GPU."""

import argparse
import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from backends.cuda import gpu_check  # noqa: E402


@pytest.mark.interpreter
def test_dry_run(tmp_path, capsys):
    data, text = tmp_path / "gpu.json", tmp_path / "gpu.md"
    assert gpu_check.main(["--dry", "--json", str(data), "--markdown", str(text)]) == 0
    report = json.loads(data.read_text())
    assert report["ok"] and report["checks"] and not report["skipped"]
    assert {"front: logits", "experts: output", "collect: combine weights"} <= {c["what"] for c in report["checks"]}
    assert {r["model"] for r in report["rows"]} == {s.name for s in gpu_check.DRY_SHAPES}
    assert all(r["us_per_layer"] is None and "gb_per_s" not in r for r in report["rows"])  # no figure without a GPU
    assert "not yet measured" in text.read_text() and text.read_text() in capsys.readouterr().out


@pytest.mark.interpreter
def test_a_wrong_kernel_fails_the_run(monkeypatch):
    from backends.cuda.kernels import experts

    right = experts.down
    monkeypatch.setattr(experts, "down", lambda *args: right(*args) * 1.01)
    assert gpu_check.main(["--dry", "--step", "correctness"]) == 1


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 2
    assert "not yet measured" in capsys.readouterr().err


def test_report_with_figures():
    row = {
        "model": "qwen3-30b-a3b",
        "policy": "base",
        "budget": 16,
        "batch": 16,
        "active_mean": 16.0,
        "us_per_layer": 50.0,
        "front_us": 6.5,
        "gb_per_s": 3000.0,
        "roof_fraction": 0.81,
        "ratio_to_dense": 4.5,
    }
    wrong = {"what": "front: logits", "shape": "x", "batch": 1, "budget": 2, "dtype": "bfloat16"}
    wrong |= {"error": 1.0, "tolerance": 1e-5, "ok": False}
    report = gpu_check.Report({"dry": False}, [wrong], {"racecheck": "clean"}, [row], ["qwen1.5-moe at 128 rows"])
    text = gpu_check.markdown(report)
    assert not report.ok and "0 of 1 comparisons right" in text and "WRONG x" in text
    assert "| qwen3-30b-a3b | 16 | 16 | 16.0 | 50.0 | 6.5 | - | - | - | - | 3000.0 | 81% | 4.50 |" in text
    assert "Out of time for: qwen1.5-moe at 128 rows." in text


def test_arguments():
    parser = argparse.ArgumentParser()
    gpu_check.add_arguments(parser)
    args = parser.parse_args([])
    assert args.minutes <= 6 and not args.dry and args.step == "all"
