"""The bubble of a pipeline run: measured, simulated and planned.

*Measured*: idle share of the ranks' recorded time, from the first action of a step to the last. *Simulated*:
the schedule with the measured times of the stages. The difference is waiting that the schedule does not
explain, such as ranks that share cores. *Planned*: predicted before the run.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from meshwright.audit.record import RecordedTimeline, RunRecord
from meshwright.core.units import format_plural, format_seconds
from meshwright.layout.pipeline_schedules import schedule_of, stage_pp_ranks
from meshwright.plan.contract import PipelineTime, PlanContract
from meshwright.plan.time.stage_layers import assign_layers, rank_costs, stage_costs
from meshwright.plan.time.stages import part_costs
from meshwright.report.timeline import Timeline, build_timeline, measured_timeline
from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule
from meshwright.schedule.pipeline.walk import StageTimes, Walk, walk_schedule
from meshwright.spec.model import DecoderModel

Spans = tuple[tuple[tuple[Action, float, float], ...], ...]
MIN_IMPROVEMENT = 0.05
"""By how much another assignment of layers must shorten the slowest rank's work to be proposed."""


@dataclass(frozen=True)
class PipelineRun:
    """One pipeline of a run: the first rank of each pp rank."""

    schedule: PipelineSchedule
    spans: Spans
    """Each rank's actions with their mean start and end."""
    steps: int
    """Number of steps averaged."""
    walk: Walk
    """The schedule simulated with the measured times."""
    planned: PipelineTime
    stage_layers: tuple[int, ...]
    better_layers: tuple[int, ...] | None
    """Layers per stage that would speed up the slowest rank; None if there are none."""

    @property
    def measured_bubble(self) -> float:
        """Idle share of the ranks' time."""
        work = sum(end - start for row in self.spans for _, start, end in row)
        return 1 - work / (len(self.spans) * self.makespan_s)

    @property
    def makespan_s(self) -> float:
        """From the first action to the last."""
        points = [point for row in self.spans for _, *times in row for point in times]
        return max(points) - min(points)

    @property
    def stage_s(self) -> tuple[float, ...]:
        """Work of each stage per micro-batch."""
        return _stage_seconds(self.schedule, self.spans)

    def timelines(self) -> tuple[Timeline, Timeline]:
        """The simulated and the measured timeline."""
        schedule = self.schedule
        title = f"{schedule.name}, {schedule.stages} stages, {schedule.micro_batches} micro-batches"
        simulated = f"simulated with the measured times of the stages: bubble {self.walk.bubble:.1%}"
        measured = f"measured, mean of {format_plural(self.steps, 'step')}: bubble {self.measured_bubble:.1%}"
        return (
            build_timeline(self.schedule, self.walk, f"{title}: simulated", simulated, unit="s"),
            measured_timeline(self.schedule, self.spans, f"{title}: measured", measured),
        )

    def sentences(self) -> list[str]:
        """Bubbles, stage times, and a better assignment of layers."""
        each = ", ".join(format_seconds(seconds) for seconds in self.stage_s)
        bubbles = f"planned {self.planned.bubble:.1%}, simulated with the measured times "
        bubbles += f"{self.walk.bubble:.1%}, measured {self.measured_bubble:.1%} of the ranks' time"
        sentences = [
            f"Bubble: {bubbles} (mean of {format_plural(self.steps, 'step')}); not audited",
            f"Stages: {each} per micro-batch, with {_listed(self.stage_layers)} layers",
        ]
        if self.better_layers is not None:
            sentences.append(
                "The stages are uneven: "
                f"layout.stage_layers=[{_listed(self.better_layers)}] would balance them"
            )
        return sentences

    def as_dict(self) -> dict[str, Any]:
        """The object for ``--json``."""
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


def find_pipeline(plan: PlanContract, record: RunRecord) -> PipelineRun | None:
    """The first pipeline of a run; None without pipeline parallelism or recorded times."""
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
    """Mean seconds of forward, input-gradient and weight-gradient actions by stage."""
    return StageTimes(*([_mean(spans, kind, stage) for stage in range(schedule.stages)] for kind in Kind))


def _stage_seconds(schedule: PipelineSchedule, spans: Spans) -> tuple[float, ...]:
    return tuple(sum(_mean(spans, kind, stage) for kind in Kind) for stage in range(schedule.stages))


def _mean(spans: Spans, kind: Kind, stage: int) -> float:
    found = [end - start for row in spans for a, start, end in row if a.kind is kind and a.stage == stage]
    return statistics.fmean(found) if found else 0.0


def _find_better(plan: PlanContract, stage_s: tuple[float, ...]) -> tuple[int, ...] | None:
    """Assign the layers by the measured stage times.

    The time of a block comes from stages without embedding and head; with two stages the embedding's share is
    the predicted one.
    """
    layers = plan.job.layout.stage_layers
    assert layers is not None, "a plan settles the layers of the stages"
    assert isinstance(plan.job.model, DecoderModel), "the legality table splits decoders only"
    costs = part_costs(plan.job)
    inner = [seconds / count for seconds, count in zip(stage_s[1:-1], layers[1:-1], strict=True)]
    block = statistics.fmean(inner) if inner else stage_s[0] / (layers[0] + costs.embedding_blocks)
    embedding, head = (max(0.0, stage_s[end] / block - layers[end]) for end in (0, -1))
    stage_ranks = stage_pp_ranks(plan.job)
    assigned = assign_layers(plan.job.model.num_layers, stage_ranks, embedding, head)

    def slowest(counts: tuple[int, ...]) -> float:
        return max(rank_costs(stage_costs(counts, embedding, head), stage_ranks))

    return assigned if slowest(assigned) < (1 - MIN_IMPROVEMENT) * slowest(layers) else None


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in numbers)
