import json

import pytest

from base_core.report import ROW_KEYS, format_table, report_row, wilson_interval, write_report


def test_rows_carry_every_common_name_in_order(tmp_path):
    row = report_row(policy="base", extra=1)
    assert tuple(row) == (*ROW_KEYS, "extra") and row["accuracy"] is None
    write_report(tmp_path / "r.json", [row], {"batch": 16}, note="x")
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["rows"] == [row] and document["settings"] == {"batch": 16} and document["note"] == "x"
    assert {"python", "numpy"} <= set(document["versions"])


def test_a_value_that_is_no_json_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_report(tmp_path / "r.json", [report_row(accuracy=float("nan"))], {})
    assert not list(tmp_path.iterdir())


def test_wilson_interval_at_known_points():
    low, high = wilson_interval(50, 100)
    assert (round(low, 4), round(high, 4)) == (0.4038, 0.5962)
    assert wilson_interval(10, 10)[1] == pytest.approx(1) and wilson_interval(0, 10)[0] == pytest.approx(0)


def test_table_is_aligned():
    assert format_table([("a", "bb"), ("ccc", "d")]).splitlines() == ["a    bb", "-------", "ccc   d"]
