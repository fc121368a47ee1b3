"""Pass criteria: the figures of a fault test from what a trial recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.core.events import Event
from meshwright.elastic.faults.injector import Injection
from meshwright.runs.faults.job import WORLD_SIZE
from meshwright.runs.faults.trial import EXIT_FAILED, SETTLE_STEPS, Trial

NOTICED_S, GOES_ON_S = 1.0, 10.0
NAMED_S = 5.0
ADOPTED_STALL_S = 15.0
PAUSE_SLACK_S = 2.0


@dataclass(frozen=True)
class Figure:
    """A measured number and its limit."""

    name: str
    value: float
    limit: float
    unit: str = "s"
    at_least: bool = False
    """Whether the limit is the least value; otherwise it is the largest."""

    @property
    def ok(self) -> bool:
        """Whether it is within the limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        relation, unit = ">=" if self.at_least else "<=", self.unit if self.unit == "%" else f" {self.unit}"
        return f"{self.name} {self.value:.3g}{unit} ({relation} {self.limit:g})"

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"value": self.value, "limit": self.limit, "unit": self.unit, "ok": self.ok}


def is_settled(trial: Trial) -> bool:
    """Whether all faults were injected and the run has made new steps since."""
    return trial.injector.done and trial.new_steps() >= SETTLE_STEPS


def judge_kills(trial: Trial) -> list[Figure]:
    """Every killed rank was noticed, and training went on; no other rank died."""
    figures = []
    for injection in trial.injections:
        recovered = _next_event(trial, injection, "recovered")
        step = None if recovered is None else _next_step(trial, injection, recovered["generation"])
        if recovered is None or step is None:
            trial.violations.append(f"no recovery from {injection.fault}")
            continue
        noticed_s = max(0.0, recovered["time"] - recovered["seconds"] - injection.time)
        figures += [
            Figure("noticed after", noticed_s, NOTICED_S),
            Figure("next step after", step["time"] - injection.time, GOES_ON_S),
        ]
    _expect_processes(trial, WORLD_SIZE + len(trial.injections))
    return worst(figures)


def judge_wrong_call(trial: Trial) -> list[Figure]:
    """The error names the rank, the call and the source line, within 5 s of the last step before it."""
    fault = trial.schedule[0]
    text = " ".join(str(error["message"]) for error in trial.errors())
    wanted = (f"rank {fault.rank}", "all_", "wrong_call.py:")
    if trial.status != EXIT_FAILED or not all(part in text for part in wanted):
        trial.violations.append(f"status {trial.status}, the error does not name the call: {text or 'none'}")
    last = max((e["time"] for e in trial.view.of("step")), default=trial.ended_at)
    named = min((e["time"] for e in trial.view.of("hang")), default=trial.ended_at)
    return [Figure("named after", named - last, NAMED_S)]


def worst(figures: list[Figure]) -> list[Figure]:
    """Of each name the figure that is furthest from passing."""
    found: dict[str, Figure] = {}
    for figure in figures:
        before = found.get(figure.name)
        if before is None or (figure.value < before.value) == figure.at_least:
            found[figure.name] = figure
    return list(found.values())


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
