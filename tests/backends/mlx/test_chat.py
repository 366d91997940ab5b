"""`base-moe chat`, its lines typed by the test."""

from __future__ import annotations

import argparse
import re

import pytest

from base_core.embedded import model_path

pytest.importorskip("mlx.core")

from backends.mlx import Policy, base_budget, chat


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def type_lines(monkeypatch, capsys):
    """`type_lines(arguments, lines) -> printed text`; a line may be an exception to raise."""

    def run(arguments, lines):
        waiting = iter([*lines, EOFError()])

        def read(prompt=""):
            line = next(waiting)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        chat.run(parse("--model", str(model_path()), *arguments))
        return " ".join(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", capsys.readouterr().out).split())

    return run


def test_commands_and_answers(type_lines, predictor_file):
    lines = ["rev abcdef=", "/stats", "/budget 2", "12+34=", "/stats", "/budget 65", "/budget", "h", "r", "", "q", "-"]
    text = type_lines(["--predictor", str(predictor_file), "--budget", "8"], lines)
    for part in (
        "base-moe chat",
        "a budget of 8 or more changes nothing",
        "fedcba 7 tokens",
        "no step so far",
        "dense",
        "2.0 of 8.0 a layer and step",
        "kept, predicted; 0 fallbacks",
        "65 is outside 1..64",
        "context cleared",
        "bye",
    ):
        assert part in text, part
    assert "not measured yet" not in text


def test_drafts_make_a_wide_budget_matter(type_lines, predictor_file):
    options = ["--predictor", str(predictor_file), "--budget", "16", "--draft-model", str(model_path())]
    text = type_lines(options, ["rev abcdef=", "/stats"])
    assert "changes nothing" not in text and "fedcba" in text and "16.0 of " in text


def test_audit_is_shown_with_the_figures_and_at_the_end(type_lines, predictor_file, recwarn):
    options = ["--predictor", str(predictor_file), "--budget", "8", "--audit", "1", "--audit-correct"]
    text = type_lines(options, ["rev abcdef=", "/stats", "12+34="])
    # A budget of 8 changes nothing in one stream, but what runs is measured.
    steps = [int(n) for n in re.findall(r"audit, (\d+) steps pairs energy kept drift rms", text)]
    assert len(steps) == 2 and 0 < steps[0] < steps[1]
    assert "layer 3" in text and "100.00%" in text
    assert text.count("audit: the predictor drifts by more than 0.25") == 2
    assert not [w for w in recwarn if "audit" in str(w.message)]
    assert "energy kept" not in type_lines(options[:4], ["rev abcdef=", "/stats"])


def test_bad_flags_are_refused(type_lines, predictor_file):
    with pytest.raises(ValueError, match="the budget is off"):
        type_lines(["--predictor", str(predictor_file), "--audit"], [])
    with pytest.raises(ValueError, match="audit 0"):
        type_lines(["--predictor", str(predictor_file), "--budget", "4", "--audit-correct"], [])
    with pytest.raises(ValueError, match="needs a predictor"):
        type_lines(["--budget", "4"], [])
    with pytest.raises(ValueError, match=r"65 is outside 1\.\.64"):
        type_lines(["--budget", "65", "--predictor", str(predictor_file)], [])
    with pytest.raises(ValueError, match="--num-draft-tokens 0"):
        type_lines(["--num-draft-tokens", "0"], [])


class Template:
    """A tokenizer whose chat template keeps the text as it is."""

    has_chat_template = True

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, messages, add_generation_prompt):
        return self._tokenizer.encode("".join(message["content"] for message in messages))


def test_a_switch_rebuilds_the_conversation(embedded):
    model, tokenizer, predictor = embedded
    turns = ["rev abcdef=", "57+38=", "sort 735142="]

    def talk(session, switch):
        session.set_budget("off")
        talk = chat.Chat(model, Template(tokenizer), session, parse())
        answers = []
        for i, turn in enumerate(turns):
            if i == switch:
                talk.set_budget("1")
                assert talk.cache[0].offset == 0
                talk.set_budget("off")
            answers.append([response.token for response in talk.reply(turn)])
            assert talk.cache[0].offset == len(talk.history)
        return answers

    with base_budget(model, predictor, "off") as session:
        assert talk(session, switch=None) == talk(session, switch=2)


def test_an_answer_stopped_early_leaves_a_usable_conversation(embedded, type_lines, monkeypatch):
    model, tokenizer, predictor = embedded
    with base_budget(model, predictor, 4, Policy(decode_window=4)) as session:
        talk = chat.Chat(model, Template(tokenizer), session, parse(), model)
        answer = talk.reply("rev abcdef=")
        next(answer)
        answer.close()
        assert not session.in_prefill and len(talk.history) == 12 and talk.cache[0].offset == 0
        assert [response.token for response in talk.reply("57+38=")]

    def interrupt(self, text):
        raise KeyboardInterrupt

    monkeypatch.setattr(chat.BudgetUI, "stream_token", interrupt)
    assert "bye" in type_lines([], ["rev abcdef=", "12+34="])
