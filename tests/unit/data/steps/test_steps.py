"""Normalisation, filters and MinHash on single texts."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from meshwright.data.steps.examine import StepOptions, examine_text, shuffle_key
from meshwright.data.steps.filters import FilterSpec, TextCounts, failed_rule
from meshwright.data.steps.near_duplicates import BANDS, MinHash
from meshwright.data.steps.normalize import normalize_text


def test_normalized_text():
    assert normalize_text("A\u0301 b \r\nc\t\rd\x00\ufeff\u2028e \n") == "Á b\nc\nd\ne\n"
    assert normalize_text("a\tb\n\n  c") == "a\tb\n\n  c"


ENGLISH = "This is the story of a town that was known for the quality of its bread and its wine.\n"


@pytest.mark.parametrize(
    ("text", "rules", "rule"),
    [
        ("four", {"min_characters": 5}, "min_characters"),
        ("longer", {"max_characters": 5}, "max_characters"),
        ("one two", {"min_words": 3}, "min_words"),
        ("12345 67", {"min_letters": 0.5}, "min_letters"),
        ("a ### $$$ b", {"max_symbols": 0.5}, "max_symbols"),
        ("same\nsame\nsame\nother\n", {"max_repeated_lines": 0.4}, "max_repeated_lines"),
        ("x x x x y", {"max_top_word": 0.5}, "max_top_word"),
        (ENGLISH, {"languages": ("de", "fr")}, "languages"),
        (ENGLISH, {"languages": ("en",)}, None),
        ("Das ist der Hund und die Katze ist nicht im Haus", {"languages": ("de",)}, None),
        ("zzz qqq", {"languages": ("en",)}, "languages"),
        (ENGLISH, {"min_words": 10, "min_letters": 0.8, "max_symbols": 0.1}, None),
    ],
)
def test_each_rule_of_the_filter(text, rules, rule):
    counts = TextCounts()
    counts.add(text)
    assert failed_rule(counts, FilterSpec(**rules)) == rule


def bands(text: str, pieces: int = 1) -> set[int]:
    found = MinHash()
    for number in range(pieces):
        found.add(text if pieces == 1 else text[number])
    return set(found.bands().tolist())


def test_similar_texts_share_a_band_and_others_do_not():
    random = Random(3)
    words = [f"word{number}" for number in range(2000)]
    texts = [" ".join(random.choices(words, k=300)) for _ in range(40)]
    signatures = [bands(text) for text in texts]
    assert all(len(signature) == BANDS for signature in signatures)
    unrelated = [a & b for n, a in enumerate(signatures) for b in signatures[:n]]
    assert not any(unrelated)
    similar = [text.replace(" word7 ", " WORD7  ") + " and a few words more" for text in texts]
    assert (
        sum(bool(bands(text) & signature) for text, signature in zip(similar, signatures, strict=True)) == 40
    )


def test_the_bands_are_frozen():
    """They decide which documents are dropped, so they must not change with a version of NumPy."""
    found = MinHash()
    found.add("The quick brown fox jumps over the lazy dog. " * 3)
    assert found.bands()[:3].tolist() == [-4259150711189339570, -1481458295646583933, 8353578916539284893]
    assert MinHash().bands().tolist() == []


def test_facts_do_not_depend_on_the_pieces():
    options = StepOptions(filter=FilterSpec(max_characters=10))
    whole, parts = (examine_text(pieces, options) for pieces in (["one two three"], ["one two", " three"]))
    assert (whole.digest, whole.size, whole.characters, whole.dropped_by) == (
        parts.digest,
        parts.size,
        parts.characters,
        "max_characters",
    )


def test_shuffle_keys_depend_on_text_and_seed():
    keys = np.asarray([shuffle_key(bytes([n]) * 16, seed) for n in range(100) for seed in (0, 1)])
    assert len(set(keys.tolist())) == 200
    assert keys.min() >= 0
    assert 0.4 < keys.mean() / 2**63 < 0.6
