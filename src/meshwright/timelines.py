"""Timelines in the public API: pipeline schedules, proved and simulated, and traces of simulated steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.core.errors import CheckFailedError, Problem, require_argument

if TYPE_CHECKING:
    from meshwright.report.timeline import Timeline
    from meshwright.schedule.pipeline.actions import PipelineSchedule
    from meshwright.schedule.pipeline.proof import Proof
    from meshwright.schedule.pipeline.walk import StageTimes, Walk
    from meshwright.simulate.step import StepTimeline

StageSeconds = float | Sequence[float]
"""One time for all stages, or one for each."""


def build_schedule(
    name: str = "1f1b", pp: int = 4, micro_batches: int = 8, virtual_stages: int | None = None
) -> PipelineSchedule:
    """Generate a pipeline schedule.

    Args:
        name: As in ``layout.schedule``.
        pp: Ranks of the pipeline.
        micro_batches: Micro-batches of one step.
        virtual_stages: Stages per rank; if left out, as many as the schedule needs.

    Raises:
        UserError: The schedule is unknown, or does not support these sizes.
    """
    from meshwright.schedule.pipeline.build import build_schedule as build  # noqa: PLC0415

    return build(name, pp, micro_batches, virtual_stages)


def load_schedule(path: str | Path) -> PipelineSchedule:
    """Read a schedule from a file in torch's compute-only CSV format, and prove it.

    Raises:
        UserError: The file cannot be read, or is not a complete schedule.
        CheckFailedError: The schedule cannot run; each violation with its line.
    """
    from meshwright.schedule.pipeline.files import load_schedule as load  # noqa: PLC0415

    return load(Path(path))


def prove_schedule(schedule: PipelineSchedule) -> Proof:
    """Prove a schedule: every action once, after its producer, and no deadlock with any stage times.

    Raises:
        CheckFailedError: It cannot run; the error lists the violations.
    """
    from meshwright.schedule.pipeline.proof import prove_schedule as prove  # noqa: PLC0415

    proof = prove(schedule)
    if not proof.proved:
        raise CheckFailedError(*(Problem("schedule-not-proved", str(found)) for found in proof.violations))
    return proof


def simulate_schedule(
    schedule: PipelineSchedule,
    *,
    forward_s: StageSeconds = 1.0,
    backward_input_s: StageSeconds = 1.0,
    backward_weight_s: StageSeconds = 1.0,
    transfer_s: StageSeconds = 0.0,
    overlap: bool = True,
) -> SimulatedSchedule:
    """Prove a schedule, and compute start and end of each of its actions.

    Args:
        schedule: From :func:`build_schedule` or :func:`load_schedule`.
        forward_s: Forward pass of a micro-batch.
        backward_input_s: Input gradients of a micro-batch.
        backward_weight_s: Weight gradients of a micro-batch.
        transfer_s: Transfer between adjacent stages on different ranks; one number, or ``stages - 1``.
        overlap: Whether the sender computes during a transfer.

    Raises:
        UserError: A time is negative or not finite, or there are too many or too few.
        CheckFailedError: The schedule cannot run; the error lists the violations.
    """
    from meshwright.schedule.pipeline.walk import StageTimes, walk_schedule  # noqa: PLC0415

    stages = schedule.stages
    _require_times("forward_s", forward_s, stages)
    _require_times("backward_input_s", backward_input_s, stages)
    _require_times("backward_weight_s", backward_weight_s, stages)
    _require_times("transfer_s", transfer_s, max(1, stages - 1))
    proof = prove_schedule(schedule)
    times = StageTimes(forward_s, backward_input_s, backward_weight_s)
    walk = walk_schedule(schedule, times, transfer_s, overlap=overlap)
    return SimulatedSchedule(schedule, proof, walk, times, transfer_s, overlap)


def _require_times(name: str, given: StageSeconds, count: int) -> None:
    times = [given] if isinstance(given, int | float) else list(given)
    rule = "must be one time, 0 or more" + (f", or {count} of them" if count > 1 else "")
    holds = len(times) in (1, count) and all(math.isfinite(time) and time >= 0 for time in times)
    require_argument(holds, name, given, rule)


@dataclass(frozen=True)
class SimulatedSchedule:
    """A proved schedule with the times of its actions. Made by :func:`simulate_schedule`."""

    schedule: PipelineSchedule
    proof: Proof
    """With the largest number of activations in flight, per rank and per stage."""
    walk: Walk = field(repr=False)
    """Start and end of each action."""
    times: StageTimes
    transfer_s: StageSeconds
    overlap: bool

    @property
    def makespan_s(self) -> float:
        """When the last action ends."""
        return self.walk.makespan_s

    @property
    def bubble(self) -> float:
        """Idle fraction of all ranks' time."""
        return self.walk.bubble

    @cached_property
    def predicted_s(self) -> float | None:
        """The makespan by the planner's closed form: of generated schedules with equal stages, else None."""
        import numpy as np  # noqa: PLC0415

        from meshwright.schedule.pipeline.closed_forms import pipeline_time  # noqa: PLC0415
        from meshwright.spec.layout import SCHEDULES  # noqa: PLC0415

        schedule, times = self.schedule, self.times
        lists = (times.forward_s, times.backward_input_s, times.backward_weight_s, self.transfer_s)
        each = [np.unique(np.asarray(values)) for values in lists]
        if schedule.name not in SCHEDULES or any(len(values) > 1 for values in each):
            return None
        f, b, w, t = (float(values[0]) for values in each)
        sizes = (schedule.pp, schedule.virtual_stages, schedule.micro_batches)
        return float(pipeline_time(schedule.name, *sizes, f, b, w, t, overlap=self.overlap))

    @cached_property
    def timeline(self) -> Timeline:
        """One row per rank, one bar per action."""
        from meshwright.report.plot import format_value  # noqa: PLC0415
        from meshwright.report.timeline import build_timeline  # noqa: PLC0415

        note = (
            f"bubble {self.bubble:.1%}, time {format_value(self.makespan_s)}, "
            f"at most {max(self.proof.peak_in_flight)} activations in flight"
        )
        return build_timeline(self.schedule, self.walk, self._title(), note)

    def _title(self) -> str:
        schedule = self.schedule
        stages = f"{schedule.stages} stages on {schedule.pp} ranks"
        if schedule.stages == schedule.pp * schedule.virtual_stages:
            each = f" x {schedule.virtual_stages}" if schedule.virtual_stages > 1 else ""
            stages = f"{schedule.pp}{each} stages"
        return f"{schedule.name}, {stages}, {schedule.micro_batches} micro-batches"

    def draw(self, path: str | Path) -> None:
        """Draw the timeline into an SVG, PNG or PDF file. Needs the extra ``plots``."""
        from meshwright.report.timeline import write_timelines  # noqa: PLC0415

        write_timelines(Path(path), self.timeline)

    def write(self, path: str | Path) -> None:
        """Write the schedule as a CSV file that :func:`load_schedule` and torch read."""
        from meshwright.schedule.pipeline.files import write_schedule  # noqa: PLC0415

        write_schedule(self.schedule, Path(path))

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright schedule pipeline --json``; times are in the unit of the given times."""
        schedule, walk = self.schedule, self.walk
        actions = [
            [
                {
                    "kind": a.kind.value,
                    "stage": a.stage,
                    "micro_batch": a.micro_batch,
                    "start": start,
                    "end": end,
                }
                for a, start, end in zip(row, walk.start_s[rank], walk.end_s[rank], strict=True)
            ]
            for rank, row in enumerate(schedule.ranks)
        ]
        return {
            "schedule": schedule.name,
            "stages": schedule.pp,
            "virtual_stages": schedule.virtual_stages,
            "micro_batches": schedule.micro_batches,
            "stage_ranks": list(schedule.stage_ranks),
            "split_backward": schedule.split_backward,
            "actions": actions,
            "bubble": walk.bubble,
            "bubble_overhead": walk.bubble_overhead,
            "makespan": walk.makespan_s,
            "predicted_makespan": self.predicted_s,
            "work": list(walk.work_s),
            "idle": list(walk.idle_s),
            "peak_in_flight": list(self.proof.peak_in_flight),
            "peak_by_stage": list(self.proof.peak_by_stage),
            "proved": self.proof.proved,
        }


def write_trace(timeline: StepTimeline, path: str | Path, pp_ranks: Sequence[int] | None = None) -> None:
    """Write a simulated step in the Chrome JSON format, which Perfetto opens.

    Args:
        timeline: From :meth:`Plan.simulate_step`.
        path: Path of the file.
        pp_ranks: Pipeline ranks to write; None for all.

    Raises:
        UserError: It would be too large, or the file cannot be written.
    """
    from meshwright.simulate.step_trace import write_trace as write  # noqa: PLC0415

    write(timeline, Path(path), pp_ranks)
