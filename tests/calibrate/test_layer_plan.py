"""Plans: the greedy allocation against every other, curves against a worked batch, and the command."""

import itertools
import json
from typing import ClassVar

import numpy as np
import pytest

from base_core import Budget, LayerPredictor, load_plan
from base_core.embedded import model_path, predictor_path
from base_core.embedded.tasks import evaluation_examples
from base_core.policies import Step
from base_core.routing import Routing
from calibrate.cli import main
from calibrate.evaluation.prompt_file import Prompt
from calibrate.evaluation.subject import Subject
from calibrate.layer_plan import WEIGHINGS, CurveRecorder, allocate, divergence_weights, plan_of, record_damage

PLAN = ["plan", "--prompts", "16", "--max-tokens", "5"]


def random_curves(rng, layers, experts):
    """Convex and falling to 0, as the shares of sorted costs are."""
    curves = {}
    for layer in range(layers):
        cost = np.sort(rng.exponential(size=experts) ** 3)[::-1]
        curves[3 * layer] = rng.uniform(0.1, 10) * (1 - np.concatenate(([0], np.cumsum(cost) / cost.sum())))
    return curves


@pytest.mark.parametrize("seed", range(5))
def test_greedy_equals_the_best_of_all_allocations(seed):
    layers, experts = 3, 5
    curves = random_curves(np.random.default_rng(seed), layers, experts)
    every = list(itertools.product(range(1, experts + 1), repeat=layers))
    for total in range(layers, layers * experts + 1):
        least = min(
            sum(curve[n] for curve, n in zip(curves.values(), given, strict=True))
            for given in every
            if sum(given) == total
        )
        given = allocate(curves, total)
        assert sum(given.values()) == total and all(1 <= n <= experts for n in given.values())
        assert sum(curves[layer][n] for layer, n in given.items()) == pytest.approx(least, abs=1e-12)


def test_allocation_by_hand():
    curves = {0: np.array([1, 0.5, 0.2, 0.1, 0]), 4: np.array([1, 0.9, 0.8, 0.7, 0.6]), 5: np.array([1.0, 0.0])}
    # Gains beyond the first expert: layer 0 has 0.3, 0.1, 0.1 and layer 4 has 0.1 each; layer 5 is full.
    assert allocate(curves, 3) == {0: 1, 4: 1, 5: 1}
    assert allocate(curves, 4) == {0: 2, 4: 1, 5: 1}
    assert allocate(curves, 9) == {0: 4, 4: 4, 5: 1}
    for total in (2, 10):
        with pytest.raises(ValueError, match="give 3 to 9"):
            allocate(curves, total)


class Equal:
    """Every expert as energetic as any other."""

    layers: ClassVar = {
        7: LayerPredictor(np.zeros((4, 2), np.float32), np.zeros(4, np.float32), np.ones(4, np.float32))
    }


def test_curves_by_hand():
    recorder = CurveRecorder(Equal())
    scores = np.full((3, 4), 0.25, np.float32)
    ids = np.array([[0, 1], [1, 2], [0, 3]])
    weights = np.array([[1, 2], [1, 1], [9, 9]], np.float32)
    routing = Routing(scores, scores, ids, weights)
    z = np.ones((3, 2), np.float32)
    for rows in ([1, 1, 0], [1, 0, 0], [0, 0, 0]):
        out = recorder(7, Step(routing, np.array(rows), log_energy=recorder.log_energy(7, z, None)))
        left = np.array(rows) == 1
        np.testing.assert_array_equal(out.ids[left], ids[left])
        np.testing.assert_array_equal(out.weights[left], weights[left])
    # Costs are 1, 5, 1, 0 and 1, 4, 0, 0; a step of padding alone does not count.
    first, second = np.array([7, 2, 1, 0, 0]) / 7, np.array([5, 1, 0, 0, 0]) / 5
    np.testing.assert_allclose(recorder.curves[7], (first + second) / 2, atol=1e-6)
    assert recorder.mean_cost == pytest.approx({7: 6.0})


def test_weights_by_divergence_starve_no_layer():
    found = divergence_weights({0: 0.3, 1: 0.1, 2: 0.0, 3: 0.5}, {0: 0.1, 1: 0.1, 2: 0.2, 3: 0.0})
    assert found == pytest.approx({0: 3, 1: 1, 2: 0.01 * 4 / 3, 3: 4 / 3})
    assert divergence_weights({0: 0.0, 1: 0.0}, {0: 0.1, 1: 0.0}) == {0: 1, 1: 1}


def test_mixed_is_the_geometric_mean_of_share_and_kl():
    prompts = [Prompt(e.prompt, e.answer, e.task) for e in evaluation_examples(32)]
    subject = Subject("m", model_path(), predictor_path(), prompts, max_tokens=4, dtype="float32")
    damage = record_damage(subject, 16, 4, WEIGHINGS)
    assert list(damage) == list(WEIGHINGS)
    for layer, mixed in damage["mixed"].items():
        np.testing.assert_allclose(mixed**2, damage["share"][layer] * damage["kl"][layer], rtol=1e-9, atol=1e-12)
    (alone,) = record_damage(subject, 16, 4).values()
    for layer, mixed in damage["mixed"].items():
        np.testing.assert_allclose(alone[layer], mixed, rtol=1e-9)


@pytest.mark.parametrize("by", WEIGHINGS)
def test_the_command_writes_a_plan_of_the_asked_total(by, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main([*PLAN, "--by", by, "--experts", "6.5", "--out", str(path)]) == 0
    table = capsys.readouterr().out
    plan = load_plan(path)
    given = {layer: budget.experts for layer, budget in plan.layers.items()}
    assert plan == plan_of(given) == Budget.parse(f"plan:{path}")
    assert sum(given.values()) == round(6.5 * len(given)) and min(given.values()) >= 1
    damage, uniform = (float(table.split("\nall")[1].split()[i]) for i in (1, 3))
    assert 0 < damage <= uniform


def test_a_plan_is_a_budget_of_other_commands(tmp_path):
    path, text, out = tmp_path / "plan.json", tmp_path / "p.jsonl", tmp_path / "out.json"
    text.write_text("\n".join(json.dumps({"prompt": e.prompt}) for e in evaluation_examples(8)))
    assert main([*PLAN, "--prompts-file", str(text), "--by", "share", "--experts", "4", "--out", str(path)]) == 0
    argv = ["generate", "--prompts", str(text), "--max-tokens", "3", "--budget", f"plan:{path}", "--json", str(out)]
    assert main(argv) == 0
    assert 1 <= json.loads(out.read_text())["stats"]["active_mean"] <= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--experts", "0.5"], "outside 1..64"),
        (["--experts", "65"], "outside 1..64"),
        (["--experts", "4", "--batch", "0"], "--batch 0 must be at least 1"),
        (["--experts", "4", "--out", "/nowhere/plan.json"], "its folder does not exist"),
        (["--experts", "4", "--model", "/some/model"], "needs a predictor"),
        (["--experts", "4", "--model", "/some/model", "--predictor", "/p"], "needs prompts"),
    ],
)
def test_bad_options(options, message, tmp_path, capsys):
    assert main([*PLAN, "--out", str(tmp_path / "plan.json"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "plan.json").exists()
