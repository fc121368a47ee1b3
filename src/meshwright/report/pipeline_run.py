"""What a pipeline did beside what its schedule says: the measured bubble, the simulated one, the planned one.

*Measured* is what the ranks recorded: the share of their time, from the first action of a step to the last,
in which they ran none. *Simulated* walks the schedule with the stages' own measured times: what differs from
it is waiting that the schedule does not explain, such as cores that several ranks share. *Planned* is what
was said before the run.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from meshwright.audit.record import RecordedTimeline, RunRecord
from meshwright.core.units import format_seconds
from meshwright.layout.pipeline_schedules import schedule_of, stage_pp_ranks
from meshwright.plan.contract import PipelineTime, Plan
from meshwright.plan.time.stage_layers import assign_layers, rank_costs, stage_costs
from meshwright.plan.time.stages import part_costs
from meshwright.report.timeline import Timeline, build_timeline, measured_timeline
from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule
from meshwright.schedule.pipeline.walk import StageTimes, Walk, walk_schedule
from meshwright.spec.model import DecoderModel

Spans = tuple[tuple[tuple[Action, float, float], ...], ...]
MIN_IMPROVEMENT = 0.05
"""By how much another cut must shorten the slowest rank's work to be proposed."""


@dataclass(frozen=True)
class PipelineRun:
    """One pipeline of a run, the first rank of each place."""

    schedule: PipelineSchedule
    spans: Spans
    """Each rank's actions with their mean start and end."""
    steps: int
    """Steps that the means are over."""
    walk: Walk
    """The schedule with the measured times of the stages."""
    planned: PipelineTime
    stage_layers: tuple[int, ...]
    better_layers: tuple[int, ...] | None
    """A cut by the measured times that would relieve the slowest rank; None if none would."""

    @property
    def measured_bubble(self) -> float:
        """The idle share of the ranks' time."""
        work = sum(end - start for row in self.spans for _, start, end in row)
        return 1 - work / (len(self.spans) * self.makespan_s)

    @property
    def makespan_s(self) -> float:
        """From the first action to the last."""
        moments = [moment for row in self.spans for _, *times in row for moment in times]
        return max(moments) - min(moments)

    @property
    def stage_s(self) -> tuple[float, ...]:
        """What each stage worked on a micro-batch."""
        return _stage_seconds(self.schedule, self.spans)

    def timelines(self) -> tuple[Timeline, Timeline]:
        """Simulated, and measured: the same actions on one axis of time."""
        schedule = self.schedule
        title = f"{schedule.name}, {schedule.stages} stages, {schedule.micro_batches} micro-batches"
        simulated = f"simulated with the measured times of the stages: bubble {self.walk.bubble:.1%}"
        measured = f"measured, mean of {self.steps} steps: bubble {self.measured_bubble:.1%}"
        return (
            build_timeline(self.schedule, self.walk, f"{title}: simulated", simulated, unit="s"),
            measured_timeline(self.schedule, self.spans, f"{title}: measured", measured),
        )

    def sentences(self) -> list[str]:
        """What there is to say, for people."""
        each = ", ".join(format_seconds(seconds) for seconds in self.stage_s)
        bubbles = f"planned {self.planned.bubble:.1%}, simulated with the measured times "
        bubbles += f"{self.walk.bubble:.1%}, measured {self.measured_bubble:.1%} of the ranks' time"
        said = [
            f"Bubble: {bubbles} (mean of {self.steps} steps); shown, not judged",
            f"Stages: {each} of work on a micro-batch, with {_listed(self.stage_layers)} layers",
        ]
        if self.better_layers is not None:
            said.append(
                "The slowest rank rules: "
                f"layout.stage_layers=[{_listed(self.better_layers)}] would even them out"
            )
        return said

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "bubble": {
                "planned": self.planned.bubble,
                "simulated": self.walk.bubble,
                "measured": self.measured_bubble,
            },
            "makespan_s": {
                "planned": self.planned.makespan_s,
                "simulated": self.walk.makespan_s,
                "measured": self.makespan_s,
            },
            "stage_s": list(self.stage_s),
            "stage_layers": list(self.stage_layers),
            "better_stage_layers": None if self.better_layers is None else list(self.better_layers),
            "steps": self.steps,
        }


def find_pipeline(plan: Plan, record: RunRecord) -> PipelineRun | None:
    """The first pipeline of a run; None without one, or if its ranks did not come to record it."""
    layout = plan.job.layout
    if plan.pipeline is None or layout.stage_layers is None:
        return None
    inner = layout.world_size // layout.pp
    recorded = [record.timelines.get(pp_rank * inner) for pp_rank in range(layout.pp)]
    found = [row for row in recorded if row is not None and row.steps]
    if len(found) < layout.pp:
        return None
    schedule = schedule_of(plan.job, plan.micro_batches)
    spans = tuple(_read(row) for row in found)
    walk = walk_schedule(schedule, _measured_times(schedule, spans), plan.pipeline.send_s)
    better = _find_better(plan, _stage_seconds(schedule, spans))
    return PipelineRun(schedule, spans, found[0].steps, walk, plan.pipeline, layout.stage_layers, better)


def _read(recorded: RecordedTimeline) -> tuple[tuple[Action, float, float], ...]:
    return tuple((Action(Kind(k), stage, m), start, end) for k, stage, m, start, end in recorded.actions)


def _measured_times(schedule: PipelineSchedule, spans: Spans) -> StageTimes:
    """Mean seconds of each stage's three kinds of action; a backward pass that is whole has them all."""
    return StageTimes(*([_mean(spans, kind, stage) for stage in range(schedule.stages)] for kind in Kind))


def _stage_seconds(schedule: PipelineSchedule, spans: Spans) -> tuple[float, ...]:
    return tuple(sum(_mean(spans, kind, stage) for kind in Kind) for stage in range(schedule.stages))


def _mean(spans: Spans, kind: Kind, stage: int) -> float:
    found = [end - start for row in spans for a, start, end in row if a.kind is kind and a.stage == stage]
    return statistics.fmean(found) if found else 0.0


def _find_better(plan: Plan, stage_s: tuple[float, ...]) -> tuple[int, ...] | None:
    """Assign the layers again by what the stages took.

    A block costs what one of a stage without ends does; of two stages the embedding is taken as predicted.
    """
    layers = plan.job.layout.stage_layers
    assert layers is not None, "a plan settles the layers of the stages"
    assert isinstance(plan.job.model, DecoderModel), "the legality table cuts decoders only"
    costs = part_costs(plan.job)
    inner = [seconds / count for seconds, count in zip(stage_s[1:-1], layers[1:-1], strict=True)]
    block = statistics.fmean(inner) if inner else stage_s[0] / (layers[0] + costs.embedding_blocks)
    embedding, head = (max(0.0, stage_s[end] / block - layers[end]) for end in (0, -1))
    homes = stage_pp_ranks(plan.job)
    assigned = assign_layers(plan.job.model.num_layers, homes, embedding, head)

    def slowest(counts: tuple[int, ...]) -> float:
        return max(rank_costs(stage_costs(counts, embedding, head), homes))

    return assigned if slowest(assigned) < (1 - MIN_IMPROVEMENT) * slowest(layers) else None


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in numbers)
