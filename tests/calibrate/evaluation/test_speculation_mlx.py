"""mlx-lm's speculative generation with both models under a budget."""

import pytest

pytest.importorskip("mlx_lm")

from base_core import load_predictor
from base_core.embedded import model_path, predictor_path
from base_core.embedded.tasks import evaluation_examples
from calibrate.evaluation.document import to_markdown
from calibrate.evaluation.prompt_file import Prompt
from calibrate.evaluation.speculation import DENSE, section
from calibrate.evaluation.speculation_mlx import Pair, run_speculation_mlx

MOST = 12
EXAMPLES = evaluation_examples(8)


@pytest.fixture(scope="module")
def pair():
    return Pair(model_path(), load_predictor(predictor_path()))


@pytest.fixture(scope="module")
def prompts(pair):
    return [pair.tokenizer.encode(example.prompt) for example in EXAMPLES]


@pytest.mark.parametrize("drafts", [1, 3])
def test_dense_drafts_are_all_accepted_up_to_the_end(pair, prompts, drafts):
    plain, count = pair.answers(prompts, MOST, 0, DENSE, DENSE)
    assert count.verify.steps == count.tokens == sum(map(len, plain)) and count.verify.active_mean == 8
    answers, count = pair.answers(prompts, MOST, drafts, DENSE, DENSE)
    assert answers == plain
    lengths = [len(answer) for answer in plain]
    assert max(lengths) < MOST, "the closed forms below leave out the limit"
    # Every step gives so many drafts and one token of its own.
    assert count.verify.steps == sum(-(-n // (drafts + 1)) for n in lengths)
    assert count.accepted == sum(n - n // (drafts + 1) for n in lengths)
    assert count.drafted >= count.accepted and count.verify.active_mean > 8


def test_small_drafts_change_no_answer_and_a_small_verification_does(pair, prompts):
    dense = pair.answers(prompts, MOST, 4, DENSE, DENSE)
    small = pair.answers(prompts, MOST, 4, "1", DENSE)
    assert small[0] == dense[0] and small[1].accepted < dense[1].accepted
    assert small[1].draft.active_mean == 1
    answers, count = pair.answers(prompts, MOST, 4, "1", "1")
    assert answers != dense[0] and count.verify.active_mean == 1


def test_rows(tmp_path):
    asked = [Prompt(e.prompt, e.answer, e.task) for e in EXAMPLES[:2]]
    rows = run_speculation_mlx("m", model_path(), load_predictor(predictor_path()), asked, max_tokens=MOST, drafts=(2,))
    assert {row["backend"] for row in rows} == {"mlx"} and rows[0]["experts_per_token"] == 8
    assert all(row["same_as_dense"] == 1 for row in rows if row["verify_budget"] == DENSE)
    assert "| **plain, dense** | **1.00** |" in to_markdown(section({"m": rows}))
