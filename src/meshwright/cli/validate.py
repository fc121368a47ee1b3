"""``meshwright validate``: predicted against published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api import validate
from meshwright.cli.output import Output
from meshwright.core.units import format_seconds
from meshwright.report.figure import require_picture, save_figure
from meshwright.report.scatter import Scatter, draw_scatter

if TYPE_CHECKING:
    from meshwright.results import Outcome, Validation

COLUMNS = (
    "family", "rows", "predicted", "time", "median", "bias", "worst", "within 10%", "tau", "best found",
    "held out", "memory",
)  # fmt: skip
SPARE = ("best found", "median", "worst", "within 10%", "bias")
"""Columns that a narrow terminal leaves out, in this order."""
WORST_SHOWN = 8


def show_validation(output: Output, runs: Sequence[Path], picture: Path | None) -> int:
    """Predict every row of the tables, and print the errors by family."""
    if picture is not None:
        require_picture(picture)
    found = validate(runs)
    output.table(
        "Predicted against published", COLUMNS, [_line(*item) for item in found.families.items()], spare=SPARE
    )
    _say_totals(output, found.totals)
    _say_rest(output, found)
    if picture is not None:
        _draw(found.outcomes, picture)
        output.print(f"picture: {picture}")
    output.result(found.as_dict())
    return 0


def _percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def _line(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    time, memory = figures["time"], figures["memory"]
    tau, best = figures["tau"], figures["best_within_5pct"]
    held_out = figures["split"]["held_out"]["time"]
    return (
        name if figures["gates"] or not figures["expressed"] else f"{name} (not counted)",
        str(figures["rows"]),
        str(figures["expressed"]),
        _percent(time["mape"]),
        _percent(time["median"]),
        _percent(time["bias"], signed=True),
        _percent(time["worst"]),
        _percent(time["within_10pct"]),
        "-" if tau is None else f"{tau:.2f}",
        "-" if best is None else f"{best:.0%} of {figures['groups']}",
        _percent(held_out["mape"]) + (f" of {held_out['rows']}" if held_out["rows"] else ""),
        _percent(memory["mape"]) + (f" of {memory['rows']}" if memory["rows"] else ""),
    )


def _say_totals(output: Output, totals: dict[str, dict[str, Any]]) -> None:
    names = {"all": "counted rows", "fit": "  of these, used for the fit", "held_out": "  of these, held out"}
    for key, name in names.items():
        time, memory = totals[key]["time"], totals[key]["memory"]
        output.print(
            f"{name}: mean time error {_percent(time['mape'])} ({time['rows']} rows, "
            f"{_percent(time['within_10pct'])} within 10%), mean memory error {_percent(memory['mape'])} "
            f"({memory['rows']} rows)"
        )


def _say_rest(output: Output, found: Validation) -> None:
    """Print the rows with the largest errors, and rows with bad cells."""
    worst = found.worst(WORST_SHOWN)
    if worst:
        lines = [
            (
                outcome.row.id,
                _percent(outcome.step_error, signed=True),
                format_seconds(outcome.predicted_step_s or 0.0),
                format_seconds(outcome.row.step_s or 0.0),
                outcome.reason or "-",
            )
            for outcome in worst
        ]
        output.print("")
        output.table("Worst rows", ("row", "error", "predicted", "published", "assumptions"), lines)
    for outcome in found.outcomes:
        if outcome.reason.startswith("bad cell"):
            output.warn(f"{outcome.row.id}: {outcome.reason}")


def _draw(outcomes: Sequence[Outcome], path: Path) -> None:
    families: dict[str, list[tuple[float, float]]] = {}
    for outcome in outcomes:
        if outcome.predicted_step_s is not None and outcome.row.step_s is not None:
            point = (outcome.row.step_s, outcome.predicted_step_s)
            families.setdefault(outcome.row.family, []).append(point)
    scatter = Scatter("Step time: predicted against published", "published, s", "predicted, s", families)
    save_figure(draw_scatter(scatter), path)
