"""``meshwright prepare``."""

from __future__ import annotations

from pathlib import Path

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from meshwright.cli.output import Output
from meshwright.core.units import format_bytes, format_count, format_rate
from meshwright.data.prepare import CorpusSpec, PrepareReport, load_corpus_spec, prepare_corpus

MOST_NAMED = 5
"""Documents left out that are named; ``--json`` has more of them."""


def prepare_file(output: Output, corpus: Path) -> int:
    """Prepare what a CORPUS.toml describes."""
    report = prepare_with_progress(output, load_corpus_spec(corpus), corpus.parent)
    output.print(summarise(report))
    output.result(report.as_dict())
    return 0


def prepare_with_progress(output: Output, spec: CorpusSpec, base: Path) -> PrepareReport:
    """Prepare, with a line that moves while it does."""
    quiet = not output.errors.is_terminal
    columns = (SpinnerColumn(), TextColumn("preparing {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=output.errors, transient=True, disable=quiet) as progress:
        task = progress.add_task(", ".join(spec.sources))
        names = ", ".join(spec.sources)

        def moved(documents: int, read_bytes: int) -> None:
            progress.update(task, description=f"{names}: {documents} documents, {format_bytes(read_bytes)}")

        return prepare_corpus(spec, base, moved)


def summarise(report: PrepareReport) -> str:
    """What was done, in one line, and a line for each of the first few documents that could not be read."""
    prompts = f"({format_count(report.prompt_tokens)} of prompts) " if report.prompt_tokens else ""
    done = (
        f"prepared {report.documents_out} documents ({report.train_documents} to train on, "
        f"{report.eval_documents} held out; {report.duplicates} duplicates, {report.quarantined} unreadable "
        f"left out) as {format_count(report.tokens)} tokens "
        f"{prompts}in {report.out}, "
        f"{format_rate(report.bytes_per_s, 'B')}"
    )
    named = report.quarantined_names[:MOST_NAMED]
    lines = [done, *(f"  left out: {name}" for name in named)]
    if report.quarantined > len(named):
        lines.append(f"  and {report.quarantined - len(named)} more")
    return "\n".join(lines)
