"""Tokenizers: round trips, files, and user errors for invalid ones."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.errors import UserError
from meshwright.data.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    TokenizerChoice,
    load_tokenizer,
    parse_tokenizer_name,
)

# No surrogates: text that came from UTF-8 has none.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
SAMPLE = ["the cat sat on the mat", "the dog sat on the log " * 5, "naïve 日本語 text"]


@pytest.fixture(scope="module")
def bpe():
    """A BPE tokenizer with at most 300 tokens."""
    pytest.importorskip("tokenizers")
    return BpeTokenizer.train(SAMPLE, 300)


def codes(error) -> list[str]:
    """The error codes of a caught error."""
    return [problem.code for problem in error.value.problems]


@given(texts)
def test_byte_tokenizer_round_trips(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids == list(text.encode())
    assert tokenizer.encode_batch([text])[0].tolist() == ids


def test_bpe_round_trips(bpe):
    @given(texts)
    def check(text):
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text
        assert all(0 <= i < bpe.vocab_size and i != bpe.end_of_document for i in ids)
        assert bpe.encode_batch(["x", text])[1].tolist() == ids

    check()


def test_bpe_learns_merges(bpe):
    """Without merges every round trip would still pass."""
    assert 280 < bpe.vocab_size <= 300
    assert len(bpe.encode(SAMPLE[1])) < len(SAMPLE[1].encode()) / 2


def test_end_of_document_marker_inside_text_is_text(bpe):
    text = "before <|endoftext|> after"
    assert bpe.end_of_document not in bpe.encode(text)
    assert bpe.decode(bpe.encode(text)) == text


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_decode_skips_special_and_unknown_tokens(kind, request):
    tokenizer = ByteTokenizer() if kind == "byte" else request.getfixturevalue("bpe")
    ids = np.asarray(tokenizer.encode("ab"))
    noisy = [tokenizer.end_of_document, *ids, tokenizer.vocab_size, -1, 10**9]
    assert tokenizer.decode(noisy) == "ab"
    assert tokenizer.decode(tokenizer.encode("é")[:1] if kind == "byte" else []) == (
        "\ufffd" if kind == "byte" else ""
    )


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_lone_surrogates_are_encoded_as_question_marks(kind, request):
    """Undecodable command-line arguments contain them."""
    tokenizer = ByteTokenizer() if kind == "byte" else request.getfixturevalue("bpe")
    assert tokenizer.decode(tokenizer.encode("a\udcffb")) == "a?b"


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_saved_tokenizer_loads_with_the_same_fingerprint(kind, request, tmp_path):
    tokenizer = ByteTokenizer() if kind == "byte" else request.getfixturevalue("bpe")
    tokenizer.save(tmp_path)
    data = (tmp_path / "tokenizer.json").read_bytes()
    assert tokenizer.fingerprint() == hashlib.sha256(data).hexdigest()
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(place)
        assert (loaded.name, loaded.vocab_size) == (kind, tokenizer.vocab_size)
        assert loaded.fingerprint() == tokenizer.fingerprint()
        assert loaded.encode("the cat é") == tokenizer.encode("the cat é")


def test_byte_tokenizer_file_has_the_documented_content(tmp_path):
    ByteTokenizer().save(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == {
        "meshwright_tokenizer": "byte",
        "version": 1,
    }


def test_bpe_training_is_deterministic_across_processes(bpe):
    """Hash seeds differ between processes and must not decide between equal merges."""
    program = "from meshwright.data.tokenizer import *;"
    program += f"print(BpeTokenizer.train({SAMPLE!r}, 300).fingerprint())"
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == bpe.fingerprint() == BpeTokenizer.train(iter(SAMPLE), 300).fingerprint()


def test_encoding_leaves_tokenizers_parallelism_unchanged(bpe, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    monkeypatch.setattr("multiprocessing.parent_process", object)
    bpe.encode_batch(["a", "b"])
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    bpe.encode_batch(["a", "b"])
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_missing_tokenizers_package_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError) as error:
        BpeTokenizer.train(["a"], 300)
    assert codes(error) == ["install-missing-extra"]
    assert "meshwright[run]" in str(error.value)
    assert ByteTokenizer().encode("a") == [97]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path)
    assert codes(error) == ["install-missing-extra"]


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"meshwright_tokenizer": "byte", "version": 2}',
        b'{"meshwright_tokenizer": "words", "version": 1}',
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
    ],
)
def test_unreadable_tokenizer_is_refused(content, tmp_path):
    pytest.importorskip("tokenizers")
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path)
    assert codes(error) == ["data-tokenizer-unreadable"]
    assert str(tmp_path / "tokenizer.json") in str(error.value)


def test_impossible_tokenizer_path_is_refused(tmp_path):
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(UserError) as error:
            load_tokenizer(tmp_path / name)
        assert codes(error) == ["data-tokenizer-unreadable"]


def test_tokenizer_names_are_parsed():
    assert parse_tokenizer_name("byte") == TokenizerChoice("byte")
    assert parse_tokenizer_name("bpe:4096") == TokenizerChoice("bpe", vocab_size=4096)
    assert parse_tokenizer_name("some/tokenizer.json") == TokenizerChoice("file", path="some/tokenizer.json")
    assert parse_tokenizer_name("t.json").path == "t.json"


@given(
    st.one_of(
        st.sampled_from(["", "bpe", "bpe:", "bpe:299", "bpe:1000001", "bpe:-5", "bpe:4k", "gpt2"]), st.text()
    )
)
def test_unknown_tokenizer_name_lists_the_three_forms(text):
    if text == "byte" or text.endswith(".json") or "/" in text:
        return
    with pytest.raises(UserError) as error:
        parse_tokenizer_name(text)
    assert codes(error) == ["data-tokenizer-unknown"]
    assert all(
        form in str(error.value) for form in ("data.tokenizer=", "'byte'", "'bpe:4096'", "tokenizer.json")
    )
