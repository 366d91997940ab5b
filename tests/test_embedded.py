"""The embedded models as they ship: size, format, predictors, and that they really answer, in both libraries."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.cuda import base_budget
from backends.cuda.experts import EXPERTS_IMPLEMENTATION, register_experts
from base_core import load_predictor
from base_core.embedded import MODELS, model_path, predictor_path, resolve_model, tasks

PROMPTS = 128
SIZES = {"qwen3_moe": 20_000_000, "qwen2_moe": 10_000_000, "deepseek_v2": 10_000_000}
SHAPES = {
    "qwen3_moe": ((0, 1, 2, 3), 64, 8, 192),
    "qwen2_moe": ((0, 1, 2, 3), 60, 4, 160),
    "deepseek_v2": ((1, 2, 3), 64, 6, 160),
}

every_model = pytest.mark.parametrize("name", MODELS)


@cache
def loaded(name):
    tokenizer = AutoTokenizer.from_pretrained(model_path(name), padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path(name), dtype=torch.float32, use_safetensors=True).eval()
    register_experts()
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
    return model, tokenizer


def answers(model, tokenizer, examples, batch=16):
    texts = []
    for start in range(0, len(examples), batch):
        inputs = tokenizer([e.prompt for e in examples[start : start + batch]], return_tensors="pt", padding=True)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        texts += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


@every_model
def test_size_and_contents(name):
    files = sorted(path for path in model_path(name).iterdir())
    assert sum(path.stat().st_size for path in files) <= SIZES[name]
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".jinja"}


@every_model
def test_config_has_both_spellings(name):
    config = json.loads((model_path(name) / "config.json").read_text())
    assert config["model_type"] == name
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


@every_model
def test_tokenizer_is_one_token_a_character(name):
    _, tokenizer = loaded(name)
    text = "sort 593118=113589 (T&F)\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode(ids) == text and ids[-1] == tokenizer.eos_token_id


@every_model
def test_it_answers_held_out_prompts(name):
    examples = tasks.evaluation_examples(PROMPTS)
    right = [t == e.answer for t, e in zip(answers(*loaded(name), examples), examples, strict=True)]
    assert sum(right) >= 0.92 * PROMPTS  # each has 95 % or more of 960


@every_model
def test_both_libraries_compute_the_same(name):
    mx = pytest.importorskip("mlx.core")
    from backends.mlx.generate import load

    ids = np.random.default_rng(0).integers(3, 98, (3, 24))
    with torch.inference_mode():
        expected = loaded(name)[0](torch.from_numpy(ids)).logits.numpy()
    got = np.array(load(model_path(name), "float32")[0](mx.array(ids)))
    np.testing.assert_allclose(got, expected, atol=2e-4)


@every_model
def test_generous_budgets_give_the_untouched_tokens(name):
    model, tokenizer = loaded(name)
    examples = tasks.evaluation_examples(32)
    predictor = load_predictor(predictor_path(name))
    stock = answers(model, tokenizer, examples)
    for budget in ("off", SHAPES[name][1], "100%", "energy:1"):
        with base_budget(model, predictor, budget):
            assert answers(model, tokenizer, examples) == stock, budget
    with base_budget(model, predictor, 2):
        assert answers(model, tokenizer, examples) != stock


@every_model
def test_removal_cost_keeps_more_energy_than_the_router_weights(name):
    model, tokenizer = loaded(name)
    examples, predictor = tasks.evaluation_examples(32), load_predictor(predictor_path(name))
    kept = {}
    for ranking in ("removal_cost", "weight_sum"):
        with base_budget(model, predictor, 4, ranking=ranking, measure=True) as session:
            answers(model, tokenizer, examples)
            kept[ranking] = session.stats().retained_energy
    assert kept["removal_cost"] > 0.95 and kept["removal_cost"] > kept["weight_sum"] + 0.01, kept


@every_model
def test_predictor_card(name):
    card = load_predictor(predictor_path(name)).card
    assert card.model_id == f"embedded/{name}" and card.model_type == name
    assert (card.layers, card.num_experts, card.experts_per_token, card.hidden_size) == SHAPES[name]
    assert card.tokens >= 100_000 and all(sum(pairs) > 0 for pairs in card.pairs.values())
    assert all(fit["r2"] > 0 for fit in card.fit.values())


def test_names():
    with pytest.raises(ValueError, match=f"choose one of {MODELS[0]}"):
        model_path("gpt5")
    with pytest.raises(ValueError, match="gpt5"):
        resolve_model("embedded/gpt5")
    assert resolve_model(None) == (str(model_path()), str(predictor_path()))
    assert resolve_model("embedded/qwen2_moe", "own") == (str(model_path("qwen2_moe")), "own")
    assert resolve_model("org/model") == ("org/model", None)
