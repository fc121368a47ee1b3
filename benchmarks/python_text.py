"""Training text without a download: the source code of Python's standard library and of torch.

The tokens are words, numbers, spaces, newlines and punctuation, numbered by frequency. 10 M tokens with a
vocabulary of 118,000 take a few seconds on one core.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.data.shard_writer import ShardWriter
from meshwright.data.tokenizer import ByteTokenizer

PIECES = re.compile(r"[^\W\d]\w*|\d+|[^\S\n]+|\n|.")
"""Words, numbers, runs of spaces, newlines, punctuation: every character is in exactly one token."""
END, UNKNOWN = 0, 1
"""Ids of end of document and unknown token; other tokens follow."""
SHUFFLE_SEED = 8


def list_sources() -> Iterator[Path]:
    """Files of Python's standard library, with its tests if installed, then those of torch."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    torch = find_spec("torch")
    roots += [Path(folder) for folder in (torch.submodule_search_locations or ())] if torch else []
    for root in roots:
        yield from sorted(path for path in root.rglob("*.py") if path.is_file() and _is_part(path, root))


def _is_part(path: Path, root: Path) -> bool:
    """Whether the file belongs to the library, not to a package installed into it."""
    return not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)


def read_documents(wanted: int) -> list[list[str]]:
    """Tokenized files, shuffled, until the wanted number of tokens."""
    documents: list[list[str]] = []
    tokens = 0
    for path in list_sources():
        pieces = PIECES.findall(path.read_text(encoding="utf-8", errors="replace"))
        if pieces:
            documents.append(pieces)
            tokens += len(pieces) + 1
        if tokens >= wanted:
            break
    random.Random(SHUFFLE_SEED).shuffle(documents)
    return documents


def number_pieces(documents: Sequence[Sequence[str]], vocab_size: int) -> list[npt.NDArray[Any]]:
    """Each document as token ids below the vocabulary size; frequent tokens have low ids."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(document)
    frequent = counts.most_common(vocab_size - UNKNOWN - 1)
    numbers = {piece: number for number, (piece, _) in enumerate(frequent, start=UNKNOWN + 1)}
    return [
        np.fromiter((numbers.get(piece, UNKNOWN) for piece in document), np.uint32, len(document))
        for document in documents
    ]


def write_text(folder: Path, vocab_size: int, wanted: int) -> dict[str, Any]:
    """Prepare the text for training; returns its description.

    Args:
        folder: An empty folder.
        vocab_size: Vocabulary size of the model.
        wanted: Tokens that all steps read together.
    """
    documents = number_pieces(read_documents(wanted), vocab_size)
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size, tokenizer.end_of_document = vocab_size, END
    with ShardWriter(folder, tokenizer) as writer:
        for document in documents:
            writer.add("train", document)
        writer.finish()
    tokens = sum(len(document) + 1 for document in documents)
    return {
        "files": len(documents),
        "tokens": tokens,
        "vocabulary": max(int(document.max()) for document in documents) + 1,
        "unknown_share": sum(int((document == UNKNOWN).sum()) for document in documents) / tokens,
        "passes": wanted / tokens,
    }


def describe_text(about: dict[str, Any]) -> str:
    """Description of the text."""
    text = f"{about['tokens'] / 1e6:.2f}M tokens of {about['files']} files, vocabulary {about['vocabulary']}"
    text += f", {about['unknown_share']:.2%} unknown"
    return text + (f"; {about['passes']:.1f} epochs" if about["passes"] > 1 else "; less than one epoch")
