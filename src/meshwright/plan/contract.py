"""The plan as a file: the chosen layout, and what each rank is predicted to hold and to send.

The planner writes it before any rank starts (``plan.build``). The run reads it to know what to do, the audit
to know what was predicted. This module holds the data and the file format; it imports nothing of the planner.
"""

from __future__ import annotations

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
from meshwright.layout.stages import list_stages, pp_rank_of
from meshwright.schedule.pipeline.files import write_schedule
from meshwright.schedule.pipeline.walk import StageTimes
from meshwright.spec.job import Job
from meshwright.spec.load import LAYERS_ASSIGNED, PLAN_KEY, build_job, find_schedule, job_tree

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
    (each) and ``save`` (each checkpoint).
    """

    axis: str
    op: str
    phase: str
    ranks: int
    calls: int
    bytes: int
    """Of all calls: the larger of the input and output tensor of a call, before backend framing."""
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
    """What one rank is predicted to hold."""

    rank: int
    state_bytes: dict[str, int]
    peak_bytes: int
    """Largest sum of live tensors in a steady step."""
    peak_at: str
    first_peak_bytes: int
    """The same in the first step."""
    activation_bytes: int
    """What one micro-batch keeps from forward to backward."""
    lines: tuple[Line, ...]
    offloaded_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """The part of the state that lies on the host, by kind; empty in plans from before there was any."""
    routed_rows: int = 0
    """Rows that the rank's experts read in one layer and micro-batch if all experts are equally busy."""
    row_bytes: int = 0
    """What one of them keeps there from forward to backward."""
    checkpoint_bytes: int = 0
    """Live tensors while a checkpoint is written; 0 in plans from before it was predicted."""
    needed_bytes: int = 0
    """Device memory that it needs: the largest of the three, allocator and context; 0 in older plans."""

    def summary(self) -> dict[str, Any]:
        """Its memory for ``--json``, with INTERFACES' keys."""
        return {
            "peak": self.peak_bytes,
            "peak_at": self.peak_at,
            "first_step": self.first_peak_bytes,
            "checkpoint": self.checkpoint_bytes,
            "needed": self.needed_bytes,
            "lines": [dataclasses.asdict(line) for line in self.lines],
        }


@dataclass(frozen=True)
class StageRow:
    """What one stage of a pipeline has."""

    stage: int
    pp_rank: int
    """Which ranks of a pipeline hold it."""
    first_layer: int
    last_layer: int
    embedding: bool
    head: bool


@dataclass(frozen=True)
class Plan:
    """A job with its layout settled, and the predictions."""

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
    """Device memory that a rank may need; 0 in older plans."""
    hidden_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Communication that computation hides, by axis; not in the step."""
    exact: bool = True
    """False: this version does not run the layout. `ranks` has one rank per class, with estimated memory."""
    pipeline: PipelineTime | None = None
    """The schedule as planned; None without a pipeline, and where the layout does not run yet."""
    layers_assigned: bool = False
    """Whether the layers of the stages are the planner's; another job deals them again."""

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.job.layout.world_size

    def collectives_of(self, rank: int) -> list[CollectiveTraffic]:
        """What one rank is promised to move."""
        pp_rank = pp_rank_of(self.job, rank)
        return [row for row in self.collectives if row.pp_rank in (None, pp_rank)]

    def classes(self) -> dict[str, RankPrediction]:
        """One rank of each kind: those of one pp rank are alike."""
        each = self.world_size // self.job.layout.pp if self.exact else 1
        names = name_classes(self.job, self.exact, len(self.ranks) // each)
        return {name: self.ranks[pp_rank * each] for name, pp_rank in names.items()}

    def stages(self) -> list[StageRow]:
        """The stages of the pipeline, first to last; none without one."""
        if not self.exact or self.job.layout.pp == 1:
            return []
        homes = stage_pp_ranks(self.job)
        return [
            StageRow(
                part.stage,
                homes[part.stage],
                part.layers.start,
                part.layers.stop - 1,
                part.first,
                part.last,
            )
            for part in list_stages(self.job)
        ]

    @property
    def mfu(self) -> float:
        """Predicted share of the peak rate."""
        rate, _ = peak_rate(self.job.cluster, self.job.train.precision)
        return self.tokens_per_step * self.flops_per_token / self.step_s / self.world_size / rate


def name_classes(job: Job, exact: bool, count: int) -> dict[str, int]:
    """Ranks that are alike: those of one pp rank, or of one class of the estimate."""
    if job.layout.pp == 1:
        return {"every rank": 0}
    if not exact:
        classes = ESTIMATED_CLASSES if count == len(ESTIMATED_CLASSES) else ESTIMATED_CLASSES[::2]
        return {name: place for place, name in enumerate(classes)}
    each = job.layout.world_size // job.layout.pp
    homes, names = stage_pp_ranks(job), dict[str, int]()
    for pp_rank in range(job.layout.pp):
        first, last = pp_rank * each, (pp_rank + 1) * each - 1
        ranks = f"rank {first}" if each == 1 else f"ranks {first} to {last}"
        stages = [str(part.stage) for part in list_stages(job) if homes[part.stage] == pp_rank]
        names[f"stage{'s' * (len(stages) > 1)} {', '.join(stages)} ({ranks})"] = pp_rank
    return names


@functools.cache
def _adapter() -> TypeAdapter[Plan]:
    """Built when a plan is first read: it takes a tenth of a second, which planning does not need."""
    return TypeAdapter(Plan)


def layout_keys(job: Job) -> dict[str, Any]:
    """The layout as plain keys, without what is None."""
    return {k: v for k, v in dataclasses.asdict(job.layout).items() if v is not None}


def plan_tree(plan: Plan) -> dict[str, Any]:
    """The plan as plain tables."""
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
            "collectives": [row.as_dict() for row in plan.collectives],
            "buckets": [list(names) for names in plan.buckets],
            "ranks": [dataclasses.asdict(rank) for rank in plan.ranks],
        },
    }
    if plan.pipeline is not None:
        tree["predicted"]["pipeline"] = dataclasses.asdict(plan.pipeline)
        tree["predicted"][LAYERS_ASSIGNED] = plan.layers_assigned
    if not plan.exact:
        tree["predicted"]["exact"] = False
    return tree


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan; a reader never sees half of one. A schedule of one's own comes beside it."""
    tree = plan_tree(plan)
    try:
        if plan.job.layout.schedule_file is not None:
            beside = path.with_name(f"{path.stem}.schedule.csv")
            write_schedule(schedule_of(plan.job, plan.micro_batches), beside)
            tree["job"]["layout"]["schedule_file"] = beside.name
        replace_text(path, tomli_w.dumps(tree))
    except OSError as error:
        raise UserError(Problem("plan-not-writable", f"cannot be written: {error}", path=str(path))) from None


def is_plan(path: Path) -> bool:
    """Whether a file is a plan rather than a job."""
    try:
        return PLAN_KEY in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def read_plan(path: Path, *, to_run: bool = True) -> Plan:
    """Read a plan back, checking its version and its job.

    Args:
        path: The file.
        to_run: False for a plan that is only looked at: its layout need not be one that runs yet.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(Problem("plan-missing", "is not there", path=str(path))) from None
    except (OSError, ValueError) as error:
        raise UserError(Problem("plan-unreadable", f"cannot be read: {error}", path=str(path))) from None
    if tree.get(PLAN_KEY) != PLAN_VERSION:
        rule = f"has plan version {tree.get(PLAN_KEY)}; this is version {PLAN_VERSION}"
        raise UserError(Problem("plan-version", rule, path=str(path), fix="Plan the job again"))
    predicted, job = tree.get("predicted"), tree.get("job")
    if not isinstance(job, dict) or not isinstance(predicted, dict):
        rule = "is not a whole plan: it has no job or no predictions"
        raise UserError(Problem("plan-unreadable", rule, path=str(path)))
    find_schedule(job, path)
    content = {
        "job": build_job(job, settled=True, to_run=to_run),
        "reasons": tree.get("reasons"),
        **predicted,
    }
    try:
        return _adapter().validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        rule = f"is not a whole plan: {where}: {first['msg']}"
        raise UserError(Problem("plan-unreadable", rule, path=str(path))) from None
