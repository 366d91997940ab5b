"""Eight synthetic tasks with exact answers: what the embedded model was trained on and what the demo asks it.

Every prompt belongs to one split for ever: a checksum of its text decides, so no evaluation prompt is ever trained on,
whatever the seeds. Answers are several characters long on purpose: the first one comes from prefill, which a budget
never touches, so only the later ones show what a budget does.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

TASKS = ("add", "subtract", "multiply", "compare", "sort", "reverse", "count", "boolean")
STOP = "\n"
HELD_OUT_SHARE = 16
TRAIN_SEEDS = range(0, 1_000_000)
EVAL_SEEDS = range(1_000_000, 2_000_000)
PATIENCE = 5_000  # repeats in a row after which a task counts as exhausted


@dataclass(frozen=True)
class Example:
    """One prompt and its only right answer (without the closing newline that ends generation)."""

    task: str
    prompt: str
    answer: str


def _add(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(100)
    return f"{a}+{b}=", str(a + b)


def _subtract(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(100), rng.randrange(100)
    return f"{a}-{b}=", str(a - b)


def _multiply(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(200), rng.randrange(10)
    if rng.random() < 0.5:
        a, b = b, a
    return f"{a}*{b}=", str(a * b)


def _compare(rng: random.Random) -> tuple[str, str]:
    a = rng.randrange(1000)
    near = rng.random() < 0.5
    b = (a + rng.randrange(-20, 21)) % 1000 if near else rng.randrange(1000)
    return f"max {a} {b}=", str(max(a, b))


def _sort(rng: random.Random) -> tuple[str, str]:
    digits = [rng.choice("0123456789") for _ in range(6)]
    return f"sort {''.join(digits)}=", "".join(sorted(digits))


def _reverse(rng: random.Random) -> tuple[str, str]:
    word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(6))
    return f"rev {word}=", word[::-1]


def _count(rng: random.Random) -> tuple[str, str]:
    word = "".join(rng.choice("abc") for _ in range(rng.randrange(6, 10)))
    return f"count {word}=", "".join(f"{letter}{word.count(letter)}" for letter in "abc")


def _boolean(rng: random.Random) -> tuple[str, str]:
    terms, values = [], []
    for _ in range(4):
        a, b, negate = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.3
        op = rng.choice("&|^")
        value = {"&": a and b, "|": a or b, "^": a != b}[op]
        terms.append(f"{'!' if negate else ''}{'T' if a else 'F'}{op}{'T' if b else 'F'}")
        values.append("T" if value != negate else "F")
    return f"bool {','.join(terms)}=", "".join(values)


_MAKERS = dict(zip(TASKS, (_add, _subtract, _multiply, _compare, _sort, _reverse, _count, _boolean), strict=True))


def held_out(prompt: str) -> bool:
    """True when `prompt` belongs to the evaluation split (one prompt in 16)."""
    return zlib.crc32(prompt.encode()) % HELD_OUT_SHARE == 0


def examples(seed: int, task: str | None = None) -> Iterator[Example]:
    """Endless examples, tasks in turn (or one task), of the split that `seed` belongs to.

    Args:
        seed: from `TRAIN_SEEDS` or `EVAL_SEEDS`; anything else is a ValueError.
        task: one of `TASKS`, or None for all eight in turn.
    """
    if seed not in TRAIN_SEEDS and seed not in EVAL_SEEDS:
        raise ValueError(f"seed {seed} belongs to no split: use 0..999999 to train, 1000000..1999999 to evaluate")
    if task is not None and task not in TASKS:
        raise ValueError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    rng = random.Random(seed)
    evaluation = seed in EVAL_SEEDS
    while True:
        for name in (task,) if task else TASKS:
            while True:
                prompt, answer = _MAKERS[name](rng)
                if held_out(prompt) == evaluation:
                    yield Example(name, prompt, answer)
                    break


def evaluation_examples(n: int, seed: int = EVAL_SEEDS.start) -> list[Example]:
    """`n` held-out examples without repeats, tasks in turn; a task that has no new prompt left is passed over."""
    sources = {task: examples(seed + i, task) for i, task in enumerate(TASKS)}
    seen: set[str] = set()
    chosen: list[Example] = []
    while True:
        for source in sources.values():
            for example in islice(source, PATIENCE):
                if example.prompt not in seen:
                    seen.add(example.prompt)
                    chosen.append(example)
                    break
            if len(chosen) == n:
                return chosen


def main() -> None:
    """Writes examples as JSON lines: `python -m base_core.embedded.tasks --seed 1 --examples 20000 > text.jsonl`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=1, help="0..999999 for the training split, above for evaluation")
    parser.add_argument("--examples", type=int, default=20_000)
    args = parser.parse_args()
    for example in islice(examples(args.seed), args.examples):
        print(json.dumps({"prompt": example.prompt, "answer": example.answer + STOP}))


if __name__ == "__main__":
    main()
