"""The result of a preparation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.core.units import format_count, format_plural, format_rate
from meshwright.data.corpus import CorpusStats
from meshwright.data.shards import ShardIndex
from meshwright.data.tokenizer import parse_tokenizer_name

MOST_NAMED = 5
"""Unreadable documents that are named; ``--json`` has all."""


def describe_left_out(names: Sequence[str], count: int) -> list[str]:
    """A line for each of the first names, and one for the others.

    Args:
        names: Of files or records that were left out, with reasons.
        count: How many there are.
    """
    named = names[:MOST_NAMED]
    lines = [f"  left out: {name}" for name in named]
    if count > len(named):
        lines.append(f"  and {count - len(named)} more; --json names them")
    return lines


def warn_of_vocabulary(tokenizer: str, index: ShardIndex) -> list[str]:
    """A sentence if BPE found fewer tokens than were asked for; else nothing."""
    choice, reached = parse_tokenizer_name(tokenizer), index.tokenizer.vocab_size
    if choice.kind != "bpe" or reached >= choice.vocab_size:
        return []
    return [f"{tokenizer} reached a vocabulary of {reached}: the corpus has no more pairs to merge"]


@dataclass(frozen=True)
class PrepareReport:
    """The result; ``meshwright prepare --json`` prints it."""

    engine: str
    """``reference``, ``embedded``, ``spark``, ``ray`` or ``flink``."""
    documents_in: int
    """Documents read: the sum of ``documents_out`` and of all that were left out."""
    documents_out: int
    """Documents written."""
    duplicates: int
    """Exact duplicates of an earlier document."""
    near_duplicates: int
    """Documents that share a MinHash band with an earlier one."""
    filtered: int
    """Documents that a rule of ``[filter]`` drops."""
    empty: int
    quarantined: int
    """Files, or lines of ``.jsonl`` files, that could not be read as text."""
    quarantined_names: tuple[str, ...]
    """``name: reason`` of the first thousand."""
    train_documents: int
    eval_documents: int
    """A single document is split: then train and eval have one each."""
    tokens: int
    """Tokens of both splits, including end-of-document tokens."""
    vocab_size: int
    """Vocabulary size of the tokenizer."""
    prompt_tokens: int
    """Tokens of prompts; 0 without a template."""
    shards: int
    sha256: str
    """Hash of the token files in index order, then the index."""
    seconds: float
    bytes_per_s: float
    """UTF-8 bytes of kept text per second."""
    out: str
    warnings: tuple[str, ...] = ()
    """Sentences about settings that may be mistakes."""

    @classmethod
    def of(
        cls,
        engine: str,
        tally: CorpusStats,
        index: ShardIndex,
        *,
        prompt_tokens: int,
        sha256: str,
        seconds: float,
        out: Path,
        warnings: Sequence[str] = (),
    ) -> PrepareReport:
        """The report of a preparation that is complete.

        Args:
            engine: That ran it.
            tally: Documents read, kept and left out.
            index: Index of the shards.
            prompt_tokens: Tokens of prompts.
            sha256: Hash of the shards.
            seconds: Since its start.
            out: The prepared folder.
            warnings: About settings that may be mistakes.
        """
        train, held_out = index.splits.train, index.splits.eval
        return cls(
            engine=engine,
            documents_in=tally.documents_in,
            documents_out=tally.documents_out,
            duplicates=tally.duplicates,
            near_duplicates=tally.near_duplicates,
            filtered=tally.filtered,
            empty=tally.empty,
            quarantined=tally.quarantined,
            quarantined_names=tuple(tally.quarantined_names),
            train_documents=train.documents,
            eval_documents=held_out.documents,
            tokens=train.tokens + held_out.tokens,
            vocab_size=index.tokenizer.vocab_size,
            prompt_tokens=prompt_tokens,
            shards=len(index.shards),
            sha256=sha256,
            seconds=seconds,
            bytes_per_s=tally.text_bytes / max(seconds, 1e-9),
            out=str(out),
            warnings=tuple(warnings),
        )

    def as_dict(self) -> dict[str, Any]:
        """The report for ``--json``."""
        return asdict(self)

    def describe(self) -> str:
        """One line about what was prepared, and one for each of the first unreadable documents."""
        prompts = f"({format_count(self.prompt_tokens)} of prompts) " if self.prompt_tokens else ""
        splits = f"{self.train_documents} to train on, {self.eval_documents} held out"
        if not self.train_documents:
            splits = "all for evaluation"
        done = (
            f"prepared {format_plural(self.documents_out, 'document')} ({splits}; "
            f"left out: {self._left_out()}) as {format_count(self.tokens)} tokens "
            f"{prompts}in {self.out}, "
            f"{format_rate(self.bytes_per_s, 'B')}"
        )
        return "\n".join([done, *describe_left_out(self.quarantined_names, self.quarantined)])

    def _left_out(self) -> str:
        """Counts by reason; duplicates and what is unreadable also if there are none."""
        near = format_plural(self.near_duplicates, "near-duplicate")
        parts = [format_plural(self.duplicates, "duplicate"), near if self.near_duplicates else ""]
        parts.append(f"{self.filtered} by the filter" if self.filtered else "")
        parts.append(f"{self.empty} empty" if self.empty else "")
        return ", ".join(filter(None, [*parts, f"{self.quarantined} unreadable"]))
