"""``meshwright audit``."""

from __future__ import annotations

from pathlib import Path

from meshwright.audit.compare import Audit, StateRow, audit_run, describe_match
from meshwright.audit.record import RunRecord, read_record
from meshwright.cli.output import Output
from meshwright.cli.timeline_file import write_timelines
from meshwright.core.errors import CheckFailedError, Problem, UserError
from meshwright.core.units import format_rate, format_seconds
from meshwright.plan.contract import PLAN_FILE, Plan, read_plan
from meshwright.report.pipeline_run import PipelineRun, find_pipeline
from meshwright.spec.model import BATCH_NORM_NOTE

CHECK_FAILED = CheckFailedError.exit_status


def audit_folder(output: Output, run_dir: Path, picture: Path | None = None) -> int:
    """Audit a finished run; status 3 if a promise did not hold.

    Args:
        output: Where to print.
        run_dir: Of the run.
        picture: Where the pipeline's simulated and measured timelines go.
    """
    record = read_record(run_dir)
    plan = read_plan(run_dir / PLAN_FILE)
    verdict, pipeline = audit_run(plan, record), find_pipeline(plan, record)
    describe_audit(output, plan, record, verdict, pipeline)
    if picture is not None:
        _draw_pipeline(output, run_dir, pipeline, picture)
    told = {} if pipeline is None else {"pipeline": pipeline.as_dict()}
    output.result({"run_dir": str(run_dir), "status": record.outcome, **verdict.as_dict(), **told})
    return 0 if verdict.ok else CHECK_FAILED


def _draw_pipeline(output: Output, run_dir: Path, pipeline: PipelineRun | None, picture: Path) -> None:
    """The two timelines, one above the other."""
    if pipeline is None:
        rule = "recorded no pipeline: it has none, or did not come to its end"
        fix = "Leave out -o, or name a run with layout.pp above 1"
        raise UserError(Problem("audit-no-pipeline", rule, path=str(run_dir), fix=fix))
    write_timelines(picture, *pipeline.timelines())
    output.print(f"picture: {picture}")


def _word(row: StateRow) -> str:
    if row.compiled:
        return "compiled, not judged"
    if row.measured is None:
        return ""  # the cell beside it says so
    return (f"within {row.tolerance:.0%}" if row.tolerance else "equal") if row.ok else "DIFFERS"


def show_state(output: Output, verdict: Audit) -> None:
    """Memory, predicted beside measured."""
    rows = [
        (
            str(row.rank),
            row.kind,
            str(row.predicted),
            "not measured" if row.measured is None else str(row.measured),
            _word(row),
        )
        for row in verdict.state
    ]
    output.table("Memory in bytes", ("rank", "what", "predicted", "measured", ""), rows)


def show_collectives(output: Output, verdict: Audit, title: str) -> None:
    """Calls and bytes, predicted beside measured."""
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


def describe_audit(
    output: Output, plan: Plan, record: RunRecord, verdict: Audit, pipeline: PipelineRun | None
) -> None:
    """Predicted and measured side by side, then the verdict in words."""
    if verdict.measured:
        show_state(output, verdict)
    else:
        output.print("Memory: predicted, but no rank measured any; the run did not get to the audited step")
    output.print()
    if verdict.collectives:
        show_collectives(output, verdict, "Collectives of the whole run, a rank")
    elif plan.collectives:
        output.print("Collectives: predicted, but no rank reported any; the run did not end")
    else:
        output.print("Collectives: none predicted, none measured")
    output.print()
    _describe_times(output, plan, record, pipeline)
    if plan.job.mixes_samples:
        output.print(f"Note: {BATCH_NORM_NOTE}")
    for note in (*record.notes, *verdict.load):
        output.print(f"Note: {note}")
    if verdict.ok:
        output.print(f"Audit: the plan held. {describe_match(plan)}")
        return
    for difference in verdict.differences:
        output.print(f"Audit: {difference} [audit-differs]")


def _describe_times(output: Output, plan: Plan, record: RunRecord, pipeline: PipelineRun | None) -> None:
    """What is shown and not judged: the step, and a pipeline's bubble."""
    if record.tokens_per_s:
        measured_s = record.tokens_per_step / record.tokens_per_s
        rate = format_rate(record.tokens_per_s, plan.job.unit)
        rate += f", {format_rate(record.flops_per_s(plan) or 0, 'FLOP')}"
        rate += f", MFU {record.mfu or 0:.1%} of {record.peak_basis}"
        output.print(
            f"Step: predicted {format_seconds(plan.step_s)}, measured {format_seconds(measured_s)} "
            f"({rate}); shown, not judged"
        )
    if pipeline is not None:
        for sentence in pipeline.sentences():
            output.print(sentence)
