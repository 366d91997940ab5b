"""A tiny random checkpoint as an evaluation subject: its answers change with a budget, and with neighbours."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from base_core import save_predictor
from base_core.embedded.tasks import evaluation_examples
from calibrate.evaluation.prompt_file import Prompt
from calibrate.evaluation.subject import Subject
from tests.backends.cuda.tiny import make_predictor, save_checkpoint

MOST = 7


@cache
def checkpoint() -> Path:
    """Its folder, with a predictor of random values."""
    folder = Path(mkdtemp())
    save_predictor(folder / "predictor.safetensors", make_predictor(save_checkpoint(folder)))
    return folder


@cache
def make_subject(count: int = 32) -> Subject:
    """With prompts of the embedded tasks; the dense model's own answers are the right ones."""
    folder = checkpoint()

    def subject(prompts):
        return Subject("tiny", folder, folder / "predictor.safetensors", prompts, max_tokens=MOST)

    examples = evaluation_examples(count)
    first = subject([Prompt(e.prompt, "", e.task) for e in examples])
    texts = first.texts(first.reference().tokens)
    return subject([Prompt(e.prompt, text, e.task) for e, text in zip(examples, texts, strict=True)])
