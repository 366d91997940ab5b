"""The embedded model as it ships: size, format, predictor, and that it really answers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.cuda import base_budget
from backends.cuda.experts import EXPERTS_IMPLEMENTATION, register_experts
from base_core import load_predictor
from base_core.embedded import MODELS, model_path, predictor_path, tasks

PROMPTS = 64


@pytest.fixture(scope="module")
def loaded():
    tokenizer = AutoTokenizer.from_pretrained(model_path(), padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32, use_safetensors=True).eval()
    return model, tokenizer


def answers(model, tokenizer, examples, batch=16):
    texts = []
    for start in range(0, len(examples), batch):
        inputs = tokenizer([e.prompt for e in examples[start : start + batch]], return_tensors="pt", padding=True)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        texts += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def test_size_and_contents():
    files = sorted(path for path in model_path().iterdir())
    assert sum(path.stat().st_size for path in files) <= 20_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".jinja"}


def test_config_has_both_spellings():
    config = json.loads((model_path() / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe" and config["num_experts"] == 64
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def test_tokenizer_is_one_token_a_character(loaded):
    _, tokenizer = loaded
    text = "sort 593118=113589 (T&F)\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode(ids) == text and ids[-1] == tokenizer.eos_token_id


def test_it_answers_held_out_prompts(loaded):
    examples = tasks.evaluation_examples(PROMPTS)
    right = [t == e.answer for t, e in zip(answers(*loaded, examples), examples, strict=True)]
    assert sum(right) >= 0.9 * PROMPTS


def test_generous_budgets_give_the_untouched_tokens(loaded):
    model, tokenizer = loaded
    examples = tasks.evaluation_examples(32)
    predictor = load_predictor(predictor_path())
    register_experts()
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    stock = answers(model, tokenizer, examples)
    for budget in ("off", 64, "100%", "energy:1"):
        with base_budget(model, predictor, budget):
            assert answers(model, tokenizer, examples) == stock, budget
    with base_budget(model, predictor, 4):
        assert answers(model, tokenizer, examples) != stock


def test_predictor_card():
    card = load_predictor(predictor_path()).card
    assert card.model_type == "qwen3_moe" and card.layers == (0, 1, 2, 3)
    assert (card.num_experts, card.experts_per_token, card.hidden_size) == (64, 8, 192)
    assert card.tokens >= 100_000 and all(sum(pairs) > 0 for pairs in card.pairs.values())
    assert all(fit["r2"] > 0 for fit in card.fit.values())


def test_unknown_embedded_model():
    with pytest.raises(ValueError, match=f"choose one of {MODELS[0]}"):
        model_path("gpt5")
