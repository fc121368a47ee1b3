"""One row of predicted traffic, and how many values the small control reductions carry.

Bytes of a call are the larger of what the rank hands in and gets out, before any framing of the backend.
Counts are for one rank and one occurrence of the phase: once at ``setup``, for each ``step``, each ``eval``,
and each checkpoint (``save``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.layout.axes import is_sharded
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

FLOAT64_BYTES = 8
CONTROL_STEP_VALUES = 3
"""Loss sum, target tokens, wish to stop: reduced once a step."""
CONTROL_NOISE_VALUES = 2
"""Squared norm and number of parts for the gradient noise scale: in every step of a job that measures it."""
CONTROL_SAVE_VALUES = 1
"""Rank 0's wish to save, where all ranks must take part."""
CONTROL_NORM_VALUES = 1
"""Squared norm of a rank's shard of the gradient, where that is cut: a reduction of its own."""
CONTROL_EVAL_VALUES = 2
"""Loss sum and target tokens of an evaluation."""


@dataclass(frozen=True)
class CollectiveTraffic:
    """Calls of one operation on one axis in one phase."""

    axis: str
    op: str
    phase: str
    ranks: int
    calls: int
    bytes: int
    pp_rank: int | None = None
    """Whose promise it is: of the ranks at this place of the pipelines; None for that of every rank."""

    def as_dict(self) -> dict[str, Any]:
        """As plain values; without the place where it is everybody's."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def merge_rows(rows: Iterable[CollectiveTraffic]) -> list[CollectiveTraffic]:
    """One row a kind, in the order in which kinds first come; kinds without a call are left out."""
    kinds: dict[tuple[str, str, str], list[CollectiveTraffic]] = {}
    for row in rows:
        kinds.setdefault((row.axis, row.op, row.phase), []).append(row)
    merged = [
        CollectiveTraffic(
            *kind, same[-1].ranks, sum(row.calls for row in same), sum(row.bytes for row in same)
        )
        for kind, same in kinds.items()
    ]
    return [row for row in merged if row.calls]


def merge_pp_ranks(rows: Sequence[Sequence[CollectiveTraffic]]) -> list[CollectiveTraffic]:
    """The rows of every place of the pipelines as one list: those that all places share once, without one."""
    shared = [row for row in rows[0] if all(row in others for others in rows[1:])]
    own = [
        replace(row, pp_rank=pp_rank)
        for pp_rank, of_rank in enumerate(rows)
        for row in of_rank
        if row not in shared
    ]
    return [*shared, *own]


def needs_grad_norm(job: Job) -> bool:
    """Whether the norm of the gradient is wanted in every step: to clip, or to find fp16's overflows."""
    return job.train.clip > 0 or job.train.precision == "fp16"


def predict_control(job: Job) -> list[CollectiveTraffic]:
    """The small reductions of loss, wishes, norm and load of experts over all ranks."""
    layout, values, calls = job.layout, CONTROL_STEP_VALUES, 1
    if job.train.noise_scale_every:
        values += CONTROL_NOISE_VALUES
    if is_sharded(job):  # all take part in norms and checkpoints
        values += CONTROL_SAVE_VALUES
        if needs_grad_norm(job):
            values, calls = values + CONTROL_NORM_VALUES, calls + 1
    if isinstance(job.model, DecoderModel) and job.model.load_size:
        values, calls = values + job.model.load_size, calls + 1
    world, evaluation = layout.world_size, CONTROL_EVAL_VALUES * FLOAT64_BYTES
    return [
        CollectiveTraffic("control", "all_reduce", "step", world, calls, values * FLOAT64_BYTES),
        CollectiveTraffic("control", "all_reduce", "eval", world, 1, evaluation),
    ]
