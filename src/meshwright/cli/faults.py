"""``meshwright faults``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api import run_faults
from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.errors import CheckFailedError
from meshwright.core.units import format_plural

if TYPE_CHECKING:
    from meshwright.results import FaultReport


def check_faults(
    output: Output, names: Sequence[str], seed: int, budget_s: float, schedule: Path | None
) -> int:
    """Run fault tests and print their figures; status 3 if one fails."""
    output.print(f"seed {seed}, budget {budget_s:g} s")
    report = run_faults(
        *names, seed=seed, budget_s=budget_s, schedule=schedule, reporter=ConsoleReporter(output)
    )
    _describe(output, report)
    output.result(report.as_dict())
    return 0 if report.ok else CheckFailedError.exit_status


def _describe(output: Output, report: FaultReport) -> None:
    """The table, what is wrong, and how to run it again."""
    ran = [case for case in report.cases if not case.skipped]
    rows = [
        [str(case.test.number), case.name, "; ".join(map(str, case.figures)), case.verdict] for case in ran
    ]
    output.table("Fault tests", ("#", "test", "figures", "verdict"), rows)
    for test in dict.fromkeys(case.test for case in ran):
        output.print(f"{test.number} {test.name}: {test.criterion}")
    for case in report.cases:
        if case.skipped:
            output.print(f"skipped {case.name}: {case.skipped}")
        for violation in case.violations:
            output.print(f"FAIL {case.name}: {violation}")
        if case.verdict == "FAIL":
            output.print(f"run it again: {report.replay(case)}")
    failed = sum(case.verdict == "FAIL" for case in ran)
    took = f"{report.seconds:.0f} s, load average {report.load_average:.1f}"
    output.print(f"{format_plural(len(ran) - failed, 'test')} passed, {failed} failed ({took})")
