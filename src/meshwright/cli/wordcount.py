"""``meshwright wordcount``."""

from __future__ import annotations

from meshwright.api import count_words
from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.units import format_plural


def count_files(
    output: Output,
    files: list[str],
    engine: str | None,
    parallelism: int | None,
    address: str | None,
    top: int,
) -> int:
    """Count the words of files."""
    counted = count_words(
        files,
        engine=engine,
        parallelism=parallelism,
        address=address,
        top=top,
        reporter=ConsoleReporter(output),
    )
    for word, count in counted.top:
        output.print(f"{count:>12,}  {word}")
    for line in counted.describe_left_out():
        output.print(line)
    words = "word" if counted.total == 1 else "words"
    output.print(
        f"{counted.total:,} {words}, {counted.distinct:,} different, in {counted.seconds:.1f} s "
        f"({counted.engine}, {format_plural(counted.splits, 'input split')})"
    )
    output.result(counted.as_dict())
    return 0
