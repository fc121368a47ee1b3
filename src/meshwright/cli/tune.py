"""``meshwright tune``: the planner's best layouts, a few steps each, and a cluster file that knows better."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from meshwright.audit.compare import audit_run
from meshwright.audit.event_scan import Attempt
from meshwright.cli.app import require_packages
from meshwright.cli.cluster_file import require_writable, write_cluster
from meshwright.cli.data import prepare_data
from meshwright.cli.measure import describe_machine, measure_plan
from meshwright.cli.output import Output
from meshwright.cli.ranks import require_compiler, require_devices
from meshwright.cli.train import refuse_preset
from meshwright.core.errors import Problem, RunFailedError, UserError
from meshwright.core.units import format_bytes, format_count, format_plural, format_seconds
from meshwright.launch.environment import prepare_environment
from meshwright.plan.build import plan_from
from meshwright.plan.calibrate import Calibration, MeasuredLayout, calibrate
from meshwright.plan.contract import Plan
from meshwright.plan.predict import Prediction, predict
from meshwright.plan.search.planner import search_job
from meshwright.report.scaling import FEWEST_STEPS, WARM_UP
from meshwright.report.tuning import TuneRow, sort_rows, summarize_times
from meshwright.spec.job import Job
from meshwright.spec.load import load_job, named_layout_keys

Show = Callable[[str, int], None]


def tune_job(output: Output, source: str, overrides: list[str], top: int, steps: int, out: Path) -> int:
    """Try the best layouts, show them beside their predictions, fit the cluster and write it."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="tune")
    refuse_preset(source)
    _require_sizes(top, steps)
    require_writable(out, "tune")
    job = shorten(load_job(source, overrides), steps)
    _require_auto_layout(job)
    require_compiler(job)
    require_devices(job, job.cluster.world_size)
    found = rank_candidates(job, source, overrides)
    plans = [plan_from(prediction) for prediction in found[:top]]
    data_dir = prepare_data(output, job)
    prepare_environment(threads=1)
    rows, attempt = _measure_all(output, plans, data_dir)
    if all(row.measured is None for row in rows):
        _show(output, job, rows)
        rule = f"none of the {format_plural(len(rows), 'layout')} that were tried ran: {rows[0].reason}"
        raise RunFailedError(Problem("tune-nothing-ran", rule, path=job.name))
    measured = [MeasuredLayout(row.plan.job.layout, row.measured.step_s) for row in rows if row.measured]
    fitted = calibrate(job, measured)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    machine = describe_machine(plans[0], attempt)
    where = machine["processor"] if machine["device"] == "cpu" else machine["device_name"]
    layouts = format_plural(len(measured), "layout")
    basis = f"fitted by meshwright tune to {layouts} of {job.name} on {where}, {date[:10]}"
    write_cluster(out, dataclasses.replace(fitted.cluster, basis=basis), "tune")
    _show(output, job, rows, fitted)
    _show_fit(output, fitted, found, rows, steps, out)
    again = dataclasses.replace(job, cluster=fitted.cluster)
    output.result(
        {
            "rows": [row.as_dict(predict(again, row.plan.job.layout).step_s) for row in rows],
            "candidates": len(found),
            "cluster_file": str(out),
            "fitted": {
                key: {"before": value, "after": fitted.after[key]} for key, value in fitted.before.items()
            },
            "error_before": fitted.error_before,
            "error_after": fitted.error_after,
            "machine": machine,
            "date": date,
            "basis": _basis(steps),
        }
    )
    return 0


def shorten(job: Job, steps: int) -> Job:
    """The job for a few steps: a schedule of the learning rate that fits them; it changes no step's time.

    What was probed is left out: rates are fitted, and steps that are built of probed times know none.
    """
    train = dataclasses.replace(
        job.train, steps=steps, schedule="constant", warmup=0, min_lr_ratio=None, decay_fraction=None
    )
    cluster = dataclasses.replace(job.cluster, probed=None)
    return dataclasses.replace(job, train=train, cluster=cluster)


def rank_candidates(job: Job, source: str, overrides: Sequence[str]) -> list[Prediction]:
    """What can be tried, the best prediction first; settings that the user wrote are kept.

    Raises:
        UserError: Nothing fits.
    """
    return search_job(job, named_layout_keys(source, overrides)).best


def _require_sizes(top: int, steps: int) -> None:
    if top < 1:
        rule = "is not a number of layouts to try"
        raise UserError(Problem("tune-top", rule, path="--top", value=top, fix="Use 1 or more"))
    if steps < FEWEST_STEPS:
        rule = f"is too few: the first {WARM_UP} are not counted, and 3 is the least for a median"
        fix = f"Use {FEWEST_STEPS} or more"
        raise UserError(Problem("tune-steps", rule, path="--steps", value=steps, fix=fix))


def _require_auto_layout(job: Job) -> None:
    """A layout that is given leaves nothing to try."""
    if job.layout.mode == "given":
        rule = f"is given: {job.layout.named_degrees()}; tune tries layouts that the planner chooses"
        fix = "Leave the degrees and layout.mode out, or measure this one with meshwright train"
        raise UserError(Problem("tune-layout-given", rule, path="layout", fix=fix))


def _measure_all(output: Output, plans: Sequence[Plan], data_dir: Path) -> tuple[list[TuneRow], Attempt]:
    """Run each plan; one that fails is a row with its reason."""
    rows: list[TuneRow] = []
    attempt = Attempt(0)
    with _bar(output, sum(plan.job.train.steps for plan in plans)) as show:
        done = 0
        for number, plan in enumerate(plans, 1):
            name = f"layout {number} of {len(plans)} ({TuneRow(plan, None).overrides})"
            show(f"{name}: starting", done)
            try:
                heard = measure_plan(plan, data_dir, name, functools.partial(_show_on, show, done))
            except RunFailedError as error:
                rows.append(TuneRow(plan, None, str(error)))
            else:
                verdict = audit_run(plan, heard.attempt.record)
                for difference in verdict.differences:
                    output.warn(f"{name}: {difference} [audit-differs]")
                times: list[Any] = [heard.times[rank] for rank in range(plan.world_size)]
                rows.append(TuneRow(plan, summarize_times(times, heard.attempt.record, verdict.ok)))
                attempt = heard.attempt
            done += plan.job.train.steps
    return sort_rows(rows), attempt


def _show_on(show: Show, done: int, text: str, steps: int) -> None:
    """Steps of one layout, behind those of the layouts before it."""
    show(text, done + steps)


@contextmanager
def _bar(output: Output, total: int) -> Iterator[Show]:
    """A bar on a terminal; in a pipe a line for each layout."""
    console = output.errors
    if not console.is_terminal:
        yield lambda text, steps: console.print(text) if text.endswith("starting") else None
        return
    with Progress(BarColumn(), TextColumn("{task.description}"), console=console) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, steps: bar.update(task, completed=steps, description=text)


def _show(output: Output, job: Job, rows: Sequence[TuneRow], fitted: Calibration | None = None) -> None:
    again = dataclasses.replace(job, cluster=fitted.cluster) if fitted else job
    columns = ("layout", "predicted", "measured", "recalibrated", f"{job.unit}/s", "predicted peak", "peak")
    cells = [
        (*_cells(row), row.reason.splitlines()[0])
        if row.measured is None
        else (*_cells(row, predict(again, row.plan.job.layout).step_s), _verdict(row))
        for row in rows
    ]
    output.table("Layouts, best measured first", (*columns, "audit"), cells)


def _verdict(row: TuneRow) -> str:
    return "ok" if row.measured and row.measured.audit_ok else "differs"


def _cells(row: TuneRow, again_s: float | None = None) -> tuple[str, ...]:
    found = row.measured
    peak = found.peak_memory_bytes if found else None
    return (
        row.overrides.replace("layout.", ""),
        format_seconds(row.plan.step_s),
        format_seconds(found.step_s) if found else "did not run",
        format_seconds(again_s) if again_s is not None else "",
        format_count(found.tokens_per_s) if found else "",
        format_bytes(row.predicted_peak_bytes),
        format_bytes(peak) if peak is not None else "",
    )


def _basis(steps: int) -> str:
    return f"medians of {steps - WARM_UP} steps after {WARM_UP} of warm-up, slowest rank of each"


def _show_fit(
    output: Output,
    fitted: Calibration,
    found: Sequence[Prediction],
    rows: Sequence[TuneRow],
    steps: int,
    out: Path,
) -> None:
    output.print(f"{_basis(steps)}; {len(rows)} of {format_plural(len(found), 'layout')} that run and fit")
    output.print()
    cells = [
        (key, f"{value:.3g}", f"{fitted.after[key]:.3g}", f"{fitted.after[key] / value:.2f}")
        for key, value in fitted.before.items()
    ]
    output.table("Rates of the cluster", ("", "before", "fitted", "times"), cells)
    before, after = f"{fitted.error_before:.0%}", f"{fitted.error_after:.0%}"
    output.print(f"predictions were off by {before} on average; with the fitted rates by {after}")
    output.print(f"\ncluster file: {out}; use it with cluster.file={out}")
