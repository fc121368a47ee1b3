"""The report of a run: facts, curves, warnings and audit.

Reads the run folder. ``html.py`` writes the report as a page, the command line prints it as text.
"""

from __future__ import annotations

import functools
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from meshwright.audit.backup_slices import UsedSlices, describe_slices, list_slices
from meshwright.audit.compare import Audit, audit_run, describe_match
from meshwright.audit.goodput import Goodput
from meshwright.audit.record import RunRecord
from meshwright.core.units import format_count, format_plural, format_rate, format_seconds, format_throughput
from meshwright.layout.no_effect import find_unused_settings
from meshwright.plan.contract import PLAN_FILE, PlanContract, read_earlier_plans, read_plan
from meshwright.report.event_text import format_loss
from meshwright.report.history import History, read_history
from meshwright.report.pipeline_run import PipelineRun, find_pipeline
from meshwright.report.plot import Chart, Series
from meshwright.report.run_list import FINISHED, resolve_status
from meshwright.spec.load import job_tree

PAGE_FILE = "report.html"

NAMES = {
    "lr": ("Learning rate", "learning rate"),
    "grad_norm": ("Gradient norm before clipping", "norm"),
    "mfu": ("MFU", "share of the peak rate"),
    "utilisation": ("Device utilisation", "share of the step's time"),
    "loss_scale": ("Loss scale", "factor"),
    "skipped": ("Skipped steps", "skipped"),
    "noise_scale": ("Gradient noise scale", "samples"),
    "expert_imbalance": ("Busiest expert, in the most imbalanced layer", "times the mean"),
    "expert_dropped": ("Dropped tokens", "share"),
    "balance_loss": ("Balance loss, without its coefficient", "1 is even"),
    "z_loss": ("Router z-loss, without its coefficient", "squared logits"),
}
"""Titles and units of the small charts; other fields use their name."""
OWN_CHART = frozenset({"loss", "tokens_per_s"})


@dataclass(frozen=True)
class RunReport:
    """A run with its history and audit."""

    run_dir: Path
    plan: PlanContract
    history: History
    audit: Audit
    status: str

    @property
    def unit(self) -> str:
        """``tokens`` or ``images``."""
        return self.plan.job.unit

    @property
    def audited(self) -> bool:
        """Whether the run finished, so that the audit is complete."""
        return self.status in FINISHED

    @functools.cached_property
    def pipeline(self) -> PipelineRun | None:
        """The recorded pipeline; None without one."""
        return find_pipeline(self.plan, self.history.run)

    def facts(self) -> list[tuple[str, str]]:
        """Names and values of what was trained and measured."""
        job, newest, record = self.plan.job, self.history.newest, self.history.run
        rows = [
            ("Model", f"{_model_name(job.model)}, {format_count(self.plan.parameters)} parameters"),
            ("Layout", f"{job.layout.named_degrees()}; {format_plural(self.plan.world_size, 'rank')}"),
            ("Batch", self._batch()),
            ("Data", self._data()),
            ("Precision", job.train.precision),
            ("Steps", f"{newest.last_step} of {job.train.steps}"),
            ("Loss", self._losses()),
        ]
        if record.tokens_per_s:
            took = record.tokens_per_step / record.tokens_per_s
            step = f"{format_seconds(took)} measured, {format_seconds(self.plan.step_s)} predicted"
            rows.append(("Step time", f"{step} (not audited)"))
            achieved = format_rate(record.flops_per_s(self.plan) or 0, "FLOP")
            rows.append(("Throughput", f"{format_throughput(record.tokens_per_s, self.unit)}, {achieved}"))
        if record.mfu:
            rows.append(("MFU", f"{record.mfu:.1%} of {record.peak_basis or 'the peak'}"))
        if record.recoveries:
            rows.append(("Recoveries", self._recoveries()))
        if self.slices:
            rows.append(("Backup replicas", describe_slices(self.slices)))
        if record.goodput is not None:
            rows.append(("Goodput", describe_goodput(record.goodput)))
        if record.experts:
            rows.append(("Experts", record.experts.sentence()))
        rows += self._where_and_when()
        return rows

    @functools.cached_property
    def slices(self) -> list[UsedSlices]:
        """The replicas whose gradients were used; empty without backup replicas."""
        layout = self.plan.job.layout
        return self.history.slices.list_ranks(layout.dp_replicate, layout.backup_replicas)

    def _recoveries(self) -> str:
        recoveries, steps = self.history.run.recoveries, self.history.run.steps
        lost = format_seconds(sum(recovery.seconds for recovery in recoveries))
        again = f"{format_plural(steps.replayed, 'step')} replayed"
        return f"{format_plural(len(recoveries), 'failure')}: {lost} to recover, {again}"

    def _data(self) -> str:
        data = self.plan.job.data
        path = data.path or ", ".join(f"{source.name} {source.weight:g}" for source in data.sources)
        return path if self.unit == "images" else f"{path}, {data.seq_len} {self.unit} per sample"

    def _batch(self) -> str:
        job = self.plan.job
        micro = format_plural(self.plan.micro_batches, "micro-batch", "es")
        micro += f" of {job.layout.micro_batch} per rank"
        return f"{format_plural(job.train.global_batch, 'sample')} per step; {micro}"

    def _losses(self) -> str:
        record = self.history.run
        if not record.losses:
            return "no step was completed"
        losses = record.target_losses
        if not losses:
            return "no step had target tokens"
        text = f"{format_loss(losses[0])} to {format_loss(losses[-1])}"
        text += f"; {format_loss(record.eval_loss)} held out" if record.eval_loss is not None else ""
        return text + "".join(f"; {format_loss(loss)} on {name}" for name, loss in record.eval_losses.items())

    def _where_and_when(self) -> list[tuple[str, str]]:
        newest, rows = self.history.newest, []
        first = next((a.began for a in self.history.attempts if a.began), None)
        if first:
            rows.append(("Began", time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(first))))
        took = sum((a.ended or 0) - (a.began or 0) for a in self.history.attempts)
        rows.append(
            ("Took", f"{format_seconds(took)} in {format_plural(len(self.history.attempts), 'attempt')}")
        )
        cluster = self.plan.job.cluster
        where = (
            f"{cluster.device_name or cluster.device} ({cluster.preset or cluster.file or cluster.device})"
        )
        rows.append(("On", f"{where}{f', host {newest.host}' if newest.host else ''}"))
        if newest.torch:
            rows.append(("Torch", newest.torch))
        if self.history.run.checkpoint:
            rows.append(("Checkpoint", self.history.run.checkpoint))
            rows.append(("Saves", self.history.run.saves.sentence()))
        if self.history.run.saves.interval_reason:
            rows.append(("Interval", self.history.run.saves.interval_reason))
        return rows

    def loss_chart(self) -> Chart:
        """Training and held-out loss over all attempts."""
        series = [self.history.series("loss", "training")]
        names = dict.fromkeys(name for c in self.history.curves for name in c.evaluations)
        series += [
            self.history.evaluations(name, name or "held out", style)
            for style, name in enumerate(names, start=1)
        ]
        unit = "nats per image" if self.unit == "images" else "nats per token"
        return self._over_steps("Loss", unit, tuple(series))

    def _over_steps(
        self, title: str, unit: str, series: tuple[Series, ...], log_y: bool = False, from_zero: bool = False
    ) -> Chart:
        """A chart with the common x axis and marks."""
        marks = (*self.history.restarts(), *self.history.not_finite())
        steps = self.history.steps()
        return Chart(title, "step", unit, series, marks, log_y, from_zero, whole_x=True, x_range=steps)

    def rate_chart(self) -> Chart:
        """Throughput over steps; the audited step is slower."""
        series = (self.history.series("tokens_per_s", "measured", style=3),)
        return self._over_steps("Throughput", f"{self.unit}/s", series, from_zero=True)

    def small_charts(self) -> list[Chart]:
        """Charts of all other fields of the step events."""
        charts = []
        for name in self.history.fields():
            if name not in OWN_CHART:
                title, unit = NAMES.get(name, (name.replace("_", " "), name))
                series = (self.history.series(name, name.replace("_", " ")),)
                log = name in ("loss_scale", "noise_scale") and all(y > 0 for _, y in series[0].points())
                zero = name not in ("lr", "loss_scale", "noise_scale") and not log
                charts.append(self._over_steps(title, unit, series, log_y=log, from_zero=zero))
        return charts

    def warnings(self) -> list[str]:
        """Failures, lost events and audit differences."""
        found = []
        for number, attempt in enumerate(self.history.attempts):
            which = f"attempt {number}: " if len(self.history.attempts) > 1 else ""
            found += [f"{which}{error}" for error in attempt.errors]
            found += [f"{which}no checkpoint at {text}" for text in attempt.record.checkpoint_failures]
            lost = attempt.record.events_lost
            found += [f"{which}rank {r} lost {n} or more lines of events.jsonl" for r, n in lost.items()]
        if self.history.unreadable:
            torn = format_plural(self.history.unreadable, "line")
            found.append(f"{torn} of events.jsonl truncated or of another version: skipped")
        found += self.audit.differences if self.audited else self.audit.real_differences
        return found

    def notes(self) -> list[str]:
        """Notes and the reasons of the plan."""
        stragglers = [span.sentence() for span in self.history.run.stragglers.spans]
        notes = [*self.history.run.notes, *stragglers, *(self.audit.coverage if self.audited else ())]
        if without := self.history.run.targetless_text():
            notes.append(without)
        broken = [name for _, name in self.history.not_finite()]
        unused = map(str, find_unused_settings(self.plan.job))
        return [*broken, *self.plan.reasons, *unused, *dict.fromkeys(notes)]

    def verdict_text(self) -> str:
        """The audit in one sentence."""
        if not self.audited:
            found = "nothing was measured"
            if self.audit.real_differences:
                count = format_plural(len(self.audit.real_differences), "difference")
                found = f"what was measured does not match the plan: {count}"
            elif self.audit.matches_so_far:
                found = "what was measured matches the plan"
            return f"Audit: incomplete: the run's status is {self.status}; {found}."
        if self.audit.ok:
            return f"Audit: ok. {describe_match(self.plan)}"
        if not self.audit.measured:
            return f"Audit: not measured: {self.audit.differences[-1]}."
        count = format_plural(len(self.audit.differences), "difference")
        return f"Audit: the run does not match the plan: {count}."

    def audited_part(self) -> str:
        """The part of the run over which collectives were counted."""
        return describe_audited(self.audit, self.history.run)

    def job_text(self) -> str:
        """The job with its layout, as TOML."""
        return tomli_w.dumps(job_tree(self.plan.job))

    def as_dict(self) -> dict[str, Any]:
        """The report for ``--json``."""
        newest, record = self.history.newest, self.history.run
        return {
            "run_dir": str(self.run_dir),
            "status": self.status,
            "facts": dict(self.facts()),
            "steps": newest.last_step,
            "target_steps": self.plan.job.train.steps,
            "world_size": self.plan.world_size,
            "attempts": [
                {
                    "generation": attempt.generation,
                    "generations": len(attempt.record.generations),
                    "status": attempt.status,
                    "began": attempt.began,
                    "ended": attempt.ended,
                    "resumed_at": attempt.resumed_at,
                    "last_step": attempt.last_step,
                }
                for attempt in self.history.attempts
            ],
            "recoveries": [asdict(recovery) for recovery in record.recoveries],
            "layout_changes": [asdict(change) for change in record.layout_changes],
            "replayed_steps": record.steps.replayed,
            "stragglers": record.stragglers.as_list(),
            "backup_replicas": list_slices(self.slices),
            "goodput": None if record.goodput is None else record.goodput.as_dict(),
            "checkpoints": record.saves.as_dict(),
            "loss": record.target_losses[-1] if record.target_losses else None,
            "eval_loss": record.eval_loss,
            "eval_losses": record.eval_losses,
            "tokens_per_s": record.tokens_per_s,
            "flops_per_s": record.flops_per_s(self.plan),
            "mfu": record.mfu,
            "step_s": record.tokens_per_step / record.tokens_per_s if record.tokens_per_s else None,
            "predicted_step_s": self.plan.step_s,
            "warnings": self.warnings(),
            "notes": self.notes(),
            "audit": self.audit.as_dict() if self.audited else None,
            "experts": None if record.experts is None else asdict(record.experts),
            "pipeline": None if self.pipeline is None else self.pipeline.as_dict(),
        }


def read_report(run_dir: Path, status: str | None = None) -> RunReport:
    """Read the report of a run folder.

    Args:
        run_dir: The folder.
        status: Status of the run, if the caller is the run itself.
    """
    history = read_history(run_dir)
    plan = read_plan(run_dir / PLAN_FILE)
    settled = status or resolve_status(run_dir, history.newest.status)
    return RunReport(
        run_dir, plan, history, audit_run(plan, history.run, read_earlier_plans(run_dir)), settled
    )


def describe_audited(verdict: Audit, record: RunRecord) -> str:
    """The part of a run over which collectives were counted."""
    if verdict.generations < len(record.generations):
        return f"since the resume at step {record.attempt_step}"
    if record.first_step:
        return f"since the resume at step {record.first_step}"
    return f"whole run, {verdict.generations} generations" if verdict.generations > 1 else "whole run"


def describe_goodput(goodput: Goodput) -> str:
    """Goodput as a sentence: the share of time of steps that count, and the causes of the rest."""
    words = {"other": "other (snapshots, events, end of the run)"}
    lost = [
        f"{words.get(cause, cause)} {seconds / goodput.wall_s:.1%}"
        for cause, seconds in goodput.lost_s.items()
        if seconds > 0
    ]
    return f"{goodput.share:.1%} of {format_seconds(goodput.wall_s)}; {', '.join(lost)}"


def _model_name(model: Any) -> str:
    return str(getattr(model, "preset", None) or getattr(model, "architecture", None) or "model")
