"""The plan as a file: the chosen layout, and what each rank is predicted to hold and to send.

The planner writes it before any rank starts (``plan.build``). The run reads it to know what to do, the audit
to know what was predicted. This module holds the data and the file format; it imports nothing of the planner.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import replace_text
from meshwright.core.version import __version__
from meshwright.layout.flops import peak_rate
from meshwright.layout.pipeline_schedules import schedule_of, stage_pp_ranks
from meshwright.layout.placement import RANK_ORDER, RankPlacement, Slots, find_placement_error
from meshwright.layout.stages import list_stages, pp_rank_of
from meshwright.schedule.pipeline.files import write_schedule
from meshwright.schedule.pipeline.walk import StageTimes
from meshwright.spec.job import Job
from meshwright.spec.load import LAYERS_ASSIGNED, PLAN_KEY, build_job, job_tree
from meshwright.spec.paths import resolve_paths

PLAN_VERSION = 1
PLAN_FILE = "plan.toml"
ESTIMATED_CLASSES = ("first stage", "middle stages", "last stage")
"""Classes of pipeline ranks that the estimate distinguishes."""


@dataclass(frozen=True)
class Line:
    """One line of a memory table."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True)
class CollectiveTraffic:
    """Calls and bytes of one collective, by axis, operation and phase.

    Counts are for one rank and one occurrence of the phase: ``setup`` (once), ``step`` (each), ``eval``
    (each) and ``replica_check`` (each comparison of replicas). Checkpoints are written without collectives.
    """

    axis: str
    op: str
    phase: str
    ranks: int
    calls: int
    bytes: int
    """Bytes of all calls: the larger of the input and output tensor of a call, before backend framing."""
    pp_rank: int | None = None
    """The pipeline rank that the row is for; None: all of them."""

    def as_dict(self) -> dict[str, Any]:
        """As plain values, without a ``pp_rank`` of None."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True)
class PipelineTime:
    """The simulated pipeline schedule of a step, in seconds."""

    bubble: float
    """Idle share of all pipeline ranks' time, from the first action to the last."""
    makespan_s: float
    """From the first action of a step to the last."""
    work_s: float
    """Compute of the busiest rank."""
    send_s: float
    """One transfer between stages on different ranks."""
    forward_s: tuple[float, ...]
    """One micro-batch in each stage."""
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    exposed_send_s: float = 0.0
    """Transfers on the critical path, as far as the busiest rank waits for them."""

    @property
    def bubble_s(self) -> float:
        """How long the busiest rank waits for the compute of other stages."""
        return self.makespan_s - self.work_s - self.exposed_send_s

    @property
    def stage_times(self) -> StageTimes:
        """The times as the schedule simulator takes them."""
        return StageTimes(self.forward_s, self.backward_input_s, self.backward_weight_s)


@dataclass(frozen=True)
class RankPrediction:
    """Predicted memory of one rank."""

    rank: int
    state_bytes: dict[str, int]
    peak_bytes: int
    """Peak of live tensors in a steady step."""
    peak_at: str
    first_peak_bytes: int
    """The same in the first step."""
    activation_bytes: int
    """Activations that one micro-batch saves for the backward pass."""
    lines: tuple[Line, ...]
    offloaded_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """State offloaded to the CPU, by kind; empty in older plans."""
    routed_rows: int = 0
    """Rows of the rank's experts in one layer and micro-batch, if routing is balanced."""
    row_bytes: int = 0
    """Activation bytes that one such row saves for the backward pass."""
    needed_bytes: int = 0
    """Device memory: the larger of the two peaks, plus allocator and context; 0 in older plans."""
    snapshot_bytes: int = 0
    """CPU memory that in-memory snapshots reserve; 0 if there are none."""
    staging_bytes: int = 0
    """CPU memory from which checkpoints are written while training goes on; 0 if they are synchronous."""

    def summary(self) -> dict[str, Any]:
        """The memory for ``--json``."""
        return {
            "peak": self.peak_bytes,
            "peak_at": self.peak_at,
            "first_step": self.first_peak_bytes,
            "needed": self.needed_bytes,
            "lines": [dataclasses.asdict(line) for line in self.lines],
        }


@dataclass(frozen=True)
class CpuMemory:
    """CPU memory of the node whose ranks need the most."""

    ranks: int
    """Ranks on the node."""
    snapshot_bytes: int
    """For in-memory snapshots of these ranks; 0 if the job has none. Not reserved if they are off."""
    rank_snapshot_bytes: int
    """The same, of the rank that needs most."""
    offloaded_bytes: int
    """State that is offloaded to the CPU."""
    training_bytes: int
    """Peaks of the ranks, where the device is the CPU."""
    room_bytes: int
    """CPU memory of the node; 0 if it is not known."""
    snapshots_off: str = ""
    """Why snapshots do not fit, as a sentence; empty if they do, and if the job has none."""
    staging_bytes: int = 0
    """For asynchronous checkpoints of these ranks; 0 if they are synchronous."""
    staging_off: str = ""
    """Why that does not fit, as a sentence: then checkpoints are synchronous."""
    changing_bytes: int = 0
    """For the in-memory snapshots of the previous layout, held while the layout changes. In the first plan,
    as much as for its own. 0 if the layout may not change."""
    collective_bytes: int = 0
    """For collectives through shared memory, at most; 0 with another transport."""

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class StageRow:
    """One pipeline stage: its rank, layers, and whether it has the embedding or the head."""

    stage: int
    pp_rank: int
    first_layer: int
    last_layer: int
    embedding: bool
    head: bool


@dataclass(frozen=True)
class PlanContract:
    """The contract that the audit checks: a job with a complete layout, and its predictions."""

    job: Job
    micro_batches: int
    step_s: float
    breakdown_s: dict[str, float]
    tokens_per_step: int
    flops_per_token: float
    parameters: int
    ranks: tuple[RankPrediction, ...]
    collectives: tuple[CollectiveTraffic, ...]
    buckets: tuple[tuple[str, ...], ...]
    reasons: tuple[str, ...]
    usable_bytes: int = 0
    """Usable memory of a device; 0 in older plans."""
    hidden_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Communication overlapped with compute, by axis; not part of the step."""
    exact: bool = True
    """False: plan-only layout. `ranks` has one rank per class, with estimated memory."""
    pipeline: PipelineTime | None = None
    """The simulated schedule; None without a pipeline, and if it is too large to simulate."""
    layers_assigned: bool = False
    """Whether the planner assigned layers to stages; another job assigns them anew."""
    host_memory: CpuMemory | None = None
    """CPU memory; None for a plan-only layout, and in older plans."""
    transport: str = ""
    """What runs the collectives of ranks on one node: `none`, `gloo`, `shared_memory` or `nccl`. It gives the
    order of sums, so rounding. Empty in older plans."""
    placement: Slots = RANK_ORDER
    """The device slot of each rank (``layout.placement``); empty: in rank order."""

    def __repr__(self) -> str:
        degrees = self.job.layout.named_degrees() or "one rank"
        return f"PlanContract({degrees}, step_s={self.step_s:.4g}, exact={self.exact})"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.job.layout.world_size

    @property
    def rank_placement(self) -> RankPlacement:
        """The node and device of each rank."""
        return RankPlacement.of(self.job, self.placement)

    def collectives_of(self, rank: int) -> list[CollectiveTraffic]:
        """Predicted collectives of one rank."""
        pp_rank = pp_rank_of(self.job, rank)
        return [row for row in self.collectives if row.pp_rank in (None, pp_rank)]

    def classes(self) -> dict[str, RankPrediction]:
        """One rank of each class; ranks with the same pp_rank are identical."""
        each = self.world_size // self.job.layout.pp if self.exact else 1
        names = name_classes(self.job, self.exact, len(self.ranks) // each)
        return {name: self.ranks[pp_rank * each] for name, pp_rank in names.items()}

    def stages(self) -> list[StageRow]:
        """The pipeline stages, first to last; empty without a pipeline."""
        if not self.exact or self.job.layout.pp == 1:
            return []
        stage_ranks = stage_pp_ranks(self.job)
        return [
            StageRow(
                part.stage,
                stage_ranks[part.stage],
                part.layers.start,
                part.layers.stop - 1,
                part.first,
                part.last,
            )
            for part in list_stages(self.job)
        ]

    @property
    def mfu(self) -> float:
        """Predicted model FLOPs utilization."""
        rate, _ = peak_rate(self.job.cluster, self.job.train.precision)
        return self.tokens_per_step * self.flops_per_token / self.step_s / self.world_size / rate

    @property
    def cost_per_step(self) -> float | None:
        """Price of a step in USD; None if the cluster has no price."""
        price = self.job.cluster.cost_per_hour
        return None if price is None else price * self.world_size * self.step_s / 3600


def name_classes(job: Job, exact: bool, count: int) -> dict[str, int]:
    """Classes of ranks with equal memory, by name, and their index: one per pipeline rank, or estimated."""
    if job.layout.pp == 1:
        return {"every rank": 0}
    if not exact:
        classes = ESTIMATED_CLASSES if count == len(ESTIMATED_CLASSES) else ESTIMATED_CLASSES[::2]
        return {name: index for index, name in enumerate(classes)}
    each = job.layout.world_size // job.layout.pp
    stage_ranks, names = stage_pp_ranks(job), dict[str, int]()
    for pp_rank in range(job.layout.pp):
        first, last = pp_rank * each, (pp_rank + 1) * each - 1
        ranks = f"rank {first}" if each == 1 else f"ranks {first} to {last}"
        stages = [str(part.stage) for part in list_stages(job) if stage_ranks[part.stage] == pp_rank]
        names[f"stage{'s' * (len(stages) > 1)} {', '.join(stages)} ({ranks})"] = pp_rank
    return names


@functools.cache
def plan_adapter() -> TypeAdapter[PlanContract]:
    """Built when a plan is first read: it takes 0.1 s, and planning does not need it."""
    return TypeAdapter(PlanContract)


def layout_keys(job: Job) -> dict[str, Any]:
    """The layout as plain keys, without those that are None."""
    return {k: v for k, v in dataclasses.asdict(job.layout).items() if v is not None}


def plan_tree(plan: PlanContract) -> dict[str, Any]:
    """The plan as TOML tables."""
    tree: dict[str, Any] = {
        PLAN_KEY: PLAN_VERSION,
        "written_by": f"meshwright {__version__}",
        "world_size": plan.world_size,
        "reasons": list(plan.reasons),
        "job": job_tree(plan.job),
        "predicted": {
            "micro_batches": plan.micro_batches,
            "step_s": plan.step_s,
            "tokens_per_step": plan.tokens_per_step,
            "flops_per_token": plan.flops_per_token,
            "parameters": plan.parameters,
            "breakdown_s": plan.breakdown_s,
            "hidden_s": plan.hidden_s,
            "usable_bytes": plan.usable_bytes,
            "transport": plan.transport,
            "collectives": [row.as_dict() for row in plan.collectives],
            "buckets": [list(names) for names in plan.buckets],
            "ranks": [dataclasses.asdict(rank) for rank in plan.ranks],
        },
    }
    if plan.pipeline is not None:
        tree["predicted"]["pipeline"] = dataclasses.asdict(plan.pipeline)
        tree["predicted"][LAYERS_ASSIGNED] = plan.layers_assigned
    if plan.host_memory is not None:
        tree["predicted"]["host_memory"] = plan.host_memory.as_dict()
    if plan.placement:
        tree["predicted"]["placement"] = list(plan.placement)
    if not plan.exact:
        tree["predicted"]["exact"] = False
    return tree


def write_plan(plan: PlanContract, path: Path) -> None:
    """Write the plan atomically. A custom schedule file is copied beside it."""
    tree = plan_tree(plan)
    try:
        if plan.job.layout.schedule_file is not None:
            beside = path.with_name(f"{path.stem}.schedule.csv")
            write_schedule(schedule_of(plan.job, plan.micro_batches), beside)
            tree["job"]["layout"]["schedule_file"] = beside.name
        replace_text(path, tomli_w.dumps(tree))
    except OSError as error:
        rule, fix = f"cannot be written: {error.strerror or error}", "Choose another file"
        raise UserError(Problem("plan-not-writable", rule, path=str(path), fix=fix)) from None


def name_earlier_plan(generation: int) -> str:
    """The file that keeps the plan of an attempt, by its first generation."""
    return f"plan-{generation}.toml"


def keep_earlier_plan(run_dir: Path, generation: int) -> None:
    """Keep the plan of an attempt, before a resume writes its own: ``plan-GENERATION.toml``.

    Args:
        run_dir: The run folder.
        generation: The first of the attempt.
    """
    kept = run_dir / name_earlier_plan(generation)
    if kept.exists():  # a command died while it wrote the next plan
        return
    with contextlib.suppress(UserError):  # a damaged plan: that attempt is not audited
        write_plan(read_plan(run_dir / PLAN_FILE), kept)


def read_earlier_plans(run_dir: Path) -> dict[int, PlanContract]:
    """The plans of earlier attempts at a run, by the first generation of the attempt."""
    found: dict[int, PlanContract] = {}
    for path in sorted(run_dir.glob("plan-*.toml")):
        number = path.stem.removeprefix("plan-")
        if number.isdigit():
            with contextlib.suppress(UserError):
                found[int(number)] = read_plan(path)
    return found


def is_plan(path: Path) -> bool:
    """Whether a file is a plan rather than a job."""
    try:
        return PLAN_KEY in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def read_plan(path: Path, *, to_run: bool = True) -> PlanContract:
    """Read a plan back, checking its version and its job.

    Args:
        path: The file.
        to_run: False for a plan that is only displayed: its layout may be plan-only.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(Problem("plan-missing", "does not exist", path=str(path))) from None
    except (OSError, ValueError) as error:
        raise UserError(Problem("plan-unreadable", f"cannot be read: {error}", path=str(path))) from None
    if tree.get(PLAN_KEY) != PLAN_VERSION:
        rule = f"has plan version {tree.get(PLAN_KEY)}; this is version {PLAN_VERSION}"
        raise UserError(Problem("plan-version", rule, path=str(path), fix="Plan the job again"))
    predicted, job = tree.get("predicted"), tree.get("job")
    if not isinstance(job, dict) or not isinstance(predicted, dict):
        rule = "is not a complete plan: it has no job or no predictions"
        raise UserError(Problem("plan-unreadable", rule, path=str(path)))
    resolve_paths(job, path.parent)
    content = {
        "job": build_job(job, settled=True, to_run=to_run),
        "reasons": tree.get("reasons"),
        **predicted,
    }
    try:
        plan = plan_adapter().validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        rule = f"is not a complete plan: {where}: {first['msg']}"
        raise UserError(Problem("plan-unreadable", rule, path=str(path))) from None
    if (wrong := find_placement_error(plan.job, plan.placement)) is not None:
        rule = f"is not a complete plan: predicted.placement {wrong}"
        raise UserError(Problem("plan-unreadable", rule, path=str(path), fix="Plan the job again"))
    return plan
