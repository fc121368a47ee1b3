"""The record of a run, built from its events: live, or from ``events.jsonl``."""

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
from meshwright.plan.contract import CollectiveTraffic, PlanContract


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
    saves: int = 0


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

    failed_rank: int
    how: str
    """How the rank failed."""
    seconds: float
    """From the failure to the moment when all ranks were ready to train again."""
    halt_s: float
    """Part of it: the other ranks left their collectives."""
    join_s: float
    """Part of it: all ranks joined again and restored their state."""
    restored_step: int
    """Step that the ranks went on from."""
    replayed_steps: int
    """Steps that were done again."""
    source: str
    """``snapshot``, ``checkpoint`` or ``start``."""


_RECOVERY: TypeAdapter[Recovery] = TypeAdapter(Recovery)


@dataclass
class RunRecord:
    """One attempt at a run. Keeps what reports need, not all events."""

    status: str = "unfinished"
    failed: bool = False
    """Whether a rank reported an error."""
    oom_reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Out-of-memory reports by error message."""
    losses: list[float | None] = field(default_factory=list)
    """Loss of each step from rank 0; NaN if not finite, None for a step without target tokens."""
    eval_loss: float | None = None
    """Newest loss on the held-out split."""
    eval_losses: dict[str, float | None] = field(default_factory=dict)
    """Newest loss on each set of ``data.eval``."""
    step_times_s: list[float] = field(default_factory=list)
    mfus: list[float] = field(default_factory=list)
    tokens_per_step: int = 0
    skipped_steps: int = 0
    """Steps skipped because fp16 gradients overflowed."""
    peak_basis: str = ""
    first_step: int = 0
    """Steps done before this attempt."""
    ready: bool = False
    """Whether rank 0 has begun to train."""
    went_on_after: int | None = None
    """The newest generation in which a rank failed and after which the run went on."""
    recoveries: list[Recovery] = field(default_factory=list)
    """Failures of ranks after which the run went on."""
    state: dict[int, MeasuredMemory] = field(default_factory=dict)
    """Measured memory by rank."""
    snapshots_off: set[int] = field(default_factory=set)
    """Ranks that found too little memory for in-memory snapshots."""
    collectives: dict[int, MeasuredCollectives] = field(default_factory=dict)
    """Counted collectives by rank."""
    timelines: dict[int, RecordedTimeline] = field(default_factory=dict)
    """Pipeline timelines by rank."""
    experts: ExpertLoads | None = None
    """The newest expert load; None for a dense model."""
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
        """How the attempt ended, according to its events."""
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
        """Throughput by the median step; the first two steps, one of them audited, do not count."""
        times = self.step_times_s[2:] or self.step_times_s
        return self.tokens_per_step / statistics.median(times) if times else None

    def flops_per_s(self, plan: PlanContract) -> float | None:
        """Achieved FLOP/s of all ranks: tokens/s times the FLOPs per token that MFU counts."""
        rate = self.tokens_per_s
        return None if rate is None else rate * plan.flops_per_token

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation by the median step."""
        values = self.mfus[2:] or self.mfus
        return statistics.median(values) if values else None

    def _on_ready(self, event: Event) -> None:
        if event["rank"] != 0:
            return
        self.peak_basis = event["peak_basis"]
        if not self.ready:
            self.ready, self.first_step = True, event["step"]
            return
        done = event["step"] - self.first_step  # after a failure: later steps are done again
        for values in (self.losses, self.step_times_s, self.mfus):
            del values[max(0, done) :]

    def _on_rank_lost(self, event: Event) -> None:
        self.went_on_after = event["generation"]

    def _on_recovered(self, event: Event) -> None:
        self.recoveries.append(_RECOVERY.validate_python(event))

    def _on_step(self, event: Event) -> None:
        if event["rank"] == 0:
            loss, targets = event["loss"], event["tokens"]
            self.losses.append(math.nan if loss is None and targets else loss)  # JSON has no NaN
            self.step_times_s.append(event["step_s"])
            self.mfus.append(event["mfu"])
            self.tokens_per_step = targets or self.tokens_per_step
            self.skipped_steps += bool(event.get("skipped"))

    def _on_eval(self, event: Event) -> None:
        if (name := event.get("set")) is None:
            self.eval_loss = event["loss"]
        else:
            self.eval_losses[name] = event["loss"]

    def _on_state(self, event: Event) -> None:
        self.state[event["rank"]] = _MEASURED.validate_python(event)

    def _on_snapshots_off(self, event: Event) -> None:
        if not event.get("planned"):
            self.snapshots_off.add(event["rank"])
        self.notes.append(f"no in-memory snapshots on rank {event['rank']}: {event['reason']}")

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
    """Turn errors of reading a run's events into messages about the folder."""
    try:
        yield
    except FileNotFoundError:
        rule = "is not a run folder: it has no events.jsonl"
        problem = Problem("run-missing", rule, path=str(run_dir), fix="Give the folder of a run")
        raise UserError(problem) from None
    except OSError as error:
        where = str(run_dir / EVENTS_FILE)
        raise UserError(Problem("run-unreadable", f"cannot be read: {error}", path=where)) from None


def read_record(run_dir: Path, generation: int | None = None) -> RunRecord:
    """The newest attempt in a run folder, or the given generation.

    An attempt has several generations if ranks failed and the run went on.
    """
    path = run_dir / EVENTS_FILE
    with reading_events(run_dir):
        log = read_events(path)
    wanted = range(log.last_generation, log.last_generation + 1)
    if generation is not None:
        wanted = range(generation, generation + 1)
    else:
        went_on = {event["generation"] for event in log.of("rank_lost")}
        while wanted.start - 1 in went_on:
            wanted = range(wanted.start - 1, wanted.stop)
    record = RunRecord()
    for event in log.events:
        if event.get("generation", 0) in wanted:
            feed_checked(record, event)
    if log.unreadable:
        record.notes.append(
            f"{log.unreadable} lines of {path.name} are truncated or of another version, and were skipped"
        )
    return record


def feed_checked(record: RunRecord, event: dict[str, Any]) -> None:
    """Feed an event from a file; one of an unexpected form becomes a note."""
    try:
        record.feed(event)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        record.notes.append(
            f"an event {event.get('event')!r} has an unexpected form ({reason}) and was skipped"
        )
