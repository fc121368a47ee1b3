"""Word count: the same answer however the input is cut."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from meshwright.core.errors import UserError

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

import pyarrow as pa

from meshwright.data.engines.embedded import EmbeddedEngine
from meshwright.data.pipeline.splits import FilePart, InputSplit
from meshwright.data.pipeline.wordcount import (
    CountTask,
    count_short,
    count_split,
    count_words,
    split_block,
    sum_counts,
)


@pytest.fixture
def texts(tmp_path):
    """Words with every separator of ``str.split()``, a skewed key, and a line longer than a split."""
    random = Random(1)
    spaces = [" ", "\t", "\x1c", "\u00a0", "\u2003", "\n", "\r\n", "\x85"]
    words = ["the"] * 50 + [f"w{n}" for n in range(200)] + ["naïve", "İ", "THE", "ﬁ"]
    text = "".join(random.choice(words) + random.choice(spaces) for _ in range(20_000))
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(("long " * 5000 + "\n" + text[:3000]).encode() + b"\xff bad")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(text[:5000].encode()))
    return tmp_path


def test_engines_and_splits_give_one_answer(texts):
    expected: Counter[str] = Counter()
    for name in ("a.txt", "b.txt"):
        expected.update((texts / name).read_bytes().decode("utf-8", "replace").split())
    expected.update(gzip.decompress((texts / "c.txt.gz").read_bytes()).decode().split())
    top = tuple(sorted(expected.items(), key=lambda entry: (-entry[1], entry[0]))[:5])
    for engine in (None, EmbeddedEngine(1)):
        for split_bytes in (2**20, 7001):
            counted = count_words(["*.txt*"], texts, engine, top=5, split_bytes=split_bytes)
            assert (counted.distinct, counted.total, counted.top) == (len(expected), expected.total(), top)
    assert counted.splits > 15
    assert sorted(path.name for path in texts.iterdir()) == ["a.txt", "b.txt", "c.txt.gz"]


def test_every_separator_and_length_of_a_word():
    """All characters of the BMP between two words; words around the length that is counted as a number."""
    separators = [chr(code) for code in range(0x10000) if chr(code).isspace()]
    assert len(separators) == 29
    characters = [chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000]
    words = ["x" * size for size in range(1, 20)] + [
        "a\0",
        "a",
        "\0",
        "\0\0",
        "é" * 4,
        "é" * 3,
        "\U0001f600" * 3,
    ]
    text = "".join(f"left{character}right-of-it " for character in characters) + " ".join(words * 2)
    expected = Counter(text.split())
    packed, long = split_block(text.encode())
    found = Counter(word.rstrip(" ") for word in long.to_pylist())
    short = count_short(packed)
    found.update(dict(zip(short["word"].to_pylist(), short["count"].to_pylist(), strict=True)))
    assert found == expected
    assert split_block(b"")[0].size == 0


def test_words_with_equal_hashes_are_kept_apart(monkeypatch):
    monkeypatch.setattr(
        "meshwright.data.pipeline.wordcount.hash_words", lambda words: np.zeros(len(words), np.int64)
    )
    split = InputSplit(0, (FilePart("f", Path(__file__), 0),))
    rows = pa.Table.from_batches(count_split(CountTask(split, 4)))
    summed = pa.Table.from_batches(sum_counts(iter(pa.concat_tables([rows, rows]).to_batches(7))))
    expected = Counter(Path(__file__).read_text().split())
    found = dict(zip(summed["word"].to_pylist(), summed["count"].to_pylist(), strict=True))
    assert found == {word: 2 * count for word, count in expected.items()}


def test_what_cannot_be_counted_is_named(texts):
    (texts / "d.txt.gz").write_bytes((texts / "c.txt.gz").read_bytes()[:-50])
    for engine in (None, EmbeddedEngine(1)):
        with pytest.raises(UserError, match=r"d\.txt\.gz cannot be counted.*data-bad-compression"):
            count_words(["*.gz"], texts, engine)
