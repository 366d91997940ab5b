"""Blocks to Markdown and HTML, files of prompts, and the folder that keeps what is done."""

import json

import pytest

from calibrate.evaluation.document import Figure, Heading, Table, Text, to_html, to_markdown
from calibrate.evaluation.prompt_file import Prompt, read_prompts
from calibrate.evaluation.units import Store, Unit
from calibrate.evaluation.variants import Variant

BLOCKS = [
    Heading(1, "A < B"),
    Text("Run `x & y` now."),
    Table(["name", "a|b"], [["one", "1"], ["two", "2"]], frozenset({1})),
    Figure("plot", '<svg viewBox="0 0 1 1"></svg>', "What it shows"),
]


def test_markdown():
    assert to_markdown(BLOCKS) == (
        "# A < B\n\nRun `x & y` now.\n\n| name | a\\|b |\n| -- | --: |\n| one | 1 |\n| **two** | **2** |\n\n"
        "![What it shows](figures/plot.svg)\n\nWhat it shows\n"
    )


def test_html_is_one_file_with_everything_escaped():
    text = to_html(BLOCKS)
    assert "<title>A &lt; B</title>" in text and "<code>x &amp; y</code>" in text and "<svg" in text
    assert "<tr class=strong><td>two</td>" in text and "prefers-color-scheme: dark" in text
    for outside in ("<script", "<link", "http://", "https://", "src=", "@import", "url("):
        assert outside not in text, outside


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_prompts_with_and_without_answers(tmp_path):
    path = write(
        tmp_path / "p", {"prompt": "a", "answer": "b", "task": "t"}, "", {"prompt": "c", "answer": "", "task": "u"}
    )
    assert read_prompts(path) == [Prompt("a", "b", "t"), Prompt("c", "", "u")]
    assert read_prompts(write(tmp_path / "p", {"prompt": "a"})) == [Prompt("a")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no prompt"),
        (["{"], "line 1 is not JSON"),
        ([{"prompt": "a"}, {"answer": "b"}], "line 2: expected an object"),
        ([{"prompt": "a", "answer": 3}], "line 1: expected"),
        ([{"prompt": "a", "answer": "b"}, {"prompt": "c"}], "1 of 2 prompts have no 'answer'"),
        ([{"prompt": "a", "task": "b"}, {"prompt": "c"}], "no 'task'"),
        (["[]"], "line 1: expected"),
    ],
)
def test_prompts_that_do_not_serve(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(write(tmp_path / "p", *lines))
    with pytest.raises(ValueError, match="cannot be read"):
        read_prompts(tmp_path / "missing")


def test_units_are_told_apart():
    oea = Variant("oea", options={"k0": 1})
    units = [
        Unit(oea), Unit(Variant("oea", options={"k0": 2})), Unit(Variant("base", "8")), Unit(oea, batch=8),
        Unit(oea, arrangement="one task"), Unit(oea, seed=1), Unit(oea, prompts=9), Unit(Variant("base", like=oea)),
    ]  # fmt: skip
    assert len({unit.key for unit in units}) == len(units)
    assert Unit(Variant("oea", options={"k0": 1})).key == Unit(oea).key


def test_store_keeps_rows_and_refuses_other_ones(tmp_path):
    unit = Unit(Variant("dense"))
    store = Store(tmp_path / "rows", {"model": "a"}, resume=False)
    assert store.find(unit) is None
    store.keep(unit, {"kl": 0.5})
    assert Store(tmp_path / "rows", {"model": "a"}, resume=True).find(unit) == {"kl": 0.5}
    with pytest.raises(ValueError, match="add --resume"):
        Store(tmp_path / "rows", {"model": "a"}, resume=False)
    with pytest.raises(ValueError, match="belongs to another evaluation"):
        Store(tmp_path / "rows", {"model": "b"}, resume=True)
    store.remove()
    assert not (tmp_path / "rows").exists()
