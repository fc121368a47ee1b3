"""Runs fault tests within a budget of time: each in several layouts, compared with a fault-free run.

The cases of a layout run first. One fault-free run, as long as the longest of them, follows. It gives the
losses and the checkpoints that all of them must have.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.core.errors import Problem, RunFailedError, UserError, require_argument
from meshwright.core.units import format_plural
from meshwright.elastic.faults.clock import ShiftedClocks, build_clock_library
from meshwright.elastic.faults.invariants import compare_runs
from meshwright.elastic.faults.schedule import INSIDE, read_schedule
from meshwright.elastic.faults.slow_work import SlowWork, build_slow_library
from meshwright.runs.faults.checks.check import CannotRunError, CheckRun, ViolationError
from meshwright.runs.faults.checks.table import CHECKS, Check
from meshwright.runs.faults.criteria import KILL_LOOP_GOODPUT, Figure, count_steps, measure_own_rate, worst
from meshwright.runs.faults.job import LAYOUTS, WORLD_SIZE, TinyJob
from meshwright.runs.faults.table import TESTS, FaultTest, Schedule, build_custom_test
from meshwright.runs.faults.trial import EXIT_FAILED, SETTLE_STEPS, Trial
from meshwright.runs.reporter import Reporter

FIRST_GUESS_START_S, FIRST_GUESS_STEP_S = 6.0, 0.05
"""Until the first run has shown how fast this machine is."""
TYPICAL_STEPS = 60
LIMIT_FACTOR, LIMIT_S = 4.0, 120.0
"""A trial is given up after this multiple of what it should take, plus this time."""


Test = FaultTest | Check


@dataclass
class Case:
    """A test in a layout, or one without a schedule."""

    test: Test
    layout: str = ""
    schedules: list[Schedule] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    skipped: str = ""
    """Why it was not run."""
    violated: str = ""
    """The invariant that a test without a schedule found violated."""

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return f"{self.test.name}/{self.layout}" if self.layout else self.test.name

    @property
    def violations(self) -> list[str]:
        """Violated invariants, over all runs."""
        found = [text for trial in self.trials for text in trial.violations]
        found += [self.violated] if self.violated else []
        return found + [str(figure) for figure in self.figures if not figure.ok]

    @property
    def verdict(self) -> str:
        """``pass``, ``FAIL`` or ``skipped``."""
        return "skipped" if self.skipped else "FAIL" if self.violations else "pass"


@dataclass(frozen=True)
class FaultReport:
    """The result of ``meshwright faults``."""

    seed: int
    cases: tuple[Case, ...]
    seconds: float
    load_average: float
    """Load of the last minute; other load makes every figure worse."""
    schedule: Path | None = None
    """The file of a schedule of the user."""

    @property
    def ok(self) -> bool:
        """Whether no test failed."""
        return not any(case.verdict == "FAIL" for case in self.cases)

    def replay(self, case: Case) -> str:
        """The command that runs a case again."""
        faults = f"--seed {self.seed}" if self.schedule is None else f"--schedule {self.schedule}"
        return f"meshwright faults {case.name} {faults} --budget 3600"

    def as_dict(self) -> dict[str, Any]:
        """The object of ``meshwright faults --json``."""
        ran = [case for case in self.cases if not case.skipped]
        failed = [case for case in ran if case.verdict == "FAIL"]
        return {
            "seed": self.seed,
            "passed": [case.name for case in ran if case.verdict == "pass"],
            "failed": [case.name for case in failed],
            "skipped": [{"name": c.name, "reason": c.skipped} for c in self.cases if c.skipped],
            "figures": {case.name: {f.name: f.as_dict() for f in case.figures} for case in ran},
            "violations": {case.name: case.violations for case in failed},
            "schedules": {case.name: [[str(f) for f in one] for one in case.schedules] for case in ran},
            "replay": {case.name: self.replay(case) for case in failed},
            "seconds": self.seconds,
            "load_average": self.load_average,
        }


def run_faults(
    names: Sequence[str], seed: int, budget_s: float, schedule: Path | None, reporter: Reporter
) -> FaultReport:
    """Run fault tests; tests that do not fit into the budget are skipped.

    Args:
        names: Tests by name or number, with ``/LAYOUT`` for one layout where a test has layouts; all if
            empty.
        seed: Seed of the schedules.
        budget_s: Time for all.
        schedule: A file with the faults of a test of your own, named ``schedule``.
        reporter: Receives the schedules and the progress.

    Raises:
        UserError: A name is unknown, the file is not a schedule, or no test fits.
    """
    require_argument(seed >= 0, "seed", seed, "must not be negative")
    require_argument(budget_s > 0, "budget", budget_s, "must be greater than 0 seconds")
    tests: tuple[Test, ...] = (*TESTS, *CHECKS)
    if schedule is not None:
        tests = (build_custom_test(_read_schedule(schedule)),)
    cases = [_build_case(test, layout, seed) for test, layout in _select(names, tests)]
    with (
        _ended_by_sigterm() as check_stop,
        tempfile.TemporaryDirectory(prefix="meshwright-faults-") as folder,
    ):
        suite = _Suite(TinyJob.write(Path(folder)), budget_s, reporter, seed)
        suite.check_stop = check_stop
        suite.run_checks(cases, quick=True)
        suite.run_layouts(cases, long=False)
        suite.run_checks(cases, quick=False)
        suite.run_layouts(cases, long=True)
    if all(case.skipped for case in cases):
        rule = f"runs no test: {cases[0].name} {cases[0].skipped}"
        fix = "Give a larger budget"
        raise UserError(Problem("faults-budget", rule, path="--budget", value=budget_s, fix=fix))
    return FaultReport(seed, tuple(cases), suite.elapsed_s, os.getloadavg()[0], schedule)


@contextmanager
def _ended_by_sigterm() -> Iterator[Callable[[], None]]:
    """Let SIGTERM end the tests like Ctrl-C, with another exit status: no run is left behind.

    Yields a function that raises after SIGTERM: Python ignores what a handler raises in a callback of a fork.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received: list[int] = []

    def check_stop() -> None:
        if received:
            raise RunFailedError(Problem("faults-interrupted", "SIGTERM ended the fault tests"))

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        check_stop()

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield check_stop
    finally:
        signal.signal(signal.SIGTERM, before)


def _read_schedule(path: Path) -> Schedule:
    found = read_schedule(path)
    for fault in found:
        if fault.rank is not None and fault.rank >= WORLD_SIZE:
            rule, fix = f"{fault}: there are {WORLD_SIZE} ranks", f"Use a rank below {WORLD_SIZE}"
            raise UserError(Problem("faults-schedule", rule, fix=fix))
    inside = {fault.kind for fault in found if fault.kind in INSIDE}
    if inside and len({fault.kind for fault in found}) > 1:
        rule = f"has other faults beside {sorted(inside)[0]}, which needs other ranks"
        raise UserError(Problem("faults-schedule", rule, path=str(path), fix="Use one file for each"))
    if len(found) > 1 and "wrong_collective" in inside:
        rule = "has other faults beside wrong_collective, which ends the run"
        raise UserError(Problem("faults-schedule", rule, path=str(path), fix="Use one file for each"))
    return found


def _select(names: Sequence[str], tests: Sequence[Test]) -> list[tuple[Test, str]]:
    """The tests that names mean, each with its layouts, if it has some."""
    known = {key: test for test in tests for key in (test.name, str(test.number))}
    found: dict[tuple[int, str], tuple[Test, str]] = {}
    for name in names or [test.name for test in tests]:
        key, _, layout = name.partition("/")
        layouts = ("",) if isinstance(known.get(key), Check) else tuple(LAYOUTS)
        if key not in known or layout not in ("", *layouts):
            choices = ", ".join(f"{test.number} {test.name}" for test in tests)
            fix = f"Tests are {choices}; layouts are {', '.join(LAYOUTS)}"
            raise UserError(Problem("faults-unknown", "is not a fault test", path=name, fix=fix))
        for chosen in (layout,) if layout else layouts:
            found[known[key].number, chosen] = (known[key], chosen)
    return sorted(found.values(), key=lambda pair: pair[0].number)


def _build_case(test: Test, layout: str, seed: int) -> Case:
    if isinstance(test, Check):
        return Case(test)
    return Case(test, layout, test.build(_build_random(seed, test.name, layout), layout))


def _build_random(seed: int, *names: str) -> random.Random:
    return random.Random("/".join((str(seed), *names)))  # noqa: S311  (faults, no secret)


class _Suite:
    """The runs of one call, in one temporary folder."""

    def __init__(self, job: TinyJob, budget_s: float, reporter: Reporter, seed: int) -> None:
        self._job, self._budget_s, self._reporter, self._seed = job, budget_s, reporter, seed
        self._began = time.monotonic()
        self._start_s, self._step_s = FIRST_GUESS_START_S, FIRST_GUESS_STEP_S
        self._runs = 0
        self.check_stop: Callable[[], None] = lambda: None
        """Called before each test; raises if the tests are to end."""
        self._clock_library: Path | str | None = None
        """The path, or why there is none; None until it is needed."""

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def run_checks(self, cases: Sequence[Case], quick: bool) -> None:
        """Run the tests without a schedule that fit."""
        for case in cases:
            if isinstance(case.test, Check) and case.test.is_quick is quick:
                case.skipped = self._exceeds_budget(case.test.seconds)
                if not case.skipped:
                    self._run_check(case, case.test)

    def _run_check(self, case: Case, test: Check) -> None:
        self._reporter.progress(f"{case.name}: {test.criterion}")
        folder = self._new_run_dir(case.name)
        folder.mkdir()
        run = CheckRun(folder, _build_random(self._seed, test.name), self._report_detail)
        began = time.monotonic()
        try:
            test.load()(run)
        except CannotRunError as error:
            case.skipped = str(error)
            return
        except ViolationError as error:
            case.violated = str(error)
        case.figures = [*run.figures, Figure("took", time.monotonic() - began)]
        self._reporter.progress(f"{case.name}: {case.verdict}")

    def _report_detail(self, text: str) -> None:
        self._reporter.progress(f"  {text}")

    def run_layouts(self, cases: Sequence[Case], long: bool) -> None:
        """Run the tests with schedules that fit, layout by layout."""
        for layout in LAYOUTS:
            found = [(c, c.test) for c in cases if c.layout == layout and isinstance(c.test, FaultTest)]
            self._run_layout([(case, test) for case, test in found if test.is_long is long])

    def _run_layout(self, cases: Sequence[tuple[Case, FaultTest]]) -> None:
        """Run the cases of a layout that fit, then the fault-free run, and evaluate them."""
        for case, test in cases:
            case.skipped = self._find_obstacle(case, test)
            if not case.skipped:
                self._run_case(case, test)
        self._compare([(case, test) for case, test in cases if case.trials and test.compares])
        for case in (case for case, _ in cases if case.trials):
            self._reporter.progress(f"{case.name}: {case.verdict}")

    def _exceeds_budget(self, needed_s: float) -> str:
        self.check_stop()
        left_s = self._budget_s - self.elapsed_s
        if needed_s <= left_s:
            return ""
        return f"needs about {needed_s:.0f} s, {max(0.0, left_s):.0f} s of the budget are left"

    def _find_obstacle(self, case: Case, test: FaultTest) -> str:
        """Why a case cannot run; empty if it can."""
        run_s = self._expect_s(test)
        calm_s = self._start_s + max(test.calm_s, run_s - self._start_s) if test.compares else 0.0
        if obstacle := self._exceeds_budget(len(case.schedules) * run_s + calm_s):
            return obstacle
        if any(fault.kind == "slow" for fault in case.schedules[0]):
            built = build_slow_library(self._job.folder)
            return built if isinstance(built, str) else ""
        if not self._shifts_clocks(case.schedules[0]):
            return ""
        if self._clock_library is None:
            self._clock_library = build_clock_library(self._job.folder)
        return self._clock_library if isinstance(self._clock_library, str) else ""

    def _expect_s(self, test: FaultTest) -> float:
        """Expected time of one run of a test."""
        return self._start_s + TYPICAL_STEPS * self._step_s + test.seconds

    @staticmethod
    def _shifts_clocks(schedule: Schedule) -> bool:
        return any(fault.kind == "shift_clock" for fault in schedule)

    def _run_case(self, case: Case, test: FaultTest) -> None:
        for schedule in case.schedules:
            for fault in schedule:
                self._reporter.progress(f"{case.name}: {fault}")
            trial = self._run_trial(case, test, schedule)
            case.trials.append(trial)
            case.figures = worst([*case.figures, *test.evaluate(trial)])
            for injection in trial.injections:
                where = f"rank {injection.fault.rank}" if injection.fault.rank is not None else "rank 0"
                reached = f"{where} was in {injection.phase} of step {injection.step}"
                self._reporter.progress(f"  {injection.fault.kind}: {reached}")
        self._reporter.progress(f"  {', '.join(map(str, case.figures)) or 'no figure'}")

    def _run_trial(self, case: Case, test: FaultTest, schedule: Schedule) -> Trial:
        run_dir = self._new_run_dir(case.name)
        trial = Trial(self._job, run_dir, (*LAYOUTS[case.layout], *test.overrides), schedule)
        if self._shifts_clocks(schedule):
            assert isinstance(self._clock_library, Path), "the case is skipped without it"
            trial.clocks = ShiftedClocks(self._clock_library, run_dir.with_suffix(".clocks"))
        if any(fault.kind == "slow" for fault in schedule):
            library = build_slow_library(self._job.folder)
            assert isinstance(library, Path), "the case is skipped without it"
            trial.slow_work = SlowWork(library, run_dir.with_suffix(".slow"))
        trial.run(test.is_over, LIMIT_FACTOR * self._expect_s(test) + LIMIT_S)
        self._learn(trial)
        trial.check(*([(EXIT_FAILED,)] if test.ends_run else []))
        return trial

    def _compare(self, cases: Sequence[tuple[Case, FaultTest]]) -> None:
        """Run without faults for as many steps, and compare losses and checkpoints."""
        trials = [trial for case, _ in cases for trial in case.trials]
        if not trials:
            return
        layout, steps = cases[0][0].layout, max(trial.view.steps_done for trial in trials)
        calm_s = max(test.calm_s for _, test in cases)
        self._reporter.progress(f"{layout}: {format_plural(steps, 'step')} without faults, to compare with")
        calm = Trial(self._job, self._new_run_dir(f"{layout}-calm"), LAYOUTS[layout])
        expected_s = self._start_s + max(calm_s, steps * self._step_s)
        calm.run(lambda trial: _is_calm_over(trial, steps, calm_s), LIMIT_FACTOR * expected_s + LIMIT_S)
        calm.check()
        for trial in trials:
            trial.violations += [f"fault-free run: {text}" for text in calm.violations]
            trial.violations += compare_runs(
                trial.history.losses, calm.history.losses, trial.checkpoints, calm.checkpoints
            )
        for case, test in cases:
            if test.calm_s:
                case.figures = worst([*case.figures, *_measure_goodput(case, test.calm_s, calm)])

    def _new_run_dir(self, name: str) -> Path:
        self._runs += 1
        return self._job.folder / f"{self._runs:03d}-{name.replace('/', '-')}"

    def _learn(self, trial: Trial) -> None:
        """How long starts and steps take on this machine now."""
        if trial.started_s:
            self._start_s = max(trial.started_s, self._start_s / 2)
        steps = [e["step_s"] for e in trial.view.of("step") if e["rank"] == 0]
        if len(steps) > SETTLE_STEPS:
            self._step_s = sorted(steps)[len(steps) // 2]


def _is_calm_over(trial: Trial, steps: int, seconds: float) -> bool:
    first = trial.view.first_step_at
    return first is not None and trial.view.steps_done >= steps and time.time() >= first + seconds


def _measure_goodput(case: Case, seconds: float, calm: Trial) -> list[Figure]:
    """Steps of each trial as a share of the fault-free ones in the same time."""
    expected = max(1, count_steps(calm, seconds))
    figures = []
    for trial in case.trials:
        steps = count_steps(trial, seconds)
        share, own = 100 * steps / expected, 100 * steps / (seconds * measure_own_rate(trial))
        figures += [
            Figure("of the fault-free steps", share, KILL_LOOP_GOODPUT, "%", at_least=True),
            Figure("of the steps at its own rate", own, None, "%", at_least=True),
        ]
    return figures
