"""The demo at small size: every policy at every budget, the numbers it reports, the files it writes."""

import json

import pytest

from base_core.policies import RANKINGS
from base_core.report import ROW_KEYS
from calibrate.cli import main


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    argv = [
        "demo",
        "--prompts",
        "32",
        "--budgets",
        "6,12.5%",
        "--json",
        str(folder / "d.json"),
        "--plot",
        str(folder / "d.png"),
    ]
    assert main(argv) == 0
    return folder, json.loads((folder / "d.json").read_text())


def test_rows(demo):
    _, document = demo
    rows = document["rows"]
    assert [(r["policy"], r["budget"]) for r in rows] == [("dense", "off")] + [
        (policy, budget) for budget in ("6", "12.5%") for policy in RANKINGS
    ]
    assert all(tuple(row)[: len(ROW_KEYS)] == ROW_KEYS for row in rows)
    assert document["settings"]["prompts"] == 32 and "torch" in document["versions"]


def test_numbers_hang_together(demo):
    rows = demo[1]["rows"]
    dense = rows[0]
    assert dense["active_mean"] > 16 and dense["retained_energy"] == 1 and dense["ratio_to_dense"] == 1
    for row in rows[1:]:
        assert row["active_mean"] <= {"6": 6, "12.5%": 8}[row["budget"]]
        assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
        assert 0 < row["retained_energy"] <= 1.000001
        if row["policy"] == "oracle":
            assert row["retained_energy"] == pytest.approx(1, abs=1e-6)
    kept = {(r["policy"], r["budget"]): r["retained_energy"] for r in rows}
    assert kept["base", "6"] > max(kept[p, "6"] for p in ("static_energy", "squared_weight", "weight_sum"))


def test_plot_is_a_png(demo):
    assert (demo[0] / "d.png").read_bytes().startswith(b"\x89PNG")
