"""A predictor fitted through either backend, quantised or not, serves the other one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

mx = pytest.importorskip("mlx.core")

from mlx import nn  # noqa: E402

from backends.cuda import base_budget as torch_budget  # noqa: E402
from backends.cuda.generate import load as torch_load  # noqa: E402
from backends.mlx import base_budget as mlx_budget  # noqa: E402
from backends.mlx.generate import generate_batch  # noqa: E402
from backends.mlx.generate import load as mlx_load  # noqa: E402
from base_core import load_predictor, save_predictor  # noqa: E402
from base_core.embedded import model_path  # noqa: E402
from base_core.embedded.tasks import STOP, evaluation_examples, examples  # noqa: E402
from calibrate.mlx_pass import MlxModel  # noqa: E402
from calibrate.passes import Settings, calibrate_model  # noqa: E402
from calibrate.text import Document, Sequences, pack, tokenise  # noqa: E402
from calibrate.torch_pass import TorchModel  # noqa: E402

CALIBRATION_EXAMPLES = 320
BUDGET = 6


def quantised():
    model, tokenizer = mlx_load(model_path(), "float32")
    nn.quantize(model, group_size=64, bits=4)
    return model, tokenizer


@pytest.fixture(scope="module")
def text() -> Sequences:
    tokenizer = torch_load(model_path(), "float32")[1]
    source = examples(7)
    documents = (Document(e.answer + STOP, e.prompt) for e, _ in zip(source, range(CALIBRATION_EXAMPLES), strict=False))
    return pack((tokenise(document, tokenizer, "answer") for document in documents), 256, 10**6)


@pytest.fixture(scope="module")
def predictors(text, tmp_path_factory):
    """By the model they were fitted on, each through its file."""
    models = {
        "torch": TorchModel(torch_load(model_path(), "float32")[0]),
        "mlx": MlxModel(mlx_load(model_path(), "float32")[0]),
        "mlx 4-bit": MlxModel(quantised()[0]),
    }
    found = {}
    for name, model in models.items():
        path = tmp_path_factory.mktemp("predictors") / "predictor.safetensors"
        save_predictor(path, calibrate_model(model, text, settings=Settings(min_pairs=8)))
        found[name] = load_predictor(path)
    return found


def test_both_backends_fit_the_same(predictors):
    ours, theirs = predictors["mlx"], predictors["torch"]
    assert ours.card.layers == theirs.card.layers and ours.card.tokens == theirs.card.tokens
    z = np.random.default_rng(0).normal(size=(200, ours.card.hidden_size)).astype(np.float32)
    for i in ours.card.layers:
        pairs = np.array([ours.card.pairs[i], theirs.card.pairs[i]])
        assert np.abs(pairs[0] - pairs[1]).sum() <= 4, "a near-tie in the router may go either way"
        same = pairs[0] == pairs[1]
        assert same.mean() > 0.9
        a, b = (p.layers[i].log_energy(z)[:, same] for p in (ours, theirs))
        median, most = np.quantile(np.abs(a - b), (0.5, 0.999))
        assert median < 1e-3 and most < 0.05


def retained(model, tokenizer, predictor):
    prompts = [e.prompt for e in evaluation_examples(96)]
    with torch_budget(model, predictor, BUDGET, measure=True) as session, torch.inference_mode():
        for start in range(0, len(prompts), 16):
            inputs = tokenizer(prompts[start : start + 16], return_tensors="pt", padding=True)
            model.generate(**inputs, max_new_tokens=8, do_sample=False)
        return session.stats().retained_energy


def test_any_of_them_serves_pytorch(predictors):
    model, tokenizer = torch_load(model_path(), "float32")
    energy = {name: retained(model, tokenizer, predictor) for name, predictor in predictors.items()}
    assert energy["torch"] > 0.97
    assert energy["mlx"] == pytest.approx(energy["torch"], abs=0.003)
    assert energy["mlx 4-bit"] == pytest.approx(energy["torch"], abs=0.01)


def test_any_of_them_serves_the_quantised_mlx_model(predictors):
    model, tokenizer = quantised()
    chosen = evaluation_examples(48)
    prompts = [tokenizer.encode(e.prompt) for e in chosen]
    right = {}
    for name, predictor in predictors.items():
        with mlx_budget(model, predictor, BUDGET) as session:
            answers = [
                answer
                for start in (0, 16, 32)
                for answer in generate_batch(
                    model, prompts[start : start + 16], max_tokens=12, end_tokens=sorted(tokenizer.eos_token_ids)
                )
            ]
            assert session.stats().active_mean <= BUDGET < session.stats().union_mean
        right[name] = sum(tokenizer.decode(a) == e.answer for a, e in zip(answers, chosen, strict=True))
    assert min(right.values()) >= 0.8 * len(chosen)
    assert max(right.values()) - min(right.values()) <= 6, right
