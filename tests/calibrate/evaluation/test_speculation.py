"""Drafting and verifying against decoding without a cache, and against transformers' own generation."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from backends.cuda import base_budget, find_moe_layers
from calibrate.evaluation import speculation
from calibrate.evaluation.document import to_markdown
from calibrate.evaluation.speculation import DENSE, Count, Settings, budget_pairs, measure, run_speculation, section
from calibrate.evaluation.units import Store
from tests.backends.cuda.tiny import EOS
from tests.calibrate.evaluation.test_independence import generated
from tests.calibrate.evaluation.tiny_subject import MOST, make_subject

PROMPTS = 12


def dense_answer(subject, place):
    return [token for token in subject.reference().tokens[place].tolist() if token >= 0]


def speculate(subject, drafts, draft, verify):
    count = Count()
    with speculation.speculating(subject) as speculator:
        answers = [speculator.answer(place, drafts, draft, verify, count) for place in range(PROMPTS)]
    return answers, count


@pytest.mark.parametrize("draft", [DENSE, "1", "2", "3"])
@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
def test_dense_verification_gives_the_dense_answers(drafts, draft):
    subject = make_subject()
    answers, count = speculate(subject, drafts, draft, DENSE)
    assert answers == [dense_answer(subject, place) for place in range(PROMPTS)]
    if draft == DENSE:
        assert count.accepted == count.drafted
    else:
        assert count.accepted < count.drafted and count.draft.active_mean == pytest.approx(int(draft))


@torch.inference_mode()
def literal(subject, drafts, draft):
    """Drafts from a cache made anew each time, checked by the known dense answer; experts from the routers' own ids."""
    model, predictor = subject.model, subject.predictor
    count, union = Count(), []
    for place in range(PROMPTS):
        prompt = subject.tokenizer(subject.prompts[place].text)["input_ids"]
        answer = dense_answer(subject, place)
        done = 1
        while done < len(answer):
            cache = DynamicCache()
            model(input_ids=torch.tensor([prompt + answer[: done - 1]]), cache=cache, use_cache=True)
            proposed = []
            with base_budget(model, predictor, draft) as session:
                session.set_rows(torch.ones(1))
                token = answer[done - 1]
                for _ in range(min(drafts, MOST - done - 1)):
                    ids = torch.tensor([[token]])
                    token = int(model(input_ids=ids, cache=cache, use_cache=True).logits[0, -1].argmax())
                    proposed.append(token)
                    if token == EOS:
                        break
            accepted = 0
            while accepted < len(proposed) and proposed[accepted] == answer[done + accepted]:
                accepted += 1
            seen: list[torch.Tensor] = []
            handles = [
                layer.router.register_forward_hook(lambda _m, _a, output, seen=seen: seen.append(output[2]))
                for layer in find_moe_layers(model)
            ]
            model(input_ids=torch.tensor([prompt + answer[:done] + proposed]))
            for handle in handles:
                handle.remove()
            rows = len(proposed) + 1
            # An end token's row is padding: nothing comes after it.
            kept = [i for i in range(rows) if i == 0 or proposed[i - 1] != EOS]
            union += [len(ids[-rows:][kept].unique()) for ids in seen]
            count.drafted, count.accepted = count.drafted + len(proposed), count.accepted + accepted
            count.verify.steps += 1
            count.draft.steps += len(proposed)
            done += accepted + 1
        count.tokens += len(answer) - 1
    count.verify.experts = float(np.mean(union)) * count.verify.steps
    return count


@pytest.mark.parametrize("draft", ["1", "2"])
@pytest.mark.parametrize("drafts", [1, 3])
def test_counts_are_those_of_a_simulation_without_a_kept_cache(drafts, draft):
    subject = make_subject()
    _, found = speculate(subject, drafts, draft, DENSE)
    expected = literal(subject, drafts, draft)
    assert 0 < expected.accepted < expected.drafted
    for name in ("drafted", "accepted", "tokens"):
        assert getattr(found, name) == getattr(expected, name), name
    assert (found.draft.steps, found.verify.steps) == (expected.draft.steps, expected.verify.steps)
    assert found.verify.active_mean == pytest.approx(expected.verify.active_mean)


def test_plain_decoding_under_a_budget_is_generate():
    subject = make_subject()
    answers, count = speculate(subject, 0, DENSE, "2")
    assert [[t for t in a if t != EOS] for a in answers] == [generated(subject, [p], "2")[0] for p in range(PROMPTS)]
    assert count.verify.active_mean == 2 and count.drafted == count.draft.steps == 0
    assert count.tokens == count.verify.steps


def test_a_budget_holds_for_all_rows_of_a_verification():
    subject = make_subject()
    row = measure(subject, 3, "2", "4", PROMPTS)
    assert row["active_mean"] <= 4 and row["active_draft"] == pytest.approx(2) and row["same_as_dense"] < 1
    dense = measure(subject, 3, "2", DENSE, PROMPTS)
    assert dense["active_mean"] > 4 and dense["same_as_dense"] == dense["accuracy"] == 1
    _, count = speculate(subject, 3, "2", DENSE)
    assert dense["taken"] == pytest.approx(count.tokens / count.verify.steps) and 1 < dense["taken"] <= 4
    read = count.draft.steps * 2 + count.verify.experts
    assert dense["experts_per_token"] == pytest.approx(read / count.tokens)


def test_model_is_left_as_it_was():
    subject = make_subject()
    before = subject.model.get_experts_implementation()
    with pytest.raises(ValueError, match="outside"):
        measure(subject, 2, "99", DENSE, 1)
    assert subject.model.get_experts_implementation() == before
    assert not any(layer.router._forward_hooks for layer in find_moe_layers(subject.model))


def test_report_and_going_on(tmp_path, monkeypatch):
    subject, settings = make_subject(), Settings(prompts=4, drafts=(1, 2))
    assert budget_pairs(4)[:2] == [(DENSE, DENSE), ("2", DENSE)] and len(set(budget_pairs(2))) == len(budget_pairs(2))
    store = Store(tmp_path / "rows", subject.identity(), resume=False)
    rows = run_speculation(subject, settings, store)
    assert [row["drafts"] for row in rows[:3]] == [0, 0, 0] and rows[0]["active_mean"] == 4
    text = to_markdown(section({"tiny": rows}))
    assert "| **plain, dense** | **1.00** | **-** | **4.00** | **-** | **4.00** | **100.0 %** | **100.0 %** |" in text
    monkeypatch.setattr(speculation, "measure", None)
    assert run_speculation(subject, settings, store) == rows
