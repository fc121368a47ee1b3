"""The second map: reads the kept documents of a split again and writes their tokens to a file.

The rows say where the tokens of each piece are, and its place in the order. Only these rows travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.core.errors import UserError
from meshwright.data.corpus import Document
from meshwright.data.encode_pieces import encode_pieces, split_documents
from meshwright.data.engines.stages import BUCKET, Batches, MapStage
from meshwright.data.engines.work_folder import BATCH_ROWS, arrow, new_file
from meshwright.data.pipeline.assignment import EVAL, TRAIN, Assignment, read_kept
from meshwright.data.pipeline.scan import CorpusTask, Rejected, changed_problem, read_split, sample_pieces
from meshwright.data.pipeline.splits import InputSplit
from meshwright.data.shard_writer import token_dtype
from meshwright.data.sources import printable
from meshwright.data.split import split_document
from meshwright.data.tokenizer import Tokenizer, load_tokenizer, sample_zeros

_KEY_BITS = 63


@dataclass(frozen=True)
class KeptTask:
    """The kept documents of one split."""

    corpus: CorpusTask
    split: InputSplit
    keys: Path
    drops: Path | None


@dataclass(frozen=True)
class SampleTask:
    """Texts to train BPE on."""

    kept: KeptTask
    bits: int
    """Zero bits at the start of the hash of a chosen text."""


@dataclass(frozen=True)
class TokenizeTask:
    """Documents to encode."""

    kept: KeptTask
    assignment: Assignment
    tokenizer: Path
    out: Path
    """Folder of the token files."""
    splits: int
    """Number of splits of the corpus."""
    order_buckets: int
    """Buckets of each side in the order of documents."""


class _Tag(NamedTuple):
    side: int
    key: int
    place: tuple[int, int]


def rows_schema() -> Any:
    """A piece of a document: its place in the order, and where its tokens are."""
    pa = arrow()
    kinds = {BUCKET: "int32", "side": "int32", "key": "int64", "split": "int32", "row": "int64"}
    kinds |= {"piece": "int32", "source": "int32", "offset": "int64", "tokens": "int64", "ends": "int32"}
    return pa.schema([(name, getattr(pa, kind)()) for name, kind in kinds.items()])


def sample_schema() -> Any:
    """A text to train BPE on."""
    return arrow().schema([("text", arrow().large_string())])


def sample_stage() -> MapStage:
    """Chooses texts to train BPE on."""
    return MapStage("sample", choose_texts, sample_schema())


def tokenize_stage() -> MapStage:
    """Encodes documents."""
    return MapStage("tokenize", tokenize_split, rows_schema())


def token_path(folder: Path, source: int) -> Path:
    """The tokens of a split."""
    return folder / f"{source:05d}.tokens"


def mask_path(folder: Path, source: int) -> Path:
    """The loss mask of a split."""
    return folder / f"{source:05d}.mask"


def choose_texts(task: SampleTask) -> Batches:
    """The texts of a split that BPE is trained on."""
    pa, schema = arrow(), sample_schema()
    texts: list[str] = []
    characters = 0
    for _, document in _kept_documents(task.kept, Assignment(0)):
        for text in sample_pieces(task.kept.corpus, document):
            if sample_zeros(text) >= task.bits:
                texts.append(text)
                characters += len(text)
        if characters > 1024**2:
            yield pa.RecordBatch.from_pydict({"text": texts}, schema)
            texts, characters = [], 0
    if texts:
        yield pa.RecordBatch.from_pydict({"text": texts}, schema)


def _kept_documents(task: KeptTask, assignment: Assignment) -> Iterator[tuple[_Tag, Document]]:
    kept = read_kept(task.keys, task.drops)
    mask, keys = kept.mask, kept.columns["key"]
    if not mask.any():
        return
    threshold = assignment.threshold
    rows = 0
    for row, item in enumerate(read_split(task.corpus, task.split)):
        rows = row + 1
        if row >= mask.size:
            break
        if not mask[row]:
            continue
        if isinstance(item, Rejected):
            raise UserError(changed_problem(printable(item.name)))
        place = task.split.number, row
        side = EVAL if int(kept.values[row]) < threshold else TRAIN
        if assignment.changed is not None and place == assignment.changed[0]:
            side = assignment.changed[1]
        yield _Tag(side, int(keys[row]), assignment.moved.get(place, place)), item
    if rows != mask.size:
        names = [printable(name) for name in dict.fromkeys(part.name for part in task.split.parts)]
        raise UserError(changed_problem(", ".join(names[:3]) + (", ..." if len(names) > 3 else "")))


@lru_cache(maxsize=2)
def _cached_tokenizer(path: Path, modified_ns: int) -> Tokenizer:
    return load_tokenizer(path)


def tokenize_split(task: TokenizeTask) -> Batches:
    """Encode the kept documents of a split; the rows come when the token file is complete."""
    pa, schema = arrow(), rows_schema()
    tokenizer = _cached_tokenizer(task.tokenizer, task.tokenizer.stat().st_mtime_ns)
    dtype, source = token_dtype(tokenizer), task.kept.split.number
    rows: dict[str, list[int]] = {name: [] for name in schema.names}
    offset, piece_number = 0, 0
    with ExitStack() as stack:
        tokens_file = stack.enter_context(new_file(token_path(task.out, source)))
        mask_file = None
        if task.kept.corpus.spec.template:
            mask_file = stack.enter_context(new_file(mask_path(task.out, source)))
        documents = split_documents(_kept_documents(task.kept, task.assignment))
        for batch in encode_pieces(documents, tokenizer):
            for piece, encoded in batch:
                tag: _Tag = piece.tag
                tokens_file.write(encoded.tokens.astype(dtype).tobytes())
                if mask_file is not None and encoded.loss_mask is not None:
                    mask_file.write(encoded.loss_mask.astype(np.uint8).tobytes())
                place = (order_bucket(task, tag), tag.side, tag.key, *tag.place, piece_number, source)
                for name, value in zip(
                    schema.names, (*place, offset, len(encoded.tokens), int(piece.ends)), strict=True
                ):
                    rows[name].append(value)
                offset += len(encoded.tokens)
                piece_number = 0 if piece.ends else piece_number + 1
    if task.assignment.single and offset:
        rows = _split_single(rows, offset, task)
    table = pa.Table.from_pydict(rows, schema)
    yield from table.to_batches(max_chunksize=BATCH_ROWS)


def _split_single(rows: dict[str, list[int]], tokens: int, task: TokenizeTask) -> dict[str, list[int]]:
    """The only document as one of each side."""
    at = split_document(tokens, task.kept.corpus.spec.eval_fraction)
    parts = [(TRAIN, 0, at), (EVAL, at, tokens - at)]
    parts = [part for part in parts if part[2]]
    found: dict[str, list[int]] = {name: [values[0]] * len(parts) for name, values in rows.items()}
    found["side"] = [side for side, _, _ in parts]
    found["bucket"] = [order_bucket(task, _Tag(side, 0, (0, 0))) for side, _, _ in parts]
    found["offset"] = [offset for _, offset, _ in parts]
    found["tokens"] = [count for _, _, count in parts]
    found["ends"] = [1] * len(parts)
    return found


def order_bucket(task: TokenizeTask, tag: _Tag) -> int:
    """The bucket of a document in the order of the corpus: buckets in order are documents in order."""
    buckets = task.order_buckets
    if task.kept.corpus.spec.shuffle and not task.assignment.single:
        within = (tag.key * buckets) >> _KEY_BITS
    else:
        within = tag.place[0] * buckets // task.splits
    return tag.side * buckets + within
