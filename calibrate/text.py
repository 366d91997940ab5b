"""Calibration text: files to packed token sequences, in an order that depends on nothing but the files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
from numpy.typing import NDArray

CHUNK_CHARACTERS = 1 << 20
"""Plain text is tokenised this much at a time, so that a large file is not read beyond the tokens wanted."""

Positions = Literal["answer", "all"]


@dataclass(frozen=True)
class Document:
    """Plain text, or a prompt with the answer that a model would give to it (then `prompt` is not None)."""

    text: str
    prompt: str | None = None


@dataclass(frozen=True)
class Sequences:
    """R rows of L tokens, documents packed one behind the other without a gap.

    Attributes:
        ids: int64 [R, L]; the last row is filled up with zeros.
        positions: int64 [R, L], 0 at the start of every document and row: what attention tells documents apart by.
        counted: bool [R, L], the tokens whose routed pairs are taken in.
        tokens: of the text, without the filling.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    counted: NDArray[np.bool_]
    tokens: int

    def digest(self) -> str:
        """Hash of the content."""
        digest = hashlib.sha256(repr(self.ids.shape).encode())
        for array in (self.ids, self.positions, self.counted):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def read_documents(path: Path) -> Iterator[Document]:
    """Documents of one file: a name in .jsonl or .json holds one JSON object a line, anything else is plain text.

    Plain text is one document, handed out in pieces that follow each other.

    Raises:
        ValueError: a file that cannot be read or is not UTF-8, or a line that is not one of the two forms.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from _read_lines(file, path) if path.suffix in (".jsonl", ".json") else _read_plain(file)
    except OSError as error:
        raise ValueError(f"--data {str(path)!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--data {str(path)!r} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _read_lines(file: TextIO, path: Path) -> Iterator[Document]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"--data {str(path)!r}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        fields = record if isinstance(record, dict) else {}
        if isinstance(fields.get("text"), str):
            yield Document(fields["text"])
        elif isinstance(fields.get("prompt"), str) and isinstance(fields.get("answer"), str):
            yield Document(fields["answer"], fields["prompt"])
        else:
            raise ValueError(f'{where}: expected an object with a string "text", or "prompt" and "answer"')


def _read_plain(file: TextIO) -> Iterator[Document]:
    while text := file.read(CHUNK_CHARACTERS):
        # A whole last line, so that no word is cut in two.
        yield Document(text + file.readline())


def describe_source(paths: Sequence[Path]) -> str:
    """Names and checksums of the files, for the card.

    Raises:
        ValueError: a file that is missing, unreadable or empty.
    """
    parts = []
    for path in paths:
        digest, size = hashlib.sha256(), 0
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                    size += len(block)
        except OSError as error:
            raise ValueError(f"--data {str(path)!r} cannot be read: {error.strerror or error}") from error
        if not size:
            raise ValueError(f"--data {str(path)!r} is empty: give a file with text")
        parts.append(f"{path.name} (sha256 {digest.hexdigest()[:12]})")
    return ", ".join(parts)


def tokenise(document: Document, tokenizer: Any, positions: Positions) -> tuple[list[int], list[bool]]:
    """Token ids of a document, and which of them are counted.

    The prompt and its answer are tokenised apart, as in generation. Of an answer every token counts but the last,
    which no decode step reads; of plain text all do, and with `positions` "all" those of the prompt as well.
    """
    if document.prompt is None:
        ids = tokenizer(document.text, verbose=False)["input_ids"]
        return ids, [True] * len(ids)
    prompt = tokenizer(document.prompt, verbose=False)["input_ids"]
    answer = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
    if positions == "all":
        return prompt + answer, [True] * (len(prompt) + len(answer))
    return prompt + answer, [len(prompt) <= i < len(prompt) + len(answer) - 1 for i in range(len(prompt + answer))]


def pack(documents: Iterable[tuple[list[int], list[bool]]], length: int, tokens: int) -> Sequences:
    """Packs tokenised documents into rows of `length`, until there are `tokens` tokens.

    A document that reaches over the end of a row goes on in the next one without what came before.

    Raises:
        ValueError: no token at all.
    """
    flat: list[list[int]] = [[], [], []]  # ids, positions, counted
    for ids, counted in documents:
        flat[0].extend(ids)
        flat[1].extend(range(len(ids)))
        flat[2].extend(counted)
        if len(flat[0]) >= tokens:
            break
    total = min(tokens, len(flat[0]))
    if not total:
        raise ValueError("--data holds no tokens: give files with text")
    length = min(length, total)
    R = -(-total // length)
    packed = np.zeros((3, R * length), np.int64)
    packed[:, :total] = [column[:total] for column in flat]
    packed[1, total:] = np.arange(R * length - total)
    packed_ids, positions, counts = packed.reshape(3, R, length)
    carried_over = np.minimum.accumulate(positions > 0, axis=1)
    positions = np.where(carried_over, positions - positions[:, :1], positions)
    return Sequences(packed_ids, positions, counts.astype(bool), total)


def unbroken(documents: Iterable[tuple[list[int], list[bool]]], length: int) -> Iterator[tuple[list[int], list[bool]]]:
    """Tokenised documents for `pack`, with filler that does not count where one would reach over the end of a row.

    Only a document longer than a row is still broken.
    """
    filled = 0
    for ids, counted in documents:
        rest = length - filled
        if filled and len(ids) > rest:
            yield [0] * rest, [False] * rest
            filled = 0
        yield ids, counted
        filled = (filled + len(ids)) % length


def read_sequences(
    paths: Sequence[Path], tokenizer: Any, *, length: int, tokens: int, positions: Positions = "answer"
) -> Sequences:
    """Reads, tokenises and packs files in the order given, at most `tokens` tokens.

    Raises:
        ValueError: see `read_documents` and `pack`.
    """
    documents = (tokenise(document, tokenizer, positions) for path in paths for document in read_documents(path))
    return pack(documents, length, tokens)
