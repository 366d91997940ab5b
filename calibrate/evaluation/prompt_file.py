"""Prompts of the evaluation, and the file that they may come from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """One prompt; `answer` and `task` are None where they are not known."""

    text: str
    answer: str | None = None
    task: str | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSONL file: an object with `prompt`, and optionally `answer` and `task`, a line.

    Raises:
        ValueError: a file that cannot be read, no prompt in it, a bad line, or answers on some lines only.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts-file {str(path)!r} cannot be read as UTF-8: {error}") from error
    prompts = [
        _read_prompt(line, f"--prompts-file {str(path)!r}, line {i}") for i, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise ValueError(f'--prompts-file {str(path)!r} holds no prompt: write {{"prompt": "some text"}} a line')
    for name in ("answer", "task"):
        missing = [prompt for prompt in prompts if getattr(prompt, name) is None]
        if 0 < len(missing) < len(prompts):
            raise ValueError(
                f"--prompts-file {str(path)!r}: {len(missing)} of {len(prompts)} prompts have no {name!r}; "
                f"give it on every line or on none"
            )
    return prompts


def _read_prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    fields = record if isinstance(record, dict) else {}
    prompt, answer, task = (fields.get(name) for name in ("prompt", "answer", "task"))
    if not isinstance(prompt, str) or not prompt or not all(v is None or isinstance(v, str) for v in (answer, task)):
        raise ValueError(f'{where}: expected an object with a string "prompt", and strings "answer" and "task" or none')
    return Prompt(prompt, answer, task)
