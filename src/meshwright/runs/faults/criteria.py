"""Pass criteria: the figures of a fault test from what a trial recorded."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from meshwright.core.events import Event
from meshwright.elastic.faults.injector import Injection, is_alive
from meshwright.runs.faults.job import WORLD_SIZE
from meshwright.runs.faults.trial import EXIT_FAILED, EXIT_OK, SETTLE_STEPS, Trial

NOTICED_S, GOES_ON_S = 1.0, 10.0
NAMED_S = 5.0
PREEMPTED_S = 10.0
ADOPTED_STALL_S = 15.0
PAUSE_SLACK_S = 2.0
REJOINED_S = 30.0
"""Time for a process to rejoin after SIGCONT."""
ATTACK_RSS_MB = 50.0
CLOCK_SLACK_S = 10.0
"""Ranks write the event of a step at about the same time."""
STRAGGLER_STEPS, CLEAN_STEPS = 20, 500
"""Steps after which a straggler is named, and steps before without a false alarm."""
KILL_LOOP_S, KILL_LOOP_GOODPUT = 100.0, 85.0


@dataclass(frozen=True)
class Figure:
    """A measured number and its limit."""

    name: str
    value: float
    limit: float | None = None
    """None if it is only reported."""
    unit: str = "s"
    at_least: bool = False
    """Whether the limit is the least value; otherwise it is the largest."""

    @property
    def ok(self) -> bool:
        """Whether it is within the limit."""
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        shown = f"{self.name} {self.value:.3g}{'' if self.unit in ('%', '') else ' '}{self.unit}"
        return shown if self.limit is None else f"{shown} ({'>=' if self.at_least else '<='} {self.limit:g})"

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"value": self.value, "limit": self.limit, "unit": self.unit, "ok": self.ok}


def is_settled(trial: Trial) -> bool:
    """Whether all faults were injected and the run has made new steps since."""
    return trial.injector.done and trial.new_steps() >= SETTLE_STEPS


def is_adopted(trial: Trial) -> bool:
    """Whether a new command has adopted the ranks, and they have made steps since."""
    adopted = trial.view.of("adopted")
    after = [
        e for e in trial.view.of("step") if adopted and e["rank"] == 0 and e["time"] > adopted[-1]["time"]
    ]
    return trial.injector.done and len(after) >= SETTLE_STEPS


def is_resumed(trial: Trial) -> bool:
    """Whether a run that was ended by a fault has been resumed, and has made steps since."""
    resumed = trial.view.of("resumed")
    return trial.injector.done and bool(resumed) and is_settled(trial)


def is_past_gradients(trial: Trial) -> bool:
    """Whether the run has made new steps after all injected bad gradients."""
    last = max((fault.step or 0 for fault in trial.schedule), default=0)
    return trial.view.steps_done >= last + SETTLE_STEPS


def is_kill_loop_over(trial: Trial) -> bool:
    """Whether the time of the kill loop is up, and the last kill was recovered from."""
    first = trial.view.first_step_at
    return first is not None and time.time() >= first + KILL_LOOP_S and is_settled(trial)


def is_rejoined(trial: Trial) -> bool:
    """Whether every stopped process has rejoined or ended, or had its time after SIGCONT."""
    rejoined = {event["former_pid"] for event in trial.view.of("rejoined")}
    now = time.time()
    waiting = [
        one.pid
        for one in trial.injections
        if one.pid not in rejoined
        and is_alive(one.pid)
        and now < one.time + (one.fault.for_s or 0.0) + REJOINED_S
    ]
    return not waiting and is_settled(trial)


def evaluate_kills(trial: Trial) -> list[Figure]:
    """Every killed rank was noticed, and training went on; no other rank died."""
    kills = sum(injection.fault.kind == "fail" for injection in trial.injections)
    _expect_processes(trial, WORLD_SIZE + kills)
    return _measure_kills(trial)


def _measure_kills(trial: Trial) -> list[Figure]:
    figures = []
    kills = [injection for injection in trial.injections if injection.fault.kind == "fail"]
    for injection in kills:
        recovered, lost = (_next_event(trial, injection, name) for name in ("recovered", "rank_lost"))
        step = None if recovered is None else _next_step(trial, injection, recovered["generation"])
        if recovered is None or lost is None or step is None:
            trial.violations.append(f"no recovery from {injection.fault}")
            continue
        noticed = min(
            lost["time"], recovered["time"] - recovered["seconds"]
        )  # the latter is the first of several
        figures += [
            Figure("noticed after", max(0.0, noticed - injection.time), NOTICED_S),
            Figure("next step after", step["time"] - injection.time, GOES_ON_S),
        ]
    return worst(figures)


def evaluate_kill_loop(trial: Trial) -> list[Figure]:
    """Every kill was recovered from. Times are only reported; the suite adds the share of steps."""
    kills = Figure("kills", len(trial.injections), unit="")
    return [kills, *(replace(figure, limit=None) for figure in evaluate_kills(trial))]


def evaluate_chaos(trial: Trial) -> list[Figure]:
    """Every kill was recovered from.

    A kill during a recovery may cost another process: ranks that connect to each other cannot be interrupted,
    and are killed after ``elastic.stop_grace_s``.
    """
    kills = len(trial.injections)
    others = len(trial.view.of("started")) - WORLD_SIZE - kills
    figures = [Figure("kills", kills, unit=""), Figure("other processes that ended", others, unit="")]
    return [*figures, *(replace(figure, limit=None) for figure in _measure_kills(trial))]


def evaluate_schedule(trial: Trial) -> list[Figure]:
    """A schedule of the user has no criterion but the invariants."""
    return [Figure("longest stall", longest_stall_s(trial))]


def evaluate_killed_supervisor(trial: Trial) -> list[Figure]:
    """No rank died, and the ranks went on stepping until and after a new command adopted them."""
    if not trial.view.of("adopted"):
        trial.violations.append("no new command adopted the ranks")
    _expect_processes(trial, WORLD_SIZE)
    return [Figure("longest stall", longest_stall_s(trial), ADOPTED_STALL_S)]


def evaluate_stopped_supervisor(trial: Trial) -> list[Figure]:
    """No rank was restarted, and the ranks waited no longer than the pause."""
    _expect_processes(trial, WORLD_SIZE)
    _expect_no_event(trial, "rank_lost", "hang")
    pause_s = max(fault.for_s or 0.0 for fault in trial.schedule)
    return [Figure("longest stall", longest_stall_s(trial), pause_s + PAUSE_SLACK_S)]


def evaluate_preemption(trial: Trial) -> list[Figure]:
    """The command ended in time with status 0, and the resumed run began with the step after the last one."""
    for status, _ in trial.preemptions:
        if status != EXIT_OK:
            trial.violations.append(f"the preempted command ended with status {status}, not {EXIT_OK}")
    lost = []
    for resumed in (e for e in trial.view.of("resumed") if e["rank"] == 0):
        before = [e["step"] for e in trial.view.of("step") if e["generation"] < resumed["generation"]]
        lost.append(Figure("steps lost", max(before) - resumed["step"], 0, ""))
    if len(lost) != len(trial.preemptions) or not lost:
        trial.violations.append(f"{len(trial.preemptions)} preemptions, {len(lost)} resumes")
    graces = [fault.grace_s for fault in trial.schedule]
    ends = zip(trial.preemptions, graces, strict=False)
    return worst([*(Figure("ended after", seconds, limit) for (_, seconds), limit in ends), *lost])


def evaluate_stopped_ranks(trial: Trial) -> list[Figure]:
    """Every stopped rank was named, the others went on, and its process rejoined or ended when it woke up.

    A process ends that was stopped inside a commit, that cannot leave a collective of gloo, or that is not
    needed as a spare.
    """
    figures, rejoined = [], {event["former_pid"] for event in trial.view.of("rejoined")}
    for injection in trial.injections:
        named, recovered = (_next_event(trial, injection, name) for name in ("hang", "recovered"))
        step = None if recovered is None else _next_step(trial, injection, recovered["generation"])
        if named is None or recovered is None or step is None:
            trial.violations.append(f"no recovery from {injection.fault}")
            continue
        if (named["rank"], named["cause"]) != (injection.fault.rank, "stopped"):
            trial.violations.append(f"{injection.fault} was reported as: {named['verdict']}")
        if injection.pid in trial.alive_at_end - rejoined:
            trial.violations.append(f"process {injection.pid} neither rejoined nor ended: {injection.fault}")
        figures += [
            Figure("named after", named["time"] - injection.time, NAMED_S),
            Figure("next step after", step["time"] - injection.time, GOES_ON_S),
        ]
    return [*worst(figures), Figure("rejoined", len(rejoined), unit="")]


def evaluate_clocks(trial: Trial) -> list[Figure]:
    """The shifts took effect, no rank was lost because of them, and a kill was recovered from."""
    shifts = [injection for injection in trial.injections if injection.fault.kind == "shift_clock"]
    times = {(e["rank"], e["generation"], e["step"]): e["time"] for e in trial.view.of("step")}
    for injection in shifts:
        rank, by_s = injection.fault.rank, injection.fault.by_s or 0.0
        after = [
            times[key] - times[0, *key[1:]]
            for key in times
            if key[0] == rank and key[2] > injection.step and (0, *key[1:]) in times
        ]
        if not after or abs(after[0] - by_s) > CLOCK_SLACK_S:
            trial.violations.append(f"{injection.fault} had no effect on the times of events")
    _expect_no_event(trial, "hang")
    return evaluate_kills(trial)


def is_straggler_over(trial: Trial) -> bool:
    """Whether the slow rank was named, or all steps in which it should have been are done."""
    injection = next(iter(trial.injections), None)
    if injection is None:
        return False
    named = any(e["time"] >= injection.time for e in trial.view.of("straggler"))
    return named or trial.new_steps() > 2 * STRAGGLER_STEPS


def evaluate_straggler(trial: Trial) -> list[Figure]:
    """No rank was named in the steps without a fault; then the slow one was, with the right phase."""
    if not trial.injections:
        return []
    injection, found = trial.injections[0], trial.view.of("straggler")
    early = [e for e in found if e["time"] < injection.time]
    named = [e for e in found if e["time"] >= injection.time]
    trial.violations += [f"false alarm: rank {e['rank']} in step {e['step']}" for e in early]
    figures = [Figure("clean steps", injection.furthest_step, CLEAN_STEPS, "", at_least=True)]
    if not named:
        trial.violations.append(f"not named: {injection.fault}")
        return figures
    if (named[0]["rank"], named[0]["phase"]) != (injection.fault.rank, "compute"):
        trial.violations.append(f"named rank {named[0]['rank']}, {named[0]['phase']}: {injection.fault}")
    _expect_processes(trial, WORLD_SIZE)
    steps = named[0]["step"] - injection.furthest_step
    return [
        *figures,
        Figure("named after steps", steps, STRAGGLER_STEPS, ""),
        Figure("its time as a multiple of its peers'", named[0]["slowdown"], unit=""),
    ]


def evaluate_attack(trial: Trial) -> list[Figure]:
    """Hostile connections changed nothing: no rank was lost, and no memory or file of ours was leaked."""
    _expect_processes(trial, WORLD_SIZE)
    _expect_no_event(trial, "rank_lost", "hang")
    if trial.attack is None or not trial.attack.ports:
        trial.violations.append("no listening port was found: nothing was tested")
        return []
    outside = [port for port in trial.attack.ports if not port.is_loopback]
    if outside:
        trial.violations.append(f"ports that other machines reach: {outside}")
    wanted = max(fault.connections or 0 for fault in trial.schedule)
    return [
        Figure("connections", trial.attack.connections, wanted, "", at_least=True),
        Figure("ports", len(trial.attack.ports), unit=""),
        Figure("RSS growth", trial.rss_growth_mb, ATTACK_RSS_MB, "MB"),
        Figure("files leaked by command and agent", trial.own_file_growth, 0, ""),
        Figure("sockets leaked by gloo per rank", trial.rank_file_growth, unit=""),
    ]


def count_steps(trial: Trial, seconds: float) -> int:
    """Steps that rank 0 had done a while after its first one."""
    first = trial.view.first_step_at or 0.0
    return max((e["step"] for e in trial.view.of("step") if e["time"] <= first + seconds), default=0)


def measure_own_rate(trial: Trial) -> float:
    """Steps per second between the end of each recovery and the next kill."""
    steps, total_s = 0, 0.0
    kills = [injection.time for injection in trial.injections]
    begin, furthest = trial.view.first_step_at, 0
    for event in (e for e in trial.view.of("step") if e["rank"] == 0):
        if event["step"] <= furthest:
            begin = None
            continue
        furthest = event["step"]
        if begin is not None and not any(begin < kill <= event["time"] for kill in kills):
            steps, total_s = steps + 1, total_s + event["time"] - begin
        begin = event["time"]
    return steps / max(total_s, 1e-9)


def longest_stall_s(trial: Trial) -> float:
    """The longest time between two steps of rank 0, from the first fault on."""
    since = trial.injections[0].time if trial.injections else 0.0
    times = [e["time"] for e in trial.view.of("step") if e["rank"] == 0 and e["time"] >= since]
    return max((b - a for a, b in pairwise([since, *times])), default=0.0)


def evaluate_wrong_call(trial: Trial) -> list[Figure]:
    """The error names the rank, the call and the source line, within 5 s of the call."""
    fault = trial.schedule[0]
    text = " ".join(str(error["message"]) for error in trial.errors())
    wanted = (f"rank {fault.rank}", "all_", "wrong_call.py:")
    if trial.status != EXIT_FAILED or not all(part in text for part in wanted):
        trial.violations.append(f"status {trial.status}, the error does not name the call: {text or 'none'}")
    made = trial.view.of("injected")
    if not made:
        trial.violations.append(f"not injected: {fault}")
        return []
    named = min((e["time"] for e in trial.view.of("hang")), default=trial.ended_at)
    return [Figure("named after", named - made[0]["time"], NAMED_S)]


def evaluate_bad_gradients(trial: Trial) -> list[Figure]:
    """Each bad step is skipped on all ranks, its rank is named, and no state changes."""
    for fault in trial.schedule:
        step = fault.step or 0
        if not any(e["fault"] == str(fault) for e in trial.view.of("injected")):
            trial.violations.append(f"not injected: {fault}")
        skipped = {
            e["rank"]: e["unchanged"] for e in trial.view.of("skipped_update") if e["step"] == step - 1
        }
        if skipped != dict.fromkeys(range(WORLD_SIZE), True):
            trial.violations.append(f"{fault}: ranks that skipped the step, with an equal state: {skipped}")
        name = "grad_spike" if fault.value == "spike" else "not_finite"
        named = [e["ranks"] for e in trial.view.of(name) if e["step"] == step]
        if named != [[fault.rank]]:
            trial.violations.append(f"{fault}: named as {name}: {named}")
    bad = {e["step"] for e in trial.view.of("step") if e["bad_step"] is not None}
    if bad != {fault.step for fault in trial.schedule}:
        trial.violations.append(f"bad steps: {sorted(bad)}")
    return [Figure("bad steps", len(bad), unit="")]


def worst(figures: list[Figure]) -> list[Figure]:
    """The figure that is furthest from passing, for each name."""
    found: dict[str, Figure] = {}
    for figure in figures:
        before = found.get(figure.name)
        if before is None or (figure.value < before.value) == figure.at_least:
            found[figure.name] = figure
    return list(found.values())


def _expect_no_event(trial: Trial, *names: str) -> None:
    found = [event for name in names for event in trial.view.of(name)]
    if found:
        trial.violations.append(f"an event {found[0]['event']} was written: {found[0]}")


def _expect_processes(trial: Trial, expected: int) -> None:
    started = len(trial.view.of("started"))
    if started != expected:
        trial.violations.append(f"{started} processes of ranks were started, {expected} expected")


def _next_event(trial: Trial, injection: Injection, name: str) -> Event | None:
    return next((e for e in trial.view.of(name) if e["time"] >= injection.time), None)


def _next_step(trial: Trial, injection: Injection, generation: int) -> Event | None:
    """The first step that rank 0 completed in a generation after a fault."""
    after = (e for e in trial.view.of("step") if e["time"] >= injection.time and e["rank"] == 0)
    return next((e for e in after if e["generation"] >= generation), None)
