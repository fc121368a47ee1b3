"""What is in a prepared folder: sizes, lengths of documents, frequent words. Read from the shards alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.data.shards import SPLITS, ShardFolder
from meshwright.data.tokenizer import load_tokenizer

SAMPLE_TOKENS = 2_000_000
"""Tokens of which words are counted: the first of the training shards."""
TOP_WORDS = 30


@dataclass(frozen=True)
class CorpusSummary:
    """A prepared folder in a few numbers."""

    tokens: dict[str, int]
    """By split."""
    documents: dict[str, int]
    shards: dict[str, int]
    disk_bytes: int
    """Size of the token files."""
    lengths: tuple[tuple[int, int], ...]
    """Documents by length: at least so many tokens (a power of two, below twice as many), and how many."""
    longest: int
    """Tokens of the longest document, with its end token."""
    sampled_words: int
    top_words: tuple[tuple[str, int], ...]
    tokenizer: str
    vocab_size: int


def summarize_corpus(folder: Path) -> CorpusSummary:
    """Summarize a prepared folder; document lengths are read from all shards, words from the first tokens.

    Raises:
        UserError: The folder is not prepared, or broken.
    """
    opened = ShardFolder.open(folder)
    index, lengths, longest = opened.index, Counter[int](), 0
    for shard in index.shards:
        starts = opened.map_documents(shard).astype(np.int64)
        sizes = np.diff(starts, append=shard.tokens)
        longest = max(longest, int(sizes.max()))
        bits, counts = np.unique(np.frexp(sizes.astype(np.float64))[1], return_counts=True)
        lengths.update(
            {2 ** (bit - 1): count for bit, count in zip(bits.tolist(), counts.tolist(), strict=True)}
        )
    words = _count_words(opened)
    return CorpusSummary(
        tokens={name: index.split(name).tokens for name in SPLITS},
        documents={name: index.split(name).documents for name in SPLITS},
        shards={name: len(index.split(name).shards) for name in SPLITS},
        disk_bytes=sum(shard.tokens for shard in index.shards) * index.token_dtype.itemsize,
        lengths=tuple(sorted(lengths.items())),
        longest=longest,
        sampled_words=words.total(),
        top_words=tuple(sorted(words.items(), key=lambda entry: (-entry[1], entry[0]))[:TOP_WORDS]),
        tokenizer=index.tokenizer.name,
        vocab_size=index.tokenizer.vocab_size,
    )


def _count_words(opened: ShardFolder) -> Counter[str]:
    tokenizer, left = load_tokenizer(opened.folder), SAMPLE_TOKENS
    words: Counter[str] = Counter()
    for shard in opened.index.shards:
        if left <= 0:
            break
        tokens = opened.map_tokens(shard)[:left]
        left -= len(tokens)
        ends = np.flatnonzero(tokens == opened.index.tokenizer.end_of_document).tolist()
        for begin, end in zip([0, *(end + 1 for end in ends)], [*ends, len(tokens)], strict=True):
            words.update(tokenizer.decode(tokens[begin:end].tolist()).split())
    return words
