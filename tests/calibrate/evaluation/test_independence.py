"""How answers depend on neighbours, against transformers' own generation of every batch."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from backends.cuda import base_budget
from calibrate.evaluation import independence
from calibrate.evaluation.document import to_markdown
from calibrate.evaluation.independence import Settings, measure, orders, run_independence, section
from calibrate.evaluation.units import Store
from calibrate.evaluation.variants import Variant
from tests.backends.cuda.tiny import EOS
from tests.calibrate.evaluation.tiny_subject import MOST, make_subject


def generated(subject, places, budget):
    """One batch by transformers, under the budget: the answers as text."""
    model, tokenizer = subject.model, subject.tokenizer
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=EOS, max_new_tokens=MOST, do_sample=False)
    encoded = [tokenizer(subject.prompts[p].text)["input_ids"] for p in places]
    inputs = tokenizer.pad({"input_ids": encoded}, return_tensors="pt")
    ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, EOS)
    with base_budget(model, subject.predictor, budget), torch.inference_mode():
        output = model.generate(input_ids=ids, attention_mask=inputs["attention_mask"])[:, ids.shape[1] :]
    return [row[: row.index(EOS)] if EOS in row else row for row in output.tolist()]


@pytest.mark.parametrize("budget", ["off", "4", "15"])
def test_shares_are_those_of_batches_generated_one_by_one(budget):
    """Two full batches and no queue behind them, so that every batch is one call of generate."""
    subject, settings = make_subject(32), Settings(prompts=32, shuffles=2)
    answers = []
    for order in orders(32, 2):
        by_prompt = {}
        for places in (order[:16].tolist(), order[16:].tolist()):
            by_prompt.update(zip(places, generated(subject, places, budget), strict=True))
        answers.append([by_prompt[p] for p in range(32)])
    dense = [row[(row >= 0) & (row != EOS)].tolist() for row in subject.reference().tokens]
    changed = [[other[p] != answers[0][p] for p in range(32)] for other in answers[1:]]
    texts = [[subject.tokenizer.decode(a, skip_special_tokens=True).strip() for a in one] for one in answers]
    right = [[t == p.answer.strip() for t, p in zip(one, subject.prompts, strict=True)] for one in texts]

    row = measure(subject, Variant("dense") if budget == "off" else Variant("base", budget), settings)
    assert row["changed"] == pytest.approx(np.mean(changed))
    assert row["changed_ever"] == pytest.approx(np.mean([any(pair) for pair in zip(*changed, strict=True)]))
    assert row["not_dense"] == pytest.approx(np.mean([a != b for a, b in zip(answers[0], dense, strict=True)]))
    flips = [[a != b for a, b in zip(one, right[0], strict=True)] for one in right[1:]]
    assert row["flipped"] == pytest.approx(np.mean(flips))
    shares = [np.mean(one) for one in right]
    assert (row["accuracy_least"], row["accuracy_most"]) == pytest.approx((min(shares), max(shares)))
    assert row["changed_low"] <= row["changed"] <= row["changed_high"]
    if budget == "off":
        assert row["changed"] == row["not_dense"] == 0 and row["accuracy"] == 1
    else:
        assert row["changed"] > 0 and (row["flipped"] > 0) == (budget == "15")


def test_per_token_choices_do_not_see_their_neighbours():
    row = measure(make_subject(32), Variant("top_k", options={"k": 1}), Settings(prompts=32, shuffles=2))
    assert row["changed"] == 0 < row["not_dense"]


def test_orders_are_the_same_in_every_run():
    first, *shuffled = orders(9, 3)
    assert first.tolist() == list(range(9)) and len({tuple(o) for o in (first, *shuffled)}) == 4
    assert all(sorted(order) == list(range(9)) for order in shuffled)
    assert [order.tolist() for order in orders(9, 3)] == [order.tolist() for order in (first, *shuffled)]


def test_report_and_going_on(tmp_path, monkeypatch):
    subject, settings = make_subject(32), Settings(prompts=32, shuffles=1)
    store = Store(tmp_path / "rows", subject.identity(), resume=False)
    some = [Variant("dense"), Variant("base", "2"), Variant("oea", options={"k0": 1})]
    assert {v.policy for v in independence.variants(subject)} >= {"dense", "base", "oea", "lynx", "xshare", "top_k"}
    assert not {v.policy for v in independence.variants(subject)} & {"sere", "exfold"}
    monkeypatch.setattr(independence, "variants", lambda _: some)
    rows = run_independence(subject, settings, store)
    text = to_markdown(section({"tiny": rows}))
    assert f"| **base @2** | **2.00** | **{100 * rows[1]['changed']:.2f} %** |" in text
    assert "in 2 orders: the file's and 1 shuffled" in text

    def fail(*_):
        raise AssertionError("a row that is there was made again")

    monkeypatch.setattr(independence, "measure", fail)
    assert run_independence(subject, settings, store) == rows
    with pytest.raises(AssertionError):
        run_independence(subject, Settings(prompts=32, shuffles=2), store)
