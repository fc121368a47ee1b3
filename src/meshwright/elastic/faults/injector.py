"""Injects a schedule of faults into a run from outside: the ranks contain no test code.

The flight recorder of a rank says in which step and phase the rank is. The injector reads it about a thousand
times per second. When step and phase are reached, it stops the process and reads again. If the rank has left
the phase meanwhile, the process goes on, and the injector waits for the phase of a later step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from meshwright.core.flight_ring import RankProgress
from meshwright.elastic.faults.run_view import RunView
from meshwright.elastic.faults.schedule import Fault
from meshwright.elastic.rank_watch import ProcessStatus

FINE_POLL_S = 0.001
"""Interval of reading a flight recorder while a fault waits for its step."""
STEPS_BETWEEN = 3
"""Steps after a fault until the next one that names a step: more than a run can do without a rank."""
STOPPED_WITHIN_S = 1.0
"""Time for SIGSTOP to take effect."""
PIPELINE_PHASE = "forward and backward"
"""A pipeline runs both in turn and records one phase."""


@dataclass(frozen=True)
class Injection:
    """A fault that was injected."""

    fault: Fault
    time: float
    """Wall-clock time."""
    pid: int
    step: int
    """Where the rank was at the fault."""
    phase: str
    generation: int
    furthest_step: int
    """Steps that the run had done at most."""


@dataclass
class Injector:
    """Injects the faults of a schedule, in order."""

    view: RunView
    schedule: Sequence[Fault]
    actions: dict[str, Callable[[Fault], int]] = field(default_factory=dict)
    """What the faults do that do not concern one rank, by kind; each returns a process."""
    injections: list[Injection] = field(default_factory=list)
    _later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    """What to do at which monotonic time: continue a process, start the command again."""

    @property
    def done(self) -> bool:
        """Whether all faults were injected, and stopped processes continued."""
        return len(self.injections) == len(self.schedule) and not self._later

    def poll(self) -> None:
        """Inject the next fault if its time has come; do what an earlier one has left to do."""
        now = time.monotonic()
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            entry[1]()
        if len(self.injections) < len(self.schedule):
            fault = self.schedule[len(self.injections)]
            if self._is_due(fault) and self._holds(fault):
                self._inject(fault)

    def do_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call something after a while."""
        self._later.append((time.monotonic() + seconds, action))

    def _is_due(self, fault: Fault) -> bool:
        if fault.after_s is not None:
            first = self.view.first_step_at
            if first is None or time.time() < first + fault.after_s:
                return False
        elif self.injections and self.view.steps_done < self.injections[-1].furthest_step + STEPS_BETWEEN:
            return False
        progress = self.view.progress(fault.rank or 0)
        if progress is None or not is_alive(progress.pid):
            return False
        if any(one.fault.kind == "fail" and one.pid == progress.pid for one in self.injections):
            return False  # it was killed, and is about to end
        return progress.step >= (fault.step or 0) and _is_in(progress, fault.during)

    def _holds(self, fault: Fault) -> bool:
        """Stop the rank of a fault with a phase, if it is still there; otherwise let it go on."""
        if fault.during is None or fault.rank is None:
            return True
        pid = self.view.ranks[fault.rank].pid
        send_signal(pid, signal.SIGSTOP)
        deadline = time.monotonic() + STOPPED_WITHIN_S
        while ProcessStatus.read(pid).state not in ("T", "") and time.monotonic() < deadline:
            pass
        if self._is_due(fault):
            return True
        send_signal(pid, signal.SIGCONT)
        return False

    def _inject(self, fault: Fault) -> None:
        now = time.time()
        pid = self._signal(fault) if fault.kind not in self.actions else self.actions[fault.kind](fault)
        progress = self.view.progress(fault.rank or 0)
        where = (progress.step, progress.phase, progress.generation) if progress else (0, "", 0)
        # A rank in a step has done the one before, even if its event has not been read yet.
        furthest = max(self.view.steps_done, where[0] - 1)
        self.injections.append(Injection(fault, now, pid, *where, furthest))

    def _signal(self, fault: Fault) -> int:
        assert fault.rank is not None, "the fault of a rank"
        pid = self.view.ranks[fault.rank].pid
        send_signal(pid, signal.SIGKILL if fault.kind == "fail" else signal.SIGSTOP)
        if fault.for_s is not None:
            self.do_later(fault.for_s, lambda: send_signal(pid, signal.SIGCONT))
        return pid


def send_signal(pid: int, number: int) -> None:
    """Send a signal; a process that is gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_in(progress: RankProgress, during: str | None) -> bool:
    return during in (None, progress.phase) or (
        progress.phase == PIPELINE_PHASE and during in ("forward", "backward")
    )


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    return ProcessStatus.read(pid).state != ""
