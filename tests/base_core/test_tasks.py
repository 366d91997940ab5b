from itertools import islice

import pytest

from base_core.embedded import tasks


def python_answer(example: tasks.Example) -> str:
    """The answer worked out from the prompt's text alone, another way than the generator did."""
    prompt = example.prompt.removesuffix("=")
    if example.task in ("add", "subtract", "multiply"):
        return str(eval(prompt))
    _, text = prompt.split(" ", 1)
    if example.task == "compare":
        return max(text.split(), key=int)
    if example.task == "sort":
        return "".join(sorted(text))
    if example.task == "reverse":
        return "".join(reversed(text))
    if example.task == "count":
        return f"a{text.count('a')}b{text.count('b')}c{text.count('c')}"
    values = []
    for term in text.split(","):
        negate, body = term.startswith("!"), term.removeprefix("!")
        value = eval(body.replace("T", "True").replace("F", "False"))
        values.append("F" if value == negate else "T")
    return "".join(values)


@pytest.mark.parametrize("seed", [0, tasks.EVAL_SEEDS.start])
def test_answers_are_right(seed):
    for example in islice(tasks.examples(seed), 800):
        assert example.answer == python_answer(example), example


def test_splits_never_overlap():
    trained = {e.prompt for seed in range(3) for e in islice(tasks.examples(seed), 4000)}
    asked = {e.prompt for e in tasks.evaluation_examples(960)}
    assert len(asked) == 960 and not trained & asked
    assert all(tasks.held_out(p) for p in asked) and not any(tasks.held_out(p) for p in trained)


def test_evaluation_is_balanced_and_repeatable():
    chosen = tasks.evaluation_examples(960)
    assert chosen == tasks.evaluation_examples(960)
    assert {task: sum(e.task == task for e in chosen) for task in tasks.TASKS} == dict.fromkeys(tasks.TASKS, 120)
    assert len(tasks.evaluation_examples(2400)) == 2400


def test_one_task_alone():
    assert {e.task for e in islice(tasks.examples(5, "sort"), 20)} == {"sort"}


@pytest.mark.parametrize(
    ("seed", "task", "message"), [(-1, None, "no split"), (2_000_000, None, "no split"), (0, "divide", "'divide'")]
)
def test_errors(seed, task, message):
    with pytest.raises(ValueError, match=message):
        next(tasks.examples(seed, task))
