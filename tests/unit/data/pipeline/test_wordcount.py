"""Word count: the same answer however the input is cut."""

from __future__ import annotations

import gzip
from collections import Counter
from random import Random

import pytest

from meshwright.core.errors import UserError

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

from meshwright.data.engines.embedded import EmbeddedEngine
from meshwright.data.pipeline.wordcount import count_words


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


def test_what_cannot_be_counted_is_named(texts):
    (texts / "d.txt.gz").write_bytes((texts / "c.txt.gz").read_bytes()[:-50])
    for engine in (None, EmbeddedEngine(1)):
        with pytest.raises(UserError, match=r"d\.txt\.gz cannot be counted.*data-bad-compression"):
            count_words(["*.gz"], texts, engine)
