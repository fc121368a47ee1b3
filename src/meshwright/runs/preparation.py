"""Prepares a corpus, or counts words, on an engine, and reports how far it is."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import can_write
from meshwright.core.units import format_rate
from meshwright.data.corpus_spec import CorpusSpec
from meshwright.data.corpus_summary import summarize_corpus
from meshwright.data.engines.choose import build_engine, check_engine, default_engine
from meshwright.data.prepare_report import PrepareReport
from meshwright.data.sources import iter_files
from meshwright.report.corpus_page import corpus_lines, write_corpus_page
from meshwright.runs.data import prepare_in_process
from meshwright.runs.reporter import Reporter

if TYPE_CHECKING:
    from meshwright.data.pipeline.wordcount import WordCount


@dataclass(frozen=True)
class EngineChoice:
    """The engine that a user asked for."""

    name: str | None = None
    """One of ``engines.choose.ENGINES``; the best that is installed if left out."""
    parallelism: int | None = None
    """Tasks at once; the cores of this machine if left out."""
    address: str | None = None
    """Address of a cluster that runs."""

    def resolve(self, reporter: Reporter) -> str:
        """The name of the engine; why, if it was not asked for."""
        if self.name is not None:
            check_engine(self.name, self.address, self.parallelism)
            return self.name
        name, reason = default_engine()
        check_engine(name, self.address, self.parallelism)
        reporter.detail(f"engine {name}: {reason}")
        return name


def prepare_with_progress(
    spec: CorpusSpec, base: Path, reporter: Reporter, choice: EngineChoice | None = None
) -> PrepareReport:
    """Prepare a corpus and report how far it is."""
    choice = choice or EngineChoice()
    name = choice.resolve(reporter)
    if name == "reference":
        return prepare_in_process(spec, base, reporter)
    from meshwright.data.pipeline.run import prepare_on_engine  # noqa: PLC0415 - needs pyarrow

    clock = _StageClock(_count_bytes(spec.sources, base))
    with reporter.bar(100) as show, closing(build_engine(name, choice.parallelism, choice.address)) as engine:

        def on_progress(stage: str, share: float, documents: int) -> None:
            show(f"{name}: {clock.describe(stage, share, documents)}", int(100 * share))

        return prepare_on_engine(spec, base, engine, on_progress)


def check_report(path: Path) -> None:
    """Refuse a page that cannot be written, before hours of work.

    Raises:
        UserError: With the file.
    """
    if not can_write(path):
        rule = "is a folder" if path.is_dir() else "cannot be written: no permission, or no such folder"
        raise UserError(Problem("report-not-writable", rule, path=str(path), fix="Choose another file"))


def report_corpus(report: PrepareReport, path: Path, reporter: Reporter) -> None:
    """Write the report of a preparation as a page, and print it as text."""
    summary = summarize_corpus(Path(report.out))
    write_corpus_page(report, summary, path)
    for line in corpus_lines(report, summary):
        reporter.message(line)
    reporter.message(f"report: {path}")


def count_words_with_progress(
    sources: Sequence[str], base: Path, reporter: Reporter, choice: EngineChoice, top: int
) -> WordCount:
    """Count the words of files and report how far it is."""
    from meshwright.data.pipeline.wordcount import count_words  # noqa: PLC0415

    name = choice.resolve(reporter)
    if name == "reference":
        return count_words(sources, base, None, top)
    with reporter.bar(100) as show, closing(build_engine(name, choice.parallelism, choice.address)) as engine:
        return count_words(sources, base, engine, top, lambda stage, done: show(f"{stage}: {done} tasks", 0))


@dataclass
class _StageClock:
    """The rate of a stage, and the time that is left of it."""

    total_bytes: int
    _stage: str = ""
    _started: float = 0.0
    _first: float = 0.0

    def describe(self, stage: str, share: float, documents: int) -> str:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._started, self._first = stage, now, share
        elapsed, done = now - self._started, share - self._first
        text = f"{stage} {share:.0%}"
        if documents:
            text += f", {documents} documents"
        if done > 0 and elapsed > 0:
            rate = done * self.total_bytes / elapsed
            text += f", {format_rate(rate, 'B')}, ETA {(1 - share) * elapsed / done:.0f}s"
        return text


def _count_bytes(sources: Sequence[str], base: Path) -> int:
    total = 0
    for source in sources:
        for _, path in iter_files(source, base, frozenset(), lambda name, reason: None):
            try:
                total += os.path.getsize(path)  # noqa: PTH202
            except OSError:
                continue
    return total
