"""Scales against worked sums and a least-squares solver, tuning against known curves, and the ablation as a whole."""

import numpy as np
import pytest

from backends.cuda.families import find_moe_layers
from base_core import Budget
from base_core.embedded import model_path, predictor_path
from base_core.embedded.tasks import evaluation_examples
from base_core.policies import Step
from base_core.routing import Routing
from base_core.selection import Selection
from calibrate.evaluation import ablations_budget as ablation
from calibrate.evaluation.document import to_markdown
from calibrate.evaluation.engine import Decoding, deal
from calibrate.evaluation.prompt_file import Prompt
from calibrate.evaluation.scaling import fit_scales, read_scales, scale_restricted, write_scales
from calibrate.evaluation.subject import Subject
from calibrate.evaluation.units import Store, run_units
from calibrate.evaluation.variants import Variant, read_layers, write_layers
from tests.calibrate.evaluation.test_engine import MOST, make_engine, rule


def test_only_restricted_rows_are_scaled():
    scores = np.full((3, 4), 0.25, np.float32)
    native = Routing(scores, scores, np.array([[0, 1], [0, 2], [0, 1]]), np.full((3, 2), 0.5, np.float32))
    chosen = Selection(
        np.array([[0, 1], [0, 1], [0, 1]]),
        np.array([[0.5, 0.5], [0.5, 0.5], [0.5, 0.25]], np.float32),
        np.array([True, True, False, False]),
        np.ones(4, np.float32),
    )
    scaled = scale_restricted(chosen, Step(native, np.ones(3, int)), 1.5)
    np.testing.assert_array_equal(scaled.weights, np.float32([[0.5, 0.5], [0.75, 0.75], [0.75, 0.375]]))
    assert scaled.ids is chosen.ids and scaled.weights.dtype == np.float32


def test_written_forms_come_back():
    assert read_scales(write_scales({3: 0.98765, 1: 1.0})) == {1: 1.0, 3: 0.9877} and read_scales("") == {}
    assert write_layers({3: 12, 0: 9}) == "layers:0=9,3=12"
    assert read_layers("layers:0=9,3=12") == Budget(layers={0: Budget(experts=9), 3: Budget(experts=12)})


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v2"])
def test_factor_is_the_least_squares_one(model_type):
    """Against numpy's solver on the outputs of one layer, gathered apart; 1 where nothing is restricted."""
    model, prompts, engine = make_engine(model_type)
    layer = find_moe_layers(model)[-1]
    native, executed, wanted = [], [], []

    def keep(router, args, output):
        native.append((output[2], output[1]))

    def gather(experts, args, output):
        ids, weights = native[-1]
        changed = (args[1] != ids).any(1)
        executed.append(output[changed].numpy())
        wanted.append(experts.forward(args[0], ids, weights)[changed].numpy())

    handles = [layer.router.register_forward_hook(keep), layer.experts.register_forward_hook(gather)]
    queues = deal(len(prompts), 2)
    scales = fit_scales(
        engine.layers, lambda: engine.decode(rule(model, Variant("base", "2")), Decoding(4, MOST), queues)
    )
    for handle in handles:
        handle.remove()
    b, y = (np.concatenate(parts).astype(np.float64).reshape(-1, 1) for parts in (executed, wanted))
    expected = float(np.linalg.lstsq(b, y[:, 0], rcond=None)[0][0])
    assert scales[layer.index] == pytest.approx(expected, rel=1e-4) and abs(expected - 1) > 1e-3
    dense = fit_scales(engine.layers, lambda: engine.decode(rule(model, Variant("dense")), Decoding(4, MOST), queues))
    assert set(dense.values()) <= {1.0} or dense == pytest.approx(dict.fromkeys(dense, 1.0), abs=1e-6)


def test_meet_finds_where_a_falling_curve_meets_the_target():
    tried = []

    def curve(x):
        tried.append(x)
        return 10 - 8 * x

    assert 10 - 8 * ablation.meet(curve, 1e-6, 1, (10, 2), 6) == pytest.approx(6, rel=ablation.MATCHED)
    assert len(tried) < ablation.MOST_TRIES
    # A staircase that no step of meets the target: the best of what was tried.
    assert round(5 / ablation.meet(lambda x: round(5 / x), 0.1, 10, (50, 0.5), 7.4)) == 7


@pytest.fixture(scope="module")
def subject():
    prompts = [Prompt(e.prompt, e.answer, e.task) for e in evaluation_examples(32)]
    return Subject("m", model_path(), predictor_path(), prompts, max_tokens=4, dtype="float32")


def test_the_whole_ablation_and_going_on_with_it(subject, tmp_path, monkeypatch):
    monkeypatch.setattr(ablation, "TIGHT", (1 / 16,))
    monkeypatch.setattr(ablation, "LOOSE", ())
    monkeypatch.setattr(ablation, "WEIGHINGS", ("share",))
    few = ablation.calibration_prompts(32)
    monkeypatch.setattr(ablation, "calibration_prompts", lambda: few)
    assert ablation.sizes(64) == {4: True}
    assert not {p.text for p in few} & {p.text for p in subject.prompts}
    store = Store(tmp_path / "rows", subject.identity(), resume=True)
    places = ablation.tune_all(subject, store)
    chosen = {own.name: own.unit.variant for own in places}
    assert list(chosen) == ["uniform", "plan by share", "energy", "share", "renormalise", "scaled"]
    target = ablation.active_mean(subject, chosen["uniform"])
    for name in ("energy", "share"):
        assert ablation.active_mean(subject, chosen[name]) == pytest.approx(target, rel=0.02), name
        assert chosen[name].budget.startswith(f"{name}:0.")
    assert sum(budget.experts for budget in read_layers(chosen["plan by share"].budget).layers.values()) == 16
    assert all(0.5 < factor < 2 for factor in read_scales(chosen["scaled"].options["scale"]).values())

    def fail(*args):
        raise AssertionError("what is there was done again")

    with monkeypatch.context() as patch:
        patch.setattr(ablation, "variants", fail)
        assert ablation.tune_all(subject, store) == places
    rows = ablation.ablation_rows(places, run_units(subject, [own.unit for own in places], store))
    by_name = {own.name: own.row for own in rows}
    uniform = by_name["uniform"]
    assert uniform["active_max"] == 4 < min(by_name[name]["active_max"] for name in ("energy", "share"))
    for name in ("renormalise", "scaled"):
        assert by_name[name]["layer_error"] != uniform["layer_error"]
    # What the factors minimise is measured here on other prompts and other inputs of later layers.
    assert by_name["scaled"]["layer_error"] < uniform["layer_error"] * 1.02
    text = to_markdown(ablation.section({"m": rows}))
    assert "| **uniform, M=4 (tight)** |" in text and "scaled: tight, ahead " in text


def test_sizes_of_the_report():
    assert ablation.sizes(64) == {4: True, 8: True, 16: False, 24: False}
