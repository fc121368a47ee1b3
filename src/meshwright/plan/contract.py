"""The plan as a file: what was decided and what every rank is predicted to hold and move.

Written before any rank starts, read by the run (what to do) and by the audit (what was promised).
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from meshwright import __version__
from meshwright.core.errors import Problem, UserError
from meshwright.core.files import replace_text
from meshwright.layout.axes import dense_shard_axis, reduces_full_grads
from meshwright.layout.flops import flops_per_token, peak_rate
from meshwright.layout.fsdp_groups import shard_ranks, sharded_state
from meshwright.layout.optimizer_offload import offloaded_state
from meshwright.layout.parameters import count_parameters
from meshwright.layout.stages import list_stages, local_buckets, pp_rank_of, schedule_of, stage_pp_ranks
from meshwright.layout.tensor_parallel import local_model
from meshwright.plan.memory.feed_forward import balanced_rows, row_bytes
from meshwright.plan.memory.fit import MemoryNeed, usable_bytes
from meshwright.plan.memory.ledger import Ledger
from meshwright.plan.memory.snapshots import Line
from meshwright.plan.predict import Prediction, name_classes
from meshwright.plan.search.find import SearchResult
from meshwright.plan.search.planner import search_job
from meshwright.plan.search.reasons import explain_choice
from meshwright.plan.time.interval import step_interval
from meshwright.plan.time.pipeline import PipelineTime
from meshwright.plan.traffic.collective import CollectiveTraffic
from meshwright.schedule.pipeline.files import write_schedule
from meshwright.spec.job import Job
from meshwright.spec.load import LAYERS_ASSIGNED, PLAN_KEY, build_job, find_schedule, job_tree
from meshwright.spec.model import DecoderModel

PLAN_VERSION = 1
PLAN_FILE = "plan.toml"


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

    def summary(self) -> dict[str, Any]:
        """The layout for ``--json``, with INTERFACES' keys."""
        return self.summary_with(self.classes())

    def summary_with(self, ranks: dict[str, RankPrediction]) -> dict[str, Any]:
        """The same with one rank of each class."""
        spread = step_interval(self.job)
        classes = {name: rank.summary() for name, rank in ranks.items()}
        needed = max(rank["needed"] for rank in classes.values())
        summary = {
            "layout": layout_keys(self.job),
            "step_s": self.step_s,
            "step_s_low": self.step_s * spread.low,
            "step_s_high": self.step_s * spread.high,
            "interval_basis": spread.basis,
            "tokens_per_s_per_device": self.tokens_per_step / self.step_s / self.world_size,
            "mfu": self.mfu,
            "memory_bytes": classes,
            "needed_bytes": needed,
            "fits": needed <= self.usable_bytes,
            "exact": self.exact,
            "breakdown_s": self.breakdown_s,
            "hidden_s": self.hidden_s,
            "collectives": [row.as_dict() for row in self.collectives],
            "reasons": list(self.reasons),
        }
        if self.pipeline is not None:
            summary["bubble"] = self.pipeline.bubble
            summary["stages"] = [dataclasses.asdict(row) for row in self.stages()]
        return summary


@functools.cache
def _adapter() -> TypeAdapter[Plan]:
    """Built when a plan is first read: it takes a tenth of a second, which planning does not need."""
    return TypeAdapter(Plan)


def build_plan(job: Job, named: Sequence[str] = ()) -> tuple[Plan, SearchResult]:
    """Search, choose, and write down what the choice promises.

    Args:
        job: Its layout may be open.
        named: Keys of the layout that the user wrote; they keep their value.
    """
    found = search_job(job, named)
    return plan_from(found.best[0], explain_choice(job, found), job.layout.stage_layers is None), found


def plan_from(prediction: Prediction, reasons: Sequence[str] = (), layers_assigned: bool = True) -> Plan:
    """The contract for one layout.

    Args:
        prediction: Of the layout.
        reasons: Why it was chosen.
        layers_assigned: Whether the planner, not the user, assigned layers to pipeline stages.
    """
    return _write(prediction, reasons, layers_assigned, tuple(_list_ranks(prediction)))


def summarize(prediction: Prediction, reasons: Sequence[str] = ()) -> dict[str, Any]:
    """One layout for ``--json``: the summary of its plan, made without a list of all its ranks."""
    memory = prediction.memory
    rank_predictions = [
        _predict_rank(pp_rank, ledger, need, ledger.state_bytes)
        for pp_rank, (ledger, need) in enumerate(zip(memory.ledgers, memory.needs, strict=True))
    ]
    plan = _write(prediction, reasons, True, ())
    return plan.summary_with(
        {name: rank_predictions[pp_rank] for name, pp_rank in prediction.classes.items()}
    )


def _write(
    prediction: Prediction,
    reasons: Sequence[str],
    layers_assigned: bool,
    ranks: tuple[RankPrediction, ...],
) -> Plan:
    job, layout = prediction.job, prediction.layout
    whole = prediction.exact and reduces_full_grads(job)
    return Plan(
        job=job,
        micro_batches=prediction.micro_batches,
        step_s=prediction.step_s,
        breakdown_s=prediction.time.parts,
        hidden_s=prediction.time.hidden,
        tokens_per_step=job.train.global_batch * job.data.seq_len,
        flops_per_token=flops_per_token(job.model, job.data.seq_len),
        parameters=count_parameters(job.model),
        ranks=ranks,
        collectives=prediction.traffic,
        buckets=tuple(
            tuple(names) for rank in (range(layout.pp) if whole else ()) for names in local_buckets(job, rank)
        ),
        layers_assigned=layout.pp > 1 and layers_assigned,
        reasons=tuple(reasons),
        pipeline=prediction.time.pipeline,
        exact=prediction.exact,
        usable_bytes=usable_bytes(job.cluster),
    )


def _list_ranks(prediction: Prediction) -> Iterator[RankPrediction]:
    """What each rank is promised; of a layout that does not run, one rank of each class."""
    job, memory = prediction.job, prediction.memory
    if not prediction.exact:
        for pp_rank, (ledger, need) in enumerate(zip(memory.ledgers, memory.needs, strict=True)):
            yield _predict_rank(pp_rank, ledger, need, ledger.state_bytes)
        return
    sharded = dense_shard_axis(job.layout).size > 1
    states: dict[tuple[int, tuple[int, int]], dict[str, int]] = {}
    away: dict[tuple[int, tuple[int, int]], dict[str, int]] = {}
    rows, each_row = _balanced_routing(job)
    for rank in range(job.layout.world_size):
        pp_rank, shards = pp_rank_of(job, rank), shard_ranks(job, rank)
        ledger = memory.ledgers[pp_rank]
        if (pp_rank, shards) not in states:
            state = sharded_state(job, rank) if sharded else ledger.state_bytes
            states[pp_rank, shards], away[pp_rank, shards] = state, offloaded_state(job, state)
        predicted = _predict_rank(rank, ledger, memory.needs[pp_rank], states[pp_rank, shards])
        yield dataclasses.replace(
            predicted, offloaded_bytes=away[pp_rank, shards], routed_rows=rows, row_bytes=each_row
        )


def _predict_rank(rank: int, ledger: Ledger, need: MemoryNeed, state: dict[str, int]) -> RankPrediction:
    return RankPrediction(
        rank=rank,
        state_bytes=state,
        peak_bytes=ledger.peak_bytes,
        peak_at=ledger.peak_at,
        first_peak_bytes=ledger.first_peak_bytes,
        activation_bytes=ledger.activation_bytes,
        lines=ledger.lines,
        checkpoint_bytes=need.checkpoint,
        needed_bytes=need.needed_bytes,
    )


def _balanced_routing(job: Job) -> tuple[int, int]:
    """Rows of a rank's experts in one layer, and what each keeps; nothing for a model without experts."""
    model = local_model(job)
    if not isinstance(model, DecoderModel) or not model.expert_layers:
        return 0, 0
    return balanced_rows(job, model, job.layout.micro_batch or 1), row_bytes(job, model)


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
