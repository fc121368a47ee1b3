"""``meshwright validate``: predicted against published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api import validate, validate_collectives
from meshwright.cli.output import Output
from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.report.figure import require_picture, save_figure
from meshwright.report.scatter import Scatter, draw_scatter

if TYPE_CHECKING:
    from meshwright.results import Outcome, Validation

COLUMNS = (
    "family", "rows", "predicted", "time", "median", "bias", "worst", "within 10%", "tau", "best found",
    "memory",
)  # fmt: skip
OPTIONAL_COLUMNS = ("best found", "median", "worst", "within 10%", "bias")
"""Columns that a narrow terminal leaves out, in this order."""
WORST_SHOWN = 8


def show_validation(
    output: Output, runs: Sequence[Path], picture: Path | None, leave_one_source_out: bool = False
) -> int:
    """Predict every row of the tables, and print the errors by family."""
    if picture is not None:
        require_picture(picture)
    found = validate(runs, leave_one_source_out=leave_one_source_out)
    title = "Predicted against measured"
    if found.left_out:
        title += ", each source with rates fitted without it"
    output.table(
        title, COLUMNS, [_line(*item) for item in found.families.items()], optional_columns=OPTIONAL_COLUMNS
    )
    _print_totals(output, found, given=bool(runs))
    _print_rows(output, found)
    if picture is not None:
        _draw(found.outcomes, picture)
        output.print(f"picture: {picture}")
    output.result(found.as_dict())
    return 0


def show_collectives(output: Output, runs: Sequence[Path], picture: Path | None) -> int:
    """Predict the published NCCL curves, and print the errors by machine."""
    for option, given in (("--runs", runs), ("--picture", picture)):
        if given:
            rule, fix = f"has no effect on collectives; {option} is of training runs", "Leave it out"
            raise UserError(Problem("validate-collectives", rule, option, fix=fix))
    found = validate_collectives()
    facts = found.as_dict()
    output.table(
        "NCCL all-reduce of 1 MB and more: simulated rings against published times",
        ("machine", "launch", "per step", "ring", "fitted rows", "error", "held out", "error", "worst"),
        [_curve_line(curve) for curve in facts["curves"]],
    )
    total = facts["held_out"]
    output.print(
        f"held-out numbers of ranks: mean error {_percent(total['mape'])}, worst {_percent(total['worst'])} "
        f"({total['rows']} rows, {_percent(total['within_20pct'])} within 20%)"
    )
    for curve in facts["curves"]:
        splits = curve["any_split"]
        output.print(
            f"{curve['hardware']}, any three numbers of ranks fitted ({splits['splits']} choices): mean "
            f"error {_percent(splits['least_mape'])} to {_percent(splits['most_mape'])}, worst "
            f"{_percent(splits['worst'])}"
        )
    for curve in found.curves:
        if curve.not_expressed:
            ranks = ", ".join(map(str, curve.not_expressed))
            output.print(f"not expressed: {curve.hardware} on {ranks} ranks, which no ring of links connects")
    reasons = ", ".join(f"{count} {reason}" for reason, count in found.not_judged.items())
    output.print(f"rows that are not judged: {reasons}")
    for choice in found.choices:
        size, times = format_bytes(choice.size_bytes), choice.times_s
        output.print(
            f"choice of {choice.source} on {choice.ranks} ranks, {size}: {choice.stated}; simulated: "
            f"{choice.simulated} (ring {format_seconds(times['ring'])}, tree {format_seconds(times['tree'])})"
        )
    output.result(facts)
    return 0


def _curve_line(curve: dict[str, Any]) -> tuple[str, ...]:
    fitted, held_out = curve["fitted"], curve["held_out"]
    return (
        curve["hardware"],
        f"{curve['launch_s'] * 1e6:.1f} us",
        f"{curve['alpha_s'] * 1e6:.1f} us",
        f"{curve['ring_bytes_per_s'] / 1e9:.1f} GB/s",
        str(fitted["rows"]),
        _percent(fitted["mape"]),
        str(held_out["rows"]),
        _percent(held_out["mape"]),
        _percent(held_out["worst"]),
    )


def _percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def _line(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    time, memory = figures["time"], figures["memory"]
    tau, best = figures["tau"], figures["best_within_5pct"]
    return (
        name if figures["counted"] or not figures["expressed"] else f"{name} (not counted)",
        str(figures["rows"]),
        str(figures["expressed"]),
        _percent(time["mape"]),
        _percent(time["median"]),
        _percent(time["bias"], signed=True),
        _percent(time["worst"]),
        _percent(time["within_10pct"]),
        "-" if tau is None else f"{tau:.2f}",
        "-" if best is None else f"{best:.0%} of {figures['groups']}",
        _percent(memory["mape"]) + (f" of {memory['rows']}" if memory["rows"] else ""),
    )


def _print_totals(output: Output, found: Validation, given: bool) -> None:
    """Print the errors of all counted rows, the ranking of layouts, intervals and memory limits.

    Args:
        output: Where to.
        found: The figures.
        given: Whether the rows are the caller's, to which nothing was fitted.
    """
    totals = found.totals
    if not found.left_out and not given:
        output.print("the rates were fitted to these rows: see --leave-one-source-out for new sources")
    names = {"all": "counted rows", "dense": "  dense models", "experts": "  models with experts"}
    for key, name in names.items():
        time, memory = totals[key]["time"], totals[key]["memory"]
        if not time["rows"] and not memory["rows"]:
            continue
        output.print(
            f"{name}: mean time error {_percent(time['mape'])} ({time['rows']} rows, "
            f"{_percent(time['within_10pct'])} within 10%), mean memory error {_percent(memory['mape'])} "
            f"({memory['rows']} rows)"
        )
    ranking, cover = totals["ranking"], totals["interval"]
    if ranking["groups"]:
        output.print(
            "layouts: the predicted best is within 5% of the best in "
            f"{_percent(ranking['best_within_5pct'])} of {ranking['groups']} groups; "
            f"tau is at least 0.7 in {ranking['sweeps_tau_70']} of {ranking['sweeps']} sweeps of 5 or more"
        )
    if (found.left_out or found.of_plans) and cover["share"] is not None:
        whose = "of plans" if found.of_plans else "from the other sources"
        output.print(
            f"80% intervals {whose} hold {_percent(cover['share'])} of {cover['rows']} rows; "
            f"median half-width {_percent(cover['half_width'])}"
        )
    if found.limits is not None:
        limits = found.limits.as_dict()
        output.print(
            f"memory limits: {_percent(limits['caught'])} of {limits['failed']} layouts that ran out of "
            f"memory and {_percent(limits['fitting'])} of {limits['ran']} that ran are predicted so; "
            f"balanced accuracy {_percent(limits['balanced_accuracy'])}"
        )


def _print_rows(output: Output, found: Validation) -> None:
    """Print why rows are not predicted, the rows with the largest errors, and rows with bad cells."""
    reasons: Counter[str] = Counter()
    for figures in found.families.values():
        reasons.update(figures["not_expressed"])
    if reasons:
        listed = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
        output.print(f"rows without a prediction: {listed}")
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
