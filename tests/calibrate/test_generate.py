"""`base-moe generate`: reading prompts, choosing backend and predictor, writing results."""

from __future__ import annotations

import argparse
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from base_core import save_predictor
from calibrate.cli import main
from calibrate.generate import add_arguments, read_prompts
from tests.backends.cuda.tiny import make_predictor, save_checkpoint


@dataclass(frozen=True)
class Stats:
    """What another backend counts; the command passes it on."""

    steps: int = 3


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    model = save_checkpoint(folder)
    save_predictor(folder / "predictor.safetensors", make_predictor(model))
    return folder


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("12+3\n\n7\nABC\n")
    return path


def test_generates_into_json_in_file_order(checkpoint, prompts, tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = ["generate", "--model", str(checkpoint), "--prompts", str(prompts), "--budget", "2"]
    assert main([*arguments, "--batch", "2", "--max-tokens", "5", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert [row["prompt"] for row in document["rows"]] == ["12+3", "7", "ABC"]
    printed = capsys.readouterr()
    for row in document["rows"]:
        assert row["tokens"] <= 5
        assert f"> {row['prompt']}\n{row['text']}\n" in printed.out
    assert document["settings"]["budget"] == "2"
    assert document["settings"]["model"] == str(checkpoint)
    assert document["stats"]["active_mean"] <= 2
    assert document["stats"]["tokens_per_s"] > 0
    assert document["versions"]["torch"]
    assert "tokens/s" in printed.err
    assert list(tmp_path.glob(".*")) == []


def test_text_files(tmp_path):
    path = tmp_path / "prompts"
    path.write_bytes("\ufefffirst line\r\n\n  indented {\nlast\u2028one".encode())
    assert read_prompts(str(path)) == ["first line", "  indented {", "last\u2028one"]


def test_json_lines(tmp_path, monkeypatch):
    text = '{"prompt": "two\\nlines", "id": 7}\n\n{"prompt": "\u00e9"}\n'
    for name in ("prompts.jsonl", "prompts.txt"):
        (tmp_path / name).write_text(text)
        assert read_prompts(str(tmp_path / name)) == ["two\nlines", "\u00e9"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert read_prompts("-") == ["two\nlines", "\u00e9"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"\n \n", "holds no prompt"),
        ("a.jsonl", b'{"prompt": "x"}\n\n{"prompt": \n', r"a\.jsonl, line 3 is not JSON"),
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "y"}', "line 2 has no prompt"),
        ("a.jsonl", b'{"prompt": ""}', "line 1 has no prompt"),
        ("a.jsonl", b"[1]", "line 1 has no prompt"),
        ("a.txt", b'{"prompt": "x"}\nplain\n', "line 2 is not JSON"),
        ("latin.txt", b"caf\xe9", "not UTF-8"),
    ],
)
def test_bad_prompt_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(str(tmp_path / name))


def test_missing_prompt_file(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.txt' cannot be read: No such file"):
        read_prompts(str(tmp_path / "nothing.txt"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch 0"),
        (["--max-tokens", "0"], "--max-tokens 0"),
        (["--budget", "many"], "not understood"),
        (["--json", "nowhere/out.json"], "folder does not exist"),
        (["--budget", "17"], "outside 1..16"),
        (["--predictor", "no/such/file.safetensors", "--budget", "4"], "no/such/file.safetensors"),
    ],
)
def test_bad_input_is_one_line_and_status_2(checkpoint, prompts, arguments, message, capsys):
    assert main(["generate", "--model", str(checkpoint), "--prompts", str(prompts), *arguments]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("base-moe generate: ")
    assert message in line


def test_a_budget_on_a_model_without_predictor_says_what_to_do(prompts, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    assert main(["generate", "--model", str(tmp_path / "model"), "--prompts", str(prompts), "--budget", "4"]) == 2
    assert "--predictor" in capsys.readouterr().err


def test_mlx_backend_is_asked_in_the_same_words(prompts, tmp_path, monkeypatch):
    seen = {}

    def generate_texts(model, predictor, budget, prompts, **options):
        seen.update(options, model=model, predictor=predictor, budget=str(budget))
        return SimpleNamespace(texts=["a", "b", "c"], token_counts=[1, 1, 1], stats=Stats(), seconds=1.0)

    monkeypatch.setitem(sys.modules, "backends.mlx.generate", SimpleNamespace(generate_texts=generate_texts))
    out = tmp_path / "out.json"
    arguments = ["generate", "--backend", "mlx", "--prompts", str(prompts), "--budget", "8", "--json", str(out)]
    assert main([*arguments, "--dtype", "float32"]) == 0
    assert Path(seen["predictor"]).name == "predictor.safetensors"
    assert (seen["budget"], seen["dtype"], seen["batch"]) == ("8", "float32", 16)
    assert json.loads(out.read_text())["rows"][2] == {"prompt": "ABC", "text": "c", "tokens": 1}


def test_missing_backend_is_a_clear_error(prompts, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "backends.mlx.generate", None)
    assert main(["generate", "--backend", "mlx", "--prompts", str(prompts)]) == 2
    assert "backend 'mlx' is not installed" in capsys.readouterr().err


def test_safe_defaults():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--prompts", "x"])
    assert (args.budget, args.temperature, args.backend, args.model) == ("off", 0.0, "torch", None)


def test_audit_is_printed_and_written(checkpoint, prompts, tmp_path, capsys):
    out = tmp_path / "out.json"
    arguments = ["generate", "--model", str(checkpoint), "--prompts", str(prompts), "--budget", "2", "--json", str(out)]
    with pytest.warns(UserWarning, match="calibrate on text like this"):
        assert main([*arguments, "--max-tokens", "5", "--audit", "1", "--audit-correct"]) == 0
    audit = json.loads(out.read_text())["stats"]["audit"]
    assert audit["steps"] > 0 and len(audit["layers"]) == 2
    table = capsys.readouterr().err
    assert f"audit, {audit['steps']} steps" in table and f"{audit['layers'][1]['drift']:+.3f}" in table


def test_audit_without_a_number_and_its_refusals(checkpoint, prompts, capsys):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args(["--prompts", "x"]).audit == 0
    assert parser.parse_args(["--prompts", "x", "--audit"]).audit == 16
    arguments = ["generate", "--model", str(checkpoint), "--prompts", str(prompts)]
    for more, message in (
        (["--audit"], "the budget is off"),
        (["--budget", "2", "--audit-correct"], "audit 0"),
    ):
        assert main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:audit")
def test_audit_runs_on_mlx(prompts, tmp_path, capsys):
    pytest.importorskip("mlx.core")
    out = tmp_path / "out.json"
    arguments = ["generate", "--backend", "mlx", "--prompts", str(prompts), "--max-tokens", "5", "--json", str(out)]
    assert main([*arguments, "--budget", "4", "--audit", "2", "--audit-correct"]) == 0
    stats = json.loads(out.read_text())["stats"]
    assert 0 < stats["audit"]["steps"] < stats["steps"] and len(stats["audit"]["layers"]) == 4
    assert f"audit, {stats['audit']['steps']} steps" in capsys.readouterr().err
    for more, message in ((["--audit"], "the budget is off"), (["--budget", "2", "--audit-correct"], "audit 0")):
        assert main([*arguments, *more]) == 2
        assert message in capsys.readouterr().err


def test_audit_without_the_backend(prompts, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "backends.mlx.generate", None)
    assert main(["generate", "--backend", "mlx", "--prompts", str(prompts), "--budget", "2", "--audit"]) == 2
    assert "backend 'mlx' is not installed" in capsys.readouterr().err
