"""``meshwright eval``."""

from __future__ import annotations

from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.units import format_count
from meshwright.saved import evaluate, find_model

COLUMNS = ("set", "loss", "perplexity", "accuracy", "targets", "samples")


def evaluate_sets(
    output: Output, path: str, data: list[str], overrides: list[str], samples: int | None, precision: str
) -> int:
    """Evaluate a saved model on each held-out set, and print a table."""
    model = find_model(path)
    reporter = ConsoleReporter(output)
    found = evaluate(model, data, *overrides, samples=samples, precision=precision, reporter=reporter)
    rows = [
        (
            one.name,
            f"{one.loss:.4f}",
            f"{one.perplexity:.4g}",
            f"{one.accuracy:.2%}",
            format_count(one.targets),
            str(one.samples),
        )
        for one in found
    ]
    output.table(f"Evaluation of {model}", COLUMNS, rows)
    output.result({"model": str(model), "sets": [one.as_dict() for one in found]})
    return 0
