"""``meshwright prepare``."""

from __future__ import annotations

from pathlib import Path

from meshwright.api import prepare_corpus
from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter


def prepare_file(
    output: Output,
    corpus: Path,
    engine: str | None,
    parallelism: int | None,
    address: str | None,
    report: Path | None,
) -> int:
    """Prepare what a CORPUS.toml describes."""
    prepared = prepare_corpus(
        corpus,
        engine=engine,
        parallelism=parallelism,
        address=address,
        report=report,
        reporter=ConsoleReporter(output),
    )
    output.print(prepared.describe())
    output.result(prepared.as_dict())
    return 0
