"""Collecting from all families, passes, interruption, and the command."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from backends.cuda.families import find_moe_layers, fingerprint
from base_core import load_predictor
from base_core.embedded import model_path, predictor_path
from calibrate import calibrate as command
from calibrate import passes, torch_pass
from calibrate.cli import main
from calibrate.passes import Origin, Settings, plan_passes
from calibrate.statistics import LayerStatistics, read_state, statistics_bytes
from calibrate.text import Sequences, pack
from calibrate.torch_pass import CALIBRATION_EXPERTS, TorchModel, collecting
from tests.backends.cuda.tiny import MODEL_TYPES, VOCABULARY, make_model

EPS = 1e-9
ROOT = Path(__file__).parents[2]
DOCUMENTS = [7, 3, 12, 1, 9]


@pytest.fixture(autouse=True)
def checkpoint_whenever_due(monkeypatch):
    """However long writing took."""
    monkeypatch.setattr(passes, "CHECKPOINT_SHARE", 0)


def make_sequences(sizes=DOCUMENTS, length=16, seed=0) -> Sequences:
    rng = np.random.default_rng(seed)
    documents = [(rng.integers(2, VOCABULARY, n).tolist(), (rng.random(n) < 0.8).tolist()) for n in sizes]
    return pack(documents, length, 10_000)


def empty_statistics(model):
    return {i.index: LayerStatistics(i.num_experts, i.hidden_size) for i in find_moe_layers(model)}


def gather(model, sequences, weighted=True):
    statistics = empty_statistics(model)
    with collecting(model, statistics, eps=EPS, weighted=weighted) as run:
        run((sequences.ids, sequences.positions, sequences.counted))
    return statistics


@torch.no_grad()
def literal_statistics(model, documents, counted, weighted):
    """Every document alone, every routed pair alone, through the model's own eager code."""
    model.set_experts_implementation("eager")
    layers, expected, seen = find_moe_layers(model), empty_statistics(model), {}

    def remember(index):
        def hook(module, args, output):
            seen[index] = args[0].reshape(-1, args[0].shape[-1]), output[1], output[2]

        return hook

    def check_input(index):
        def hook(module, args):
            assert torch.equal(args[0], seen[index][0]), "the experts' input is the router's"

        return hook

    for layer in layers:
        layer.router.register_forward_hook(remember(layer.index))
        layer.experts.register_forward_pre_hook(check_input(layer.index))
    for ids, kept in zip(documents, counted, strict=True):
        model(torch.tensor([ids]))
        for layer in layers:
            z, weights, chosen = (part.clone() for part in seen[layer.index])
            energy = torch.zeros(chosen.shape)
            for t, slot in np.ndindex(*chosen.shape):
                seen[layer.index] = (z[t : t + 1],)
                out = layer.experts(z[t : t + 1], chosen[t : t + 1, slot : slot + 1], torch.ones(1, 1))
                energy[t, slot] = out.square().sum()
            rows = torch.tensor(kept)
            weights = weights if weighted else torch.ones_like(weights)
            expected[layer.index].add(z[rows], chosen[rows], energy[rows], weights[rows], EPS)
    return expected


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_pairs_of_every_family(model_type):
    """Packed documents give what each document gives alone."""
    sequences = make_sequences(length=40)
    assert sequences.ids.shape == (1, sum(DOCUMENTS))
    ends = np.cumsum(DOCUMENTS)[:-1]
    documents = [part.tolist() for part in np.split(sequences.ids[0], ends)]
    counted = [part.tolist() for part in np.split(sequences.counted[0], ends)]
    weighted = model_type != "olmoe"
    found = gather(make_model(model_type), sequences, weighted)
    expected = literal_statistics(make_model(model_type), documents, counted, weighted)
    assert found.keys() == expected.keys()
    for i, layer in expected.items():
        assert (
            int(layer.pairs.sum())
            == sequences.counted.sum() * find_moe_layers(make_model(model_type))[0].experts_per_token
        )
        for name, tensor in layer.tensors().items():
            torch.testing.assert_close(found[i].tensors()[name], tensor, rtol=2e-4, atol=1e-4, msg=f"{i} {name}")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_forward_pass_stays_dense(model_type):
    model = make_model(model_type)
    ids = torch.from_numpy(make_sequences().ids)
    before = model.get_experts_implementation()
    with torch.no_grad():
        dense = model(ids).logits
        with collecting(
            model, {find_moe_layers(model)[0].index: empty_statistics(model).popitem()[1]}, eps=EPS, weighted=True
        ):
            assert model.get_experts_implementation() == {"": CALIBRATION_EXPERTS}
            for layer in find_moe_layers(model):
                if hasattr(layer.experts, "_base_sink"):
                    del layer.experts._base_sink
            inside = model(ids).logits
        torch.testing.assert_close(inside, dense, rtol=1e-4, atol=1e-4)
        assert model.get_experts_implementation() == before
        assert torch.equal(model(ids).logits, dense)


class StopError(Exception):
    pass


def test_model_is_restored_after_an_exception():
    model = make_model()
    model.train()
    before = model.get_experts_implementation()
    sequences = make_sequences()
    with pytest.raises(StopError), collecting(model, empty_statistics(model), eps=EPS, weighted=True) as run:
        assert not model.training
        run((sequences.ids, sequences.positions, sequences.counted))
        raise StopError
    assert model.training
    assert model.get_experts_implementation() == before
    assert not any(hasattr(module, "_base_sink") for module in model.modules())


def test_layers_behind_the_last_one_are_not_run():
    model, sequences = make_model(), make_sequences()
    first, last = find_moe_layers(model)
    calls = []
    for layer in (first, last):
        layer.router.register_forward_hook(lambda *_, i=layer.index: calls.append(i))
    with collecting(model, {0: empty_statistics(model)[0]}, eps=EPS, weighted=True) as run:
        run((sequences.ids, sequences.positions, sequences.counted))
    assert calls == [0]


def test_filling_does_not_count():
    """The last row is filled with token 0; whatever stands there changes nothing."""
    model, sequences = make_model(), make_sequences([10, 11], length=16)
    assert sequences.ids.shape == (2, 16)
    other = sequences.ids.copy()
    other[1, 5:] = 33
    first, second = gather(model, sequences), gather(model, replace(sequences, ids=other))
    for i, layer in first.items():
        assert int(layer.pairs.sum()) == 4 * sequences.counted.sum()
        for name, tensor in layer.tensors().items():
            torch.testing.assert_close(tensor, second[i].tensors()[name], rtol=1e-5, atol=1e-5)


def calibrate_model(model, sequences, **options):
    return passes.calibrate_model(TorchModel(model), sequences, **options)


def make_text(model, tokens=400):
    return make_sequences([20] * (tokens // 20), length=40)


def assert_same(first, second):
    assert first.card == second.card
    for i, layer in first.layers.items():
        for name in ("weight", "bias", "mean_energy"):
            np.testing.assert_array_equal(getattr(layer, name), getattr(second.layers[i], name))


def one_layer(model):
    first = find_moe_layers(model)[0]
    return statistics_bytes(first.num_experts, first.hidden_size)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v2"])
def test_several_passes_give_the_same(model_type):
    model = make_model(model_type)
    sequences = make_text(model)
    settings = Settings(batch_tokens=120)
    whole = calibrate_model(model, sequences, settings=settings)
    split = calibrate_model(model, sequences, settings=replace(settings, memory=one_layer(model)))
    assert_same(whole, split)
    last = find_moe_layers(model)[-1]
    last.experts.down_proj.data *= 2
    changed = calibrate_model(model, sequences, settings=settings).layers[last.index].bias
    assert (changed > whole.layers[last.index].bias + 1).all()


def test_card():
    model = make_model("glm4_moe")
    sequences = make_text(model)
    predictor = calibrate_model(model, sequences, origin=Origin("a/b", "f00", "text"), settings=Settings(eps=1e-6))
    card = predictor.card
    assert (card.model_id, card.model_revision, card.source, card.model_type) == ("a/b", "f00", "text", "glm4_moe")
    assert (card.layers, card.num_experts, card.experts_per_token, card.hidden_size) == ((1, 2), 16, 4, 32)
    assert (card.tokens, card.eps) == (400, 1e-6)
    assert all(sum(card.pairs[i]) == 4 * sequences.counted.sum() for i in card.layers)
    assert all(
        len(card.ridge[i]) == 16 and set(card.fit[i]) == {"r2", "residual_std", "correction"} for i in card.layers
    )
    assert all(card.fallback[i] == tuple(e for e in range(16) if card.pairs[i][e] < 16) for i in card.layers)
    assert any(card.fallback.values())
    assert "torch" in card.versions
    predictor.check_model(
        model_type="glm4_moe",
        layers=(1, 2),
        num_experts=16,
        experts_per_token=4,
        hidden_size=32,
        fingerprint=fingerprint(model),
    )


@pytest.mark.parametrize("interrupted_after", [0, 1, 3, 4, 6])
def test_resumed_is_uninterrupted(tmp_path, monkeypatch, interrupted_after):
    """Two passes of four batches, stopped in the middle of either, between them, and before the end."""
    model = make_model()
    settings = Settings(memory=one_layer(model), batch_tokens=100, checkpoint_minutes=0)
    sequences, partial = make_text(model), tmp_path / "out.partial"
    whole = calibrate_model(model, sequences, settings=settings)
    writes = 0
    write = passes.write_checkpoint

    def stopping(*args):
        nonlocal writes
        write(*args)
        writes += 1
        if writes > interrupted_after:
            raise StopError

    monkeypatch.setattr(passes, "write_checkpoint", stopping)
    with pytest.raises(StopError):
        calibrate_model(model, sequences, settings=settings, partial=partial)
    monkeypatch.setattr(passes, "write_checkpoint", write)
    state = read_state(partial)
    assert state["pass"] * 5 + state["batch"] == interrupted_after + 1
    # Another amount of memory would make other passes: the checkpoint's own go on.
    resumed = calibrate_model(model, sequences, settings=replace(settings, memory=None), partial=partial)
    assert_same(whole, resumed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": make_model(seed=1)}, "routers differs;"),
        ({"model": make_model(dtype=torch.bfloat16)}, "model dtype differs .*float32.*bfloat16"),
        ({"sequences": make_sequences([20] * 20, length=40, seed=1)}, "token ids differs"),
        ({"sequences": make_sequences([20] * 30, length=40)}, "tokens differs .400 there, 600 now"),
        ({"sequences": make_sequences([20] * 20, length=20)}, "length differs"),
        ({"origin": Origin("other")}, "model differs .'' there, 'other' now"),
        ({"origin": Origin(source="other")}, "source differs"),
        ({"settings": Settings(weighted=False, batch_tokens=100)}, "weighted differs"),
        ({"settings": Settings(eps=1e-3, batch_tokens=100)}, "eps differs"),
        ({"settings": Settings(batch_tokens=101)}, "batch tokens differs"),
    ],
)
def test_another_calibrations_checkpoint_is_refused(tmp_path, change, message):
    partial = tmp_path / "out.partial"
    given = {"model": make_model(), "sequences": make_text(None), "settings": Settings(batch_tokens=100)}
    calibrate_model(given["model"], given["sequences"], settings=given["settings"], partial=partial)
    content = partial.read_bytes()
    changed = {**given, **change}
    with pytest.raises(ValueError, match=message):
        calibrate_model(changed.pop("model"), changed.pop("sequences"), partial=partial, **changed)
    assert partial.read_bytes() == content


def test_a_full_disk_costs_the_checkpoint_only(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(passes, "write_checkpoint", fail)
    model = make_model()
    settings = Settings(batch_tokens=100, checkpoint_minutes=0)
    failed = calibrate_model(model, make_text(model), settings=settings, partial=tmp_path / "out.partial")
    assert_same(failed, calibrate_model(model, make_text(model), settings=settings))


def test_plan():
    assert plan_passes(range(5), 10, 1000) == [(0, 1, 2, 3, 4)]
    assert plan_passes(range(5), 10, 29) == [(0,), (1, 2), (3, 4)]
    assert plan_passes([1, 2, 3, 4], 10, 20) == [(1, 2), (3, 4)]
    assert plan_passes([7], 10, 10) == [(7,)]
    with pytest.raises(ValueError, match=r"--memory 9e-09 GB: .* one layer take 1e-08 GB"):
        plan_passes([1], 10, 9)


def test_activations_that_are_not_finite():
    model = make_model()
    model.base_model.layers[1].mlp.experts.down_proj.data[:] = torch.inf
    with pytest.raises(ValueError, match=r"layer 1: .*not finite"):
        calibrate_model(model, make_text(model))


# The command


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A tiny random model with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-moe"
    make_model(vocab_size=98).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder)
    return folder


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    records = [{"prompt": f"{i}+{i}=", "answer": f"{2 * i}, that is {i} twice\n"} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def arguments(checkpoint, data, out, *more):
    return ["calibrate", "--model", str(checkpoint), "--data", str(data), "--out", str(out), "--length", "64", *more]


def test_command(tmp_path, checkpoint, data, capsys):
    out, again = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert main(arguments(checkpoint, data, out)) == 0
    captured = capsys.readouterr()
    assert "2 MoE layers of 16 experts, width 32" in captured.err
    assert "passes: 1" in captured.err
    card = load_predictor(out).card
    assert card.model_id == "tiny-moe"
    assert card.source.startswith("data.jsonl (sha256 ")
    assert str(tmp_path) not in out.read_bytes().decode(errors="ignore")
    assert f"{card.tokens:,}" in captured.out
    assert main(arguments(checkpoint, data, again)) == 0
    assert out.read_bytes() == again.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "data.jsonl"]

    small = tmp_path / "c.safetensors"
    assert (
        main(arguments(checkpoint, data, small, "--dtype", "bfloat16", "--memory", "1e-4", "--positions", "all")) == 0
    )
    assert "passes: 2" in capsys.readouterr().err
    assert load_predictor(small).card.pairs != card.pairs
    assert small.stat().st_size < out.stat().st_size


def test_command_on_mlx(tmp_path, data, capsys):
    pytest.importorskip("mlx.core")
    out = tmp_path / "mlx.safetensors"
    argv = ["calibrate", "--backend", "mlx", "--data", str(data), "--out", str(out), "--tokens", "1200"]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "4 MoE layers of 64 experts, width 192" in captured.err and "weights are cast to float32" in captured.err
    card = load_predictor(out).card
    embedded = load_predictor(predictor_path()).card
    assert (card.model_id, card.model_type, card.layers) == (embedded.model_id, embedded.model_type, embedded.layers)
    assert card.tokens == 1200 and len({sum(pairs) for pairs in card.pairs.values()}) == 1
    for more, message in (
        (["--device", "cuda"], "--device 'cuda' is for --backend torch"),
        (["--model-dtype", "float16"], "float32 only"),
    ):
        assert main([*argv, *more]) == 2
        assert message in capsys.readouterr().err


KILLED = """
import os, signal, sys
from calibrate import passes, statistics
from calibrate.cli import main
passes.CHECKPOINT_SHARE = 0
replace, writes = os.replace, 0
def killing(*args):
    global writes
    if str(args[1]).endswith(".partial"):
        writes += 1
        if writes == 4:
            os.kill(os.getpid(), signal.SIGKILL)
    replace(*args)
statistics.os.replace = killing
main(sys.argv[1:])
"""


def test_killed_and_resumed(tmp_path, checkpoint, data):
    """SIGKILL while the fourth checkpoint is being written, in the first of two passes."""
    out, whole = tmp_path / "out.safetensors", tmp_path / "whole.safetensors"
    options = ("--batch-tokens", "64", "--checkpoint-minutes", "0", "--memory", "1e-4")
    command_line = arguments(checkpoint, data, out, *options)
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *command_line], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert killed.returncode == -9, killed.stderr.decode()
    partial = tmp_path / "out.safetensors.partial"
    state = read_state(partial)
    assert (state["pass"], state["batch"]) == (0, 3)
    assert not out.exists()

    assert main(command_line) == 2  # an unfinished calibration is not overwritten
    assert read_state(partial) == state
    assert main([*command_line, "--resume"]) == 0
    assert main(arguments(checkpoint, data, whole, *options)) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.jsonl", "out.safetensors", "whole.safetensors"]


def test_unfinished_calibration_is_named(tmp_path, checkpoint, data, capsys):
    out = tmp_path / "out.safetensors"
    (tmp_path / "out.safetensors.partial").write_bytes(b"")
    assert main(arguments(checkpoint, data, out)) == 2
    assert "add --resume" in capsys.readouterr().err
    assert main(arguments(checkpoint, data, out, "--resume")) == 2
    assert "no whole calibration checkpoint" in capsys.readouterr().err


def test_bad_input_is_refused_before_the_model_is_loaded(tmp_path, checkpoint, data, capsys, monkeypatch):
    def unexpected(*_):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(torch_pass.TorchCheckpoint, "load", unexpected)
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text("")
    short.write_text("short")
    dense, bare = tmp_path / "dense", tmp_path / "bare"
    LlamaConfig(vocab_size=98, hidden_size=32, num_hidden_layers=1).save_pretrained(dense)
    bare.mkdir()
    shutil.copy(checkpoint / "config.json", bare)
    out = tmp_path / "out.safetensors"
    cases = [
        (arguments(checkpoint, data, out, "--tokens", "0"), "--tokens 0 must be above 0"),
        (arguments(checkpoint, data, out, "--memory", "-1"), "--memory -1.0 must be above 0"),
        (arguments(checkpoint, data, out, "--memory", "1e-6"), "statistics of one layer take"),
        (arguments(checkpoint, data, out, "--device", "abacus"), "--device 'abacus'"),
        (arguments(checkpoint, data, out, "--device", "meta"), "--device 'meta'"),
        (arguments(checkpoint, data, out, "--length", "300"), "above the model's 256 positions"),
        (arguments(checkpoint, data, out, "--tokens", "10"), "too little text: "),
        (arguments(checkpoint, short, out), "give at least 64"),
        (arguments(checkpoint, empty, out), "empty.txt' is empty"),
        (arguments(checkpoint, tmp_path / "none.txt", out), "none.txt' cannot be read"),
        (arguments(checkpoint, data, tmp_path / "none" / "out"), "folder does not exist"),
        (arguments(checkpoint, data, tmp_path), "is a folder"),
        (arguments(tmp_path / "none", data, out), "cannot be loaded"),
        (arguments(dense, data, out), "model_type 'llama'"),
        (arguments(bare, data, out), "has no tokenizer"),
    ]
    for argv, message in cases:
        assert main(argv) == 2, argv
        error = capsys.readouterr().err.strip()
        assert message in error.splitlines()[-1], (argv, error)
    assert not out.exists()


def test_a_foreign_tokenizer(tmp_path, checkpoint, data, capsys):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 40}))
    assert main(arguments(folder, data, tmp_path / "out")) == 2
    assert "do not belong together" in capsys.readouterr().err


def test_defaults_are_the_settings():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--data", "x", "--out", "y"])
    assert (args.batch_tokens, args.checkpoint_minutes) == (Settings().batch_tokens, Settings().checkpoint_minutes)
    assert not args.unweighted and Settings().weighted
