"""Arguments that several commands share, and how a command's errors become messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.completion import complete_key, complete_model
from meshwright.cli.output import Output
from meshwright.core.errors import MeshwrightError, Problem, UserError

if TYPE_CHECKING:
    from meshwright.results import NearestLegal

Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object on standard output; messages go to standard error."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Override keys of the job file, such as train.lr=3e-4.",
        metavar="KEY=VALUE",
        autocompletion=complete_key,
    ),
]
PlanSource = Annotated[
    str,
    typer.Argument(
        help="Job file, plan file, or model preset.", metavar="JOB", autocompletion=complete_model
    ),
]
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
JobSource = Annotated[str, typer.Argument(help="Job file or plan file.", metavar="JOB")]


def guarded(output: Output, command: Callable[[], int | None]) -> None:
    """Run a command; errors become messages and an exit status."""
    try:
        status = command() or 0
    except MeshwrightError as error:
        near = _find_near(error)
        facts = {"nearest": [one.as_dict() for one in near]} if near else None
        output.failure(error, [one.line for one in near], facts=facts)
        status = error.exit_status
    except KeyboardInterrupt:
        output.errors.print("interrupted")
        status = 130
    raise typer.Exit(status)


def read_size(option: str, text: str) -> int:
    """Bytes from a text such as ``64MB``, ``1MiB`` or ``4096``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        fix = "For example 64MB, 1MiB or 4096"
        raise UserError(Problem("collective-size", "is not a size in bytes", option, text, fix))
    return round(float(match[1]) * UNITS[match[2] or ""])


def _find_near(error: MeshwrightError) -> list[NearestLegal]:
    """The nearest legal layouts, if a rule forbids the job's layout."""
    from meshwright.job_files import find_nearest_legal  # noqa: PLC0415  (only when something is wrong)

    return find_nearest_legal(error)
