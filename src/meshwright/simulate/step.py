"""One step as a timeline, without devices: compute, collectives by axis, bubbles, optimizer.

The timeline adds no times of its own. It places the parts of the plan (``plan.time``) along the simulated
pipeline schedule (``schedule.pipeline.walk``), so that it ends at the plan's step time. Ranks with the same
pp rank are identical: there is one lane per pp rank.

The order of compute and exposed collectives inside a pass is not modelled. A pass is drawn as one piece of
each, not layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.layout.text import describe_layout
from meshwright.plan.contract import PlanContract
from meshwright.plan.profiles import PROFILES
from meshwright.plan.time.pipeline import walk_pipeline
from meshwright.plan.time.stage_parts import PassTime, StagePasses, StepParts, find_step_parts
from meshwright.schedule.pipeline.actions import Action, Kind, PipelineSchedule, consumer_of, producer_of
from meshwright.schedule.pipeline.walk import Walk

AXIS_PARTS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "dp_shard": "sharded data parallel",
}
"""Parts of the plan by mesh axis."""
WORK = ("compute", *AXIS_PARTS.values())
"""Parts of the plan that every micro-batch has."""
IDLE = ("bubble", "pipeline transfers", "uneven stages")
"""Parts of the plan in which a rank of a pipeline waits."""
AFTER = ("gradient reduction", "optimizer", "step overhead")
"""Parts of the plan after the last micro-batch, in this order."""
DATA_PARALLEL = "data parallel"
"""The plan's name of overlapped gradient reduction and parameter all-gathers."""


@dataclass(frozen=True)
class StepEvent:
    """One piece of a lane."""

    name: str
    """``forward``, ``recompute``, ``input gradient``, ``weight gradient``, or as the part."""
    part: str
    """The part of the plan's breakdown that it belongs to."""
    start_s: float
    end_s: float
    stage: int | None = None
    micro_batch: int | None = None

    @property
    def duration_s(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Lane:
    """The step of one pp rank."""

    pp_rank: int
    actions: tuple[StepEvent, ...]
    """Whole passes, in order; idle time is left out."""
    events: tuple[StepEvent, ...]
    """Every point in time of the step once: compute, exposed communication, idle time, and what follows."""
    overlapped: dict[str, tuple[StepEvent, ...]]
    """Communication during compute, by axis."""

    def totals(self) -> dict[str, float]:
        """Seconds by part."""
        found: dict[str, float] = {}
        for event in self.events:
            found[event.part] = found.get(event.part, 0.0) + event.duration_s
        return found

    def overlapped_totals(self) -> dict[str, float]:
        """Seconds of overlapped communication by axis."""
        return {axis: math.fsum(one.duration_s for one in events) for axis, events in self.overlapped.items()}


@dataclass(frozen=True)
class StepTimeline:
    """A simulated step. Made by :meth:`meshwright.Plan.simulate_step`."""

    plan: PlanContract
    parts: StepParts
    schedule: PipelineSchedule | None
    """None without a pipeline, and if the schedule is too large to generate: then one average rank stands
    for all."""
    walk: Walk | None

    def __repr__(self) -> str:
        return f"StepTimeline(step_s={self.step_s:.4g}, pp_ranks={len(self.pp_ranks)}, plan={self.plan})"

    @classmethod
    def of(cls, plan: PlanContract) -> StepTimeline:
        """The timeline of a planned step."""
        parts = find_step_parts(
            plan.job, plan.micro_batches, plan.breakdown_s.get("compute", 0.0), plan.pipeline, plan.placement
        )
        if plan.pipeline is None:
            timeline = cls(plan, parts, None, None)
        else:
            timeline = cls(plan, parts, *walk_pipeline(plan.job, plan.micro_batches, plan.pipeline))
        equal = math.isclose(timeline.step_s, plan.step_s, rel_tol=1e-6)
        assert equal, f"the timeline takes {timeline.step_s} s, the plan {plan.step_s} s"
        return timeline

    @property
    def step_s(self) -> float:
        """When the last event ends: the plan's step time."""
        return self.compute_end_s + math.fsum(self.plan.breakdown_s.get(part, 0.0) for part in AFTER)

    @property
    def compute_end_s(self) -> float:
        """When the last micro-batch of the slowest rank ends."""
        if self.walk is not None:
            return self.walk.makespan_s
        return math.fsum(self.plan.breakdown_s.get(part, 0.0) for part in (*WORK, *IDLE))

    @property
    def pp_ranks(self) -> range:
        """The lanes."""
        return range(1 if self.schedule is None else self.schedule.pp)

    @property
    def actions(self) -> int:
        """Passes of all lanes."""
        if self.schedule is None:
            return 2 * self.plan.micro_batches
        return sum(len(row) for row in self.schedule.ranks)

    @property
    def bubble(self) -> float:
        """Idle share of all pipeline ranks' time, from the first action to the last."""
        return 0.0 if self.walk is None else self.walk.bubble

    def name_of(self, pp_rank: int) -> str:
        """A lane as text, with its ranks."""
        each = self.plan.world_size // self.plan.job.layout.pp
        first, last = pp_rank * each, (pp_rank + 1) * each - 1
        if self.schedule is None:
            first, last = 0, self.plan.world_size - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        if self.schedule is None:
            return "an average rank" if self.plan.job.layout.pp > 1 else ranks
        return f"pp rank {pp_rank} ({ranks})"

    def lane(self, pp_rank: int) -> Lane:
        """The events of a pp rank."""
        return _LaneBuilder(self, pp_rank).build()

    def lanes(self) -> Iterator[Lane]:
        """All lanes, one at a time."""
        return map(self.lane, self.pp_ranks)

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright simulate step --json``; ``--trace`` has the events."""
        plan = self.plan
        return {
            "layout": describe_layout(plan.job.layout),
            "step_s": self.step_s,
            "planned_step_s": plan.step_s,
            "micro_batches": plan.micro_batches,
            "schedule": None if self.schedule is None else self.schedule.name,
            "bubble": self.bubble,
            "breakdown_s": plan.breakdown_s,
            "hidden_s": plan.hidden_s,
            "lanes": [
                {
                    "pp_rank": lane.pp_rank,
                    "name": self.name_of(lane.pp_rank),
                    "parts_s": lane.totals(),
                    "overlapped_s": lane.overlapped_totals(),
                }
                for lane in self.lanes()
            ],
        }


class _LaneBuilder:
    """Places the events of one pp rank."""

    def __init__(self, timeline: StepTimeline, pp_rank: int) -> None:
        self.timeline, self.plan, self.pp_rank = timeline, timeline.plan, pp_rank
        self.events: list[StepEvent] = []
        self.actions: list[StepEvent] = []
        self.overlapped: dict[str, list[StepEvent]] = {}

    def build(self) -> Lane:
        """All events."""
        if self.timeline.walk is None:
            self._add_one_rank()
        else:
            self._add_schedule()
        now = self.timeline.compute_end_s
        self._add_data_parallel()
        for part in AFTER:
            seconds = self.plan.breakdown_s.get(part, 0.0)
            self._add(part, part, now, now + seconds)
            now += seconds
        overlapped = {axis: tuple(events) for axis, events in self.overlapped.items()}
        return Lane(self.pp_rank, tuple(self.actions), tuple(self.events), overlapped)

    def _add(self, name: str, part: str, start_s: float, end_s: float, action: Action | None = None) -> None:
        if end_s > start_s:
            place = (None, None) if action is None else (action.stage, action.micro_batch)
            self.events.append(StepEvent(name, part, start_s, end_s, *place))

    def _add_one_rank(self) -> None:
        """Micro-batches one after another; then what an average rank of a pipeline waits."""
        (stage,) = self.timeline.parts.stages
        now = 0.0
        for micro_batch in range(self.plan.micro_batches):
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                passes = _passes_of(stage, kind, split_backward=False)
                end_s = now + sum(one.total_s for _, one in passes)
                self._add_action(Action(kind, 0, micro_batch), passes, now, end_s)
                now = end_s
        for part in IDLE:
            seconds = self.plan.breakdown_s.get(part, 0.0)
            self._add(part, part, now, now + seconds)
            now += seconds

    def _add_schedule(self) -> None:
        """The actions of the walk, and the gaps between them."""
        schedule, walk = self.timeline.schedule, self.timeline.walk
        assert schedule is not None, "a walk is of a schedule"
        assert walk is not None, "a schedule has a walk"
        row = schedule.ranks[self.pp_rank]
        times = zip(row, walk.start_s[self.pp_rank], walk.end_s[self.pp_rank], strict=True)
        free_s, before = 0.0, None
        for action, start_s, end_s in times:
            self._add_gap(before, action, free_s, start_s)
            passes = _passes_of(
                self.timeline.parts.stages[action.stage], action.kind, schedule.split_backward
            )
            self._add_action(action, passes, start_s, end_s)
            free_s, before = end_s, action
        self._add_gap(before, None, free_s, walk.makespan_s)

    def _add_gap(self, before: Action | None, after: Action | None, start_s: float, end_s: float) -> None:
        """Idle time: a blocking send, then the compute of other stages, then the transfer of the input."""
        pipeline, schedule = self.plan.pipeline, self.timeline.schedule
        if end_s <= start_s or pipeline is None or schedule is None:
            return
        overlap = PROFILES[self.plan.job.train.runtime].time.overlap_p2p
        sent_s = arriving_s = 0.0
        if before is not None and not overlap:
            sent_s = self._transfer_s(before, consumer_of(before, schedule.stages), pipeline.send_s)
        if after is not None and after.kind is not Kind.WEIGHT:
            arriving_s = self._transfer_s(after, producer_of(after, schedule.stages), pipeline.send_s)
        sent_end = min(end_s, start_s + sent_s)
        waited_end = max(sent_end, end_s - arriving_s)
        self._add("pipeline transfers", "pipeline transfers", start_s, sent_end, before)
        self._add("bubble", "bubble", sent_end, waited_end)
        self._add("pipeline transfers", "pipeline transfers", waited_end, end_s, after)

    def _transfer_s(self, action: Action, other: Action | None, send_s: float) -> float:
        """Seconds of the transfer between two actions; 0 on the same rank."""
        schedule = self.timeline.schedule
        if other is None or schedule is None:
            return 0.0
        return send_s if schedule.rank_of(action.stage) != schedule.rank_of(other.stage) else 0.0

    def _add_action(
        self, action: Action, passes: list[tuple[str, PassTime]], start_s: float, end_s: float
    ) -> None:
        """One pass, or both halves of a backward pass."""
        name = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight gradient"}[
            action.kind
        ]
        self.actions.append(StepEvent(name, "compute", start_s, end_s, action.stage, action.micro_batch))
        now = start_s
        for number, (work, one) in enumerate(passes):
            stop = end_s if number == len(passes) - 1 else min(end_s, now + one.total_s)
            self._add_pass(action, work, one, now, stop)
            now = stop
            for axis, seconds in one.hidden_s.items():
                self._add_overlapped(action, axis, max(start_s, end_s - seconds), end_s)

    def _add_overlapped(self, action: Action, axis: str, start_s: float, end_s: float) -> None:
        """Beside the end of an action: exposed communication comes first."""
        part = AXIS_PARTS[axis]
        place = (action.stage, action.micro_batch)
        event = StepEvent(f"{part}, overlapped", part, start_s, end_s, *place)
        self.overlapped.setdefault(axis, []).append(event)

    def _add_pass(self, action: Action, work: str, one: PassTime, now: float, stop: float) -> None:
        """Gathered parameters, recompute, other exposed communication, and compute as the rest."""
        gathers = {axis: s for axis, s in one.exposed_s.items() if axis == "dp_shard"}
        others = {axis: s for axis, s in one.exposed_s.items() if axis != "dp_shard"}
        pieces = [(AXIS_PARTS[axis], AXIS_PARTS[axis], s) for axis, s in gathers.items()]
        pieces.append(("recompute", "compute", one.recompute_s))
        pieces += [(AXIS_PARTS[axis], AXIS_PARTS[axis], s) for axis, s in others.items()]
        for name, part, seconds in pieces:
            end_s = min(stop, now + seconds)
            self._add(name, part, now, end_s, action)
            now = max(now, end_s)
        self._add(work, "compute", now, stop, action)

    def _add_data_parallel(self) -> None:
        """Overlapped all-gather beside the first pass, and gradient reduction beside the last."""
        hidden_s = self.plan.hidden_s.get(DATA_PARALLEL, 0.0)
        gather_s = min(hidden_s, self.timeline.parts.hidden_gather_s)
        found = []
        if gather_s > 0:
            found.append(StepEvent("parameter all-gather, overlapped", DATA_PARALLEL, 0.0, gather_s))
        if hidden_s > gather_s:
            end_s = max(self.actions[-1].end_s, hidden_s)
            name = "gradient reduction, overlapped"
            found.append(StepEvent(name, DATA_PARALLEL, end_s - (hidden_s - gather_s), end_s))
        if found:
            self.overlapped["dp"] = found


def _passes_of(stage: StagePasses, kind: Kind, split_backward: bool) -> list[tuple[str, PassTime]]:
    """The passes of an action, in order."""
    if kind is Kind.FORWARD:
        return [("forward", stage.forward)]
    if kind is Kind.WEIGHT:
        return [("weight gradient", stage.backward_weight)]
    if split_backward:
        return [("input gradient", stage.backward_input)]
    if not stage.backward_weight.total_s:  # not modelled separately
        return [("backward", stage.backward_input)]
    return [("input gradient", stage.backward_input), ("weight gradient", stage.backward_weight)]
