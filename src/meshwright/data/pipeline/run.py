"""Prepares a corpus on an engine: the stages in order. The driver holds counts, never text or tokens."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshwright.core.errors import Problem, UserError
from meshwright.core.packages import has_package
from meshwright.core.version import __version__
from meshwright.data.corpus import bad_record_problem, empty_problem
from meshwright.data.corpus_spec import CorpusSpec
from meshwright.data.engines.engine import ENGINE_FAILED, Engine, engine_problem, map_tasks, shuffle_rows
from meshwright.data.engines.work_folder import WorkFolder, read_batches, remove_other_folders
from meshwright.data.files import BadDataError
from meshwright.data.growth import warn_of_replacement
from meshwright.data.pipeline.assignment import Assignment, DocumentCounts, assign_sides, count_documents
from meshwright.data.pipeline.duplicates import (
    BandTask,
    bands_stage,
    drops_stage,
    duplicates_stage,
    near_duplicates_stage,
)
from meshwright.data.pipeline.scan import CorpusTask, ScanTask, scan_stage
from meshwright.data.pipeline.splits import SPLIT_BYTES, InputSplit, plan_splits
from meshwright.data.pipeline.tokenize import (
    KeptTask,
    SampleTask,
    TokenizeTask,
    sample_stage,
    tokenize_stage,
)
from meshwright.data.pipeline.write import ShardTask, bound_shards, order_stage, write_stage
from meshwright.data.prepare_report import PrepareReport, warn_of_vocabulary
from meshwright.data.shard_writer import token_dtype, write_index
from meshwright.data.shards import ShardEntry, ShardFolder, ShardIndex, is_prepared_folder
from meshwright.data.sources import locate
from meshwright.data.staging import check_target, publish_folder, storage_errors
from meshwright.data.tokenizer import (
    END_OF_DOCUMENT,
    TOKENIZER_FILE,
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    parse_tokenizer_name,
    sample_bits,
)

WORK_VERSION = 2
_WRITE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Only writing raises these."""
_BUCKET_BYTES = 64 * 1024**2
_ORDER_BUCKETS = 16

StageProgress = Callable[[str, float, int], None]
"""Called with the name of a stage, its finished share, and the documents that were scanned."""


def prepare_on_engine(
    spec: CorpusSpec,
    base: Path,
    engine: Engine,
    progress: StageProgress = lambda *_: None,
    split_bytes: int = SPLIT_BYTES,
) -> PrepareReport:
    """Prepare a corpus. A run that was killed goes on where it was, also on another engine.

    Args:
        spec: The corpus.
        base: Folder of relative paths.
        engine: Runs the stages; the caller closes it.
        progress: Called now and then.
        split_bytes: Size of an input split; the output does not depend on it.

    Raises:
        UserError: A mistake in the spec, no text, a full disk: no files are left behind. Another error of the
            system or of the engine: the next run goes on.
    """
    started = time.monotonic()
    out = locate(spec.out, base)
    with storage_errors(out):
        check_target(out, is_prepared_folder)
        target = Path(os.path.realpath(out))
        target.parent.mkdir(parents=True, exist_ok=True)
    base = base.absolute()
    splits = plan_splits(spec.sources, base, (out,), spec.on_bad_records == "skip", split_bytes)
    work = WorkFolder(target.with_name(f".{target.name}.{_fingerprint(spec, base, splits)}.work"))
    with ExitStack() as stack:
        with storage_errors(out):
            stack.enter_context(work.locked())
            remove_other_folders(work.path, target)
        with _errors_of_stages(work, out):
            result = _Preparation(spec, base, engine, work, splits, progress).run()
            sha256 = ShardFolder(work.path / "shards", result.index).content_sha256()
        warnings = warn_of_replacement(out, work.path / "shards")
        publish_folder(work.path / "shards", out, is_prepared_folder)
        work.remove()
    return PrepareReport.of(
        engine.name,
        result.counts.tally,
        result.index,
        prompt_tokens=result.prompt_tokens,
        sha256=sha256,
        seconds=time.monotonic() - started,
        out=out,
        warnings=[*warnings, *warn_of_vocabulary(spec.tokenizer, result.index)],
    )


@contextmanager
def _errors_of_stages(work: WorkFolder, out: Path) -> Iterator[None]:
    """Remove the work folder after a mistake in the corpus and on a full disk; else the next run goes on."""
    try:
        yield
    except UserError as error:
        if any(problem.code != ENGINE_FAILED for problem in error.problems):
            work.remove()
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            work.remove()
        if error.errno in _WRITE_ERRORS or _is_within(error.filename, work.path):
            with storage_errors(out):
                raise
        where = f" {error.filename}" if error.filename else ""
        raise UserError(engine_problem(f"{error.strerror or error}{where}")) from error


def _is_within(name: object, folder: Path) -> bool:
    return isinstance(name, str) and Path(name).is_relative_to(folder)


def _fingerprint(spec: CorpusSpec, base: Path, splits: Sequence[InputSplit]) -> str:
    """Names the work folder: other files or settings are another preparation."""
    files = [
        [
            (part.name, str(part.path), part.file_size, part.modified_ns, part.part, part.unreadable)
            for part in split.parts
        ]
        for split in splits
    ]
    choice = parse_tokenizer_name(spec.tokenizer, key="tokenizer")
    tokenizer = load_tokenizer(locate(choice.path, base)).fingerprint() if choice.kind == "file" else ""
    template = CorpusTask(spec, base, buckets=1).template
    versions = [__version__, version("tokenizers") if has_package("tokenizers") else ""]
    facts = [
        WORK_VERSION,
        versions,
        repr(spec),
        str(base),
        tokenizer,
        template.identity if template else "",
        files,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Result:
    index: ShardIndex
    counts: DocumentCounts
    prompt_tokens: int


class _Preparation:
    """The stages of one preparation."""

    def __init__(
        self,
        spec: CorpusSpec,
        base: Path,
        engine: Engine,
        work: WorkFolder,
        splits: list[InputSplit],
        progress: StageProgress,
    ) -> None:
        self._spec, self._engine, self._work, self._splits = spec, engine, work, splits
        self._progress = progress
        self._documents = 0
        total = sum(split.size for split in splits)
        self._corpus = CorpusTask(spec, base, buckets=max(4, total // _BUCKET_BYTES))

    def run(self) -> _Result:
        spec, work = self._spec, self._work
        tokenizer = self._given_tokenizer()
        keys = self._map(scan_stage(), [ScanTask(self._corpus, split) for split in self._splits])
        drops = self._drops(keys)
        counts = count_documents(keys, drops)
        self._documents = counts.tally.documents_in
        self._check(counts)
        fraction, documents = spec.eval_fraction, counts.tally.documents_out
        assignment = assign_sides(keys, drops, fraction, documents, can_split=not spec.template)
        kept = [
            KeptTask(self._corpus, split, keys[number], drops.get(number))
            for number, split in enumerate(self._splits)
        ]
        if tokenizer is None:
            tokenizer = self._train_tokenizer(kept, counts)
        tokenizer_path = work.path / TOKENIZER_FILE
        if not tokenizer_path.exists():
            tokenizer.save(work.path)
        ordered = self._tokenize(kept, assignment, tokenizer_path)
        index = self._write(ordered, tokenizer)
        self._check_complete(index, counts, assignment)
        return _Result(index, counts, _count_prompts(work.path / "shards", index))

    def _given_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if it must be trained."""
        choice = parse_tokenizer_name(self._spec.tokenizer, key="tokenizer")
        if choice.kind == "bpe":
            template = self._corpus.template
            specials = (END_OF_DOCUMENT, *(template.markers if template else ()))
            self._corpus = replace(self._corpus, special_tokens=specials)
            return None
        path = locate(choice.path, self._corpus.base)
        tokenizer = ByteTokenizer() if choice.kind == "byte" else load_tokenizer(path)
        self._corpus = replace(self._corpus, special_tokens=tuple(tokenizer.special_tokens))
        return tokenizer

    def _drops(self, keys: list[Path]) -> dict[int, Path]:
        """The dropped documents, by split."""
        found = self._shuffle(duplicates_stage(), keys)
        if self._spec.near_duplicates:
            tasks = [BandTask(path, self._corpus.buckets) for path in keys]
            found = found + self._shuffle(near_duplicates_stage(), self._map(bands_stage(), tasks))
        return {int(path.stem): path for path in self._shuffle(drops_stage(), found)}

    def _check(self, counts: DocumentCounts) -> None:
        """Refuse an empty corpus, and a bad record if the job says so."""
        if (bad := counts.first_bad) is not None:
            code, reason, fix = bad["code"], bad["reason"], bad["fix"] or ""
            raise UserError(bad_record_problem(bad["name"], BadDataError(code, reason, fix)))
        if counts.tally.documents_out == 0:
            raise UserError(empty_problem(self._spec.sources, self._corpus.options, counts.tally))

    def _check_complete(self, index: ShardIndex, counts: DocumentCounts, assignment: Assignment) -> None:
        """Every document that the scan counted is in the shards; an only document may be split in two."""
        written, counted = sum(shard.documents for shard in index.shards), counts.tally.documents_out
        if written == counted or (assignment.single and written == counted + 1):
            return
        rule = f"would have {written} documents, and the first pass over the files counted {counted}"
        fix = "Start again when the files no longer change"
        raise UserError(Problem("data-changed", rule, path=self._spec.out, fix=fix))

    def _train_tokenizer(self, kept: Sequence[KeptTask], counts: DocumentCounts) -> Tokenizer:
        """Train BPE in the driver, once, on a sample that hashes choose."""
        path = self._work.path / TOKENIZER_FILE
        if path.exists():
            return load_tokenizer(path)
        bits = sample_bits(counts.sample_characters)
        files = self._map(sample_stage(), [SampleTask(task, bits) for task in kept])
        choice, template = parse_tokenizer_name(self._spec.tokenizer), self._corpus.template
        markers = template.markers if template else ()
        self._progress("train BPE", 0.0, self._documents)
        trained = BpeTokenizer.train(_texts(files), choice.vocab_size, markers)
        draft = self._work.stage("tokenizer")
        trained.save(draft)
        (draft / TOKENIZER_FILE).replace(path)
        return trained

    def _tokenize(self, kept: Sequence[KeptTask], assignment: Assignment, tokenizer: Path) -> list[Path]:
        tokens = self._work.stage("tokens")
        tasks = [
            TokenizeTask(task, assignment, tokenizer, tokens, len(kept), _ORDER_BUCKETS) for task in kept
        ]
        return self._shuffle(order_stage(), self._map(tokenize_stage(), tasks))

    def _write(self, ordered: list[Path], tokenizer: Tokenizer) -> ShardIndex:
        """Write all shards, then the index."""
        folder, tokens = self._work.stage("shards"), self._work.stage("tokens")
        itemsize, has_mask = token_dtype(tokenizer).itemsize, self._corpus.template is not None
        tasks = [
            ShardTask(side, number, rows, tokens, folder, itemsize, tokenizer.end_of_document, has_mask)
            for side, number, rows in bound_shards(ordered, self._spec.shard_tokens)
        ]
        for number, task in enumerate(tasks):
            if not all((folder / name).exists() for name in task.file_names):  # published, then killed
                self._work.forget(write_stage().name, number)
        entries: list[list[ShardEntry]] = [[], []]
        for task, path in zip(tasks, self._map(write_stage(), tasks), strict=True):
            (batch,) = read_batches(path)
            entries[task.side].append(ShardEntry(**json.loads(batch.column("entry")[0].as_py())))
        known = {name for task in tasks for name in task.file_names}
        for path in folder.iterdir():
            if path.name not in known:  # drafts of workers that were killed
                path.unlink()
        return write_index(folder, tokenizer, tuple(entries[0]), tuple(entries[1]))

    def _map(self, stage: Any, tasks: Sequence[Any]) -> list[Path]:
        return map_tasks(self._engine, self._work, stage, tasks, self._show(len(tasks)))

    def _shuffle(self, stage: Any, inputs: Sequence[Path]) -> list[Path]:
        return shuffle_rows(self._engine, self._work, stage, inputs, self._show(0))

    def _show(self, tasks: int) -> Callable[[str, int], None]:
        return lambda name, done: self._progress(name, done / tasks if tasks else 0.0, self._documents)


def _texts(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        for batch in read_batches(path):
            yield from batch.column("text").to_pylist()


def _count_prompts(folder: Path, index: ShardIndex) -> int:
    """Tokens of prompts, from the loss masks."""
    opened = ShardFolder(folder, index)
    masked = [shard for shard in index.shards if shard.loss_mask_file is not None]
    return sum(shard.tokens - int(opened.map_loss_mask(shard).sum()) for shard in masked)
