"""Tunes the planner to this machine: runs its best layouts for a few steps, and fits the cluster's rates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.audit.compare import audit_run
from meshwright.audit.event_scan import Attempt
from meshwright.core.errors import Problem, RunFailedError, UserError
from meshwright.core.packages import require_packages
from meshwright.core.units import format_plural
from meshwright.launch.environment import prepare_environment
from meshwright.plan.build import plan_from
from meshwright.plan.calibrate import Calibration, MeasuredLayout, calibrate
from meshwright.plan.contract import PlanContract
from meshwright.plan.predict import predict
from meshwright.plan.search.planner import search_job
from meshwright.report.scaling import FEWEST_STEPS, WARM_UP
from meshwright.report.tuning import TuneRow, sort_rows, summarize_times
from meshwright.runs.cluster_file import require_writable, write_cluster
from meshwright.runs.data import prepare_data
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.measure import describe_machine, measure_plan
from meshwright.runs.ranks import require_devices, settle_block_backend
from meshwright.runs.reporter import Reporter
from meshwright.spec.job import Job


@dataclass(frozen=True)
class TuneResult:
    """The layouts that were run, best measured first, and the fitted cluster."""

    job: Job
    rows: list[TuneRow]
    fitted: Calibration
    candidates: int
    """Layouts that run and fit; the best of them were run."""
    out: Path
    """The cluster file."""
    machine: dict[str, Any]
    date: str
    steps: int

    @property
    def basis(self) -> str:
        """How the times were measured."""
        return describe_basis(self.steps)

    def recalibrated_step_s(self, row: TuneRow) -> float:
        """Step time of a layout as predicted with the fitted rates."""
        fitted = dataclasses.replace(self.job, cluster=self.fitted.cluster)
        return predict(fitted, row.plan.job.layout).step_s

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright tune --json``."""
        fitted = self.fitted
        return {
            "rows": [row.as_dict(self.recalibrated_step_s(row)) for row in self.rows],
            "candidates": self.candidates,
            "cluster_file": str(self.out),
            "fitted": {
                key: {"before": value, "after": fitted.after[key]} for key, value in fitted.before.items()
            },
            "error_before": fitted.error_before,
            "error_after": fitted.error_after,
            "machine": self.machine,
            "date": self.date,
            "basis": self.basis,
        }


def tune_job(job: LoadedJob, out: Path, top: int, steps: int, reporter: Reporter) -> TuneResult:
    """Run the best layouts, fit the cluster's rates to them, and write the cluster file.

    Raises:
        UserError: The job gives its layout or cannot run here, or the file cannot be written.
        RunFailedError: No layout ran.
    """
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="tune")
    job.require_runnable()
    _require_sizes(top, steps)
    require_writable(out, "tune")
    spec = shorten(job.spec, steps)
    _require_auto_layout(spec)
    spec = settle_block_backend(spec, reporter)
    require_devices(spec, spec.cluster.world_size)
    found = search_job(spec, job.named_layout_keys()).best
    plans = [plan_from(prediction) for prediction in found[:top]]
    data_dir = prepare_data(spec, reporter)
    prepare_environment(threads=1)
    rows, attempt = _measure_all(plans, data_dir, reporter)
    if all(row.measured is None for row in rows):
        rule = f"ran none of {format_plural(len(rows), 'layout')}: {rows[0].reason}"
        raise RunFailedError(Problem("tune-nothing-ran", rule, path=spec.name))
    measured = [MeasuredLayout(row.plan.job.layout, row.measured.step_s) for row in rows if row.measured]
    fitted = calibrate(spec, measured)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    machine = describe_machine(plans[0], attempt)
    where = machine["processor"] if machine["device"] == "cpu" else machine["device_name"]
    layouts = format_plural(len(measured), "layout")
    basis = f"fitted by meshwright tune to {layouts} of {spec.name} on {where}, {date[:10]}"
    write_cluster(out, dataclasses.replace(fitted.cluster, basis=basis), "tune")
    return TuneResult(spec, rows, fitted, len(found), out, machine, date, steps)


def shorten(job: Job, steps: int) -> Job:
    """The job for a few steps, with a constant learning rate; neither changes the time of a step.

    Probed times are left out: ``tune`` fits rates, and steps predicted from probed times use none.
    """
    train = dataclasses.replace(
        job.train, steps=steps, schedule="constant", warmup=0, min_lr_ratio=None, decay_fraction=None
    )
    cluster = dataclasses.replace(job.cluster, probed=None)
    return dataclasses.replace(job, train=train, cluster=cluster)


def _require_sizes(top: int, steps: int) -> None:
    if top < 1:
        rule = "is not a number of layouts"
        fix = "Use 1 or more"
        raise UserError(Problem("tune-top", rule, path="top", value=top, fix=fix, is_argument=True))
    if steps < FEWEST_STEPS:
        rule = f"is too few: the first {WARM_UP} are warm-up, and a median needs at least 3"
        fix = f"Use {FEWEST_STEPS} or more"
        raise UserError(Problem("tune-steps", rule, path="steps", value=steps, fix=fix, is_argument=True))


def _require_auto_layout(job: Job) -> None:
    """With a given layout there is nothing to tune."""
    if job.layout.mode == "given":
        rule = f"is given: {job.layout.named_degrees()}; tune runs layouts that the planner chooses"
        fix = "Leave the degrees and layout.mode out, or measure this layout with meshwright train"
        raise UserError(Problem("tune-layout-given", rule, path="layout", fix=fix))


def _measure_all(
    plans: Sequence[PlanContract], data_dir: Path, reporter: Reporter
) -> tuple[list[TuneRow], Attempt]:
    """Run each plan; one that fails is a row with its reason."""
    rows: list[TuneRow] = []
    attempt = Attempt(0)
    with reporter.bar(sum(plan.job.train.steps for plan in plans)) as show:
        done = 0
        for number, plan in enumerate(plans, 1):
            name = f"layout {number} of {len(plans)} ({TuneRow(plan, None).overrides})"
            show(f"{name}: starting", done)
            try:
                measured = measure_plan(plan, data_dir, name, functools.partial(_show_after, show, done))
            except RunFailedError as error:
                rows.append(TuneRow(plan, None, str(error)))
            else:
                audit = audit_run(plan, measured.attempt.record)
                for difference in audit.differences:
                    reporter.warning(f"{name}: {difference} [audit-differs]")
                times: list[Any] = [measured.times[rank] for rank in range(plan.world_size)]
                rows.append(TuneRow(plan, summarize_times(times, measured.attempt.record, audit.ok)))
                attempt = measured.attempt
            done += plan.job.train.steps
    return sort_rows(rows), attempt


def _show_after(show: Callable[[str, int], None], done: int, text: str, steps: int) -> None:
    """Steps of one layout, after those of the layouts before it."""
    show(text, done + steps)


def describe_basis(steps: int) -> str:
    """How the times were measured."""
    return f"median of {steps - WARM_UP} steps after {WARM_UP} warm-up steps, slowest rank of each"
