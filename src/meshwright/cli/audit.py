"""``meshwright audit``."""

from __future__ import annotations

from pathlib import Path

from meshwright.api import Run, load_run
from meshwright.audit.compare import Audit, StateRow, describe_match
from meshwright.cli.output import Output
from meshwright.core.errors import CheckFailedError, Problem, UserError
from meshwright.core.units import format_rate, format_seconds, format_throughput
from meshwright.report.run_report import describe_audited
from meshwright.report.timeline import write_timelines
from meshwright.spec.model import BATCH_NORM_NOTE

CHECK_FAILED = CheckFailedError.exit_status


def audit_folder(output: Output, run_dir: Path, picture: Path | None = None) -> int:
    """Audit a run; status 3 if it does not match its plan.

    Args:
        output: Where to print.
        run_dir: Run folder.
        picture: Where to plot the simulated and the measured pipeline timeline.
    """
    run = load_run(run_dir)
    audit = run.audit()
    describe_audit(output, run)
    if picture is not None:
        _draw_pipeline(output, run, picture)
    pipeline = {} if run.pipeline is None else {"pipeline": run.pipeline.as_dict()}
    output.result({"run_dir": str(run_dir), "status": run.status, **audit.as_dict(), **pipeline})
    return 0 if audit.ok else CHECK_FAILED


def _draw_pipeline(output: Output, run: Run, picture: Path) -> None:
    """The simulated timeline above the measured one."""
    if run.pipeline is None:
        rule = "recorded no pipeline: it has no pipeline parallelism, or did not finish"
        fix = "Leave out -o, or choose a run with layout.pp above 1"
        raise UserError(Problem("audit-no-pipeline", rule, path=str(run.run_dir), fix=fix))
    write_timelines(picture, *run.pipeline.timelines())
    output.print(f"picture: {picture}")


def _word(row: StateRow) -> str:
    if row.measured is None:
        return ""
    if row.compiled and row.ok:
        return f"at most, compiled: {row.measured / row.predicted:.0%}"
    return row.match if row.ok else "DIFFERS"


def show_state(output: Output, verdict: Audit) -> None:
    """Print predicted and measured memory."""
    rows = [
        (
            str(row.rank),
            row.kind if row.generation is None else f"{row.kind}, generation {row.generation}",
            str(row.predicted),
            "not measured" if row.measured is None else str(row.measured),
            _word(row),
        )
        for row in verdict.state
    ]
    output.table("Memory in bytes", ("rank", "kind", "predicted", "measured", ""), rows)


def show_collectives(output: Output, verdict: Audit, title: str) -> None:
    """Print predicted and measured calls and bytes."""
    moved = [
        (
            row.axis if row.pp_rank is None else f"{row.axis}, pp rank {row.pp_rank}",
            row.op,
            row.phase,
            f"{row.predicted_calls} / {row.calls}",
            f"{row.predicted_bytes} / {row.bytes}",
            "equal" if row.equal else "DIFFERS",
        )
        for row in verdict.collectives
    ]
    columns = ("axis", "op", "phase", "calls predicted / measured", "bytes predicted / measured", "")
    output.table(title, columns, moved)


def describe_audit(output: Output, run: Run) -> None:
    """Predicted and measured side by side, then the verdict."""
    plan, verdict = run.contract, run.audit()
    if verdict.measured:
        show_state(output, verdict)
    else:
        output.print("Memory: not measured; the run ended before the audited step")
    output.print()
    if verdict.collectives:
        show_collectives(output, verdict, f"Collectives per rank, {describe_audited(verdict, run.record)}")
    elif plan.collectives:
        output.print("Collectives: not reported; the run did not finish")
    else:
        output.print("Collectives: none predicted, none measured")
    output.print()
    describe_verdict(output, run)


def describe_verdict(output: Output, run: Run) -> None:
    """Print times, notes and whether the run matches its plan."""
    plan, record, verdict = run.contract, run.record, run.audit()
    _describe_times(output, run)
    if plan.job.mixes_samples:
        output.print(f"Note: {BATCH_NORM_NOTE}")
    for note in (*record.notes, *verdict.load, *verdict.coverage):
        output.print(f"Note: {note}")
    if verdict.ok:
        output.print(f"Audit: ok. {describe_match(plan)}{_describe_placement(run)}")
        return
    for difference in verdict.real_differences:
        output.print(f"Audit: {difference} [audit-differs]")
    if verdict.incomplete:
        matches = "; what was measured matches the plan" if verdict.matches_so_far else ""
        output.print(f"Audit: {verdict.incomplete}{matches} [audit-incomplete]")


def _describe_times(output: Output, run: Run) -> None:
    """Print step time and pipeline bubble, which are not audited."""
    plan, record = run.contract, run.record
    if record.tokens_per_s:
        measured_s = record.tokens_per_step / record.tokens_per_s
        rate = format_throughput(record.tokens_per_s, plan.job.unit)
        rate += f", {format_rate(record.flops_per_s(plan) or 0, 'FLOP')}"
        rate += f", MFU {record.mfu or 0:.1%} of {record.peak_basis}"
        output.print(
            f"Step: predicted {format_seconds(plan.step_s)}, measured {format_seconds(measured_s)} "
            f"({rate}); not audited"
        )
    if run.pipeline is not None:
        for sentence in run.pipeline.sentences():
            output.print(sentence)


def _describe_placement(run: Run) -> str:
    """A sentence about ranks on several nodes that reported where they ran."""
    nodes = {row.node for row in run.audit().placement}
    if run.contract.job.cluster.nodes == 1 or None in nodes or not nodes:
        return ""
    return f" Every rank ran on its planned device ({len(nodes)} nodes)."
