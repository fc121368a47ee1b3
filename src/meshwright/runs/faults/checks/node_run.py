"""A run of the tiny job on three nodes, as network namespaces, for the tests of the network."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.elastic.faults.invariants import check_checkpoints, compare_runs, read_history
from meshwright.runs.faults.checks.check import CheckRun, require
from meshwright.runs.faults.checks.network_nodes import PORT, Nodes, require_namespaces, wait_until
from meshwright.runs.faults.checks.running_command import Command, commands, read_events
from meshwright.runs.faults.checks.tcp_proxy import TcpProxy
from meshwright.runs.faults.job import TinyJob

NODES = 3
BATCH = 12
OVERRIDES = (f"layout.dp_replicate={NODES}", f"train.global_batch={BATCH}", "cluster.devices_per_node=1")
SAME_SUMS = "train.transport=gloo"
"""Between nodes gloo sums; ranks of one machine would use shared memory, and sum in another order."""
COMMITS = ("step", "checkpoint", "eval")
SETTLE_STEPS = 25
STARTS_WITHIN_S, GOES_ON_WITHIN_S = 180.0, 120.0
"""Only broken runs take so long."""


@dataclass
class NodeRun:
    """A run whose network is disturbed, and what must hold."""

    check: CheckRun
    job: Path
    nodes: Nodes
    running: Command
    overrides: tuple[str, ...] = ()
    proxy: TcpProxy | None = None
    """Between the agents and the supervisor."""

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events with a name."""
        return [event for event in self.nodes.events() if event["event"] == name]

    def steps_done(self) -> int:
        """The furthest step."""
        return max((event["step"] for event in self.events("step")), default=0)

    def wait_for_step(self, step: int, limit_s: float = GOES_ON_WITHIN_S) -> None:
        """Wait until the run has done a step."""
        self.wait(lambda: self.steps_done() >= step, limit_s, f"step {step} was not done")

    def wait(self, holds: Callable[[], object], limit_s: float, what: str) -> None:
        """Wait for a condition; the run must not end before."""

        def holds_or_ended() -> object:
            if self.running.process.poll() is not None:
                require(False, f"the run ended: {self.running.process.communicate()[1]}")
            return holds()

        wait_until(holds_or_ended, limit_s, what)

    def wait_for_generation(self, generation: int, limit_s: float = GOES_ON_WITHIN_S) -> dict[str, Any]:
        """The first step of a generation."""

        def find() -> list[dict[str, Any]]:
            return [e for e in self.events("step") if e["generation"] >= generation]

        self.wait(find, limit_s, f"generation {generation} made no step")
        return find()[0]

    def commits_between(self, begin: float, end: float, node: int | None = None) -> list[dict[str, Any]]:
        """Commits of ranks in a time, by their own clocks; for one node also those that only it has."""
        events = self.nodes.events()
        if node:
            own = self.nodes.folder / f"node-{node}" / "node-runs" / f"run-node-{node}"
            events = read_events(own)
        return [e for e in events if e["event"] in COMMITS and begin < e["time"] < end]

    def finish(self) -> None:
        """Stop the run, and check its invariants and that it equals a run without faults on one machine."""
        self.wait_for_step(self.steps_done() + SETTLE_STEPS)
        self.running.process.send_signal(signal.SIGTERM)
        status, out, err = self.running.finish(GOES_ON_WITHIN_S)
        require(status == 0, f"status {status}: {err}")
        result = json.loads(out)
        require(result["audit_ok"], f"the audit differs: {result['differences']}")
        if self.proxy is not None:
            self.proxy.close()
        self.nodes.require_empty(30)
        history = read_history(self.nodes.events())
        checkpoints = self.nodes.run_dir / "checkpoints"
        found = [*history.violations, *check_checkpoints(checkpoints, BATCH)]
        require(not found, "; ".join(found))
        calm = self.check.folder / "calm"
        with commands(self.check.folder) as start:
            steps = f"train.steps={max(history.losses) + 1}"
            alone = (f"cluster.devices_per_node={NODES}", steps, f"run_dir={calm}", SAME_SUMS)
            more = [text for text in self.overrides if not text.startswith("cluster.")]
            status, _, err = start("train", self.job, *OVERRIDES[:2], *more, *alone).finish(600)
        require(status == 0, f"the undisturbed run failed: {err}")
        expected = read_history(read_events(calm))
        different = compare_runs(history.losses, expected.losses, checkpoints, calm / "checkpoints")
        require(not different, "; ".join(different))


@contextlib.contextmanager
def started(
    check: CheckRun,
    more: int = 0,
    overrides: tuple[str, ...] = (),
    slow: bool = False,
    via_proxy: bool = False,
) -> Iterator[NodeRun]:
    """Start a run on three nodes and wait until it trains.

    Args:
        check: Of the test.
        more: Further nodes, for spares.
        overrides: Overrides of the job.
        slow: Whether the network can be delayed.
        via_proxy: Whether the agents join through a proxy on one more node.
    """
    require_namespaces()
    job = TinyJob.write(check.folder).file
    last = NODES + more
    nodes, proxy = Nodes(last + via_proxy, check.folder), None
    try:
        nodes.create(slow)
        if via_proxy:
            inside = ("ip", "netns", "exec", nodes.names[last])
            proxy = TcpProxy.start(inside, nodes.address(last), PORT, nodes.address(0))
        running = nodes.train(job, *OVERRIDES, f"cluster.nodes={NODES}", *overrides)
        for node in range(1, NODES):
            nodes.join(node, via=last if via_proxy else 0)
        run = NodeRun(check, job, nodes, running, overrides, proxy)
        run.wait(lambda: run.steps_done() >= 3, STARTS_WITHIN_S, "no step was done")
        yield run
    finally:
        if proxy is not None:
            proxy.close()
        nodes.remove()


def now() -> float:
    """The time of events."""
    return time.time()
