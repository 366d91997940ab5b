"""Other families than the embedded model's, speculative decoding, and engines that must not start."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from backends.cuda import base_budget
from backends.cuda.vllm.worker import find_blocks
from base_core import Predictor, load_predictor, save_predictor
from base_core.embedded import predictor_path
from tests.backends.cuda.tiny import make_model, make_predictor
from tests.vllm.engines import base

BUDGET = 5
LENGTH = 12
PROMPTS = [[3 + i, 5, 7 + i, 9] for i in range(8)]
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
"""The only sizes that vLLM's attention for deepseek_v2 takes on a CPU, where it also wants bfloat16."""


def ran_on(run_engine, folder, model, dtype="float32"):
    model.save_pretrained(folder / "model")
    predictor = make_predictor(model)
    save_predictor(folder / "predictor.safetensors", predictor)
    ran = run_engine(
        folder / "model",
        [[{"prompt_token_ids": prompt} for prompt in PROMPTS]],
        base={"predictor": str(folder / "predictor.safetensors"), "budget": str(BUDGET)},
        watch="experts",
        engine={"skip_tokenizer_init": True, "dtype": dtype},
        sampling={"max_tokens": LENGTH, "ignore_eos": True, "detokenize": False},
    )
    steps = [record for record in ran.result["seen"][0]["records"] if record["counted"]]
    assert len(steps) == (LENGTH - 1) * len(predictor.layers)
    assert {len(record["emitted"]) for record in steps} == {BUDGET}
    assert min(len(record["native"]) for record in steps) > BUDGET
    return ran.result["tokens"], predictor


def pytorch_tokens(model, predictor: Predictor):
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    with base_budget(model, predictor, BUDGET), torch.inference_mode():
        output = model.generate(torch.tensor(PROMPTS), max_new_tokens=LENGTH, do_sample=False)
    return output[:, len(PROMPTS[0]) :].tolist()


@pytest.mark.parametrize("model_type", ["qwen2_moe", "mixtral", "olmoe", "glm4_moe"])
def test_families_give_the_pytorch_paths_tokens(model_type, run_engine, tmp_path):
    model = make_model(model_type, **SHAPE)
    tokens, predictor = ran_on(run_engine, tmp_path, model)
    assert tokens == pytorch_tokens(model, predictor)


def test_deepseek_v2(run_engine, tmp_path):
    ran_on(run_engine, tmp_path, make_model("deepseek_v2", **{**SHAPE, **LATENT}), "bfloat16")


def test_verification_rows_decode_when_asked(run_engine, checkpoint, groups):
    ran = run_engine(
        checkpoint,
        groups[:2],
        base=base(BUDGET, speculative=True),
        watch="experts",
        engine={
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 2,
                "prompt_lookup_min": 1,
            }
        },
    )
    steps = [record for record in ran.result["seen"][0]["records"] if record["counted"]]
    assert max(record["decode"] for record in steps) > len(groups[0])
    assert max(len(record["emitted"]) for record in steps) == BUDGET


def test_a_predictor_of_another_model_stops_the_engine(run_engine, checkpoint, tmp_path):
    own = load_predictor(predictor_path())
    sketches = {layer: tuple(-value for value in sketch) for layer, sketch in own.card.fingerprint.items()}
    foreign = tmp_path / "foreign.safetensors"
    save_predictor(foreign, replace(own, card=replace(own.card, fingerprint=sketches)))
    entry = base(BUDGET, predictor=str(foreign))
    log = run_engine(checkpoint, [], base=entry, expect_failure=True).log
    assert "predictor fingerprint differs from the model's routers" in log and "BASE active" not in log


def test_a_model_without_experts_stops_the_engine(run_engine, tmp_path):
    config = AutoConfig.for_model("qwen3", vocab_size=64, intermediate_size=32, num_hidden_layers=2, **SHAPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    entry, engine = base(BUDGET), {"skip_tokenizer_init": True}
    log = run_engine(tmp_path, [], base=entry, engine=engine, expect_failure=True).log
    assert "BASE cannot run in this engine: model type 'qwen3' is not supported" in log


def test_a_loaded_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="cannot run on Linear: it has no mixture of experts"):
        find_blocks(torch.nn.Linear(2, 2))
