"""``meshwright prepare``."""

from __future__ import annotations

from pathlib import Path

from meshwright.api import prepare_corpus
from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter


def prepare_file(output: Output, corpus: Path) -> int:
    """Prepare what a CORPUS.toml describes."""
    report = prepare_corpus(corpus, reporter=ConsoleReporter(output))
    output.print(report.describe())
    output.result(report.as_dict())
    return 0
