"""Prepares a run: checks everything, plans, and writes the run folder. Checks come before writes."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from meshwright.checkpoint.manifest import (
    check_same_job,
    check_same_optimizer,
    list_checkpoints,
    read_manifest,
)
from meshwright.checkpoint.stores import CheckpointStores, OpenStores
from meshwright.core.errors import Problem, UserError
from meshwright.core.events import EVENTS_FILE, read_events
from meshwright.core.object_path import AnyPath
from meshwright.core.packages import require_packages
from meshwright.core.units import format_seconds
from meshwright.data.epochs import CorpusState
from meshwright.data.mixture import read_mixture
from meshwright.launch.agent_file import AgentFile
from meshwright.launch.assignment import Assignment
from meshwright.launch.lock import RunLock
from meshwright.layout.no_effect import find_unused_settings
from meshwright.plan.build import build_plan
from meshwright.plan.contract import (
    PLAN_FILE,
    PlanContract,
    is_plan,
    keep_earlier_plan,
    read_plan,
    write_plan,
)
from meshwright.runs.data import find_corpus, prepare_data
from meshwright.runs.held_out import check_paths, prepare_held_out
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.nodes import require_ranks
from meshwright.runs.planning import warn_of_snapshots
from meshwright.runs.ranks import require_devices, settle_block_backend
from meshwright.runs.reporter import Reporter
from meshwright.runs.same_data import check_same_data
from meshwright.runs.weights import InitialWeights
from meshwright.spec.job import Job
from meshwright.spec.model import BATCH_NORM_NOTE

RUNS = Path("runs")
"""Folder of runs whose job names none."""
ResumeMode = Literal["no", "must", "may"]
"""Whether to continue from a checkpoint; "may" starts from the beginning if there is none."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start."""

    plan: PlanContract
    assignment: Assignment
    locks: contextlib.ExitStack
    """Held during the run: no second process writes into its folder, or into its checkpoints."""


@dataclass(frozen=True)
class _PreparedData:
    """The data of a run."""

    folder: Path
    eval_sets: dict[str, Path]
    corpus: CorpusState | None
    """What is in the folder; None for images."""


def prepare_run(
    job: LoadedJob,
    resume: ResumeMode,
    reporter: Reporter,
    started: int | None = None,
    with_agents: bool = False,
) -> PreparedRun:
    """Check everything, plan, and write the run folder.

    Args:
        job: The job, or a plan.
        resume: Whether to continue from a checkpoint.
        reporter: Receives messages and the plan.
        started: Ranks that a launcher has already started, if one has.
        with_agents: Whether the agents of other nodes join.
    """
    path, spec = Path(job.source), job.spec
    given = read_plan(path) if not job.overrides and job.on is None and is_plan(path) else None
    spec = given.job if given else spec
    _require_trackers(spec)
    settled = settle_block_backend(spec, reporter)
    plan = given if given and settled is spec else build_plan(settled, job.named_layout_keys())[0]
    spec = settled
    if started is not None and plan.world_size != started:
        rule = f"needs {plan.world_size} ranks; the launcher started {started}"
        fix = "Start as many ranks as the layout has"
        raise UserError(Problem("launch-world-size", rule, path="layout", fix=fix))
    if started is None:
        require_devices(spec, plan.world_size, with_agents)
        require_ranks(plan)
    elif plan.placement:
        plan = _place_in_rank_order(plan, settled, job, reporter)
    weights = InitialWeights(spec)
    if resume == "no":
        _ = weights.found  # errors come before data are prepared, which may take long
    check_paths(spec)
    data_dir = prepare_data(spec, reporter)
    tokenizer = Path(read_mixture(data_dir)[0].folder)  # all sources have the same
    eval_sets = {one.name: prepare_held_out(spec, one, tokenizer, reporter) for one in spec.data.eval}
    reporter.planned(plan)
    for unused in find_unused_settings(plan.job):
        reporter.warning(str(unused))
    warn_of_snapshots(job, plan, reporter)
    if spec.mixes_samples:
        reporter.warning(BATCH_NORM_NOTE)
    if with_agents and spec.cluster.nic_bytes_per_s is None:
        reporter.warning(
            "cluster.nic_bytes_per_s is missing: the predicted step time assumes that the network "
            "between nodes is as fast as the links within a node"
        )
    devices = spec.cluster.world_size
    if plan.world_size > devices:
        what = f"{plan.world_size} ranks share {devices} {spec.cluster.device_name}s"
        reporter.warning(f"{what}: this works, but is slower")
    data = _PreparedData(data_dir, eval_sets, find_corpus(spec, data_dir))
    return _write_run(plan, data, resume, weights, reporter)


def _place_in_rank_order(plan: PlanContract, spec: Job, job: LoadedJob, reporter: Reporter) -> PlanContract:
    """The plan with ranks in rank order, as torchrun starts them.

    Raises:
        UserError: The job names another placement.
    """
    if not isinstance(spec.layout.placement, str):
        rule = "needs ranks that Meshwright starts: torchrun starts them in rank order"
        fix = "Use layout.placement=rank-order, or start the run with meshwright train and agents"
        value = str(list(spec.layout.placement))
        raise UserError(
            Problem("layout-placement-torchrun", rule, path="layout.placement", value=value, fix=fix)
        )
    ordered = replace(spec, layout=replace(spec.layout, placement="rank-order"))
    following = build_plan(ordered, job.named_layout_keys())[0]
    slower, planned = format_seconds(following.step_s), format_seconds(plan.step_s)
    reporter.warning(
        f"torchrun starts ranks in rank order, so the planned placement {list(plan.placement)} is not used: "
        f"predicted step {slower} instead of {planned}. meshwright train with agents uses it"
    )
    return following


def _require_trackers(job: Job) -> None:
    """Check that the packages of the trackers that the job asks for are installed."""
    if job.train.tensorboard:
        require_packages(("tensorboard", "tensorboard"), needed_for="train.tensorboard")
    if job.train.wandb is not None:
        require_packages(("wandb", "wandb"), needed_for="train.wandb")
    if job.train.mlflow is not None:
        require_packages(
            ("mlflow", "mlflow"), ("sqlalchemy", "mlflow"), ("alembic", "mlflow"), needed_for="train.mlflow"
        )


def _write_run(
    plan: PlanContract,
    data: _PreparedData,
    resume: ResumeMode,
    weights: InitialWeights,
    reporter: Reporter,
) -> PreparedRun:
    """Choose the run folder and the checkpoint to resume from; lock the folder; write plan and assignment."""
    job = plan.job
    run_dir = _run_dir(job, resume)
    stores = CheckpointStores.of(job.checkpoint, job.checkpoint.dir or run_dir / "checkpoints")
    try:
        with contextlib.suppress(OSError):  # a folder that cannot be written is reported below
            if stores.has_drafts():
                with _take_locks(run_dir, stores, fresh=not (run_dir / EVENTS_FILE).exists()).locks:
                    stores.finish_drafts()  # no run is writing them
        found = stores.list_paths()
        resume_from = _choose_checkpoint(job, data, stores, resume, reporter)
        hf_weights = resume_from is None and weights.announce(reporter)
    except UserError:
        if job.run_dir is None:  # a numbered folder that was just created is still empty
            with contextlib.suppress(OSError):
                run_dir.rmdir()
        raise
    fresh = not (run_dir / EVENTS_FILE).exists()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        opened = _take_locks(run_dir, stores)
        _require_unchanged(stores, found)
        for sentence in opened.notes:
            reporter.warning(sentence)
        generation = _next_generation(run_dir)
        assignment = Assignment(
            run_dir=str(run_dir),
            data_dir=str(data.folder.resolve()),
            checkpoint_dir=str(stores.roots[0]),
            resume_from=str(resume_from) if resume_from else None,
            hf_weights=hf_weights,
            eval_sets={name: str(folder) for name, folder in data.eval_sets.items()},
            corpus=None if data.corpus is None else asdict(data.corpus),
            generation=generation,
            attempt=time.time_ns() // 10**6,
            stores=opened.locked,
        )
        if not fresh:
            _keep_plan(run_dir, generation)
        write_plan(plan, run_dir / PLAN_FILE)
        assignment.write()
        (run_dir / EVENTS_FILE).touch()
    except (OSError, UserError) as error:
        if fresh and not (isinstance(error, UserError) and error.problems[0].code == "run-busy"):
            shutil.rmtree(run_dir, ignore_errors=True)
        if isinstance(error, UserError):
            raise
        where = str(error.filename or run_dir)
        rule = f"cannot be written: {error.strerror or error}"
        fix = "Set run_dir or checkpoint.dir elsewhere"
        raise UserError(Problem("run-not-writable", rule, path=where, fix=fix)) from None
    return PreparedRun(plan, assignment, opened.locks)


def _take_locks(run_dir: Path, stores: CheckpointStores, fresh: bool = False) -> OpenStores:
    """Lock the folder of a run and its checkpoints: other runs may name them in ``checkpoint.dir``.

    Args:
        run_dir: Run folder.
        stores: Stores of its checkpoints.
        fresh: The run has no folder yet, or an empty one: only its checkpoints are locked.

    Raises:
        UserError: Another process has one of the locks, or too few stores are reached.
    """
    with contextlib.ExitStack() as locks:
        if not fresh:
            locks.enter_context(RunLock.take(run_dir))
        opened = stores.open(run_dir)
        locks.enter_context(opened.locks)
        return replace(opened, locks=locks.pop_all())


def _require_unchanged(stores: CheckpointStores, before: list[AnyPath]) -> None:
    """Check that no other run wrote checkpoints before these were locked."""
    if stores.list_paths() != before:
        rule, fix = "was written by another run meanwhile", "Try again, or use another checkpoint.dir"
        raise UserError(Problem("checkpoint-dir-busy", rule, path=str(stores.roots[0]), fix=fix))


def _keep_plan(run_dir: Path, generation: int) -> None:
    """Keep the plan of the attempt before; one that cannot be read is not audited later.

    An attempt that was stopped before it wrote an event has no generation: the next one has its number.

    Args:
        run_dir: The run folder.
        generation: The first of the next attempt.
    """
    with contextlib.suppress(OSError, ValueError, TypeError):
        before = Assignment.read(run_dir).generation
        if before < generation:
            keep_earlier_plan(run_dir, before)


def find_orphans(job: Job) -> Path | None:
    """The folder of the run to resume, if its agent is still there without a supervisor."""
    folder = Path(job.run_dir) if job.run_dir is not None else _newest_numbered(job)
    file = None if folder is None else AgentFile.read(folder)
    connection = None if file is None else file.connect()
    if connection is None:
        return None
    connection.close()
    return folder


def _newest_numbered(job: Job) -> Path | None:
    found = _list_numbered(job)
    return found[-1][1] if found else None


def _list_numbered(job: Job) -> list[tuple[int, Path]]:
    """The numbered folders of a job, oldest first."""
    found = [(path.name.removeprefix(f"{job.name}-"), path) for path in RUNS.glob(f"{job.name}-*")]
    return sorted((int(number), path) for number, path in found if number.isdigit())


def _run_dir(job: Job, resume: ResumeMode) -> Path:
    """The folder that the job names; else a new numbered one, or the newest with checkpoints."""
    if job.run_dir is not None:
        given = Path(job.run_dir)
        if resume == "no" and (given / EVENTS_FILE).exists():
            rule, fix = "holds a run already", "Resume it, or use another folder"
            raise UserError(Problem("run-exists", rule, path="run_dir", value=job.run_dir, fix=fix))
        if not (given / EVENTS_FILE).exists() and given.is_dir() and any(given.iterdir()):
            rule, fix = "is a folder with other files in it", "Use a new folder"
            raise UserError(Problem("run-exists", rule, path="run_dir", value=job.run_dir, fix=fix))
        return given
    numbered = _list_numbered(job)
    if resume == "may" and numbered:  # the run of an earlier attempt of this launch
        return numbered[-1][1]
    if resume == "must" and job.checkpoint.dir is None:
        with_checkpoints = [path for _, path in numbered if list_checkpoints(path / "checkpoints")]
        if not with_checkpoints:
            rule = f"has no run with a checkpoint under {RUNS}"
            raise UserError(Problem("resume-nothing", rule, path=job.name, fix="Start without resume"))
        return with_checkpoints[-1]
    return _make_numbered(RUNS, job.name, numbered[-1][0] + 1 if numbered else 1)


def _make_numbered(runs: Path, name: str, number: int) -> Path:
    """Create the next free folder; two processes at once get different ones."""
    while True:
        folder = runs / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            rule = f"cannot be created: {error.strerror or error}"
            fix = "Set run_dir elsewhere"
            raise UserError(Problem("run-not-writable", rule, path=str(folder), fix=fix)) from None
        else:
            return folder


def _choose_checkpoint(
    job: Job, data: _PreparedData, stores: CheckpointStores, resume: ResumeMode, reporter: Reporter
) -> AnyPath | None:
    """The checkpoint to resume from; None for a run that starts at the beginning."""
    if resume == "no" and (used := stores.has_checkpoints()) is not None:
        rule = "holds checkpoints of another run"
        fix = "Resume from them, or use another folder"
        raise UserError(Problem("checkpoint-dir-used", rule, path=str(used), fix=fix))
    if resume == "no":
        return None
    found = stores.find_newest()
    if found is None and resume == "may":
        return None
    if found is None:
        rule = "holds no checkpoint"
        raise UserError(
            Problem("resume-nothing", rule, path=str(stores.roots[0]), fix="Start without resume")
        )
    checkpoint, refused = found
    for sentence in refused:
        reporter.warning(f"skipped: {sentence}")
    manifest = read_manifest(checkpoint, verify=False)
    check_same_job(manifest, job.model, job.data, checkpoint)
    check_same_optimizer(manifest, job.train, checkpoint)
    check_same_data(manifest, job, data.folder, data.corpus, checkpoint)
    if manifest.step >= job.train.steps:
        rule = f"is at step {manifest.step} already, and train.steps={job.train.steps}"
        raise UserError(
            Problem("resume-complete", rule, path=str(checkpoint), fix="Raise train.steps to continue")
        )
    return checkpoint


def _next_generation(run_dir: Path) -> int:
    events = run_dir / EVENTS_FILE
    if not events.exists():
        return 0
    log = read_events(events)
    return log.last_generation + 1 if log.events else 0
