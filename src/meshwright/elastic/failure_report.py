"""Reports on a failed rank, for users and for the policy: the messages of a run that ends or regroups.

Pure functions of the supervisor's view: no connection, no clock.
"""

from __future__ import annotations

import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.core.errors import Problem
from meshwright.core.units import format_plural
from meshwright.elastic.hang import WRONG_CALLS, Verdict
from meshwright.elastic.policy import Failure
from meshwright.elastic.rank_view import RankView
from meshwright.launch.channel import Message

NODE_LOST = "NodeLost"
"""Kind of the failure of ranks whose agent is gone."""
SIGNAL_HINTS: dict[int, str] = {
    signal.SIGILL: "A kernel used an instruction that this machine advertises but does not have (AMX on "
    "virtual machines): set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or train.precision=fp32. ",
}
"""Hints for signals with a known cause."""


def report_lost_node(name: str) -> Message:
    """The failure of a rank whose agent is gone, in the form in which ranks report theirs.

    Args:
        name: Name of the node, with its host.
    """
    text = f"the agent of {name} is gone"
    return {"kind": NODE_LOST, "message": text, "problems": [], "peer_lost": False}


def describe_missing_nodes(joined: int, nodes: int, limit_s: float, refused: int) -> Problem:
    """The error of a run whose nodes did not all join at its start.

    Args:
        joined: Nodes that did.
        nodes: Nodes of the run.
        limit_s: How long it waited.
        refused: Connections that did not prove the token.
    """
    rule = f"{joined} of {nodes} nodes joined within elastic.join_timeout_s={limit_s:g}"
    if refused:
        rule += f"; {format_plural(refused, 'connection')} did not prove the token"
    fix = "Run meshwright agent on the other nodes, and check address, firewall and token file"
    return Problem("run-nodes-missing", rule, fix=fix)


def describe_hang(found: Verdict, logs: Path, saved: bool) -> Problem:
    """The error of a run that hangs.

    Args:
        found: What it waits for.
        logs: Folder with the output of the ranks.
        saved: Whether there is a checkpoint.
    """
    rule = f"The run on {socket.gethostname()} hangs: {found.verdict}"
    fix = f"The output of the ranks is in {logs}; {_describe_resume(saved)}"
    return Problem("run-hang", rule, fix=fix)


def report_wrong_call(found: Verdict, logs: Path, saved: bool) -> Message:
    """The failure of a rank whose call differs from those of the others, as ranks report theirs."""
    problems = [describe_hang(found, logs, saved).as_dict()]
    return {"kind": "Hang", "message": found.verdict, "problems": problems, "peer_lost": False}


def _describe_resume(saved: bool) -> str:
    if saved:
        return "resume the run to continue from the last checkpoint"
    return "there is no checkpoint yet; set checkpoint.every_steps to save them"


@dataclass(frozen=True)
class FailureReport:
    """The failure of one rank, for the policy, for events and as the error of the run."""

    rank: RankView
    hang: Verdict | None
    """The last hang of the generation."""
    world_size: int
    furthest_step: int
    """Steps that the run had done at most."""
    node: int
    """Node of the rank; 0 is the machine of the supervisor."""
    host: str
    log: Path
    """File with the output of the rank."""
    saved: bool
    """Whether there is a checkpoint."""
    reason: str = ""
    """Why the run does not go on, if it ends."""

    @property
    def is_hang(self) -> bool:
        """Whether the process was fenced or killed because it did not answer."""
        taken = self.rank.fenced or self.rank.exit_status == -signal.SIGKILL
        return taken and self.hang is not None and self.hang.ends_run and self.hang.rank == self.rank.rank

    @property
    def _lost_node(self) -> bool:
        return self.rank.failure is not None and self.rank.failure["kind"] == NODE_LOST

    @property
    def _is_rollback(self) -> bool:
        """Whether a bad step asks for a rollback."""
        return (self.rank.failure or {}).get("rollback_position") is not None

    def how(self) -> str:
        """How the rank failed, in a few words."""
        status, report = self.rank.exit_status, self.rank.failure
        if self.hang is not None and self.is_hang:
            then = "fenced" if self.rank.fenced else "killed"
            return f"{self.hang.cause} for {self.hang.since_s:.1f} s, then {then}"
        if report is not None and self._lost_node:
            return str(report["message"])
        if report is not None and self._is_rollback:
            problem = report["problems"][0]
            return f"{problem['path']} {problem['rule'].partition(';')[0]}"
        if report is not None:
            first_line = report["message"].partition("\n")[0]
            what = f"{report['kind']}: {first_line}" if first_line else report["kind"]
            return what if status is None else f"exit status {status}: {what}"
        if status is None:
            return "fenced"
        if self.rank.replaced and status == -signal.SIGKILL:
            return "a straggler, replaced"
        return f"killed by {_name_signal(-status)}" if status < 0 else f"exit status {status}"

    def classify(self) -> Failure:
        """The failure, for the policy."""
        rank, step, report = self.rank.rank, self.furthest_step, self.rank.failure
        if self.hang is not None and self.hang.cause in WRONG_CALLS:
            return Failure(rank, "raised", self.hang.verdict, step, refused=True)
        if report is None:
            kind: Literal["exited", "silent"] = "silent" if self.is_hang else "exited"
            return Failure(rank, kind, self.how(), step)
        if self._lost_node:
            return Failure(rank, "node" if self.node else "exited", report["message"], step)
        message, rollback = f"{report['kind']}: {report['message']}", self._is_rollback
        refused = bool(report["problems"]) and not rollback
        return Failure(rank, "raised", message, step, refused, rollback)

    def problem(self, now: float) -> Problem:
        """The error of the run, if this failure ends it.

        Args:
            now: The wall-clock time, as events have it.
        """
        report = self.rank.failure
        if report is not None and report["problems"]:
            return Problem.from_dict(report["problems"][0])
        if self.hang is not None and self.is_hang:
            return describe_hang(self.hang, self.log.parent, self.saved)
        resume = _describe_resume(self.saved)
        if report is not None and self._lost_node:
            fix = f"See the output of its command and its logs; {resume}"
            return Problem("run-node-lost", f"{report['message']}; {self.reason}", fix=fix)
        where = f"rank {self.rank.rank} of {self.world_size} on {self.host}"
        rule = f"{where} died ({self.how()}); {self._describe_last_event(now)}"
        return Problem("run-rank-died", rule, fix=f"{self._hint()}Its output is in {self.log}; {resume}")

    def _describe_last_event(self, now: float) -> str:
        last = self.rank.last_event
        step = f" of step {last['step']}" if "step" in last else ""
        age = f", {now - last['time']:.1f} s ago" if last else ""
        seen = f"its last event was {last['event']!r}{step}{age}" if last else "it sent no event"
        if self.hang is not None and self.hang.step >= self.furthest_step:  # it did not resolve itself
            seen += f"; {self.hang.verdict}"
        return seen

    def _hint(self) -> str:
        return SIGNAL_HINTS.get(-(self.rank.exit_status or 0), "")


def _name_signal(number: int) -> str:
    """The name of a signal; most of the real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
