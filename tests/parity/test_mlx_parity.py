"""The MLX twin against the NumPy reference."""

from __future__ import annotations

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from backends.mlx.selection import select_no_sync  # noqa: E402
from base_core import Budget, select  # noqa: E402


@st.composite
def cases(draw):
    E = draw(st.sampled_from([1, 2, 5, 8, 60, 64, 128]))
    k = draw(st.integers(1, min(E, 10)))
    T = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([0, 3, 4096]))
    scores = rng.random((T, E)) if not levels else (rng.integers(0, levels, (T, E)) + 1) / levels
    scores = (scores * draw(st.sampled_from([1e-4, 1.0]))).astype(np.float32)
    if draw(st.booleans()):
        scores[:] = scores[0]
    preference = scores.copy()
    if draw(st.booleans()):
        preference += rng.normal(size=E).astype(np.float32)
    ids = np.argsort(-preference, axis=1, kind="stable")[:, :k]
    ids = rng.permuted(ids, axis=1).astype(np.uint32)
    weights = np.take_along_axis(scores, ids.astype(np.int64), axis=1) * np.float32(rng.uniform(0.5, 2))
    forbidden = rng.random((T, E)) < draw(st.sampled_from([0.0, 0.5]))
    np.put_along_axis(forbidden, ids.astype(np.int64), False, axis=1)
    preference = np.where(forbidden, -np.inf, preference).astype(np.float32)
    energy = rng.normal(scale=draw(st.sampled_from([0.0, 1.0, 100.0])), size=(T, E)).astype(np.float32)
    if draw(st.integers(0, 19)) == 0:
        energy[0, int(ids[0, 0])] = np.nan
    rows = rng.choice(draw(st.sampled_from([(1,), (0, 1), (0,), (0, 1, 2)])), T).astype(np.int32)
    budget = draw(
        st.one_of(
            st.integers(1, E).map(str),
            st.sampled_from(["10%", "50%", "100%", "energy:0.5", "energy:0.9", "energy:1"]),
            st.integers(1, E).map(lambda n: f"energy:0.8,max={n}"),
            st.sampled_from(["share:0.001", "share:0.03", "share:0.2", "share:1", "share:0.02,max=1"]),
        )
    )
    ranking = draw(st.sampled_from(["removal_cost", "static_energy", "weight_sum", "squared_weight", "top1_union"]))
    energies = energy[0] if ranking == "static_energy" else energy
    fill = draw(st.sampled_from(["backfill", "drop"]))
    denominator = draw(st.sampled_from(["native", "renormalise"]))
    return scores, ids, weights, energies, Budget.parse(budget), preference, rows, ranking, fill, denominator


def undecided(cost: np.ndarray, budget: Budget) -> bool:
    """True when float rounding may decide which experts stay: equal costs are a tie, not a near-tie."""
    if not np.isfinite(cost).all():
        return False
    ranked = np.sort(cost.astype(np.float64))[::-1]
    gaps = ranked[:-1] - ranked[1:]
    if ((gaps > 0) & (gaps <= 2e-5 * ranked[:-1])).any():
        return True
    if budget.floor is not None:
        bar = budget.floor * ranked.sum()
        return bool((np.abs(ranked - bar) <= 2e-5 * bar).any())
    if budget.tau is None or budget.tau == 1:
        return False
    running = np.cumsum(ranked)
    return bool((np.abs(running - budget.tau * running[-1]) <= 2e-5 * running[-1]).any())


@settings(max_examples=300, deadline=None)
@given(cases())
def test_select_twin_equals_reference(case):
    scores, ids, weights, energy, budget, preference, rows, ranking, fill, denominator = case
    choices = dict(ranking=ranking, fill=fill, denominator=denominator)
    expected = select(scores, ids, weights, energy, budget, preference=preference, rows=rows, **choices)
    got = select_no_sync(
        *map(mx.array, (scores, ids, weights, energy)),
        mx.array(budget.limit(scores.shape[1])),
        tau=budget.tau,
        floor=budget.floor,
        preference=mx.array(preference),
        rows=mx.array(rows),
        **choices,
    )
    cost = np.array(got.cost)
    np.testing.assert_allclose(cost, expected.cost, rtol=1e-5)
    assert got.fell_back.item() == expected.fell_back
    if undecided(expected.cost, budget) and not np.array_equal(np.array(got.active), expected.active):
        return
    np.testing.assert_array_equal(np.array(got.active), expected.active)
    np.testing.assert_array_equal(np.array(got.ids), expected.ids)
    np.testing.assert_allclose(np.array(got.weights), expected.weights, rtol=2e-6, atol=1e-12)
    assert np.isin(np.array(got.ids), np.flatnonzero(expected.active)).all() or not expected.active.any()


BUDGETS = (
    "off",
    "64",
    "16",
    "8",
    "5",
    "3",
    "1",
    "50%",
    "energy:0.9",
    "energy:0.5,max=6",
    "share:0.03",
    "share:0.01,max=8",
)


@pytest.fixture(scope="module")
def embedded_predictor(tmp_path_factory):
    """A random predictor for the embedded model: rougher on the decisions than a calibrated one."""
    pytest.importorskip("torch")
    from backends.mlx.families import describe
    from backends.mlx.generate import load
    from base_core import Card, LayerPredictor, Predictor, save_predictor
    from base_core.embedded import model_path

    facts = describe(load(model_path(), "float32")[0])
    rng = np.random.default_rng(0)
    E, d = facts["num_experts"], facts["hidden_size"]
    layers = {
        i: LayerPredictor(
            rng.normal(size=(E, d)).astype(np.float32), rng.normal(size=E).astype(np.float32), np.ones(E, np.float32)
        )
        for i in facts["layers"]
    }
    path = tmp_path_factory.mktemp("parity") / "predictor.safetensors"
    save_predictor(path, Predictor(Card(model_id="embedded", **facts), layers))
    return path


@pytest.mark.parametrize("budget", BUDGETS)
def test_batches_equal_pytorch(budget, embedded_predictor):
    """Batches that shrink as rows end: the same tokens, and the same experts read and chosen."""
    from base_core.embedded import model_path

    assert_batches_equal(model_path(), embedded_predictor, budget)


@pytest.mark.parametrize("budget", ("off", "60", "12", "6", "2", "energy:0.9"))
@pytest.mark.parametrize("name", ("qwen2_moe", "deepseek_v2"))
def test_batches_of_other_architectures_equal_pytorch(name, budget):
    from base_core.embedded import model_path, predictor_path

    assert_batches_equal(model_path(name), predictor_path(name), budget)


def assert_batches_equal(model, predictor, budget):
    from backends.cuda.generate import generate_texts as torch_texts
    from backends.mlx.generate import generate_texts as mlx_texts
    from base_core.embedded.tasks import evaluation_examples

    prompts = [example.prompt for example in evaluation_examples(16)]
    arguments = (model, predictor, budget, prompts)
    ours, theirs = (f(*arguments, batch=8, max_tokens=12, dtype="float32") for f in (mlx_texts, torch_texts))
    assert ours.texts == theirs.texts
    assert ours.token_counts == theirs.token_counts
    for name in ("steps", "active_mean", "union_mean", "fallbacks"):
        assert getattr(ours.stats, name) == getattr(theirs.stats, name), name


@pytest.mark.filterwarnings("ignore:audit")
@pytest.mark.parametrize(("name", "budget"), [("qwen3_moe", "8"), ("qwen2_moe", "6"), ("deepseek_v2", "energy:0.9")])
@pytest.mark.parametrize(("every", "correct"), [(1, False), (3, False), (1, True)])
def test_audits_equal_pytorch(name, budget, every, correct):
    """One batch that shrinks as rows end: the same steps and pairs, and the same figures within float tolerance."""
    from backends.cuda import generate as theirs
    from backends.mlx import generate as ours
    from base_core.embedded import model_path, predictor_path
    from base_core.embedded.tasks import evaluation_examples

    prompts = [example.prompt for example in evaluation_examples(16)]
    audits = []
    for backend in (ours, theirs):
        policy = backend.Policy(audit=every, audit_correct=correct)
        options = dict(batch=16, max_tokens=12, dtype="float32", policy=policy)
        generated = backend.generate_texts(model_path(name), predictor_path(name), budget, prompts, **options)
        audits.append((generated.texts, generated.stats.audit))
    (texts, got), (expected_texts, expected) = audits
    assert texts == expected_texts
    assert got.steps == expected.steps > 1
    for a, b in zip(got.layers, expected.layers, strict=True):
        assert (a.layer, a.pairs) == (b.layer, b.pairs)
        assert a.drift == pytest.approx(b.drift, abs=1e-4) and a.rms == pytest.approx(b.rms, abs=1e-4)
        assert a.kept_energy == pytest.approx(b.kept_energy, abs=1e-4)


class TorchDecoder:
    """Greedy decoding of one sequence with the PyTorch path, step for step as mlx-lm schedules it."""

    def __init__(self, model, cache=None):
        from transformers import DynamicCache

        self.model, self.cache = model, cache or DynamicCache(config=model.config)

    def feed(self, tokens):
        import torch

        with torch.inference_mode():
            output = self.model(input_ids=torch.tensor([tokens]), cache=self.cache, use_cache=True)
        return output.logits[0].argmax(-1).tolist()

    def drop(self, count):
        if count:
            self.cache.crop(-count)

    def generate(self, session, prompt, most, ends):
        import torch

        tokens = [self.feed(prompt)[-1]]
        while len(tokens) < most and tokens[-1] not in ends:
            tokens.append(self.feed(tokens[-1:])[-1])
        # mlx-lm decodes the last token into its cache too; here an end token would pass for a finished row.
        session.set_rows(torch.ones(1, dtype=torch.int32))
        self.feed(tokens[-1:])
        session.set_rows(None)
        return tokens

    def speculate(self, draft, prompt, most, ends, drafts):
        self.feed(prompt[:-1])
        draft.feed(prompt[:-1])
        tokens, last, unseen = [], prompt[-1], [prompt[-1]]
        while True:
            count = min(most - len(tokens), drafts)
            guesses = []
            for _ in range(count):
                guesses.append(draft.feed(unseen)[-1])
                unseen = guesses[-1:]
            checked = self.feed([last, *guesses])
            accepted = next((i for i in range(count) if checked[i] != guesses[i]), count)
            for token in checked[: accepted + 1]:
                tokens.append(token)
                if token in ends or len(tokens) == most:
                    return tokens
            self.drop(count - accepted)
            draft.drop(max(count - accepted - 1, 0))
            last = checked[accepted]
            unseen = [guesses[-1], last] if accepted == count else [last]


@pytest.fixture(autouse=True)
def one_thread():
    """Two thread pools on a small machine spend their time waiting for each other."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def both(embedded_predictor):
    """The embedded model twice in each framework: (mlx model, mlx draft, tokenizer, torch model, torch draft)."""
    from backends.cuda.generate import load as torch_load
    from backends.mlx.generate import load as mlx_load
    from base_core.embedded import model_path

    (ours, tokenizer), (draft, _) = mlx_load(model_path(), "float32"), mlx_load(model_path(), "float32")
    theirs = [torch_load(model_path(), "float32")[0] for _ in range(2)]
    return ours, draft, tokenizer, *theirs


@pytest.mark.parametrize("budget", ("off", "7", "4", "2", "1", "energy:0.8"))
def test_kept_prompt_caches_equal_pytorch(budget, embedded_predictor, both):
    from mlx_lm.models.cache import make_prompt_cache

    from backends import cuda, mlx
    from backends.mlx.generate import stream_generate
    from base_core import load_predictor

    ours, _, tokenizer, theirs, _ = both
    predictor, ends = load_predictor(embedded_predictor), set(tokenizer.eos_token_ids)
    turns = [tokenizer.encode(text) for text in ("rev abcdef=", "57+38=", "sort 735142=")]
    with mlx.base_budget(ours, predictor, budget), cuda.base_budget(theirs, predictor, budget) as session:
        cache, decoder = make_prompt_cache(ours), TorchDecoder(theirs)
        for turn in turns:
            stream = stream_generate(ours, tokenizer, turn, max_tokens=12, prompt_cache=cache)
            assert [r.token for r in stream] == decoder.generate(session, turn, 12, ends)


@pytest.mark.parametrize("budget", ("off", "24", "12", "6", "3", "1", "energy:0.8"))
def test_speculative_decoding_equals_pytorch(budget, embedded_predictor, both):
    """The model drafts for itself, dense; its drafts are checked under the budget, four rows at a time."""
    from backends import cuda, mlx
    from backends.mlx.generate import stream_generate
    from base_core import load_predictor

    ours, draft, tokenizer, theirs, their_draft = both
    predictor, ends = load_predictor(embedded_predictor), set(tokenizer.eos_token_ids)
    with (
        mlx.base_budget(ours, predictor, budget, mlx.Policy(decode_window=4)),
        cuda.base_budget(theirs, predictor, budget, decode_window=4),
    ):
        for text in ("rev abcdef=", "count abcabcab="):
            prompt = tokenizer.encode(text)
            stream = stream_generate(ours, tokenizer, prompt, max_tokens=12, draft_model=draft, num_draft_tokens=3)
            tokens = TorchDecoder(theirs).speculate(TorchDecoder(their_draft), prompt, 12, ends, 3)
            assert [r.token for r in stream] == tokens


def test_calibration_statistics_equal_pytorch(both):
    """Both collectors over the same packed text: the same pairs, and the same sums within float tolerance."""
    from backends.mlx.collector import collecting as mlx_collecting
    from base_core.embedded.tasks import evaluation_examples
    from calibrate.statistics import LayerStatistics
    from calibrate.torch_pass import collecting as torch_collecting

    ours, _, tokenizer, theirs, _ = both
    documents = [tokenizer.encode(e.prompt + e.answer + "\n") for e in evaluation_examples(24)]
    size = sum(map(len, documents)) // 4
    ids = np.concatenate(documents)[: 4 * size].reshape(4, size)
    positions = np.concatenate([np.arange(len(d)) for d in documents])[: 4 * size].reshape(4, size)
    positions = np.minimum(positions, np.arange(size))  # a row begins at position 0, also within a document
    starts = np.maximum.accumulate(np.where(positions == 0, np.arange(size), 0), axis=1)
    positions = np.arange(size) - starts
    counted = positions > 2
    layers = (1, 3)
    gathered = []
    for name in ("mlx", "torch"):
        statistics = {i: LayerStatistics(64, 192) for i in layers}
        if name == "mlx":
            sinks = {i: lambda *pairs, s=s: s.add(*pairs, 1e-12) for i, s in statistics.items()}
            with mlx_collecting(ours, sinks) as run:
                run(ids, positions, counted)
        else:
            with torch_collecting(theirs, statistics, eps=1e-12, weighted=True) as run_batch:
                run_batch((ids, positions, counted))
        gathered.append(statistics)
    for i in layers:
        a, b = gathered[0][i], gathered[1][i]
        assert a.pairs.sum() == counted.sum() * 8
        assert (a.pairs - b.pairs).abs().sum() <= 2, "a near-tie in the router may go either way"
        np.testing.assert_allclose(a.moments.sum(0), b.moments.sum(0), rtol=1e-3)
        np.testing.assert_allclose(a.first.sum(0), b.first.sum(0), rtol=1e-2, atol=1e-3)
