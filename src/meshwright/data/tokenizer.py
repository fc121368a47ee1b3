"""Tokenizers: text to token numbers and back.

Two kinds. ``byte`` needs no training and no package, so every example and test runs on it. ``bpe`` is
byte-level byte-pair encoding by Hugging Face ``tokenizers``, trained here or brought along as a standard
``tokenizer.json``; the package is imported only when such a tokenizer is made.

A tokenizer is what :meth:`Tokenizer.save` writes: its fingerprint is the hash of those bytes, and prepared
data carries it, so that data and tokenizer cannot be mixed up.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from meshwright.core.errors import Problem, UserError, missing_package

TOKENIZER_FILE = "tokenizer.json"
END_OF_DOCUMENT = "<|endoftext|>"
MIN_BPE_VOCAB = 300
"""256 bytes, the end-of-document token, and some merges."""
MAX_BPE_VOCAB = 1_000_000
TRAIN_CHARACTERS = 64 * 1024**2
"""Most text that BPE is trained on."""

_KNOWN_ENDS = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "[SEP]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
_PARALLELISM = "TOKENIZERS_PARALLELISM"

Tokens = npt.NDArray[np.unsignedinteger[Any]]


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    name: str
    """``byte`` or ``bpe``."""
    vocab_size: int
    """Number of token ids."""
    end_of_document: int
    """The end-of-document token."""
    special_tokens: dict[str, int]
    """Special tokens, by their spelling in templates; plain text never becomes one."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without an end-of-document token."""

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of many texts, in one batch."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text; end-of-document tokens and unknown ids are skipped, invalid UTF-8 is replaced."""

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``."""

    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of what :meth:`save` writes."""


class ByteTokenizer:
    """Token ids 0 to 255 are bytes; 256 is the end-of-document token."""

    name = "byte"
    vocab_size = 257
    end_of_document = 256

    def __init__(self) -> None:
        """It has no special tokens for templates."""
        self.special_tokens: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """The bytes of the text in UTF-8; lone surrogates become ``?``."""
        return list(text.encode("utf-8", "replace"))

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """The bytes of each text."""
        return [
            np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint16) for text in texts
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """The text; ids that are not bytes are skipped."""
        return bytes(i for i in map(int, ids) if 0 <= i <= 255).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``."""
        (folder / TOKENIZER_FILE).write_bytes(_BYTE_TOKENIZER)

    def fingerprint(self) -> str:
        """SHA-256 of what :meth:`save` writes."""
        return hashlib.sha256(_BYTE_TOKENIZER).hexdigest()


_BYTE_TOKENIZER = json.dumps({"meshwright_tokenizer": "byte", "version": 1}).encode() + b"\n"


class BpeTokenizer:
    """A Hugging Face tokenizer, with the exact text of its ``tokenizer.json``.

    The text is kept because versions of the library serialise the same tokenizer differently, and the
    fingerprint must not change with the library.
    """

    name = "bpe"

    def __init__(self, serialized: str) -> None:
        """Make the tokenizer.

        Args:
            serialized: The text of a ``tokenizer.json``.

        Raises:
            UserError: ``tokenizers`` is not installed.
            ValueError: The text is not a tokenizer, or it has no token that can end a document.
        """
        self.serialized = serialized
        try:
            self._inner: Any = _tokenizers().Tokenizer.from_str(serialized)
        except UserError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer: {error}") from error
        # Text that spells <|endoftext|> is text: only the writer ends documents.
        self._inner.encode_special_tokens = True
        self._inner.no_truncation()
        self._inner.no_padding()
        vocab: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        ends = [vocab[token] for token in _KNOWN_ENDS if token in vocab]
        if not ends:
            raise ValueError(f"it has no token that ends a document (looked for {', '.join(_KNOWN_ENDS)})")
        self.end_of_document = ends[0]
        self.end_token: str = self._inner.id_to_token(ends[0])
        added = self._inner.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {t.content: i for i, t in added.items() if t.special}
        self.vocab_size = max(vocab.values()) + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, markers: Sequence[str] = ()) -> BpeTokenizer:
        """Train on a stream of texts; on a sample of a long one, see :func:`sample_texts`.

        The same texts in the same order give the same tokenizer. A small corpus may not have enough pairs to
        merge; then ``vocab_size`` is smaller than requested. ``markers`` become special tokens.
        """
        library = _tokenizers()
        inner = library.Tokenizer(library.models.BPE())
        inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT, *markers],
            initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        with _fit_to_process():
            inner.train_from_iterator((_encodable(text) for text in sample_texts(texts)), trainer=trainer)
        return cls(inner.to_str())

    def encode(self, text: str) -> list[int]:
        """The tokens of the text; lone surrogates become ``?``."""
        return list(self._inner.encode(_encodable(text), add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, on all cores."""
        with _fit_to_process():
            batch = self._inner.encode_batch_fast([_encodable(t) for t in texts], add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in batch]

    def decode(self, ids: Iterable[int]) -> str:
        """The text; end-of-document tokens and unknown ids are skipped."""
        known = [i for i in map(int, ids) if 0 <= i < self.vocab_size and i != self.end_of_document]
        return str(self._inner.decode(known, skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``."""
        (folder / TOKENIZER_FILE).write_bytes(self.serialized.encode())

    def fingerprint(self) -> str:
        """SHA-256 of what :meth:`save` writes."""
        return hashlib.sha256(self.serialized.encode()).hexdigest()


def sample_texts(texts: Iterable[str], most_characters: int = TRAIN_CHARACTERS) -> list[str]:
    """A sample of a stream of texts, chosen by hashes: about ``most_characters``, or all of a short stream.

    The trainer's memory grows with the number of distinct words, and a sample of tens of MB gives the same
    merges but for the rarest. A text is chosen by its own hash and the length of all texts, so every engine
    chooses the same ones. The number of bits grows with the length so far: one pass is enough.
    """
    kept: list[tuple[int, str]] = []
    bits, characters = 0, 0
    for text in texts:
        characters += len(text)
        wanted = sample_bits(characters, most_characters)
        if wanted > bits:
            bits = wanted
            kept = [(zeros, old) for zeros, old in kept if zeros >= bits]
        zeros = sample_zeros(text)
        if zeros >= bits:
            kept.append((zeros, text))
    return [text for _, text in kept]


def sample_bits(characters: int, most_characters: int = TRAIN_CHARACTERS) -> int:
    """Zero bits that the hash of a chosen text starts with: 1 / 2^bits of all texts are chosen."""
    return max(0, -(-characters // most_characters) - 1).bit_length()


def sample_zeros(text: str) -> int:
    """Zero bits at the start of the hash of a text."""
    hashed = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8, key=b"meshwright sample 1")
    return 64 - int.from_bytes(hashed.digest(), "big").bit_length()


def load_tokenizer(folder_or_file: Path) -> Tokenizer:
    """Read a tokenizer of either kind.

    Args:
        folder_or_file: A ``tokenizer.json``, or a folder with one.

    Raises:
        UserError: It is missing or not a tokenizer, or the package for it is not installed.
    """
    # Path.is_dir raises for a path that is too long or may not be searched; reading then says so.
    is_folder = os.path.isdir(folder_or_file)  # noqa: PTH112
    path = folder_or_file / TOKENIZER_FILE if is_folder else folder_or_file
    try:
        text = path.read_bytes().decode("utf-8")
        content = json.loads(text)
        if isinstance(content, dict) and "meshwright_tokenizer" in content:
            kind, version = content["meshwright_tokenizer"], content.get("version")
            if (kind, version) != ("byte", 1):
                raise ValueError(f"its kind {kind!r}, version {version!r}, is not supported")
            return ByteTokenizer()
        return BpeTokenizer(text)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            Problem(
                code="data-tokenizer-unreadable",
                path=str(path),
                rule=f"cannot be read as a tokenizer: {reason}",
                fix="Give a Hugging Face tokenizer.json, or use the tokenizer 'byte' or 'bpe:4096'",
            )
        ) from error


@dataclass(frozen=True)
class TokenizerChoice:
    """The tokenizer of the key ``data.tokenizer``."""

    kind: Literal["byte", "bpe", "file"]
    vocab_size: int = 0
    """For ``bpe``: the vocabulary to train."""
    path: str = ""
    """For ``file``: the path of a ``tokenizer.json``, or of a folder with one, as the user wrote it."""


def parse_tokenizer_name(text: str, key: str = "data.tokenizer") -> TokenizerChoice:
    """Read ``byte``, ``bpe:4096`` or a path to a ``tokenizer.json`` or to a folder that has one.

    A path is recognised by its form (it ends in ``.json`` or has a slash), so that the answer does not depend
    on which files happen to exist.

    Args:
        text: The value of the key.
        key: The dotted key to name in the error.

    Raises:
        UserError: It is none of the three forms.
    """
    if text == "byte":
        return TokenizerChoice("byte")
    if match := re.fullmatch(r"bpe:([0-9]{1,9})", text):
        vocab_size = int(match[1])
        if MIN_BPE_VOCAB <= vocab_size <= MAX_BPE_VOCAB:
            return TokenizerChoice("bpe", vocab_size=vocab_size)
        rule = (
            f"asks for a vocabulary of {vocab_size}; BPE is trained with {MIN_BPE_VOCAB} to {MAX_BPE_VOCAB}"
        )
    elif not text.startswith("bpe:") and "\0" not in text and (text.endswith(".json") or "/" in text):
        return TokenizerChoice("file", path=text)
    else:
        rule = "is not a tokenizer"
    fix = "Use 'byte', 'bpe:4096' (trains a vocabulary of that size), or a path to a tokenizer.json"
    if re.fullmatch(r"[\w.~-]+", text) and not text.startswith("bpe"):
        fix += f" or to a folder that has one, with a slash: './{text}'"
    raise UserError(Problem(code="data-tokenizer-unknown", path=key, value=text, rule=rule, fix=fix))


def _tokenizers() -> ModuleType:
    try:
        import tokenizers  # noqa: PLC0415 - optional: only BPE needs it
        import tokenizers.decoders  # noqa: PLC0415
        import tokenizers.models  # noqa: PLC0415
        import tokenizers.pre_tokenizers  # noqa: PLC0415
        import tokenizers.trainers  # noqa: PLC0415
    except ImportError as error:
        raise missing_package("tokenizers", "run", "BPE tokenization") from error
    return tokenizers


@contextmanager
def _fit_to_process() -> Iterator[None]:
    """Use one thread of the library in a worker process, and its default otherwise.

    Workers share the cores, and a forked worker must not use the thread pool of its parent. A value that the
    user has set wins, and the environment is restored afterwards.
    """
    if _PARALLELISM in os.environ or multiprocessing.parent_process() is None:
        yield
        return
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        os.environ.pop(_PARALLELISM, None)


def _encodable(text: str) -> str:
    """The text without lone surrogates, which the library does not accept."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
