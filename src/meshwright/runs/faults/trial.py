"""One run of the tiny job under a schedule of faults: the command is a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.elastic.faults.clock import ShiftedClocks
from meshwright.elastic.faults.hostile import Attack, attack
from meshwright.elastic.faults.injector import FINE_POLL_S, Injection, Injector, is_alive, send_signal
from meshwright.elastic.faults.invariants import History, check_checkpoints, read_history
from meshwright.elastic.faults.run_view import RunView
from meshwright.elastic.faults.schedule import FAULT_VARIABLE, INSIDE, Fault
from meshwright.elastic.faults.slow_work import SlowWork
from meshwright.launch.agent_file import AgentFile
from meshwright.runs.faults.job import GLOBAL_BATCH, TinyJob

TRAIN = ("-m", "meshwright", "train", "--json")
FAULTY_TRAIN = ("-m", "meshwright.runs.faults.faulty_train")
EVENTS_POLL_S = 0.01
AFTER_ATTACK_S = 2.0
"""When the memory and the files of the processes are read again."""
SETTLE_STEPS = 25
"""New steps after the last fault: at least one checkpoint is among them."""
EXIT_OK, EXIT_FAILED = 0, 4
ENDS_WITHIN_S = 30.0
"""Time for processes to end after they were told to; only broken ones need it."""


@dataclass
class Trial:
    """A run under faults, and what was observed."""

    job: TinyJob
    run_dir: Path
    layout: Sequence[str]
    """Overrides."""
    schedule: Sequence[Fault] = ()
    clocks: ShiftedClocks | None = None
    """Needed to shift clocks."""
    slow_work: SlowWork | None = None
    """Needed to slow down ranks."""
    violations: list[str] = field(default_factory=list)
    status: int | None = None
    """Exit status of the command."""
    started_s: float = 0.0
    """From the start of the command to the first step."""
    seconds: float = 0.0
    """Seconds of the whole trial."""
    ended_at: float = 0.0
    """Wall-clock time of its end."""
    alive_at_end: set[int] = field(default_factory=set)
    """Processes with an injected fault that lived when the trial was over."""
    preemptions: list[tuple[int, float]] = field(default_factory=list)
    """Exit status of each command that got SIGTERM from a fault, and the seconds until it ended."""
    attack: Attack | None = None
    """The hostile connections, if the schedule has them."""
    rss_growth_mb: float = 0.0
    own_file_growth: int = 0
    """Growth of the command and the agent."""
    rank_file_growth: int = 0
    """Growth of the rank that grew most; gloo keeps the sockets of connections that sent invalid data."""

    def __post_init__(self) -> None:
        self.view = RunView(self.run_dir)
        from_outside = [fault for fault in self.schedule if fault.kind not in INSIDE]
        self.injector = Injector(self.view, from_outside)
        self._inside = [fault for fault in self.schedule if fault.kind in INSIDE]
        self._ends = any(fault.kind == "wrong_collective" for fault in self._inside)
        self.injector.actions |= {
            "kill_supervisor": self._kill_supervisor,
            "stop_supervisor": self._stop_supervisor,
            "preempt": self._preempt,
            "shift_clock": self._shift_clock,
            "connect": self._connect,
            "slow": self._slow,
        }
        self.history = History({}, ())
        self._commands: list[subprocess.Popen[bytes]] = []

    @property
    def injections(self) -> list[Injection]:
        """The faults that were injected, in order."""
        return self.injector.injections

    @property
    def command(self) -> subprocess.Popen[bytes]:
        """The newest command."""
        return self._commands[-1]

    @property
    def output(self) -> Path:
        """Standard output of the newest command."""
        return self.run_dir.with_suffix(f".out{len(self._commands)}")

    def run(self, is_over: Callable[[Trial], bool], limit_s: float) -> None:
        """Start the command, inject the faults, and stop it when the trial is over or the time is up."""
        began = time.monotonic()
        with self._ended_at_exit():
            self._start()
            while True:
                self._poll()
                if self.command.poll() is not None and not self._is_restarted():
                    if not self._ends:
                        self.violations.append(
                            f"the command ended early with status {self.command.returncode}{self._error()}"
                        )
                    break
                if not self.started_s and self.view.first_step_at is not None:
                    self.started_s = time.monotonic() - began
                if is_over(self):
                    self.alive_at_end = {one.pid for one in self.injections if is_alive(one.pid)}
                    self._stop()
                    break
                if time.monotonic() - began > limit_s:
                    self.violations.append(f"no end within {limit_s:.0f} s: {self._describe_state()}")
                    break
            self.status, self.ended_at = self.command.poll(), time.time()
        self.seconds = time.monotonic() - began

    def _poll(self) -> None:
        """Read the events every 10 ms, and the flight recorder of the next fault's rank in between."""
        self.view.poll()
        until = time.monotonic() + EVENTS_POLL_S
        while time.monotonic() < until:
            self.injector.poll()
            time.sleep(EVENTS_POLL_S if self.injector.done else FINE_POLL_S)

    def check(self, statuses: Sequence[int] = (EXIT_OK,)) -> None:
        """Check the invariants of the run."""
        self.history = read_history(self.view.events)
        self.violations += self.history.violations
        if self.status is not None and self.status not in statuses:
            self.violations.append(f"the command ended with status {self.status}{self._error()}")
        self.violations += check_checkpoints(self.checkpoints, GLOBAL_BATCH)
        deadline = time.monotonic() + ENDS_WITHIN_S
        while (left := sorted(filter(is_alive, self._list_pids()))) and time.monotonic() < deadline:
            time.sleep(EVENTS_POLL_S)
        if left:
            self.violations.append(f"processes {left} are left behind")
        for fault in self.injector.schedule[len(self.injections) :]:
            self.violations.append(f"not injected: {fault}")

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.run_dir / "checkpoints"

    def new_steps(self) -> int:
        """Steps beyond those that were done when the last fault was injected."""
        last = max((one.furthest_step for one in self.injections), default=0)
        return self.view.steps_done - last

    def errors(self) -> list[dict[str, Any]]:
        """The problems that the command printed as JSON."""
        try:
            return list(json.loads(self.output.read_bytes() or b"{}").get("errors", []))
        except (OSError, ValueError):
            return []

    def _start(self, *more: str) -> None:
        command = FAULTY_TRAIN if self._inside else TRAIN
        environment = {FAULT_VARIABLE: "\n".join(map(str, self._inside))} if self._inside else {}
        environment |= self.clocks.environment if self.clocks is not None else {}
        environment |= self.slow_work.environment if self.slow_work is not None else {}
        number = len(self._commands) + 1
        output, log = (self.run_dir.with_suffix(f".{kind}{number}").open("wb") for kind in ("out", "err"))
        with output, log:
            self._commands.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        *command,
                        str(self.job.file),
                        *self.layout,
                        f"run_dir={self.run_dir}",
                        *more,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                    start_new_session=True,
                )
            )

    def _is_restarted(self) -> bool:
        """Whether the command was ended by a fault and is about to be started again."""
        return any(
            one.pid == self.command.pid
            for one in self.injections
            if one.fault.kind in ("kill_supervisor", "preempt")
        )

    def _kill_supervisor(self, fault: Fault) -> int:
        assert fault.restart_after_s is not None, "an argument of the fault"
        command = self.command
        command.kill()
        command.wait()
        self.injector.do_later(fault.restart_after_s, lambda: self._start("--resume"))
        return command.pid

    def _stop_supervisor(self, fault: Fault) -> int:
        assert fault.for_s is not None, "an argument of the fault"
        command = self.command
        command.send_signal(signal.SIGSTOP)
        self.injector.do_later(fault.for_s, lambda: command.send_signal(signal.SIGCONT))
        return command.pid

    def _preempt(self, fault: Fault) -> int:
        assert fault.grace_s is not None, "an argument of the fault"
        command, began = self.command, time.monotonic()
        command.send_signal(signal.SIGTERM)

        def resume_when_ended() -> None:
            ended, passed_s = command.poll() is not None, time.monotonic() - began
            if not ended and passed_s < (fault.grace_s or 0.0):
                self.injector.do_later(EVENTS_POLL_S, resume_when_ended)
                return
            if not ended:
                command.kill()
            self.preemptions.append((command.wait(), passed_s))
            self._start("--resume")

        self.injector.do_later(EVENTS_POLL_S, resume_when_ended)
        return command.pid

    def _shift_clock(self, fault: Fault) -> int:
        assert fault.rank is not None, "an argument of the fault"
        assert fault.by_s is not None, "an argument of the fault"
        assert self.clocks is not None, "given with a schedule that shifts clocks"
        pid = self.view.ranks[fault.rank].pid
        self.clocks.shift(pid, fault.by_s)
        return pid

    def _connect(self, fault: Fault) -> int:
        assert fault.connections is not None, "an argument of the fault"
        file = AgentFile.read(self.run_dir)
        pids = [self.command.pid, *sorted(self._list_pids())]
        self.attack = attack(pids, None if file is None else file.path, fault.connections, fault.connections)
        self.injector.do_later(AFTER_ATTACK_S, self._measure_attack)
        return self.command.pid

    def _slow(self, fault: Fault) -> int:
        assert fault.rank is not None, "an argument of the fault"
        assert self.slow_work is not None, "given with a schedule that slows down ranks"
        slow_work, pid = self.slow_work, self.view.ranks[fault.rank].pid
        slow_work.slow(pid, fault.factor or 1.0)
        self.injector.do_later(fault.for_s or 0.0, lambda: slow_work.slow(pid, 1.0))
        return pid

    def _measure_attack(self) -> None:
        assert self.attack is not None, "measured after it"
        ranks = [process.pid for process in self.view.ranks.values()]
        own = [pid for pid in self.attack.before if pid not in ranks]
        self.rss_growth_mb = self.attack.rss_growth_mb()
        self.own_file_growth = self.attack.file_growth(own)
        self.rank_file_growth = self.attack.file_growth(ranks)

    def _stop(self) -> None:
        """Let the run save and stop."""
        self.command.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + ENDS_WITHIN_S
        while self.command.poll() is None and time.monotonic() < deadline:
            self.view.poll()
            time.sleep(EVENTS_POLL_S)
        if self.command.poll() is None:
            self.violations.append(f"the run did not stop within {ENDS_WITHIN_S:.0f} s of SIGTERM")

    @contextmanager
    def _ended_at_exit(self) -> Iterator[None]:
        """Kill what is left of the run at the end: only processes of this trial."""
        try:
            yield
        except BaseException:
            self._kill_all()
            raise
        if self.command.poll() is None:
            self._kill_all()
        self.view.poll()

    def _kill_all(self) -> None:
        self.view.poll()
        for command in self._commands:
            command.kill()
            command.wait()
        for pid in self._list_pids():
            send_signal(pid, signal.SIGKILL)

    def _list_pids(self) -> set[int]:
        """Agent and ranks."""
        file = AgentFile.read(self.run_dir)
        return {e["pid"] for e in self.view.of("started")} | ({file.pid} if file is not None else set())

    def _error(self) -> str:
        """The last output of the command, as the end of a sentence."""
        found = [str(error["message"]) for error in self.errors()]
        with contextlib.suppress(OSError):
            log = self.run_dir.with_suffix(f".err{len(self._commands)}")
            found += log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
        return f": {found[0]}" if found else ""

    def _describe_state(self) -> str:
        return f"{self.view.steps_done} steps done, {len(self.injections)} faults injected"
