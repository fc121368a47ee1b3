"""Measures data-parallel scaling: the same job on 1 to N ranks, a few steps each, with the real launcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.audit.compare import audit_run
from meshwright.core.errors import Problem, UserError
from meshwright.core.packages import require_packages
from meshwright.core.units import format_plural
from meshwright.launch.environment import prepare_environment
from meshwright.plan.build import build_plan
from meshwright.plan.contract import PlanContract
from meshwright.report.plot import Chart
from meshwright.report.scaling import FEWEST_STEPS, WARM_UP, ScalingRow, basis, build_row, scaling_chart
from meshwright.runs.data import prepare_data
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.measure import MeasuredRun, describe_machine, measure_plan
from meshwright.runs.ranks import require_devices, settle_block_backend
from meshwright.runs.reporter import Reporter
from meshwright.spec.layout import DEGREES
from meshwright.spec.load import apply_override, read_tree


@dataclass(frozen=True)
class ScalingResult:
    """A row for each number of ranks."""

    plans: list[PlanContract]
    rows: list[ScalingRow]
    weak: bool
    steps: int
    machine: dict[str, Any]
    date: str

    @property
    def basis(self) -> str:
        """How the figures were measured."""
        return basis(self.rows, self.steps)

    def chart(self) -> Chart:
        """Speed-up over ranks."""
        where = self.machine["processor" if self.machine["device"] == "cpu" else "device_name"]
        note = f"{self.plans[0].job.name} on {where}, {self.date[:10]}"
        return scaling_chart(self.rows, self.weak, note)

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright bench scaling --json``."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "weak": self.weak,
            "machine": self.machine,
            "date": self.date,
            "basis": self.basis,
        }


def bench_scaling(
    job: LoadedJob, ranks: Sequence[int] | None, steps: int, weak: bool, reporter: Reporter
) -> ScalingResult:
    """Measure each number of ranks.

    Raises:
        UserError: Too few steps, a degree other than dp_replicate, or a job that cannot run here.
        RunFailedError: A rank died.
    """
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="bench scaling")
    job.require_not_preset()
    if steps < FEWEST_STEPS:
        rule = f"is too few: the first {WARM_UP} are warm-up, and a median needs at least 3"
        fix = f"Use {FEWEST_STEPS} or more"
        raise UserError(Problem("bench-steps", rule, path="steps", value=steps, fix=fix, is_argument=True))
    _check_degrees(job, reporter)
    plans = plan_rows(job, ranks, steps, weak, reporter)
    data_dir = prepare_data(plans[0].job, reporter)
    prepare_environment(threads=1)
    rows: list[ScalingRow] = []
    measured = MeasuredRun()
    for plan in plans:
        measured = _measure_row(plan, data_dir, reporter)
        audit = audit_run(plan, measured.attempt.record)
        for difference in audit.differences:
            reporter.warning(f"{plan.world_size} ranks: {difference} [audit-differs]")
        times: list[Any] = [measured.times[rank] for rank in range(plan.world_size)]
        tokens = measured.attempt.record.tokens_per_step
        rows.append(build_row(plan, times, tokens, audit.ok, rows[0] if rows else None))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return ScalingResult(plans, rows, weak, steps, describe_machine(plans[0], measured.attempt), date)


def plan_rows(
    job: LoadedJob, ranks: Sequence[int] | None, steps: int, weak: bool, reporter: Reporter
) -> list[PlanContract]:
    """A plan for each number of ranks; nothing starts before all of them are legal."""
    given = ["layout.mode=given", f"train.steps={steps}"]
    alone = job.with_overrides(*given, "layout.dp_replicate=1").spec
    if settle_block_backend(alone, reporter) is not alone:
        given.append("train.block_backend=eager")
    plans = []
    for number in ranks or default_ranks(alone.cluster.world_size):
        batch = alone.train.global_batch * (number if weak else 1)
        sizes = [f"layout.dp_replicate={number}", f"train.global_batch={batch}"]
        spec = job.with_overrides(*given, *sizes).spec
        require_devices(spec, number)
        plans.append(build_plan(spec)[0])
    return plans


def default_ranks(devices: int) -> list[int]:
    """Powers of two up to the number of devices, and all devices."""
    powers = [2**n for n in range(devices.bit_length()) if 2**n <= devices]
    return sorted({*powers, devices})


def _check_degrees(job: LoadedJob, reporter: Reporter) -> None:
    """The benchmark sets dp_replicate itself; every other degree must be 1."""
    tree = read_tree(job.source)
    for text in job.overrides:
        apply_override(tree, text)
    layout = tree.get("layout")
    named = {key: layout[key] for key in DEGREES if key in layout} if isinstance(layout, dict) else {}
    replicas = named.pop("dp_replicate", 1)
    for key, value in named.items():
        if isinstance(value, int) and value > 1:
            rule = "cannot be measured: bench scaling varies dp_replicate, all other degrees must be 1"
            fix = f"Leave layout.{key} out"
            raise UserError(Problem("bench-layout", rule, path=f"layout.{key}", value=value, fix=fix))
    if replicas != 1:
        reporter.warning(f"layout.dp_replicate={replicas} of the job is replaced by each number of ranks")


def _measure_row(plan: PlanContract, data_dir: Path, reporter: Reporter) -> MeasuredRun:
    """Run one number of ranks."""
    name = format_plural(plan.world_size, "rank")
    reporter.progress(f"measuring {name}: {plan.job.train.steps} steps")
    with reporter.activity(f"{name}: starting") as update:
        return measure_plan(plan, data_dir, name, lambda text, steps: update(text))
