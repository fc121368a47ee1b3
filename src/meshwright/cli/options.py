"""Arguments that several commands share, and how a command's errors become messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.completion import complete_key, complete_model
from meshwright.cli.output import Output
from meshwright.core.errors import MeshwrightError

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


def _find_near(error: MeshwrightError) -> list[NearestLegal]:
    """The nearest legal layouts, if a rule forbids the job's layout."""
    from meshwright.job_files import find_nearest_legal  # noqa: PLC0415  (only when something is wrong)

    return find_nearest_legal(error)
