"""Batched generation from a checkpoint folder."""

from __future__ import annotations

import pytest
import torch

from backends.cuda.generate import generate_texts, load
from base_core import PredictorError, save_predictor
from tests.backends.cuda.tiny import EOS, make_model, make_predictor, save_checkpoint

PROMPTS = ["12+3", "7", "ABCDEF", "9=9", "max"]


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


def generate(checkpoint, budget="off", **options):
    predictor = None if budget == "off" else checkpoint
    return generate_texts(checkpoint, predictor, budget, PROMPTS, **{"batch": 2, "max_tokens": 6, **options})


def test_answers_are_the_stock_model_s(checkpoint):
    """Against generate on every prompt alone, unpadded: left padding and batching change nothing at budget off."""
    out = generate(checkpoint)
    model, tokenizer = load(checkpoint)
    for prompt, text, count in zip(PROMPTS, out.texts, out.token_counts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        answer = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
        answer = answer[: answer.index(EOS)] if EOS in answer else answer
        assert (text, count) == (tokenizer.decode(answer, skip_special_tokens=True), len(answer))
    assert out.stats.steps == 0
    assert out.seconds > 0


def test_budgets_act(checkpoint):
    expected = generate(checkpoint)
    assert generate(checkpoint, 16).texts == expected.texts
    restricted = generate(checkpoint, 2)
    assert restricted.texts != expected.texts
    assert restricted.stats.active_max <= 2
    assert [t[:1] for t in restricted.texts] == [t[:1] for t in expected.texts]


def test_sampling_follows_the_seed(checkpoint):
    first, again, other = (generate(checkpoint, 4, temperature=1.0, seed=seed).texts for seed in (1, 1, 2))
    assert first == again != other
    assert first != generate(checkpoint, 4).texts


def test_dtype_and_progress(checkpoint, capsys):
    assert load(checkpoint)[0].dtype == torch.float32
    assert load(checkpoint, "bfloat16")[0].dtype == torch.bfloat16
    generate(checkpoint, progress=True)
    assert "tokens/s" in capsys.readouterr().err


def test_a_tokenizer_without_padding_uses_the_end_token(checkpoint, tmp_path):
    save_checkpoint(tmp_path, pad_token=None)
    _, tokenizer = load(tmp_path)
    assert tokenizer.pad_token == "<eos>"
    assert generate(tmp_path).texts == generate(checkpoint).texts


def test_a_tokenizer_without_any_end_is_refused(tmp_path):
    save_checkpoint(tmp_path, pad_token=None, eos_token=None)
    with pytest.raises(ValueError, match="neither pad_token nor eos_token"):
        load(tmp_path)


def test_bad_input_is_refused_before_anything_is_generated(checkpoint, tmp_path):
    foreign = tmp_path / "foreign.safetensors"
    save_predictor(foreign, make_predictor(make_model(seed=3)))
    for arguments, options, message in (
        ((checkpoint, None, "off", PROMPTS), {"batch": 0}, "batch 0"),
        ((checkpoint, None, "off", PROMPTS), {"max_tokens": 0}, "max_tokens 0"),
        ((checkpoint, None, "off", PROMPTS), {"temperature": -1.0}, "temperature -1"),
        ((checkpoint, None, "off", PROMPTS), {"dtype": "int4"}, "dtype 'int4'"),
        ((checkpoint, None, "off", ["a", ""]), {}, "no token"),
        ((checkpoint, None, "lots", PROMPTS), {}, "not understood"),
        ((checkpoint, None, 4, PROMPTS), {}, "needs a predictor"),
        ((checkpoint, checkpoint, 17, PROMPTS), {}, r"outside 1\.\.16"),
    ):
        with pytest.raises(ValueError, match=message):
            generate_texts(*arguments, **options)
    with pytest.raises(PredictorError, match="fingerprint"):
        generate_texts(checkpoint, foreign, 4, PROMPTS)
    with pytest.raises((ValueError, OSError), match="nowhere"):
        generate_texts(tmp_path / "nowhere", None, "off", PROMPTS)


def test_only_safetensors_are_loaded(tmp_path):
    model = save_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load(tmp_path)
