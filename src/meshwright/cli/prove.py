"""``meshwright prove``: the layout and one process beside each other, ten steps, every gradient."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.cli.app import require_packages
from meshwright.cli.audit import CHECK_FAILED
from meshwright.cli.data import prepare_data
from meshwright.cli.output import Output
from meshwright.cli.ranks import build_launch
from meshwright.cli.search_progress import search_progress
from meshwright.cli.train import refuse_preset
from meshwright.core.errors import InterruptedRunError, Problem, RunFailedError, UserError
from meshwright.core.events import EVENTS_FILE, Event
from meshwright.core.units import format_plural
from meshwright.launch.assignment import Assignment
from meshwright.launch.environment import prepare_environment
from meshwright.launch.local import LOGS
from meshwright.layout.text import describe_layout
from meshwright.plan.build import build_plan
from meshwright.plan.contract import PLAN_FILE, Plan, layout_keys, write_plan
from meshwright.plan.search.planner import search_job
from meshwright.spec.cluster import machine_memory_bytes
from meshwright.spec.job import Job
from meshwright.spec.legality.table import with_layout
from meshwright.spec.load import load_job, named_layout_keys, require_runnable
from meshwright.verify.proof_task import (
    STEPS,
    TIE,
    ProofTask,
    RankFindings,
    ReferenceRecord,
    explain_settings,
    proof_job,
    reference_job,
    select_sample_positions,
)
from meshwright.verify.shrink import ShrunkJob, shrink_to_fit
from meshwright.verify.verdict import TOLERANCE, Verdict, judge

REFERENCE_ENTRY = "meshwright.verify.prove:run_rank"
ENTRY = "meshwright.verify.prove:run_rank"
NOT_FINITE = "train-not-finite"


@dataclass(frozen=True)
class Prepared:
    """The two runs of a proof, ready to start."""

    plan: Plan
    reference: Plan
    data_dir: Path
    shrunk: ShrunkJob
    settings: list[str]
    """What is done otherwise than the job says."""


@dataclass
class Losses:
    """What the ranks say of their steps."""

    values: list[float | None] = field(default_factory=list)

    def feed(self, event: Event) -> None:
        """Take in one event."""
        if event["event"] == "step" and event["rank"] == 0:
            self.values.append(event["loss"])


def prove_job(output: Output, source: str, overrides: list[str]) -> int:
    """Run both, compare, say which module differs first; status 3 if one does."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="a proof")
    prepared = prepare_proof(output, source, overrides)
    describe_proof(output, prepared)
    prepare_environment(threads=1)
    folder = make_folder()
    job = prepared.plan.job
    positions = select_sample_positions(job.train.global_batch, job.layout.data_degree)
    home = folder / "reference"
    reference_losses = run_proof_side(
        output, REFERENCE_ENTRY, prepared.reference, home, ProofTask(positions), prepared.data_dir
    )
    task = ProofTask(positions, str(home))
    losses = run_proof_side(output, ENTRY, prepared.plan, folder / "layout", task, prepared.data_dir)
    found = [RankFindings.read(folder / "layout", rank) for rank in range(prepared.plan.world_size)]
    verdict = judge(ReferenceRecord.read(home), found, losses, reference_losses)
    shutil.rmtree(folder, ignore_errors=True)
    describe_verdict(output, prepared, verdict, found)
    output.result(
        {
            **verdict.as_dict(),
            "losses": losses,
            "reference_losses": reference_losses,
            "replayed_ties": sum(one.replayed_ties for one in found),
            "tolerance": TOLERANCE,
            "layout": layout_keys(job),
            "world_size": prepared.plan.world_size,
            "shrunk": prepared.shrunk.as_dict(),
            "settings": prepared.settings,
        }
    )
    return 0 if verdict.equal else CHECK_FAILED


def make_folder() -> Path:
    """A folder for both runs; the reference's tensors take three times the weights there."""
    try:
        return Path(tempfile.mkdtemp(prefix="meshwright-prove-"))
    except OSError as error:
        where, rule = tempfile.gettempdir(), f"cannot be written: {error.strerror or error}"
        raise UserError(Problem("run-not-writable", rule, path=where, fix="Set TMPDIR elsewhere")) from None


def prepare_proof(output: Output, source: str, overrides: list[str]) -> Prepared:
    """Settle the layout, make the job small enough, and plan both runs; nothing is started yet.

    Raises:
        UserError: The job cannot run, or promises no equal losses.
    """
    refuse_preset(source)
    job = load_job(source, overrides, to_run=False)
    if job.mixes_samples:
        rule = (
            "mixes the samples of a micro-batch: the loss depends on the layout, and no promise can be proved"
        )
        fix = "Use model.norm=group"
        raise UserError(Problem("prove-batch-norm", rule, path="model.norm", value="batch", fix=fix))
    memory = machine_memory_bytes()
    asked = resolve_layout(output, job, source, overrides)
    here = proof_job(asked, memory)
    shrunk = shrink_to_fit(here, STEPS, memory, here.cluster.fp32_flops_per_s)
    require_runnable(shrunk.job)
    plan = build_plan(shrunk.job)[0]
    reference = build_plan(reference_job(plan.job))[0]
    # The tokenizer may be that of the model's folder, which a smaller model does not have.
    whole = dataclasses.replace(plan.job, model=asked.model) if shrunk.reasons else plan.job
    data_dir = prepare_data(output, whole)
    return Prepared(plan, reference, data_dir, shrunk, explain_settings(asked))


def resolve_layout(output: Output, job: Job, source: str, overrides: list[str]) -> Job:
    """The job with the layout that it names, or that the planner chooses for its cluster."""
    if job.layout.mode == "given":
        return job
    with search_progress(output) as progress:
        found = search_job(job, named_layout_keys(source, overrides), progress=progress)
    return with_layout(job, found.best[0].layout)


def run_proof_side(
    output: Output, entry: str, plan: Plan, folder: Path, task: ProofTask, data_dir: Path
) -> list[float | None]:
    """Run one of the two; returns its losses, fewer if those of the layout stop being finite.

    Raises:
        RunFailedError: A rank died; its log is kept.
    """
    folder.mkdir()
    write_plan(plan, folder / PLAN_FILE)
    Assignment(str(folder), str(data_dir.resolve()), str(folder / "checkpoints")).write()
    task.write(folder)
    (folder / EVENTS_FILE).touch()
    losses = Losses()
    name = "the reference, one process" if task.reference is None else name_layout(plan)
    if not output.errors.is_terminal:
        output.errors.print(f"{name}: {task.steps} steps")
    try:
        with output.errors.status(f"{name}: starting") as status:

            def listen(event: Event) -> None:
                losses.feed(event)
                if event["event"] == "step" and event["rank"] == 0:
                    status.update(f"{name}: {len(losses.values)} of {task.steps} steps")

            interrupted = build_launch(entry, plan.job, folder, listen).run()
    except RunFailedError as error:
        if task.reference is not None and error.problems[0].code == NOT_FINITE:
            return losses.values  # where one process had finite ones: a difference, not a failure
        kept = [_with_log(problem, folder) for problem in error.problems]
        raise RunFailedError(*kept) from None
    if interrupted:
        shutil.rmtree(folder.parent, ignore_errors=True)
        raise InterruptedRunError(Problem("prove-interrupted", f"interrupted while running {name}"))
    return losses.values


def _with_log(problem: Problem, folder: Path) -> Problem:
    """A proof has no checkpoint to go on from: only the log helps."""
    if problem.code != "run-rank-died":
        return problem
    return dataclasses.replace(problem, fix=f"The output of the ranks is in {folder / LOGS}")


def name_layout(plan: Plan) -> str:
    """The layout in a few words."""
    if plan.world_size == 1:
        return "one process"
    return f"{describe_layout(plan.job.layout)} ({format_plural(plan.world_size, 'rank')})"


def describe_proof(output: Output, prepared: Prepared) -> None:
    """What is run, and what was changed for it."""
    words = name_layout(prepared.plan)
    output.print(f"Proof: {words} against one process, {STEPS} steps in float32 on the cores of this machine")
    if prepared.plan.world_size == 1:
        output.print("Nothing is split: this shows only that the run repeats itself")
    for sentence in prepared.settings:
        output.print(f"Proved with {sentence}")
    if prepared.shrunk.reasons:
        output.print(f"Shrunk: the job has {'; '.join(prepared.shrunk.reasons)}")
        rows = [(change.key, str(change.before), str(change.after)) for change in prepared.shrunk.changes]
        output.table("Proved in small", ("key", "job", "here"), rows)


def describe_verdict(
    output: Output, prepared: Prepared, verdict: Verdict, findings: list[RankFindings]
) -> None:
    """Equal and how nearly, or the first divergence."""
    parts = sorted({module for found in findings for module in found.not_compared})
    if parts:
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        output.print(f"Outputs that a rank holds in part were not compared: {', '.join(parts[:3])}{more}")
    if ties := sum(found.replayed_ties for found in findings):
        output.print(
            f"{format_plural(ties, 'choice')} of experts tied within {TIE:g}: the reference's was replayed"
        )
    losses = f"losses of {STEPS} steps differ by at most {_size(verdict.max_rel_diff)}"
    gradients = f"gradients by {_size(verdict.max_grad_diff)} of their norm"
    limits = f"allowed are {TOLERANCE['loss']:g} and {TOLERANCE['gradient']:g}"
    name = name_layout(prepared.plan)
    if verdict.equal:
        output.print(f"Equal: {name}: {losses}, {gradients}; {limits}")
        return
    assert verdict.first_divergence is not None, "what is not equal diverges somewhere"
    output.print(f"NOT equal: {name}: {losses}, {gradients}; {limits}")
    output.print(f"First divergence: {verdict.first_divergence.sentence()} [prove-differs]")


def _size(difference: float | None) -> str:
    return "no finite number" if difference is None else f"{difference:.2g}"
