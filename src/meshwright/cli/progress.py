"""Progress of a run, made from its events: a bar on a terminal, plain lines in a pipe or a log."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn

from meshwright.audit.record import RunRecord, format_loss
from meshwright.core.events import Event
from meshwright.core.units import format_bytes, format_count, format_plural, format_seconds
from meshwright.report.tensorboard import TensorBoardSink
from meshwright.report.trackers import RunOutcome, build_trackers
from meshwright.spec.execution import uses_torch_compile
from meshwright.spec.job import Job

WIDE_ENOUGH = 100
"""Columns of a terminal on which a bar fits beside the figures."""
OF_EVERY_RANK = frozenset({"checkpoint", "checkpoint_failed", "events_lost", "stopping"})
"""Events that are shown whoever wrote them; of others those of rank 0."""
PLAIN_LINES = 20
"""About this many step lines in a log, whatever the number of steps."""


class ProgressView:
    """Shows events of rank 0, and whatever any rank has to complain about."""

    def __init__(self, console: Console, job: Job) -> None:
        self._console = console
        self._unit = job.unit
        self._steps = job.train.steps
        self._compiler = job.train.compile_backend if uses_torch_compile(job) else None
        self._first = 0
        self._started = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw the bar while inside, where there is a terminal."""
        if not self._console.is_terminal:
            yield
            return
        columns: list[ProgressColumn] = [TextColumn("{task.description}")]
        if self._console.width >= WIDE_ENOUGH:  # the figures matter more than the bar
            columns.append(BarColumn(bar_width=None))
        with Progress(*columns, console=self._console) as bar:
            self._bar = bar
            self._task = bar.add_task("starting the ranks", total=self._steps)
            yield
        self._bar = None

    def feed(self, event: Event) -> None:
        """Show one event."""
        if event["rank"] == 0 or event["event"] in OF_EVERY_RANK:
            show = getattr(self, f"_show_{event['event']}", None)
            if show is not None:
                show(event)

    def _show_ready(self, event: Event) -> None:
        self._first, self._started = event["step"], time.monotonic()
        if self._compiler is not None:  # nothing else would be heard until the first step is done
            self._line(f"compiling with {self._compiler}: the first step takes longer")

    def _show_gemm_autotune_started(self, event: Event) -> None:
        count = format_plural(event["shapes"], "GEMM shape")
        self._line(f"autotuning {count}: about 2 s each, once per GPU model")

    def _show_gemm_autotune(self, event: Event) -> None:
        shapes = event["tuned"] + event["cached"]
        what = f"GEMM autotuning: {event['changed']} of {shapes} shapes use another algorithm"
        self._line(f"{what}, {event['gain']:.1%} less GEMM time ({format_seconds(event['seconds'])})")

    def _show_eval(self, event: Event) -> None:
        on = format_plural(event["samples"], "sample")
        self._line(f"step {event['step']}: evaluation loss {_shown(event)} on {on}")

    def _show_checkpoint(self, event: Event) -> None:
        cost = f"{format_bytes(event['bytes'])}, {format_seconds(event['seconds'])}"
        self._line(f"step {event['step']}: checkpoint {event['path']} ({cost})")

    def _show_checkpoint_failed(self, event: Event) -> None:
        self._line(f"warning: step {event['step']}: no checkpoint: {event['reason']}; training goes on")

    def _show_events_lost(self, event: Event) -> None:
        if "reason" in event:
            what = f"rank {event['rank']} cannot write its events ({event['reason']})"
            self._line(f"warning: {what}; lines are lost, training goes on")

    def _show_stopping(self, event: Event) -> None:
        self._line("stopping after this step, with a checkpoint; Ctrl-C again ends it at once")

    def _show_resumed(self, event: Event) -> None:
        self._line(f"resumed from {event['checkpoint']} at step {event['step']}")

    def _show_step(self, event: Event) -> None:
        step = event["step"]
        busy = event.get("utilisation")
        done, passed = step - self._first, time.monotonic() - self._started
        seconds = round(passed / done * (self._steps - step)) if done else 0
        left = f"{seconds} s" if seconds < 120 else format_seconds(seconds)
        rate = format_count(event["tokens_per_s"])
        loss = _shown(event) + (" (overflow, not taken)" if event.get("skipped") else "")
        text = (
            f"step {step}/{self._steps} loss {loss} {rate} {self._unit}/s "
            f"MFU {event['mfu']:.1%} device {'?' if busy is None else f'{busy:.0%}'} left {left}"
        )
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif step in (self._first + 1, self._steps) or step % max(1, self._steps // PLAIN_LINES) == 0:
            self._console.print(text)

    def _line(self, text: str) -> None:
        self._console.print(text)


class EventListeners:
    """Everybody who follows a run: the record for the report, the progress, the curves."""

    def __init__(self, console: Console, job: Job, run_dir: Path) -> None:
        self.record = RunRecord()
        self._view = ProgressView(console, job)
        self._curves = TensorBoardSink(run_dir) if job.train.tensorboard else None
        self._trackers = build_trackers(job, run_dir, lambda text: console.print(f"warning: {text}"))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Show the progress while inside; flush the curves at the end."""
        try:
            with self._view.shown():
                yield
        finally:
            if self._curves is not None:
                self._curves.close()

    def on_event(self, event: Event) -> None:
        """Pass one event on to all."""
        self.record.feed(event)
        self._view.feed(event)
        if self._curves is not None:
            self._curves.feed(event)
        for tracker in self._trackers:
            tracker.feed(event)

    def close(self, ending: RunOutcome) -> None:
        """Tell the trackers how it ended; after that nobody listens."""
        for tracker in self._trackers:
            tracker.close(ending)


def _shown(event: Event) -> str:
    """The loss of a step or an evaluation for people; JSON has no number for one that is not finite."""
    if event["loss"] is None and event.get("tokens") != 0:
        return format_loss(math.nan)
    return format_loss(event["loss"])
