"""What a run did, folded from its events; fed live by a run or from ``events.jsonl`` afterwards."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from meshwright.core.errors import Problem, UserError
from meshwright.core.events import EVENTS_FILE, Event, read_events
from meshwright.core.units import format_plural
from meshwright.plan.contract import CollectiveTraffic, Plan


@dataclass(frozen=True)
class RoutedRows:
    """Rows that one rank's experts read, by layer with experts."""

    fullest: tuple[int, ...]
    """In the micro-batch in which they read most."""
    mean: tuple[int, ...]
    """Over the micro-batches."""


@dataclass(frozen=True)
class MeasuredMemory:
    """Memory of one rank in its audited step."""

    state_bytes: dict[str, int]
    activation_bytes: int | None
    """None where compiled code hides it."""
    peak_bytes: int | None
    first_step: bool
    compiled: bool = False
    offloaded_bytes: dict[str, int] = field(default_factory=dict)
    """The part of the state that lies on the host."""
    routed_rows: RoutedRows | None = None
    """None for a model without experts, and in records from before it was written down."""


@dataclass(frozen=True)
class MeasuredCollectives:
    """Everything that one rank sent, and in how many steps and evaluations."""

    rows: tuple[CollectiveTraffic, ...]
    steps: int
    evaluations: int
    saves: int = 0


@dataclass(frozen=True)
class RecordedTimeline:
    """When one rank of a pipeline did what."""

    pp_rank: int
    steps: int
    """Steps that the times are means of."""
    actions: tuple[tuple[str, int, int, float, float], ...]
    """Kind, stage, micro-batch, start and end in seconds since the step began."""


@dataclass(frozen=True)
class LayerLoad:
    """What the experts of one layer had to do in a step."""

    layer: int
    load: tuple[int, ...]
    """Tokens that chose each expert."""
    dropped: int
    """Choices that found no place."""
    imbalance: float
    """The busiest expert's tokens over the mean."""

    @property
    def dropped_share(self) -> float:
        """Of all choices."""
        return self.dropped / max(1, sum(self.load))


@dataclass(frozen=True)
class ExpertLoads:
    """What the experts of all layers had to do in a step."""

    step: int
    layers: tuple[LayerLoad, ...]

    def sentence(self) -> str:
        """The most uneven layer, and what was dropped, for people."""
        worst = max(self.layers, key=lambda layer: layer.imbalance)
        dropped = sum(layer.dropped for layer in self.layers)
        share = dropped / max(1, sum(sum(layer.load) for layer in self.layers))
        busiest = f"the busiest has {worst.imbalance:.2f} times the mean (layer {worst.layer})"
        return f"{busiest}, {share:.1%} of the choices dropped; step {self.step}"


_EXPERTS: TypeAdapter[ExpertLoads] = TypeAdapter(ExpertLoads)
_MEASURED: TypeAdapter[MeasuredMemory] = TypeAdapter(MeasuredMemory)
_COLLECTIVES: TypeAdapter[MeasuredCollectives] = TypeAdapter(MeasuredCollectives)
_RECORDED: TypeAdapter[RecordedTimeline] = TypeAdapter(RecordedTimeline)


@dataclass
class RunRecord:
    """One attempt at a run. Keeps what reports need, not every event."""

    status: str = "unfinished"
    failed: bool = False
    """A rank said that it ends by an error."""
    oom_reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Reports of ranks that ran out of memory, by their error's message."""
    losses: list[float | None] = field(default_factory=list)
    """Of each step, from rank 0; NaN where it was not finite, None for a step without targets."""
    eval_loss: float | None = None
    step_times_s: list[float] = field(default_factory=list)
    mfus: list[float] = field(default_factory=list)
    tokens_per_step: int = 0
    skipped_steps: int = 0
    """Steps that were not taken because fp16 gradients overflowed."""
    peak_basis: str = ""
    state: dict[int, MeasuredMemory] = field(default_factory=dict)
    """The audited step of each rank."""
    collectives: dict[int, MeasuredCollectives] = field(default_factory=dict)
    """The counts of each rank."""
    timelines: dict[int, RecordedTimeline] = field(default_factory=dict)
    """Of the ranks of pipelines."""
    experts: ExpertLoads | None = None
    """The newest load of experts, where there are some."""
    checkpoint: str | None = None
    checkpoint_failures: list[str] = field(default_factory=list)
    last_checkpoint_failed: bool = False
    notes: list[str] = field(default_factory=list)
    events_lost: dict[int, int] = field(default_factory=dict)

    def feed(self, event: Event) -> None:
        """Take in one event."""
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    @property
    def outcome(self) -> str:
        """How it ended, by what its ranks wrote."""
        return "failed" if self.failed and self.status == "unfinished" else self.status

    @property
    def target_losses(self) -> list[float]:
        """Those of the steps that had targets."""
        return [loss for loss in self.losses if loss is not None]

    def targetless_text(self) -> str:
        """A sentence about the steps that had no targets; nothing if all had some."""
        without = len(self.losses) - len(self.target_losses)
        if not without:
            return ""
        which = f"{without} of {format_plural(len(self.losses), 'step')}"
        return f"{which} had no target tokens, masked prompts alone, and so no loss"

    @property
    def tokens_per_s(self) -> float | None:
        """Of the whole run, by the median step; the first two steps, one of them audited, are left out."""
        times = self.step_times_s[2:] or self.step_times_s
        return self.tokens_per_step / statistics.median(times) if times else None

    def flops_per_s(self, plan: Plan) -> float | None:
        """Achieved by all ranks together: tokens a second times the FLOPs of a token that MFU counts."""
        rate = self.tokens_per_s
        return None if rate is None else rate * plan.flops_per_token

    @property
    def mfu(self) -> float | None:
        """By the median step."""
        values = self.mfus[2:] or self.mfus
        return statistics.median(values) if values else None

    def _on_ready(self, event: Event) -> None:
        if event["rank"] == 0:
            self.peak_basis = event["peak_basis"]

    def _on_step(self, event: Event) -> None:
        if event["rank"] == 0:
            loss, targets = event["loss"], event["tokens"]
            self.losses.append(math.nan if loss is None and targets else loss)  # JSON has no NaN
            self.step_times_s.append(event["step_s"])
            self.mfus.append(event["mfu"])
            self.tokens_per_step = targets or self.tokens_per_step
            self.skipped_steps += bool(event.get("skipped"))

    def _on_eval(self, event: Event) -> None:
        self.eval_loss = event["loss"]

    def _on_state(self, event: Event) -> None:
        self.state[event["rank"]] = _MEASURED.validate_python(event)

    def _on_collectives(self, event: Event) -> None:
        self.collectives[event["rank"]] = _COLLECTIVES.validate_python(event)

    def _on_timeline(self, event: Event) -> None:
        self.timelines[event["rank"]] = _RECORDED.validate_python(event)

    def _on_experts(self, event: Event) -> None:
        self.experts = _EXPERTS.validate_python(event)

    def _on_checkpoint(self, event: Event) -> None:
        self.checkpoint = event["path"]
        self.last_checkpoint_failed = False

    def _on_checkpoint_failed(self, event: Event) -> None:
        self.last_checkpoint_failed = True
        self.checkpoint_failures.append(f"step {event['step']}: {event['reason']}")

    def _on_resumed(self, event: Event) -> None:
        if event["rank"] == 0:
            self.notes += event["notes"]

    def _on_no_evaluation(self, event: Event) -> None:
        if event["rank"] == 0:
            self.notes.append(f"no evaluation: {event['reason']}")

    def _on_gemm_autotune_skipped(self, event: Event) -> None:
        if event["rank"] == 0:
            self.notes.append(f"no GEMM autotuning: {event['reason']}")

    def _on_events_lost(self, event: Event) -> None:
        self.events_lost[event["rank"]] = max(event["count"], self.events_lost.get(event["rank"], 0))

    def _on_error(self, event: Event) -> None:
        self.failed = True
        if event.get("memory"):
            self.oom_reports[event["message"]] = event["memory"]

    def _on_finished(self, event: Event) -> None:
        if event["rank"] == 0:
            self.status = event["status"]


@contextlib.contextmanager
def reading_events(run_dir: Path) -> Iterator[None]:
    """Around the reading of a run's events: says what is wrong with the folder, if anything is."""
    try:
        yield
    except FileNotFoundError:
        rule = "is not the folder of a run: it has no events.jsonl"
        problem = Problem("run-missing", rule, path=str(run_dir), fix="Give the run_dir of a train")
        raise UserError(problem) from None
    except OSError as error:
        where = str(run_dir / EVENTS_FILE)
        raise UserError(Problem("run-unreadable", f"cannot be read: {error}", path=where)) from None


def read_record(run_dir: Path, generation: int | None = None) -> RunRecord:
    """The newest attempt in a run's folder, or the one asked for."""
    path = run_dir / EVENTS_FILE
    with reading_events(run_dir):
        log = read_events(path)
    wanted = log.last_generation if generation is None else generation
    record = RunRecord()
    for event in log.events:
        if event.get("generation", 0) == wanted:
            feed_checked(record, event)
    if log.unreadable:
        record.notes.append(
            f"{log.unreadable} lines of {path.name} are torn, or of another version, and were skipped"
        )
    return record


def feed_checked(record: RunRecord, event: dict[str, Any]) -> None:
    """Feed an event from a file, which may have been edited or written by another version."""
    try:
        record.feed(event)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        record.notes.append(f"an event {event.get('event')!r} is not as expected ({reason}) and was skipped")
