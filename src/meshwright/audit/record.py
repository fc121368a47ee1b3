"""The record of a run, built from its events: live, or from ``events.jsonl``.

A run has one or more *attempts*: the first start, and each resume in the same folder. An attempt has one or
more *generations*: after a failure the ranks regroup and go on in the next one.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from meshwright.audit.goodput import Goodput, RunClock
from meshwright.audit.saves import Saves
from meshwright.audit.steps import StepSeries
from meshwright.audit.stragglers import StragglerLog
from meshwright.core.errors import Problem, UserError
from meshwright.core.events import EVENTS_FILE, Event
from meshwright.core.units import format_plural
from meshwright.plan.contract import CollectiveTraffic, PlanContract

BY_GENERATION = frozenset({"state", "collectives", "rank_lost", "layout_changed", "node_left"})
"""Events that count in their own generation, however late they are."""


@dataclass(frozen=True)
class RoutedRows:
    """Rows that one rank's experts read, by MoE layer."""

    fullest: tuple[int, ...]
    """In the micro-batch with the most rows."""
    mean: tuple[int, ...]
    """Mean over micro-batches."""


@dataclass(frozen=True)
class MeasuredMemory:
    """Measured memory of one rank in its audited step."""

    state_bytes: dict[str, int]
    activation_bytes: int | None
    """None for compiled code, where it cannot be measured."""
    peak_bytes: int | None
    first_step: bool
    compiled: bool = False
    offloaded_bytes: dict[str, int] = field(default_factory=dict)
    """The part of the state that is offloaded to CPU memory."""
    routed_rows: RoutedRows | None = None
    """None for a model without experts, and in older records."""
    snapshot_bytes: int | None = None
    """CPU memory reserved for in-memory snapshots; None if no agent keeps them, and in older records."""


@dataclass(frozen=True)
class MeasuredTraffic(CollectiveTraffic):
    """Counted calls and bytes of one collective."""

    dropped_rows: int = 0
    """Rows that the router dropped, of an all-to-all to experts: the bytes do not contain them."""


@dataclass(frozen=True)
class MeasuredCollectives:
    """All collectives of one rank, and the number of steps and evaluations."""

    rows: tuple[MeasuredTraffic, ...]
    steps: int
    evaluations: int
    replica_checks: int = 0


@dataclass(frozen=True)
class RecordedTimeline:
    """Action times of one rank of a pipeline."""

    pp_rank: int
    steps: int
    """Number of steps that the times are averaged over."""
    actions: tuple[tuple[str, int, int, float, float], ...]
    """Kind, stage, micro-batch, start and end in seconds from the start of the step."""


@dataclass(frozen=True)
class LayerLoad:
    """Expert load of one layer in a step."""

    layer: int
    load: tuple[int, ...]
    """Tokens routed to each expert."""
    dropped: int
    """Tokens dropped because an expert was full."""
    imbalance: float
    """Tokens of the busiest expert divided by the mean."""

    @property
    def dropped_share(self) -> float:
        """Dropped share of all routed tokens."""
        return self.dropped / max(1, sum(self.load))


@dataclass(frozen=True)
class ExpertLoads:
    """Expert load of all layers in a step."""

    step: int
    layers: tuple[LayerLoad, ...]

    def sentence(self) -> str:
        """The most imbalanced layer and the dropped share."""
        worst = max(self.layers, key=lambda layer: layer.imbalance)
        dropped = sum(layer.dropped for layer in self.layers)
        share = dropped / max(1, sum(sum(layer.load) for layer in self.layers))
        busiest = f"busiest expert {worst.imbalance:.2f} times the mean (layer {worst.layer})"
        return f"{busiest}, {share:.1%} of routed tokens dropped; step {self.step}"


_EXPERTS: TypeAdapter[ExpertLoads] = TypeAdapter(ExpertLoads)
_MEASURED: TypeAdapter[MeasuredMemory] = TypeAdapter(MeasuredMemory)
_COLLECTIVES: TypeAdapter[MeasuredCollectives] = TypeAdapter(MeasuredCollectives)
_RECORDED: TypeAdapter[RecordedTimeline] = TypeAdapter(RecordedTimeline)


@dataclass(frozen=True)
class Recovery:
    """A failure of a rank after which the run went on."""

    failed_rank: int | None
    """None if no rank failed: the layout changed because devices came back."""
    how: str
    """How the rank failed."""
    seconds: float
    """From the time when the failure was known until all ranks were ready to train again."""
    restored_step: int
    """Step that the ranks went on from."""
    replayed_steps: int
    """Replayed steps."""
    source: str
    """``snapshot``, ``checkpoint`` or ``start``."""
    detect_s: float | None = None
    """From the last sign of life of the rank until the failure was known; None if unknown."""
    halt_s: float = 0.0
    decide_s: float = 0.0
    start_s: float = 0.0
    join_s: float = 0.0
    rebuild_s: float = 0.0
    load_s: float = 0.0
    replay_s: float | None = None
    """Time of the repeated steps; None if they are not all done."""

    def parts(self) -> dict[str, float]:
        """The parts in order, in seconds."""
        named = ("halt", "decide", "start", "join", "rebuild", "load")
        found = {name: getattr(self, f"{name}_s") for name in named}
        ends = {"detect": self.detect_s or 0.0}, {"replay": self.replay_s or 0.0}
        return {**ends[0], **found, **ends[1]}


_RECOVERY: TypeAdapter[Recovery] = TypeAdapter(Recovery)


@dataclass(frozen=True)
class LayoutChanged:
    """The run went on in another layout."""

    reason: str
    layout: dict[str, Any]
    """The new one."""
    ranks_before: int
    ranks: int
    step: int
    """Steps that were done."""

    def describe_layout(self) -> str:
        """The new layout as keys."""
        return " ".join(f"{key}={value}" for key, value in self.layout.items()) or "one process"


_LAYOUT_CHANGE: TypeAdapter[LayoutChanged] = TypeAdapter(LayoutChanged)


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs, as it reported."""

    host: str
    node: int | None
    """None if its launcher does not number nodes."""
    device: int | None


@dataclass
class GenerationRecord:
    """The measurements of all ranks in one generation."""

    generation: int
    attempt_start: int
    """First generation of its attempt."""
    attempt: int = 0
    """Number of its attempt, from 0."""
    command: int = 0
    """Number of the command that ran it, from 0; a command that changes the layout makes several attempts."""
    state: dict[int, MeasuredMemory] = field(default_factory=dict)
    """Memory by rank."""
    collectives: dict[int, MeasuredCollectives] = field(default_factory=dict)
    """Counted collectives by rank."""
    places: dict[int, RankPlace] = field(default_factory=dict)
    """Where each rank ran; those of older runs did not report it."""
    snapshots_off: set[int] = field(default_factory=set)
    """Ranks that found too little memory for in-memory snapshots."""
    lost: bool = False
    """Whether a rank failed, and the run went on in the next generation."""
    layout_changed: bool = False
    """Whether the next generation has another layout."""


@dataclass
class RunRecord:
    """A run over all its attempts, or one attempt. Keeps what reports need, not all events."""

    status: str = "unfinished"
    failed: bool = False
    """Whether a rank reported an error in the newest attempt."""
    oom_reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Out-of-memory reports by error message."""
    steps: StepSeries = field(default_factory=StepSeries)
    """Steps of rank 0."""
    eval_loss: float | None = None
    """Newest loss on the held-out split."""
    eval_losses: dict[str, float | None] = field(default_factory=dict)
    """Newest loss on each set of ``data.eval``."""
    tokens_per_step: int = 0
    skipped_steps: int = 0
    """Steps skipped because fp16 gradients overflowed."""
    bad_steps: int = 0
    """Steps that changed nothing: the loss or a gradient was not finite, or there was a gradient spike."""
    peak_basis: str = ""
    attempt_step: int = 0
    """Steps done before the newest attempt."""
    generations: dict[int, GenerationRecord] = field(default_factory=dict)
    """By number."""
    newest: GenerationRecord = field(default_factory=lambda: GenerationRecord(-1, -1, -1, -1))
    clock: RunClock = field(default_factory=RunClock)
    recoveries: list[Recovery] = field(default_factory=list)
    """Failures of ranks after which the run went on."""
    layout_changes: list[LayoutChanged] = field(default_factory=list)
    """Changes of the layout by which the run went on with fewer devices, or with more."""
    placements: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Node and device of each rank in a layout that followed another one, by its first generation. The plan
    has the slots of the devices that were left."""
    changed_layouts: set[int] = field(default_factory=set)
    """Generations that began with another layout: equal losses up to rounding."""
    changed_curves: set[int] = field(default_factory=set)
    """Generations that resumed with a change of the loss curve: another layout, another learning rate."""
    timelines: dict[int, RecordedTimeline] = field(default_factory=dict)
    """Pipeline timelines by rank."""
    experts: ExpertLoads | None = None
    """The newest expert load; None for a dense model."""
    checkpoint: str | None = None
    checkpoint_step: int | None = None
    """Steps done when the newest checkpoint was taken."""
    saves: Saves = field(default_factory=Saves)
    """The cost of all checkpoints."""
    checkpoint_failures: list[str] = field(default_factory=list)
    last_checkpoint_failed: bool = False
    stragglers: StragglerLog = field(default_factory=StragglerLog)
    notes: list[str] = field(default_factory=list)
    events_lost: dict[int, int] = field(default_factory=dict)

    def feed(self, event: Event) -> None:
        """Take in one event. Late events of an older generation count in that generation only."""
        generation = self._enter(event.get("generation", 0))
        self.clock.feed(event, generation.generation, generation.command)
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None and (generation is self.newest or event["event"] in BY_GENERATION):
            handler(event, generation)

    def feed_step(self, generation: int, when: float, step: int, loss: float, seconds: float) -> None:
        """Take in a step of rank 0 of which only these values were read."""
        command = self._enter(generation).command
        self.clock.feed({"event": "step", "rank": 0, "step": step, "time": when}, generation, command)
        self.steps.add(step, generation, loss, seconds, 0.0)

    def _enter(self, number: int) -> GenerationRecord:
        """The record of a generation. A new one begins an attempt, unless the one before it lost a rank.

        An attempt has one layout. A command that changes the layout begins another attempt.
        """
        known = self.generations.get(number)
        if known is not None:
            return known
        before = self.newest
        if before.lost and number > before.generation and not before.layout_changed:
            known = GenerationRecord(number, before.attempt_start, before.attempt, before.command)
        else:
            command = before.command if before.layout_changed else before.command + 1
            known = GenerationRecord(number, number, before.attempt + 1, command)
        if before.layout_changed:
            self.changed_layouts.add(number)
        self.generations[number] = known
        if number > before.generation:
            self.newest = known
            if known.attempt > before.attempt:
                self.status, self.failed, self.last_checkpoint_failed = "unfinished", False, False
                self.oom_reports, self.timelines, self.tokens_per_step = {}, {}, 0
        return known

    @property
    def state(self) -> dict[int, MeasuredMemory]:
        """Measured memory by rank: the newest of the newest attempt."""
        found: dict[int, MeasuredMemory] = {}
        for number in sorted(self.generations):
            if self.generations[number].attempt == self.newest.attempt:
                found |= self.generations[number].state
        return found

    @property
    def collectives(self) -> dict[int, MeasuredCollectives]:
        """Counted collectives of the newest generation, by rank."""
        return self.newest.collectives

    @property
    def losses(self) -> list[float | None]:
        """Loss of each step; NaN if not finite, None for a step without target tokens."""
        return self.steps.losses

    @property
    def first_step(self) -> int:
        """Steps done before the first one of the run: not 0 if it began from a checkpoint of another run."""
        return self.steps.numbers[0] - 1 if self.steps.numbers else self.attempt_step

    @property
    def furthest_step(self) -> int:
        """The last step that was done."""
        return self.steps.numbers[-1] if self.steps.numbers else self.attempt_step

    @property
    def goodput(self) -> Goodput | None:
        """Where the time went; None if nothing was recorded."""
        return self.clock.measure(sum(self.steps.seconds), self.steps.replayed_s)

    @property
    def outcome(self) -> str:
        """How the newest attempt ended, according to its events."""
        return "failed" if self.failed and self.status == "unfinished" else self.status

    @property
    def target_losses(self) -> list[float]:
        """Losses of the steps that had target tokens."""
        return [loss for loss in self.losses if loss is not None]

    def targetless_text(self) -> str:
        """A sentence about steps without target tokens; empty if there are none."""
        without = len(self.losses) - len(self.target_losses)
        if not without:
            return ""
        which = f"{without} of {format_plural(len(self.losses), 'step')}"
        return f"{which} had no target tokens (masked prompts only) and so no loss"

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput by the median step of the newest attempt.

        The first two steps, one of them audited, do not count.
        """
        times = _without_first(self.steps.seconds[self.steps.since(self.attempt_step)])
        return self.tokens_per_step / statistics.median(times) if times else None

    def flops_per_s(self, plan: PlanContract) -> float | None:
        """Achieved FLOP/s of all ranks: tokens/s times the FLOPs per token that MFU counts."""
        rate = self.tokens_per_s
        return None if rate is None else rate * plan.flops_per_token

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation by the median step of the newest attempt."""
        values = _without_first(self.steps.mfus[self.steps.since(self.attempt_step)])
        return statistics.median(values) if values else None

    def _on_ready(self, event: Event, generation: GenerationRecord) -> None:
        if "host" in event:
            generation.places[event["rank"]] = RankPlace(event["host"], event["node"], event["device"])
        if event["rank"] == 0:
            self.peak_basis = event["peak_basis"]
            if generation.generation == generation.attempt_start:
                self.attempt_step = event["step"]

    def _on_rank_lost(self, event: Event, generation: GenerationRecord) -> None:
        generation.lost = True

    def _on_node_left(self, event: Event, generation: GenerationRecord) -> None:
        if event[
            "replaced"
        ]:  # the ranks saved a checkpoint and ended, and the same command starts them again
            generation.lost, self.status = True, "unfinished"

    def _on_layout_changed(self, event: Event, generation: GenerationRecord) -> None:
        generation.layout_changed = True
        if placed := event.get("placement"):
            self.placements[generation.generation + 1] = [(node, device) for node, device in placed]
        self.layout_changes.append(_LAYOUT_CHANGE.validate_python(event))
        self.stragglers.close(event["step"])

    def _on_recovered(self, event: Event, generation: GenerationRecord) -> None:
        self.recoveries.append(_RECOVERY.validate_python(event))

    def _on_replayed(self, event: Event, generation: GenerationRecord) -> None:
        if self.recoveries:
            self.recoveries[-1] = replace(self.recoveries[-1], replay_s=event["seconds"])

    def _on_step(self, event: Event, generation: GenerationRecord) -> None:
        if event["rank"] == 0:
            loss, targets = event["loss"], event["tokens"]
            loss = math.nan if loss is None and targets else loss  # JSON has no NaN
            self.steps.add(event["step"], generation.generation, loss, event["step_s"], event["mfu"])
            self.tokens_per_step = targets or self.tokens_per_step
            bad = event.get("bad_step") is not None
            self.bad_steps += bad
            self.skipped_steps += bool(event.get("skipped")) and not bad

    def _on_eval(self, event: Event, generation: GenerationRecord) -> None:
        if (name := event.get("set")) is None:
            self.eval_loss = event["loss"]
        else:
            self.eval_losses[name] = event["loss"]

    def _on_state(self, event: Event, generation: GenerationRecord) -> None:
        generation.state[event["rank"]] = _MEASURED.validate_python(event)

    def _on_snapshots_off(self, event: Event, generation: GenerationRecord) -> None:
        if not event.get("planned"):
            generation.snapshots_off.add(event["rank"])
        self.notes.append(f"no in-memory snapshots on rank {event['rank']}: {event['reason']}")

    def _on_collectives(self, event: Event, generation: GenerationRecord) -> None:
        generation.collectives[event["rank"]] = _COLLECTIVES.validate_python(event)

    def _on_timeline(self, event: Event, generation: GenerationRecord) -> None:
        self.timelines[event["rank"]] = _RECORDED.validate_python(event)

    def _on_experts(self, event: Event, generation: GenerationRecord) -> None:
        self.experts = _EXPERTS.validate_python(event)

    def _on_checkpoint(self, event: Event, generation: GenerationRecord) -> None:
        self.checkpoint, self.checkpoint_step = event["path"], event["step"]
        self.last_checkpoint_failed = False
        self.saves.feed(event)

    def _on_checkpoint_waited(self, event: Event, generation: GenerationRecord) -> None:
        self.saves.feed(event)

    def _on_checkpoint_interval(self, event: Event, generation: GenerationRecord) -> None:
        self.saves.feed(event)

    def _on_checkpoint_failed(self, event: Event, generation: GenerationRecord) -> None:
        self.last_checkpoint_failed = True
        self.checkpoint_failures.append(f"step {event['step']}: {event['reason']}")

    def _on_checkpoint_copy_failed(self, event: Event, generation: GenerationRecord) -> None:
        self.checkpoint_failures.append(
            f"step {event['step']}: no copy in {event['store']}: {event['reason']}"
        )

    def _on_resumed(self, event: Event, generation: GenerationRecord) -> None:
        if event["rank"] == 0:
            self.notes += event["notes"]
            if event["notes"] and generation.generation not in self.changed_layouts:
                self.changed_curves.add(generation.generation)

    def _on_no_evaluation(self, event: Event, generation: GenerationRecord) -> None:
        if event["rank"] == 0:
            self.notes.append(f"no evaluation: {event['reason']}")

    def _on_gemm_autotune_skipped(self, event: Event, generation: GenerationRecord) -> None:
        if event["rank"] == 0:
            self.notes.append(f"no GEMM autotuning: {event['reason']}")

    def _on_grad_spike(self, event: Event, generation: GenerationRecord) -> None:
        self.notes.append(f"gradient spike at step {event['step']}; the recomputed step is not audited")

    def _on_not_finite(self, event: Event, generation: GenerationRecord) -> None:
        self.notes.append(f"step {event['step']} is not finite; the recomputed step is not audited")

    def _on_rolled_back(self, event: Event, generation: GenerationRecord) -> None:
        self.changed_curves.add(generation.generation)

    def _on_straggler(self, event: Event, generation: GenerationRecord) -> None:
        self.stragglers.feed(event)

    _on_straggler_recovered = _on_straggler

    def _on_events_lost(self, event: Event, generation: GenerationRecord) -> None:
        self.events_lost[event["rank"]] = max(event["count"], self.events_lost.get(event["rank"], 0))

    def _on_error(self, event: Event, generation: GenerationRecord) -> None:
        self.failed = True
        if event.get("memory"):
            self.oom_reports[event["message"]] = event["memory"]

    def _on_finished(self, event: Event, generation: GenerationRecord) -> None:
        if event["rank"] == 0:
            self.status = event["status"]
            self.steps.drop_after(event["step"])


def _without_first(values: array[float]) -> array[float]:
    return values[2:] or values


@contextlib.contextmanager
def reading_events(run_dir: Path) -> Iterator[None]:
    """Turn errors of reading a run's events into messages about the folder."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        rule = "is not a run folder: it has no events.jsonl"
        problem = Problem("run-missing", rule, path=str(run_dir), fix="Give the folder of a run")
        raise UserError(problem) from None
    except OSError as error:
        where = str(run_dir / EVENTS_FILE)
        raise UserError(Problem("run-unreadable", f"cannot be read: {error}", path=where)) from None


def feed_checked(record: RunRecord, event: dict[str, Any]) -> None:
    """Feed an event from a file; one of an unexpected form becomes a note."""
    try:
        record.feed(event)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        record.notes.append(
            f"an event {event.get('event')!r} has an unexpected form ({reason}) and was skipped"
        )
