"""``meshwright plan --why``: one layout explained, legal or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.cli.output import Output
from meshwright.cli.plan_text import describe_plan
from meshwright.core.units import format_bytes, format_seconds
from meshwright.layout.text import describe_layout

if TYPE_CHECKING:
    from meshwright.results import LayoutExplanation, Prediction


def describe_explanation(output: Output, explanation: LayoutExplanation, verbose: bool) -> None:
    """Which rules forbid the layout and the nearest legal one; or its plan beside the best layout."""
    if explanation.plan is None or explanation.requested is None:
        job = explanation.job
        output.print(f"{job.name}: {describe_layout(job.layout)} is not legal")
        for problem in explanation.problems:
            output.print(f"  {problem}")
        for one in explanation.nearest:
            output.print(one.line)
            for change in one.alternatives:
                output.print(f"  it would fit with {change.overrides} ({change.step_and_memory})")
        return
    describe_plan(output, explanation.plan, verbose)
    if explanation.best is not None:
        _compare_table(output, explanation.best, explanation.requested, explanation.against_best_s)


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "0"


def _signed(seconds: float) -> str:
    """A difference with its sign, in the units of the columns beside it."""
    return f"{'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))}" if seconds else "0"


def _compare_table(
    output: Output, best: Prediction, requested: Prediction, differences: dict[str, float]
) -> None:
    rows = [
        (
            name,
            _time(requested.time.parts.get(name, 0.0)),
            _time(best.time.parts.get(name, 0.0)),
            _signed(more),
        )
        for name, more in sorted(differences.items(), key=lambda item: -abs(item[1]))
    ]
    step, peak = requested.step_s - best.step_s, requested.needed_bytes - best.needed_bytes
    rows.append(("step", format_seconds(requested.step_s), format_seconds(best.step_s), _signed(step)))
    sign = "+" if peak >= 0 else "-"
    rows.append(
        (
            "memory",
            format_bytes(requested.needed_bytes),
            format_bytes(best.needed_bytes),
            f"{sign}{format_bytes(abs(peak))}",
        )
    )
    output.print()
    output.table("Against the best layout", ("", "this layout", "best", "difference"), rows)
