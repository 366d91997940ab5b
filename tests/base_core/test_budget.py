import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from base_core import Budget, BudgetError, load_plan, save_plan


@pytest.mark.parametrize(
    ("text", "experts", "limit", "tau"),
    [
        ("16", 64, 16, None),
        (16, 64, 16, None),
        (" 1 ", 64, 1, None),
        ("64", 64, 64, None),
        ("12.5%", 64, 8, None),
        ("12.5%", 60, 8, None),
        ("0.1%", 64, 1, None),
        ("100%", 64, 64, None),
        ("energy:0.98", 64, 64, 0.98),
        ("energy:0.98,max=24", 64, 24, 0.98),
        ("energy:.5, max=25%", 64, 16, 0.5),
        ("energy:1", 64, 64, 1.0),
        ("share:0.01", 64, 64, None),
        ("share:1,max=24", 64, 24, None),
        ("share:0.0000123456789,max=25%", 64, 16, None),
        ("energy:0.98765432", 64, 64, 0.98765432),
        ("off", 64, 64, None),
        ("OFF", 64, 64, None),
    ],
)
def test_forms(text, experts, limit, tau):
    budget = Budget.parse(text)
    assert budget.limit(experts) == limit and budget.tau == tau
    assert budget.is_off == (str(text).lower() == "off")
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "below 1"),
        (-3, "below 1"),
        ("1.5", "whole"),
        ("0%", r"outside \(0, 100\]"),
        ("101%", r"outside \(0, 100\]"),
        ("energy:0", r"outside \(0, 1\]"),
        ("energy:1.5", r"outside \(0, 1\]"),
        ("energy:0.9,cap=3", "max=N"),
        ("energy:", "not understood"),
        ("share:0", r"outside \(0, 1\], try share:0.01"),
        ("share:1%", "not understood"),
        ("share:0.1,min=3", "share:0.01,max=24"),
        ("nan", "not understood"),
        ("inf%", "not understood"),
        ("1e3", "not understood"),
        ("", "not understood"),
        ("many", "give a number"),
        (True, "bool"),
        (None, "NoneType"),
        (2.0, "float"),
        ("plan:/nowhere/plan.json", "cannot be read"),
    ],
)
def test_errors_say_what_to_do(text, message):
    with pytest.raises(BudgetError, match=message):
        Budget.parse(text)


def test_more_experts_than_there_are_is_an_error_with_the_range():
    with pytest.raises(BudgetError, match=r"65 is outside 1\.\.64"):
        Budget.parse(65).limit(64)


@given(st.integers(1, 100), st.integers(1, 512))
def test_percent_rounds_up(percent, experts):
    limit = Budget.parse(f"{percent}%").limit(experts)
    assert 1 <= limit <= experts and (limit - 1) * 100 < experts * percent <= limit * 100


def test_plan_round_trip(tmp_path):
    path = tmp_path / "plan.json"
    layers = {0: Budget.parse(12), 3: Budget.parse("energy:0.9,max=20"), 10: Budget.parse("off")}
    save_plan(path, layers)
    plan = Budget.parse(f"plan:{path}")
    assert plan == Budget.parse(str(path)) == load_plan(path)
    assert [plan.for_layer(i) for i in layers] == list(layers.values()) and not plan.is_off
    assert Budget.parse(5).for_layer(7) == Budget.parse(5)
    with pytest.raises(BudgetError, match="no entry for layer 1"):
        plan.for_layer(1)
    with pytest.raises(BudgetError, match="for_layer"):
        plan.limit(64)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "not JSON"),
        ([], "format field"),
        ({"format": "other"}, "format field"),
        ({"format": "base-moe-plan", "version": 9, "layers": {"0": "1"}}, "version 9"),
        ({"format": "base-moe-plan", "version": 1}, "layers must map"),
        ({"format": "base-moe-plan", "version": 1, "layers": {"first": "1"}}, "'first' is not an index"),
        ({"format": "base-moe-plan", "version": 1, "layers": {"2": "0"}}, "layer 2: .*below 1"),
        ({"format": "base-moe-plan", "version": 1, "layers": {"2": "plan:x"}}, "cannot hold another plan"),
    ],
)
def test_broken_plans_name_the_entry(tmp_path, document, message):
    path = tmp_path / "plan.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(BudgetError, match=message):
        load_plan(path)
