"""The predictor's study: statistics by part, the shared basis and storage against computations of their own."""

import numpy as np
import pytest
import torch

from base_core.artifact import from_bfloat16, from_int8, to_bfloat16, to_int8
from base_core.embedded.tasks import TASKS
from calibrate.evaluation import ablations_predictor as study
from calibrate.evaluation.ablations_predictor import Settings, judge, run_predictors, section
from calibrate.evaluation.document import to_markdown
from calibrate.evaluation.metrics import evaluate
from calibrate.evaluation.subject import MIXED
from calibrate.evaluation.units import Store
from calibrate.ridge import fit_layer
from calibrate.statistics import LayerStatistics
from calibrate.torch_pass import collecting
from tests.calibrate.evaluation.tiny_subject import make_subject

SMALL = Settings(tokens=8192, length=64, prompts=32, shares=(0.25, 1.0), ranks=(2,))
EPS = 0.0  # as the tiny predictor's card says


@pytest.fixture(scope="module")
def subject():
    return make_subject(32)


@pytest.fixture(scope="module")
def gathered(subject):
    return study.gather(subject, SMALL)


def gathered_apart(subject, chosen, weighted):
    """Statistics of rows chosen one by one: (ids, positions, counted) each, through the calibration's own pass."""
    layers = subject.engine.layers
    found = {layer.index: LayerStatistics(layer.num_experts, layer.hidden_size) for layer in layers}
    with collecting(subject.model, found, eps=EPS, weighted=weighted) as run:
        for ids, positions, counted in chosen:
            run((ids[None], positions[None], counted[None]))
    return found


def assert_same(found, expected):
    for i, own in expected.items():
        assert torch.equal(found[i].pairs, own.pairs) and int(own.pairs.sum()) > 0
        for name, tensor in own.tensors().items():
            torch.testing.assert_close(found[i].tensors()[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


def test_every_part_is_what_its_tokens_give_alone(subject, gathered):
    text = study.read_text(subject.tokenizer, SMALL)
    R = min(len(rows.ids) for rows, _ in text.values())

    def rows(tasks, prompts=False, most=R):
        return [
            (s.ids[r], s.positions[r], marks[r] if prompts else s.counted[r])
            for s, marks in (text[task] for task in tasks)
            for r in range(most)
        ]

    for part, chosen, weighted in (
        ("sort", rows(["sort"]), True),
        (study.PROMPT_PART, rows(TASKS, prompts=True), True),
        (study.ALIKE_PART, rows(TASKS), False),
    ):
        assert_same(gathered.parts[part], gathered_apart(subject, chosen, weighted))
        assert gathered.tokens[part] == sum(int(counted.sum()) for _, _, counted in chosen)
    whole = gathered_apart(subject, rows(TASKS), True)
    assert_same(study.total(gathered.parts[task] for task in TASKS), whole)

    (few, first), (most, last) = gathered.curve
    quarter = rows(TASKS, most=round(R / 4))
    assert few == sum(int(counted.sum()) for _, _, counted in quarter) < most == gathered.tokens[study.ALIKE_PART]
    for statistics, predictor in ((gathered_apart(subject, quarter, True), first), (whole, last)):
        for i, own in statistics.items():
            expected = fit_layer(own).predictor
            np.testing.assert_allclose(predictor.layers[i].bias, expected.bias, rtol=1e-3, atol=1e-3)
            np.testing.assert_allclose(predictor.layers[i].weight, expected.weight, rtol=1e-3, atol=1e-3)


def test_marks_of_prompts_and_answers(subject):
    """Row by row of the first task: every token is of a prompt, counted, an answer's last one, or filling."""
    answers, prompts = study.read_text(subject.tokenizer, SMALL)[TASKS[0]]
    assert not (answers.counted & prompts).any()
    flat_ids, flat_prompts = answers.ids.flatten()[: answers.tokens], prompts.flatten()[: answers.tokens]
    place = 0
    for example, _ in zip(study.examples(study.TEXT_SEED, TASKS[0]), range(20), strict=False):
        for text, is_prompt in ((example.prompt, True), (example.answer + study.STOP, False)):
            ids = subject.tokenizer(text)["input_ids"]
            assert flat_ids[place : place + len(ids)].tolist() == ids
            assert (flat_prompts[place : place + len(ids)] == is_prompt).all()
            place += len(ids)


def random_statistics(seed, E=3, d=6, T=400, k=2):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(T, d)) @ np.diag([4, 2, 1, 0.5, 0.2, 0.1]) + rng.normal(size=d)
    ids = np.stack([rng.permutation(E)[:k] for _ in range(T)])
    energy, weights = rng.random((T, k)) + 0.1, rng.random((T, k)) + 0.1
    own = LayerStatistics(E, d)
    own.add(z.astype(np.float32), ids, energy, weights, EPS)
    return own, z / np.linalg.norm(z, axis=1, keepdims=True), ids, weights


def test_moments_of_inputs():
    layers = {i: random_statistics(i) for i in (0, 3)}
    means = study.input_means({i: own for i, (own, *_) in layers.items()})
    covariances = []
    for i, (_, x, ids, weights) in layers.items():
        spread, mass = np.zeros((6, 6)), 0.0
        for e in range(3):
            rows, slots = np.nonzero(ids == e)
            w = weights[rows, slots]
            mean = np.average(x[rows], axis=0, weights=w)
            np.testing.assert_allclose(means[i][e], mean, atol=1e-6)
            spread += (w[:, None] * (x[rows] - mean)).T @ (x[rows] - mean)
            mass += w.sum()
        covariances.append(spread / mass)
    found = study.input_covariance({i: own for i, (own, *_) in layers.items()})
    np.testing.assert_allclose(found, np.mean(covariances, axis=0), atol=1e-6)


@pytest.mark.parametrize("by_predictions", [False, True])
def test_shared_basis_is_the_best_of_its_rank(subject, gathered, by_predictions):
    """Its squared error is the tail of the singular values, of the rows or of what they predict (Eckart and Young)."""
    predictor, rank = subject.predictor, 5
    statistics = study.total(gathered.parts[task] for task in TASKS)
    means = study.input_means(statistics)
    covariance = study.input_covariance(statistics) if by_predictions else None
    found = study.shared_basis(predictor, rank, means, covariance)
    stacked, low = (
        np.concatenate([p.layers[i].weight for i in p.layers]).astype(np.float64) for p in (predictor, found)
    )
    assert np.linalg.matrix_rank(low, tol=1e-4) == rank
    metric = np.eye(stacked.shape[1]) if covariance is None else covariance
    error = np.trace((stacked - low) @ metric @ (stacked - low).T)
    values = np.sqrt(np.maximum(np.linalg.eigvalsh(stacked @ metric @ stacked.T), 0))[::-1]
    assert error == pytest.approx((values[rank:] ** 2).sum(), rel=1e-3)
    for i, layer in found.layers.items():
        old = predictor.layers[i]
        np.testing.assert_allclose(
            (layer.weight * means[i]).sum(1) + layer.bias, (old.weight * means[i]).sum(1) + old.bias, atol=1e-4
        )
    whole = study.shared_basis(predictor, stacked.shape[1], means, covariance)
    for i, layer in whole.layers.items():
        np.testing.assert_allclose(layer.weight, predictor.layers[i].weight, atol=1e-3)
        np.testing.assert_allclose(layer.bias, predictor.layers[i].bias, atol=1e-3)


def test_storage(subject):
    steps = study.stored(subject.predictor, "int8")
    for i, layer in subject.predictor.layers.items():
        np.testing.assert_array_equal(steps.layers[i].weight, from_int8(*to_int8(layer.weight)))
    half = study.stored(subject.predictor, "bfloat16")
    for i, layer in subject.predictor.layers.items():
        np.testing.assert_array_equal(half.layers[i].weight, from_bfloat16(to_bfloat16(layer.weight)))
        np.testing.assert_array_equal(half.layers[i].bias, layer.bias)


def test_judgement_is_the_evaluations(subject):
    """The same figure as an evaluated unit's; the true energies as a predictor would give 1, others less."""
    queues = subject.queues(16, MIXED, 32)
    expected = evaluate(
        subject.engine, subject.rule(study.VARIANT), subject.decoding(16), queues, subject.reference(), None
    )
    row = judge(subject, subject.predictor, 32)
    assert row["retained_energy"] == pytest.approx(expected["retained_energy"]) and row["retained_energy"] < 1
    assert row["active_mean"] == pytest.approx(expected["active_forced"])
    better = judge(subject, study.gather(subject, SMALL).curve[-1][1], 32)
    assert better["retained_energy"] > row["retained_energy"], "fitted against random"


def test_one_tasks_prompts_are_judged_alone(subject):
    seen = []
    decode = subject.engine.decode

    def watch(rule, decoding, queues, **options):
        seen.extend(prompt for queue in queues for prompt in queue)
        return decode(rule, decoding, queues, **options)

    subject.engine.decode = watch
    try:
        judge(subject, subject.predictor, 24, "sort")
    finally:
        del subject.engine.decode
    assert sorted(seen) == [i for i in range(24) if subject.prompts[i].task == "sort"] != []


def test_the_whole_study_and_going_on_with_it(subject, tmp_path, monkeypatch):
    store = Store(tmp_path / "rows", subject.identity(), resume=False)
    rows = run_predictors(subject, SMALL, store)
    by_label = {row["label"]: row for row in rows}
    last = by_label["by routing weight"]
    assert last["retained_energy"] == by_label["1 of the text"]["retained_energy"]
    assert last["retained_energy"] > by_label["shipped"]["retained_energy"], "which is random here"
    assert by_label["0.25 of the text"]["tokens"] < last["tokens"]
    E, d, L = 16, 32, 2
    assert by_label["rank 2"]["bytes"] == (2 * d / L + E * 2) * 4 and by_label["int8"]["bytes"] == E * d + E * 4
    without = by_label["without the task, judged on it"]
    assert set(without["by_task"]) == set(TASKS)
    assert without["retained_energy"] == pytest.approx(np.mean(list(without["by_task"].values())))
    seen = by_label["all tasks, judged by task"]
    assert without["by_task"] != seen["by_task"] and without["tokens"] < seen["tokens"] == last["tokens"]
    text = to_markdown(section({"tiny": rows}))
    assert f"| pairs: by routing weight | {last['tokens']:,} |" in text and "below the 98.0 % aimed at" in text

    def fail(*_):
        raise AssertionError("the text was run through again")

    monkeypatch.setattr(study, "gather", fail)
    assert run_predictors(subject, SMALL, store) == rows


def test_a_task_left_out_is_not_in_the_fit(subject, gathered):
    make = study.Predictors(subject, SMALL)
    make.__dict__["gathered"] = gathered
    for i, own in study.total(gathered.parts[task] for task in TASKS if task != "count").items():
        np.testing.assert_array_equal(make.without("count").layers[i].weight, fit_layer(own).predictor.weight)
        assert int(own.pairs.sum()) < sum(int(gathered.parts[task][i].pairs.sum()) for task in TASKS)


def test_refuses_a_subject_without_predictor(subject, monkeypatch):
    monkeypatch.setattr(subject, "predictor", None)
    with pytest.raises(ValueError, match="--predictor"):
        run_predictors(subject)
