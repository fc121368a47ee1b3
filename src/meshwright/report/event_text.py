"""Events of a run as lines of text, for logs and progress bars."""

from __future__ import annotations

import math
import time

from meshwright.core.events import Event, name_phase
from meshwright.core.units import format_bytes, format_plural, format_seconds, format_throughput
from meshwright.spec.execution import uses_torch_compile
from meshwright.spec.job import Job

FROM_EVERY_RANK = frozenset(
    {
        "checkpoint",
        "checkpoint_copy_failed",
        "checkpoint_failed",
        "events_lost",
        "hang",
        "layout_changed",
        "rank_lost",
        "recovered",
        "replayed",
        "snapshots_off",
        "stopping",
        "straggler",
        "straggler_recovered",
    }
)
"""Events that are shown whichever rank wrote them; of all others only rank 0's."""
ACTIONS = {"skip": "; all ranks skip the step", "rollback": "; all ranks roll back"}
"""What follows a bad step, if the run goes on."""
LOG_LINES = 20
"""About this many step lines in a log, whatever the number of steps."""
OWN_LINES = 4
"""Evaluations and checkpoints that get lines of their own; if there are more, step lines have them."""


def format_loss(loss: float | None, digits: int = 4) -> str:
    """A loss; None is that of a step without target tokens."""
    if loss is None:
        return "none (no target tokens)"
    return f"{loss:.{digits}f}" if math.isfinite(loss) else "not finite"


class EventText:
    """Turns the events of one run into lines; keeps what the remaining time is computed from."""

    def __init__(self, job: Job, every_line: bool = False) -> None:
        """Start with a run.

        Args:
            job: That runs.
            every_line: Whether all evaluations and checkpoints get a line of their own, however many.
        """
        self._unit = job.unit
        steps, train = job.train.steps, job.train
        evaluations = steps // train.eval_every * (1 + len(job.data.eval)) if train.eval_every else 0
        saves = steps // job.checkpoint.every_steps if job.checkpoint.every_steps else 0
        self._appends_to_step_lines = evaluations + saves > OWN_LINES and not every_line
        self._pending: dict[int, list[str]] = {}
        self.steps = job.train.steps
        self._memory_bytes: int | None = None
        self._compiler = job.train.compile_backend if uses_torch_compile(job) else None
        self._first = 0
        self._started = time.monotonic()

    def describe(self, event: Event) -> str | None:
        """The event in one line; None for an event that is not shown."""
        if event["rank"] != 0 and event["event"] not in FROM_EVERY_RANK:
            return None
        describe = getattr(self, f"_describe_{event['event']}", None)
        return None if describe is None else describe(event)

    def log_line(self, event: Event) -> str | None:
        """The event in one line of a log; None if it is not shown: of many steps only some are."""
        text = self.describe(event)
        if text is None or event["event"] != "step":
            return text
        step, pending = event["step"], self.take_pending()
        due = step in (self._first + 1, self.steps) or step % max(1, self.steps // LOG_LINES) == 0
        return f"{text}{f'  ({pending})' if pending else ''}" if due or pending else None

    def take_pending(self) -> str:
        """The evaluations and checkpoints since the last call that the next step line shows."""
        pending = "; ".join(f"step {step}: {', '.join(texts)}" for step, texts in self._pending.items())
        self._pending = {}
        return pending

    def _describe_ready(self, event: Event) -> str | None:
        self._first, self._started = event["step"], time.monotonic()
        if self._compiler is None:
            return None
        return f"compiling with {self._compiler}: the first step takes longer"

    def _describe_state(self, event: Event) -> None:
        """The audited step: its peak is the memory of step lines on CPUs."""
        self._memory_bytes = event["peak_bytes"]

    def _describe_gemm_autotune_started(self, event: Event) -> str:
        shapes = format_plural(event["shapes"], "GEMM shape")
        return f"autotuning {shapes}: about 2 s each, once per GPU model"

    def _describe_gemm_autotune(self, event: Event) -> str:
        shapes = f"{event['changed']} of {event['tuned'] + event['cached']} shapes use another algorithm"
        gain = f"{event['gain']:.1%} less GEMM time ({format_seconds(event['seconds'])})"
        return f"GEMM autotuning: {shapes}, {gain}"

    def _describe_eval(self, event: Event) -> str | None:
        name, loss = event.get("set"), _event_loss(event)
        if self._appends_to_step_lines:
            self._append(event["step"], f"held-out loss {loss}" if name is None else f"{name} {loss}")
            return None
        samples = format_plural(event["samples"], "sample")
        of = "" if name is None else f" of {name}"
        return f"step {event['step']}: held-out loss {loss} on {samples}{of}"

    def _append(self, step: int, text: str) -> None:
        self._pending.setdefault(step, []).append(text)

    def _describe_checkpoint(self, event: Event) -> str | None:
        if self._appends_to_step_lines:
            self._append(event["step"], "saved")
            return self.take_pending() if event["step"] >= self.steps else None  # no step line follows
        cost = f"{format_bytes(event['bytes'])}, {format_seconds(event['seconds'])}"
        if event.get("slowdown") is not None:
            cost += f", steps {event['slowdown']:.2f} times as long"
        return f"step {event['step']}: checkpoint {event['path']} ({cost})"

    def _describe_checkpoint_waited(self, event: Event) -> str | None:
        if self._appends_to_step_lines:
            self._append(event["step"], f"waited {format_seconds(event['waited_s'])} for the last save")
            return None
        waited = f"training waited {format_seconds(event['waited_s'])}"
        return f"step {event['step']}: {waited} for the checkpoint of step {event['previous_step']}"

    def _describe_checkpoint_interval(self, event: Event) -> str:
        return str(event["reason"])

    def _describe_checkpoint_failed(self, event: Event) -> str:
        return f"warning: step {event['step']}: no checkpoint: {event['reason']}; training continues"

    def _describe_checkpoint_copy_failed(self, event: Event) -> str:
        return (
            f"warning: step {event['step']}: no copy of the checkpoint in {event['store']}: {event['reason']}"
        )

    def _describe_grad_spike(self, event: Event) -> str:
        norm, times = _format_norm(event["grad_norm"]), event["grad_norm"] / event["median"]
        what = f"gradient norm {norm}, {times:.0e} times the median of the last steps"
        found = "it did not come back when the step was recomputed"
        if event["ranks"]:
            ranks = ", ".join(map(str, event["ranks"]))
            found = f"its gradients come from rank {ranks}, most from {event['module']}"
        return f"warning: step {event['step']}: {what}; {found}{_describe_action(event)}"

    def _describe_not_finite(self, event: Event) -> str | None:
        if event.get("action") not in ACTIONS:  # the error of the run says it
            return None
        found = "a value that is not finite; none was found when the step was recomputed"
        if event["ranks"]:
            of = {"data": "the batch", "": "the model"}.get(event["module"], event["module"])
            ranks = ", ".join(map(str, event["ranks"]))
            found = f"the {event['what']} of {of} is {event['value']} on rank {ranks}"
        return f"warning: step {event['step']}: {found}{_describe_action(event)}"

    def _describe_rolled_back(self, event: Event) -> str:
        samples = format_plural(event["skipped_samples"], "sample")
        return f"rolled back to step {event['step']}: {samples}, up to the bad step, are not read again"

    def _describe_data_grew(self, event: Event) -> str:
        return f"step {event['step']}: {'; '.join(event['notes'])}"

    def _describe_grace_too_short(self, event: Event) -> str:
        step, grace = format_seconds(event["step_s"]), f"elastic.stop_grace_s={event['stop_grace_s']:g}"
        return (
            f"warning: a step takes {step}, longer than {grace}: SIGTERM may come too late for a checkpoint"
        )

    def _describe_transport_fallback(self, event: Event) -> str:
        needs = "that needs ranks that meshwright started, x86-64, and Linux with pidfd_open"
        return f"warning: collectives use {event['used']}, not {event['planned']} as planned: {needs}"

    def _describe_rank_lost(self, event: Event) -> str:
        return f"warning: rank {event['failed_rank']} failed ({event['how']}); regrouping: {event['reason']}"

    def _describe_layout_changed(self, event: Event) -> str:
        names = " ".join(f"{key}={value}" for key, value in event["layout"].items()) or "one process"
        ranks = f"{event['ranks_before']} ranks before, {event['ranks']} now"
        return f"warning: the layout changes after step {event['step']}: {event['reason']}; {ranks}: {names}"

    def _describe_waiting_for_devices(self, event: Event) -> str:
        return f"warning: {event['reason']}; waiting for more devices: {event['missing']}"

    def _describe_node_joined(self, event: Event) -> str:
        node = f"node {event['node']} ({event['host']})"
        return f"{node} joined: {event['joined']} of {event['nodes']} nodes"

    def _describe_node_spare(self, event: Event) -> str:
        return f"{event['host']} joined as a spare node: it takes over the next node that is lost"

    def _describe_spare_lost(self, event: Event) -> str:
        return f"warning: the spare node {event['host']} is gone: {event['reason']}"

    def _describe_node_leaving(self, event: Event) -> str:
        node = f"node {event['node']} ({event['host']})"
        follows = {
            "replace": "the ranks save a checkpoint, and a spare node takes over",
            "shrink": "the ranks save a checkpoint and go on without it",
            "stop": "the run cannot go on without it, and stops after this step",
        }
        return f"warning: {node} leaves the run (SIGTERM): {follows[event['action']]}"

    def _describe_node_left(self, event: Event) -> str:
        return f"node {event['node']} ({event['host']}) has left the run"

    def _describe_minority(self, event: Event) -> str:
        return f"warning: {event['reason']}; the run waits for other agents"

    def _describe_node_refused(self, event: Event) -> str:
        return f"warning: node {event['node']} was refused: {event['reason']}"

    def _describe_recovered(self, event: Event) -> str:
        again = format_plural(event["replayed_steps"], "step")
        went_on = f"resumed from step {event['restored_step']} ({event['source']}), {again} to replay"
        return f"recovered in {format_seconds(event['seconds'])}: {went_on}"

    def _describe_replayed(self, event: Event) -> str:
        return f"{format_plural(event['steps'], 'step')} replayed in {format_seconds(event['seconds'])}"

    def _describe_adopted(self, event: Event) -> str:
        return f"adopted {format_plural(len(event['ranks']), 'rank')} that still train"

    def _describe_snapshots_off(self, event: Event) -> str:
        where = "" if event["planned"] else f" on rank {event['rank']}"
        return f"warning: no in-memory snapshots{where}: {event['reason']}"

    def _describe_events_lost(self, event: Event) -> str | None:
        if "reason" not in event:
            return None
        what = f"rank {event['rank']} cannot write its events ({event['reason']})"
        return f"warning: {what}; lines are lost, training continues"

    def _describe_hang(self, event: Event) -> str:
        return f"{'warning: ' if event['cause'] not in ('computing', 'running') else ''}{event['verdict']}"

    def _describe_straggler(self, event: Event) -> str:
        per = "save" if event["phase"] == "storage" else "step"
        late = f"{format_seconds(event['lateness_s'])} ({event['share']:.0%} of a step)"
        who = f"rank {event['rank']} on {event['host']} is a straggler since step {event['since_step']}"
        then = "; another process takes its rank" if event["action"] == "replace" else ""
        phase = name_phase(event["phase"], event["preempted"])
        return f"warning: {who}: {late} later than its peers in every {per}, by {phase}{then}"

    def _describe_straggler_recovered(self, event: Event) -> str:
        how = "was replaced" if event.get("replaced") else "is as fast as its peers again"
        return f"rank {event['rank']}, a straggler since step {event['since_step']}, {how}"

    def _describe_stopping(self, event: Event) -> str:
        return "stopping after this step, with a checkpoint; press Ctrl-C again to stop at once"

    def _describe_resumed(self, event: Event) -> str:
        return f"resumed from {event['checkpoint']} at step {event['step']}"

    def _describe_step(self, event: Event) -> str:
        step, skipped = event["step"], " (skipped: fp16 overflow)" if event.get("skipped") else ""
        skipped = " (no update)" if event.get("bad_step") else skipped
        done, passed = step - self._first, time.monotonic() - self._started
        seconds = round(passed / done * (self.steps - step)) if done else 0
        parts = [f"step {step}/{self.steps}", f"loss {_event_loss(event, 3)}{skipped}"]
        if event.get("lr") is not None:
            parts.append(f"lr {_format_power(event['lr'])}")
        if event.get("grad_norm") is not None:
            parts.append(f"grad norm {_format_norm(event['grad_norm'])}")
        parts += [format_throughput(event["tokens_per_s"], self._unit), f"MFU {event['mfu']:.1%}"]
        if memory := event.get("memory_bytes") or self._memory_bytes:
            parts.append(f"memory {format_bytes(memory)}")
        eta = f"{seconds}s" if seconds < 120 else format_seconds(seconds)
        return "  ".join([*parts, f"ETA {eta}"])


def _describe_action(event: Event) -> str:
    """The reaction to a bad step, as a clause."""
    return ACTIONS.get(event.get("action", ""), "")


def _format_norm(value: float) -> str:
    """``1.92``; very small and very large norms as powers of ten."""
    return f"{value:.2f}" if value == 0 or 0.01 <= value < 1e4 else _format_power(value)


def _format_power(value: float) -> str:
    """``3.0e-4``."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _event_loss(event: Event, digits: int = 4) -> str:
    """The loss of a step or an evaluation; JSON writes a loss that is not finite as null."""
    if event["loss"] is None and event.get("tokens") != 0:
        return format_loss(math.nan)
    return format_loss(event["loss"], digits)
