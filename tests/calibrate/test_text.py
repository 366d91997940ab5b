"""Calibration text: forms of the files, what counts, and packing."""

import json

import numpy as np
import pytest

from calibrate import text
from calibrate.text import describe_source, pack, read_documents, read_sequences, unbroken

BOS = 999


class Characters:
    """Ids are code points; 999 is prepended as real tokenizers prepend their start token."""

    def __call__(self, content, add_special_tokens=True, verbose=True):
        return {"input_ids": [BOS] * add_special_tokens + [ord(c) for c in content]}


def codes(content):
    return [ord(c) for c in content]


def read(paths, length=100, tokens=10_000, **options):
    return read_sequences(paths, Characters(), length=length, tokens=tokens, **options)


@pytest.fixture
def file(tmp_path):
    def write(name, content):
        path = tmp_path / name
        if isinstance(content, list):
            content = "\n".join(map(json.dumps, content))
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_files_in_the_order_given(file):
    lines = file("a.jsonl", [{"text": "one"}, {"prompt": "q", "answer": "xyz"}])
    plain = file("b.txt", "plain\ntext")
    packed = read([plain, lines])
    expected = [[BOS, *codes("plain\ntext")], [BOS, *codes("one")], [BOS, *codes("qxyz")]]
    assert packed.ids.ravel().tolist() == [i for ids in expected for i in ids]
    assert packed.positions.ravel().tolist() == [i for ids in expected for i in range(len(ids))]
    assert packed.tokens == packed.ids.size == 20


def test_of_an_answer_counts_what_decoding_reads(file):
    path = file("a.jsonl", [{"text": "ab"}, {"prompt": "pq", "answer": "xyz"}, {"prompt": "r", "answer": ""}])
    packed = read([path])
    counted = [chr(c) if c != BOS else "^" for c in packed.ids[packed.counted]]
    assert "".join(counted) == "^abxy"
    assert read([path], positions="all").counted.all()


def test_documents_cut_by_a_row_start_again():
    documents = [([1, 2, 3], [True] * 3), ([4, 5, 6, 7, 8, 9], [True] * 6), ([10], [False])]
    packed = pack(documents, length=4, tokens=100)
    assert packed.ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert packed.positions.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 0, 0, 1]]
    assert packed.counted.tolist() == [[True] * 4, [True] * 4, [True, False, False, False]]
    assert packed.tokens == 10


def test_positions_never_run_on_across_documents():
    rng = np.random.default_rng(0)
    for _ in range(50):
        documents = [(list(range(n)), [True] * n) for n in rng.integers(0, 12, 20)]
        L = int(rng.integers(1, 9))
        packed = pack(documents, L, 1000)
        starts = packed.positions == 0
        assert starts[:, 0].all()
        begins = packed.ids == 0  # each document counts up from 0
        assert starts.ravel()[: packed.tokens][begins.ravel()[: packed.tokens]].all()
        inside = ~starts[:, 1:]
        assert (np.diff(packed.positions, axis=1)[inside] == 1).all()
        flat = packed.ids.ravel()[: packed.tokens]
        assert flat.tolist() == [i for ids, _ in documents for i in ids]


def test_no_more_tokens_than_asked(file):
    packed = read([file("a.txt", "abcdefghij"), file("b.txt", "never")], length=4, tokens=7)
    assert packed.tokens == 7
    assert packed.ids.tolist() == [[BOS, *codes("abc")], [*codes("def"), 0]]
    assert not packed.counted[1, 3]


def test_short_text_makes_a_short_row(file):
    assert read([file("a.txt", "abc")]).ids.shape == (1, 4)


def test_plain_text_is_read_in_pieces(file, monkeypatch):
    lines = "".join(f"line {i}\n" for i in range(20))
    path = file("a.txt", lines)
    monkeypatch.setattr(text, "CHUNK_CHARACTERS", 10)
    pieces = [document.text for document in read_documents(path)]
    assert "".join(pieces) == lines
    assert len(pieces) > 5
    assert all(piece.endswith("\n") for piece in pieces)


def test_digest_sees_every_part(file):
    packed = read([file("a.jsonl", [{"prompt": "p", "answer": "xyz"}])])
    assert packed.digest() == read([file("a.jsonl", [{"prompt": "p", "answer": "xyz"}])]).digest()
    others = [
        read([file("b.jsonl", [{"prompt": "p", "answer": "xyw"}])]),
        read([file("b.jsonl", [{"prompt": "px", "answer": "yz"}])]),
        read([file("b.jsonl", [{"prompt": "p", "answer": "xyz"}])], length=2),
    ]
    assert len({packed.digest(), *(other.digest() for other in others)}) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text": ', r"a\.jsonl', line 2 is not JSON"),
        ("a.jsonl", '\n\n{"prompt": "x"}', r"line 3: expected an object with a string \"text\""),
        ("a.jsonl", '["x"]', "line 1: expected"),
        ("a.jsonl", '{"text": 3}', "line 1: expected"),
        ("a.txt", b"abc\xff", "not UTF-8"),
        ("a.jsonl", "\n \n", "no tokens"),
    ],
)
def test_bad_content(file, name, content, message):
    class Bare(Characters):
        def __call__(self, content, add_special_tokens=True, verbose=True):
            return super().__call__(content, add_special_tokens=False)

    with pytest.raises(ValueError, match=message):
        read_sequences([file(name, content)], Bare(), length=8, tokens=8)


def test_source(file, tmp_path):
    assert describe_source([file("a.txt", "abc"), file("b.txt", "d")]) == (
        "a.txt (sha256 ba7816bf8f01), b.txt (sha256 18ac3e7343f0)"
    )
    with pytest.raises(ValueError, match=r"none\.txt' cannot be read: No such file"):
        describe_source([tmp_path / "none.txt"])
    with pytest.raises(ValueError, match=r"a\.txt' is empty"):
        describe_source([file("a.txt", "")])
    with pytest.raises(ValueError, match="cannot be read"):
        describe_source([tmp_path])


def test_unbroken_documents_start_a_row_rather_than_reach_over_its_end():
    documents = [(list(range(1, n + 1)), [True] * n) for n in (3, 4, 8, 5, 2, 1)]
    text = pack(unbroken(documents, 8), 8, 100)
    assert text.ids.tolist() == [[1, 2, 3, 1, 2, 3, 4, 0], list(range(1, 9)), [1, 2, 3, 4, 5, 1, 2, 1]]
    assert (text.positions + 1)[text.counted].tolist() == text.ids[text.counted].tolist()
    assert text.counted.sum() == sum(len(ids) for ids, _ in documents)


def test_a_document_longer_than_a_row_takes_no_filler_at_its_start():
    text = pack(unbroken([([1] * 10, [True] * 10), ([2] * 7, [True] * 7)], 8), 8, 100)
    assert text.ids[0].tolist() == [1] * 8
    assert text.ids[1].tolist() == [1, 1] + [0] * 6 and text.ids[2].tolist() == [2] * 7 + [0]
    assert text.counted.sum() == 17
