"""The command: a small grid, the whole report on made-up rows, interruption, both backends, bad input."""

import json
import re
import zlib

import pytest

from base_core.embedded.tasks import evaluation_examples
from base_core.policies import POLICIES
from base_core.report import ROW_KEYS, report_row, wilson_interval
from calibrate import evaluate as command
from calibrate.cli import main
from calibrate.evaluation import (
    ablations_budget,
    ablations_predictor,
    audit_study,
    independence,
    plan,
    speculation,
    units,
)
from calibrate.evaluation.plan import counterpart
from calibrate.evaluation.units import pack_bits
from calibrate.evaluation.variants import Variant

GRID = ["eval", "--prompts", "32", "--budgets", "8,union:1"]


@pytest.fixture(scope="module")
def rivals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rivals")
    lines = [json.dumps({"prompt": e.prompt, "answer": e.answer + "\n"}) for e in evaluation_examples(80)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    assert main(["calibrate", "--data", str(folder / "text.jsonl"), "--rivals", str(folder / "r.safetensors")]) == 0
    return folder / "r.safetensors"


@pytest.fixture(scope="module")
def grid(tmp_path_factory, rivals):
    out = tmp_path_factory.mktemp("grid")
    policies = "base,oracle,weight_sum,oea,exfold,lynx"
    argv = [*GRID, "--policies", policies, "--rivals", str(rivals), "--out", str(out), "--json", str(out / "e.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "LYNX", ((1.0, 1),))
        assert main(argv) == 0
    return out, json.loads((out / "e.json").read_text())


def test_rows_of_a_grid(grid):
    rows = grid[1]["rows"]
    by_label = {row["label"]: row for row in rows}
    assert all(tuple(row)[: len(ROW_KEYS)] == ROW_KEYS for row in rows) and len(by_label) == len(rows)
    dense = by_label["dense"]
    assert dense["kl"] == 0 and dense["agreement"] == 1 and dense["retained_energy"] == pytest.approx(1)
    assert by_label["oracle @8"]["retained_energy"] == pytest.approx(1, abs=1e-5)
    for row in rows:
        assert row["active_mean"] <= dense["active_mean"] and row["layer_error"] >= 0
        assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] and 0 < row["retained_energy"] <= 1.000001
        if row["budget"] == "8":
            assert row["active_max"] <= 8
    assert by_label["base @8"]["retained_energy"] > by_label["weight_sum @8"]["retained_energy"]
    # The same size in every layer and step along the same dense text, up to what earlier layers change.
    assert by_label["base @union:1"]["active_forced"] == pytest.approx(by_label["oea k0=1"]["active_forced"], rel=0.05)
    assert {counterpart(Variant("oea", options={"k0": n})).label for n in (1, 2, 3, 4)} <= set(by_label)
    assert by_label["base @as lynx alpha=1.0 beta=1"]["active_mean"] < 10
    assert "seconds" in grid[1]["settings"] and "torch" in grid[1]["versions"]


def test_accuracy_is_counted_prompt_by_prompt(grid):
    for row in grid[1]["rows"]:
        right = units.unpack_bits(row["right"], 32)
        assert right.mean() == row["accuracy"]
        by_task = {}
        for example, mark in zip(evaluation_examples(32), right, strict=True):
            by_task.setdefault(example.task, []).append(mark)
        assert row["accuracy_by_task"] == pytest.approx({task: sum(m) / len(m) for task, m in by_task.items()})


def test_report_of_a_grid(grid):
    out = grid[0]
    text = (out / "report.md").read_text()
    for heading in ("equal experts in every step", "equal experts on average", "At equal quality"):
        assert heading in text, heading
    assert "--bench" in text and (out / "figures" / "curves.svg").read_text().startswith("<svg")
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 1 and "base @8" in page
    assert not (out / "partial").exists()


def test_user_prompts_without_answers(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": e.prompt}) for e in evaluation_examples(20)))
    argv = [
        "eval",
        "--prompts-file",
        str(path),
        "--policies",
        "base",
        "--budgets",
        "6",
        "--json",
        str(tmp_path / "e.json"),
    ]
    assert main([*argv, "--out", str(tmp_path), "--temperature", "3", "--seeds", "0,1"]) == 0
    rows = json.loads((tmp_path / "e.json").read_text())["rows"]
    assert [(row["policy"], row["seed"]) for row in rows] == [("dense", 0), ("base", 0), ("dense", 1), ("base", 1)]
    assert all(row["accuracy"] is None and row["right"] is None and row["prompts"] == 20 for row in rows)
    assert rows[0]["tokens"] != rows[2]["tokens"] or rows[1]["kl"] != rows[3]["kl"], "seeds change the text"


def test_weights_in_bfloat16(tmp_path):
    out = tmp_path / "e.json"
    argv = ["--policies", "base", "--budgets", "8,64", "--dtype", "bfloat16", "--json", str(out)]
    assert main(["eval", "--prompts", "32", *argv]) == 0
    rows = {row["label"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["base @64"]["kl"] == 0 and rows["base @64"]["agreement"] == 1
    assert rows["base @8"]["active_max"] <= 8 and rows["base @8"]["accuracy"] > 0.5


def test_interrupted_grid_goes_on(tmp_path, monkeypatch, capsys):
    argv = ["eval", "--prompts", "16", "--policies", "base,weight_sum", "--budgets", "4,8", "--out", str(tmp_path)]
    real, calls = units.run_unit, []

    def stop_at_third(subject, unit):
        calls.append(unit.variant.label)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(subject, unit)

    monkeypatch.setattr(units, "run_unit", stop_at_third)
    assert main(argv) == 130
    assert main(argv) == 2 and "add --resume" in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0
    assert calls == ["dense", "base @4", "base @8", "base @8", "weight_sum @4", "weight_sum @8"]
    assert not (tmp_path / "partial").exists()
    (tmp_path / "report.md").unlink()


def made_up(subject, unit):
    """A row that depends on the unit alone: more experts are better, but OEA beats BASE where both read the union."""
    chance = zlib.crc32(unit.key.encode()) / 2**32
    size = 30.0 if unit.variant.policy == "dense" else 4 + 12 * chance
    count = unit.prompts or len(subject.prompts)
    wrong = {"base @union:1": count // 4, "oea k0=1": 0}.get(unit.variant.label, int(20 / size))
    right = [True] * (count - wrong) + [False] * wrong
    if unit.variant.policy == "oea":
        size = {1: 5.5, 2: 9.5}.get(unit.variant.options["k0"], 14.0)
    low, high = wilson_interval(sum(right), count)
    return report_row(
        model=subject.name, policy=unit.variant.policy, budget=unit.variant.budget, batch=unit.batch, active_mean=size,
        active_max=int(size) + 1, union_mean=30.0, accuracy=sum(right) / count, accuracy_low=low, accuracy_high=high,
        retained_energy=0.9, layer_error=0.1, kl=0.1 / size, agreement=0.9, label=unit.variant.label, seed=0,
        options=dict(unit.variant.options), arrangement=unit.arrangement, prompts=count, right=pack_bits(right),
        accuracy_by_task=dict.fromkeys(subject.tasks, 0.5),
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory, rivals):
    """The whole report with made-up rows, interrupted once on the way."""
    out, calls = tmp_path_factory.mktemp("whole") / "report", []

    def stop_once(subject, unit):
        calls.append(unit.key)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return made_up(subject, unit)

    argv = ["eval", "--all-embedded", "--prompts", "64", "--workers", "1", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units, "run_unit", stop_once)
        patch.setattr(command, "MODELS", ("qwen3_moe",))
        few = ablations_budget.calibration_prompts(16)
        patch.setattr(ablations_budget, "calibration_prompts", lambda: few)
        patch.setattr(ablations_budget, "MOST_TRIES", 2)
        patch.setattr(ablations_budget, "TIGHT", (1 / 16,))
        patch.setattr(ablations_budget, "LOOSE", ())
        for study, settings in (
            (ablations_predictor, ablations_predictor.Settings(4096, 64, 16, (1.0,), (2,))),
            (independence, independence.Settings(16, 1)),
            (speculation, speculation.Settings(2, (1,))),
        ):
            patch.setattr(study, "Settings", lambda settings=settings: settings)
        patch.setattr(audit_study, "PROMPTS", 16)
        speculation_mlx = pytest.importorskip("calibrate.evaluation.speculation_mlx")
        patch.setattr(speculation_mlx, "PROMPTS", 2)
        patch.setattr(speculation_mlx, "DRAFTS", (1,))
        patch.setattr(command, "calibrate_embedded_rivals", lambda name, path: path.write_bytes(rivals.read_bytes()))
        assert main(argv) == 130
        assert main(argv) == 2
        assert main([*argv, "--resume"]) == 0
    return out, calls


def test_whole_report_does_every_unit_once(whole):
    _, calls = whole
    assert len(calls) == len(set(calls)) + 1, "only the interrupted one runs again"


def test_whole_report_has_all_its_parts(whole):
    out, _ = whole
    text, page = (out / "report.md").read_text(), (out / "report.html").read_text()
    for part in (
        "Summary", "Figure 1", "Table 1", "Table 2", "Table 3", "Figure 3", "Gap to the oracle", "Batches of one task",
        "equal quality", "equal experts in every step", "equal experts on average", "arXiv 2609.36222v1",
    ):  # fmt: skip
        assert part in text and part in page, part
    assert page.count("<svg") == 3 and not re.search(r'(src|href)="', page.replace('xlink:href="#', ""))
    assert {path.stem for path in (out / "figures").iterdir()} == {"figure-1", "curves-qwen3_moe", "figure-3-qwen3_moe"}
    assert "Budgets that choose themselves" in text and "plan by share, M=4 (tight)" in text
    for part in (
        "What the predictor needs", "The audit, and a predictor", "depend on neighbours", "Drafting under a budget",
        "qwen3_moe, mlx, 2 prompts",
    ):  # fmt: skip
        assert part in text and part in page, part
    assert not (out / "partial").exists()


def test_whole_report_covers_policies_batches_and_arrangements(whole):
    found = json.loads((whole[0] / "report.json").read_text())["rows"]
    rows = [row for row in found if "study" not in row]
    studies = {row["study"] for row in found if "study" in row}
    assert studies == {"predictor", "audit", "independence", "speculation"}
    assert {row["policy"] for row in rows} == set(POLICIES)
    assert {row["batch"] for row in rows} == {1, 4, 8, 16, 32, 64}
    assert {row["arrangement"] for row in rows} == {"mixed", "one task"}
    assert {row["options"].get("similarity") for row in rows} >= {"frobenius", "cosine", "cka"}
    fixed = {row["budget"] for row in rows if row["policy"] == "base" and not row["options"]}
    assert {"5", "9", "union:1", "union:2"} <= fixed, "what OEA reads in the two regimes, rounded down"


def test_a_lost_comparison_is_named_with_its_reason(whole):
    text = (whole[0] / "report.md").read_text()
    summary = text[: text.index("## Figure 1")]
    assert "embedded/qwen3_moe oea k0=1 (mixed, batch 16): -25.0 points; BASE is closer to dense" in summary
    (table,) = re.findall(r"equal experts in every step\n\n.*?\n\n(.*?)\n\n", text, re.DOTALL)
    lost = [line.split("|")[1].strip(" *") for line in table.splitlines() if "**rival**" in line]
    assert "oea k0=1" in lost and all(f"{label} (mixed, batch 16)" in summary for label in lost)
    counts = re.search(r"behind in (\d+)", summary)
    assert int(counts[1]) >= len(lost)


def test_a_pool_gives_the_same_rows(rivals):
    what = ("qwen3_moe", command._embedded_prompts(16), 12, rivals)
    wanted = [units.Unit(Variant("dense")), units.Unit(Variant("base", "6"))]
    subject = command.open_embedded(*what)
    with command._pool(2, command.open_embedded, *what) as pool:
        apart = units.run_units(subject, wanted, pool=pool)
    for here, there in zip(units.run_units(subject, wanted), apart, strict=True):
        assert {**here, "seconds": 0} == {**there, "seconds": 0}


def test_mlx_backend(tmp_path, capsys):
    pytest.importorskip("mlx.core")
    argv = ["eval", "--backend", "mlx", "--prompts", "16", "--policies", "base,top1_union", "--budgets", "6"]
    assert main([*argv, "--json", str(tmp_path / "e.json")]) == 0
    rows = json.loads((tmp_path / "e.json").read_text())["rows"]
    dense, base, _ = rows
    assert dense["active_mean"] == dense["union_mean"] > 20 and dense["ratio_to_dense"] == 1
    assert base["active_mean"] <= 6 and 0 < base["kept_energy"] <= 1 and base["tokens_per_s"] > 0
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies", "best"], "unknown policy 'best'"),
        (["--policies", ","], "names none"),
        (["--budgets", "off"], "always evaluated"),
        (["--budgets", ","], "names none"),
        (["--budgets", "union:x"], "positive number of ranks"),
        (["--budgets", "300", "--policies", "weight_sum", "--prompts", "4"], r"outside 1\.\.64"),
        (["--batch", "0"], "--batch 0 must be at least 1"),
        (["--max-tokens", "1"], "--max-tokens 1 must be at least 2"),
        (["--temperature", "-1"], "is negative"),
        (["--seeds", "a"], "whole numbers"),
        (["--workers", "0"], "--workers 0"),
        (["--model", "somewhere"], "--prompts-file"),
        (["--rivals", "missing"], "cannot be read"),
        (["--bench", "missing"], "no file of base-moe bench"),
        (["--json", "no/where/e.json"], "its folder does not exist"),
        (["--all-embedded"], "--out"),
        (["--resume"], "--out"),
        (["--all-embedded", "--out", "x", "--model", "y"], "leave out --model"),
        (["--policies", "sere", "--prompts", "4"], "calibration"),
        (["--backend", "mlx", "--policies", "oea"], "does not offer policy 'oea'"),
        (["--backend", "mlx", "--policies", "base", "--budgets", "union:1"], "does not offer budget"),
        (["--backend", "mlx", "--out", "x"], "leave out --out"),
    ],
)
def test_bad_options(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *options]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_rivals_of_another_model_are_refused(rivals, tmp_path, capsys):
    from dataclasses import replace

    from base_core.rivals import load_rivals, save_rivals

    found = load_rivals(rivals)
    other = {i: tuple(-v for v in sketch) for i, sketch in found.card.fingerprint.items()}
    save_rivals(tmp_path / "r", replace(found, card=replace(found.card, fingerprint=other)))
    assert main(["eval", "--prompts", "4", "--policies", "sere", "--rivals", str(tmp_path / "r")]) == 2
    assert "rivals file fingerprint differs" in capsys.readouterr().err
