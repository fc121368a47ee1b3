"""Proves that a layout computes what one process computes: ten steps of both, and every gradient compared."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.errors import Problem, RunFailedError, UserError, name_interruption
from meshwright.core.events import EVENTS_FILE, Event
from meshwright.core.packages import require_packages
from meshwright.core.units import format_plural
from meshwright.elastic.rank_starter import LOGS
from meshwright.launch.assignment import Assignment
from meshwright.launch.environment import prepare_environment
from meshwright.layout.text import describe_layout
from meshwright.plan.build import build_plan
from meshwright.plan.contract import PLAN_FILE, PlanContract, layout_keys, write_plan
from meshwright.runs.data import prepare_data
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.planning import resolve_layout
from meshwright.runs.ranks import build_launch
from meshwright.runs.reporter import Reporter
from meshwright.spec.cluster import machine_memory_bytes
from meshwright.spec.load import require_runnable
from meshwright.verify.proof_task import (
    MIXED_PRECISIONS,
    STEPS,
    TIE,
    ProofTask,
    RankFindings,
    ReferenceRecord,
    RunFigures,
    explain_settings,
    mixed_job,
    proof_job,
    reference_job,
    select_sample_positions,
)
from meshwright.verify.shrink import ShrunkJob, shrink_to_fit
from meshwright.verify.verdict import Verdict, judge

ENTRY = "meshwright.verify.prove:run_rank"
DIVERGED = ("train-not-finite", "train-grad-spike")


@dataclass(frozen=True)
class ProofRuns:
    """The two runs of a proof, ready to start."""

    plan: PlanContract
    reference: PlanContract
    data_dir: Path
    mixed: tuple[PlanContract, PlanContract] | None
    """Both in the job's own precision, if a CPU has it and it is not float32."""
    shrunk: ShrunkJob
    settings: list[str]
    """What differs from the job's settings."""


@dataclass(frozen=True)
class Comparison:
    """Both runs in one precision, compared."""

    verdict: Verdict
    record: ReferenceRecord
    """What the reference recorded."""
    findings: list[RankFindings]
    """What each rank of the layout compared."""
    figures: RunFigures
    reference_figures: RunFigures


@dataclass(frozen=True)
class Proof:
    """Both runs compared, in float32 and in the job's own precision."""

    runs: ProofRuns
    exact: Comparison
    """In float32."""
    mixed: Comparison | None
    """In the job's precision: None if that is float32, or float32 differs already."""

    def __repr__(self) -> str:
        return f"Proof({self.layout_name}, equal={self.equal})"

    @property
    def equal(self) -> bool:
        """Whether the layout computes what one process computes, within the tolerances."""
        return self.exact.verdict.equal and (self.mixed is None or self.mixed.verdict.equal)

    @property
    def layout_name(self) -> str:
        """The proved layout and its number of ranks."""
        return name_layout(self.runs.plan)

    @property
    def tie(self) -> float:
        """Difference of two routing scores up to which an expert may be chosen either way."""
        return TIE

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright prove --json``."""
        exact, mixed = self.exact, None
        if self.mixed is not None and self.runs.mixed is not None:
            precision = self.runs.mixed[0].job.train.precision
            mixed = {"precision": precision, **self.mixed.verdict.as_dict()}
        return {
            **exact.verdict.as_dict(),
            "equal": self.equal,
            "mixed": mixed,
            "losses": exact.figures.losses,
            "reference_losses": exact.reference_figures.losses,
            "tokens_read": exact.record.tokens_read,
            "idle_experts": exact.record.idle_experts,
            "replayed_ties": sum(one.replayed_ties for one in exact.findings),
            "layout": layout_keys(self.runs.plan.job),
            "world_size": self.runs.plan.world_size,
            "shrunk": self.runs.shrunk.as_dict(),
            "settings": self.runs.settings,
        }


def prove_job(job: LoadedJob, reporter: Reporter) -> Proof:
    """Run the reference and the layout, and compare them."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="a proof")
    runs = prepare_proof(job, reporter)
    prepare_environment(threads=1)
    folder = _make_folder()
    spec = runs.plan.job
    positions = select_sample_positions(spec.train.global_batch, spec.layout.data_degree)
    exact = _run_both(runs.plan, runs.reference, folder, ProofTask(positions), runs.data_dir, reporter)
    mixed = None
    if runs.mixed is not None and exact.verdict.equal:
        task = ProofTask((), precision=runs.mixed[0].job.train.precision)
        reporter.message(f"Equal in float32; {STEPS} steps of both in {task.precision} follow")
        mixed = _run_both(*runs.mixed, folder / "mixed", task, runs.data_dir, reporter)
    shutil.rmtree(folder, ignore_errors=True)
    return Proof(runs, exact, mixed)


def _run_both(
    plan: PlanContract,
    reference: PlanContract,
    folder: Path,
    task: ProofTask,
    data_dir: Path,
    reporter: Reporter,
) -> Comparison:
    """Run one process and the layout in one precision, and compare them."""
    home = folder / "reference"
    expected = run_proof_side(ENTRY, reference, home, task, data_dir, reporter)
    against = dataclasses.replace(task, reference=str(home))
    figures = run_proof_side(ENTRY, plan, folder / "layout", against, data_dir, reporter)
    found = [RankFindings.read(folder / "layout", rank) for rank in range(plan.world_size)]
    record = ReferenceRecord.read(home)
    verdict = judge(record, found, figures, expected, task.tolerances)
    return Comparison(verdict, record, found, figures, expected)


def _make_folder() -> Path:
    """A folder for both runs, with reference tensors and checkpoints."""
    try:
        return Path(tempfile.mkdtemp(prefix="meshwright-prove-"))
    except OSError as error:
        where, rule = tempfile.gettempdir(), f"cannot be written: {error.strerror or error}"
        raise UserError(Problem("run-not-writable", rule, path=where, fix="Set TMPDIR elsewhere")) from None


def prepare_proof(job: LoadedJob, reporter: Reporter) -> ProofRuns:
    """Choose the layout, shrink the job if it is too large, and plan both runs. Starts nothing.

    Raises:
        UserError: The job cannot run, or its loss depends on the layout.
    """
    job.require_not_preset()
    if job.spec.mixes_samples:
        rule = (
            "mixes the samples of a micro-batch: the loss depends on the layout, so there is nothing to prove"
        )
        fix = "Use model.norm=group"
        raise UserError(Problem("prove-batch-norm", rule, path="model.norm", value="batch", fix=fix))
    memory = machine_memory_bytes()
    requested = resolve_layout(job, reporter)
    here = proof_job(requested, memory)
    shrunk = shrink_to_fit(here, STEPS, memory, here.cluster.fp32_flops_per_s)
    require_runnable(shrunk.job)
    plan = build_plan(shrunk.job)[0]
    reference = build_plan(reference_job(plan.job))[0]
    # The tokenizer may be that of the model's folder, which a smaller model does not have.
    whole = dataclasses.replace(plan.job, model=requested.model) if shrunk.reasons else plan.job
    data_dir = prepare_data(whole, reporter)
    mixed = None
    if requested.train.precision in MIXED_PRECISIONS:
        own = mixed_job(plan.job, requested.train.precision, requested.train.loss_scale)
        mixed = build_plan(own)[0], build_plan(reference_job(own))[0]
    runs = ProofRuns(plan, reference, data_dir, mixed, shrunk, explain_settings(requested))
    _announce(runs, reporter)
    return runs


def run_proof_side(
    entry: str, plan: PlanContract, folder: Path, task: ProofTask, data_dir: Path, reporter: Reporter
) -> RunFigures:
    """Run the reference or the layout; returns its figures, fewer if those of the layout stop being finite.

    Raises:
        RunFailedError: A rank died; its log is kept.
    """
    folder.mkdir(parents=True)
    write_plan(plan, folder / PLAN_FILE)
    Assignment(str(folder), str(data_dir.resolve()), str(folder / "checkpoints")).write()
    task.write(folder)
    (folder / EVENTS_FILE).touch()
    figures = RunFigures()
    name = "the reference, one process" if task.reference is None else name_layout(plan)
    reporter.progress(f"{name}: {task.steps} steps")
    try:
        with reporter.activity(f"{name}: starting") as update:

            def listen(event: Event) -> None:
                figures.feed(event)
                if event["event"] == "step" and event["rank"] == 0:
                    update(f"{name}: {len(figures.losses)} of {task.steps} steps")

            stops = build_launch(entry, plan.job, folder, listen).run()
    except RunFailedError as error:
        if task.reference is not None and error.problems[0].code in DIVERGED:
            return figures  # one process had finite ones: a difference, not a failure
        kept = [_with_log(problem, folder) for problem in error.problems]
        raise RunFailedError(*kept) from None
    if stops:
        shutil.rmtree(folder.parent, ignore_errors=True)
        raise name_interruption(stops, Problem("prove-interrupted", f"interrupted while running {name}"))
    return figures


def _with_log(problem: Problem, folder: Path) -> Problem:
    """A proof has no checkpoint to resume from: only the log helps."""
    if problem.code != "run-rank-died":
        return problem
    return dataclasses.replace(problem, fix=f"The output of the ranks is in {folder / LOGS}")


def name_layout(plan: PlanContract) -> str:
    """The layout and its number of ranks."""
    if plan.world_size == 1:
        return "one process"
    return f"{describe_layout(plan.job.layout)} ({format_plural(plan.world_size, 'rank')})"


def _announce(runs: ProofRuns, reporter: Reporter) -> None:
    """Report the layout that is run, and the changes of the job."""
    reporter.message(
        f"Proof: {name_layout(runs.plan)} against one process, {STEPS} steps in float32 on this machine's CPU"
    )
    if runs.plan.world_size == 1:
        reporter.message("The layout is one process: this only shows that the run is deterministic")
    for sentence in runs.settings:
        reporter.message(f"Proved with {sentence}")
    if runs.shrunk.reasons:
        reporter.message(f"Shrunk: the job has {'; '.join(runs.shrunk.reasons)}")
        for change in runs.shrunk.changes:
            reporter.message(f"  {change.key}: {change.before} -> {change.after}")
