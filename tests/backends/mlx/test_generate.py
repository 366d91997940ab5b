"""Generation with the embedded model: prompts stock, decoding under the budget, finished rows without a vote."""

from __future__ import annotations

import pytest

from base_core.embedded import model_path
from base_core.embedded.tasks import evaluation_examples

mx = pytest.importorskip("mlx.core")

import mlx_lm  # noqa: E402

from backends.mlx import Policy, base_budget  # noqa: E402
from backends.mlx.generate import (  # noqa: E402
    BudgetedBatchGenerator,
    fit_to_device,
    generate_batch,
    generate_texts,
    load,
    stream_generate,
)

PROMPTS = [example.prompt for example in evaluation_examples(10)]


def encode(tokenizer):
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


def stream(model, tokenizer, prompt, **options):
    return [response.token for response in stream_generate(model, tokenizer, prompt, max_tokens=12, **options)]


def test_wide_budgets_answer_as_mlx_lm_does(embedded):
    model, tokenizer, predictor = embedded
    stock = mlx_lm.batch_generate(model, tokenizer, encode(tokenizer), max_tokens=12, return_token_ids=True)
    ends = sorted(tokenizer.eos_token_ids)
    for budget in ("off", 64, "energy:1"):
        with base_budget(model, predictor, budget):
            assert generate_batch(model, encode(tokenizer), max_tokens=12, end_tokens=ends) == stock.token_ids


def test_first_tokens_come_from_the_prompt_and_are_never_restricted(embedded):
    model, tokenizer, predictor = embedded
    ends = sorted(tokenizer.eos_token_ids)
    prompts = [*encode(tokenizer), tokenizer.encode("7")]
    stock = generate_batch(model, prompts, max_tokens=4, end_tokens=ends)
    with base_budget(model, predictor, 1) as session:
        restricted = generate_batch(model, prompts, max_tokens=4, end_tokens=ends)
        assert session.stats().active_mean == 1
        assert [stream(model, tokenizer, p)[0] for p in prompts] == [s[0] for s in stock]
        assert not session.in_prefill and session.rows is None
    assert [r[0] for r in restricted] == [s[0] for s in stock]
    assert restricted != stock


def test_answers_do_not_depend_on_finished_neighbours(embedded):
    model, tokenizer, predictor = embedded
    ends = sorted(tokenizer.eos_token_ids)
    long, short = tokenizer.encode("rev abcdef="), tokenizer.encode("1+2=")
    with base_budget(model, predictor, 3) as session:
        generate_batch(model, [long, short], max_tokens=1, end_tokens=ends)
        assert session.stats().steps == 0, "what a row at its last token would decode is never used"
        alone = generate_batch(model, [long], max_tokens=12, end_tokens=ends)
        # A second row that ends with its first token has no decode step to vote in.
        end = [*tokenizer.encode("1+2=3")]
        both = generate_batch(model, [long, end], max_tokens=12, end_tokens=ends)
    assert both[1] == [] and both[0] == alone[0]


def test_rows_may_join_and_leave(embedded):
    model, tokenizer, predictor = embedded
    with base_budget(model, predictor, 6) as session:
        generator = BudgetedBatchGenerator(model, max_tokens=8, completion_batch_size=3, prefill_batch_size=2)
        uids = generator.insert(encode(tokenizer))
        tokens = {uid: 0 for uid in uids}
        while responses := generator.next_generated():
            for response in responses:
                tokens[response.uid] += 1
        generator.close()
        assert set(tokens.values()) == {8}
        assert session.stats().active_mean <= 6


def test_drafts_are_checked_under_the_budget(embedded):
    model, tokenizer, predictor = embedded
    draft, _ = load(model_path(), "float32")
    prompt = tokenizer.encode("rev abcdef=")
    stock = stream(model, tokenizer, prompt)
    for budget, equal in (("off", True), (64, True), (32, True), (1, False)):
        with base_budget(model, predictor, budget, Policy(decode_window=4)) as session:
            tokens = stream(model, tokenizer, prompt, draft_model=draft, num_draft_tokens=3)
            assert (tokens == stock) is equal
            if not equal:
                assert session.stats().active_mean == 1 < session.stats().union_mean


def test_texts_have_their_prompts_order(predictor_file):
    dense = generate_texts(model_path(), None, "off", PROMPTS, batch=4, max_tokens=12, dtype="float32")
    examples = evaluation_examples(len(PROMPTS))
    assert sum(text == e.answer for text, e in zip(dense.texts, examples, strict=True)) >= 9
    assert dense.token_counts == [len(text) for text in dense.texts] and dense.stats.steps == 0
    wide = generate_texts(model_path(), predictor_file, 64, PROMPTS, batch=4, max_tokens=12, dtype="float32")
    assert wide.texts == dense.texts and wide.stats.active_mean == wide.stats.union_mean
    options = dict(batch=4, max_tokens=6, temperature=4.0, dtype="float32")
    sampled = [generate_texts(model_path(), predictor_file, 4, PROMPTS[:4], seed=s, **options).texts for s in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_bad_input_is_refused_before_generation(predictor_file, embedded, capsys):
    model, *_ = embedded
    for options, message in (
        (dict(batch=0), "batch 0"),
        (dict(temperature=-1), "temperature -1"),
        (dict(dtype="int8"), "dtype 'int8' is unknown"),
        (dict(prompts=[""]), "no token"),
        (dict(budget=65), r"65 is outside 1\.\.64"),
        (dict(budget="many"), "many"),
        (dict(predictor_source=None), "needs a predictor"),
    ):
        arguments = dict(predictor_source=predictor_file, budget=4, prompts=PROMPTS[:1]) | options
        with pytest.raises(ValueError, match=message):
            generate_texts(model_path(), **arguments)
    if mx.default_device().type == mx.cpu:
        with pytest.raises(ValueError, match=r"'bfloat16'.*float32 only"):
            fit_to_device(model, "bfloat16")
        assert "weights are cast to float32" in capsys.readouterr().err
