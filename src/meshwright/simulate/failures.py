"""The failure model of a run, and the failures of many simulated runs as numpy arrays.

Failures are a Poisson process in wall-clock time at the rate of the complete run. Their times do not depend
on the checkpoint interval, the number of spare nodes or the policy, so all alternatives are compared under
the same failures (common random numbers). What cannot fail at that moment (nodes in repair, software that
does not run) is left out later, by the mark of the failure: ``simulate.downtime``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

KINDS = ("device", "node", "switch", "software", "preemption")
"""What fails. All but software take nodes out of service."""
DEVICE, NODE, SWITCH, SOFTWARE, PREEMPTION = range(len(KINDS))
START = -1
"""The kind of the event that begins a run."""
CHUNK_EVENTS = 500_000
"""Failures that are simulated at once: about 300 MB."""


@dataclass(frozen=True)
class FailureModel:
    """A run that fails: rates, times, spare nodes, and what it does while nodes are missing."""

    wall_s: float
    """Length of each simulated run."""
    nodes: int
    """Nodes of the complete run."""
    rates_per_s: Mapping[str, float]
    """Failures of the complete run by kind."""
    detect_s: float
    restart_s: float
    load_s: float
    """Reading the checkpoint."""
    save_s: float
    """Training that a save costs."""
    interval_s: float
    """Training between the end of a save and the start of the next one."""
    repair_s: float
    """From detection until the node can be used again; the mean if ``repair`` is exponential."""
    spares: int
    """Spare nodes."""
    repair: str = "fixed"
    """Distribution of the repair time: ``fixed`` or ``exponential``."""
    nodes_per_switch: int = 1
    """Nodes that a switch failure takes out of service."""
    snapshot_s: float = 0.0
    """Training between in-memory snapshots; 0: none."""
    snapshot_cost_s: float = 0.0
    """Training that a snapshot costs."""
    snapshot_load_s: float = 0.0
    """Loading the state from a snapshot."""
    replans: bool = False
    """Whether the run goes on with fewer nodes, and grows when nodes are back; else it waits."""
    min_nodes: int = 1
    """Fewest nodes to go on with."""
    nodes_per_replica: int = 1
    """A run with fewer nodes has a multiple of this."""
    throughput: tuple[tuple[int, float], ...] = ()
    """Numbers of nodes that have a layout, ascending, with their share of the complete run's throughput.
    Empty: throughput is proportional to the nodes."""
    notice_s: float = 0.0
    """From the notice of a preemption until the node is gone."""
    replace_s: float = 0.0
    """From a preemption until another node is there; the mean if ``repair`` is exponential."""

    @property
    def rate_per_s(self) -> float:
        """Failures of the complete run, all kinds."""
        return sum(self.rates_per_s.values())

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures; infinite without failures."""
        return 1 / self.rate_per_s if self.rate_per_s else float("inf")

    @property
    def expected(self) -> float:
        """Expected failures of a run."""
        return self.rate_per_s * self.wall_s

    @property
    def most_missing(self) -> int:
        """Nodes that are hardly ever out of service at once: the mean and five standard deviations more."""
        rates = np.array([self.rates_per_s.get(kind, 0.0) for kind in KINDS])
        in_repair = rates * self.out_s  # mean number of failures that are not repaired, by kind
        mean, variance = float(in_repair @ self.taken), float(in_repair @ self.taken**2)
        return math.ceil(mean + 5 * math.sqrt(variance))

    @property
    def saves_in_notice(self) -> bool:
        """Whether a preempted run has time to save."""
        return self.notice_s >= self.save_s

    @property
    def taken(self) -> Ints:
        """Nodes that a failure of each kind takes out of service."""
        taken = np.ones(len(KINDS), dtype=np.int64)
        taken[SOFTWARE], taken[SWITCH] = 0, min(self.nodes_per_switch, self.nodes)
        return taken

    @property
    def out_s(self) -> Floats:
        """Seconds from a failure of each kind until its nodes can be used again; the mean."""
        out_s = np.full(len(KINDS), self.detect_s + self.repair_s)
        out_s[PREEMPTION] = self.replace_s
        return out_s

    def usable(self, in_service: Ints) -> Ints:
        """Nodes that train if so many are in service, spares included; 0: the run waits."""
        if not self.replans:
            return np.where(in_service >= self.nodes, self.nodes, 0)
        each = self.nodes_per_replica
        whole = np.where(in_service >= self.nodes, self.nodes, in_service // each * each)
        return self._fastest[np.where(whole >= min(self.min_nodes, self.nodes), whole, 0)]

    def speed(self, nodes: Ints) -> Floats:
        """Share of the complete run's throughput of numbers of nodes that ``usable`` returns."""
        return self._speeds[nodes]

    @cached_property
    def _fastest(self) -> Ints:
        """By nodes that are there: how many of them train. The others are idle where fewer are faster."""
        fastest = np.arange(self.nodes + 1)
        best = 0.0
        for nodes, share in self.throughput:
            if share > best:
                best = share
                fastest[nodes:] = nodes
        return fastest

    @cached_property
    def _speeds(self) -> Floats:
        """By nodes that train. Fewer than have a layout: in proportion."""
        speeds = np.arange(self.nodes + 1) / self.nodes
        if self.throughput:
            least, share = self.throughput[0]
            speeds[:least] = np.arange(least) / least * share
            for nodes, share in self.throughput:
                speeds[nodes] = share
        return speeds


@dataclass(frozen=True)
class Failures:
    """Events of several runs, one after another; each run begins with its start."""

    runs: int
    run: Ints
    """Index of the run of each event."""
    at_s: Floats
    """Since the start of the run; increases within a run."""
    kind: Ints
    """Index in ``KINDS``, or ``START``."""
    mark: Floats
    """Between 0 and 1: the event happens if a larger share of the nodes can fail."""
    out_s: Floats
    """Seconds until the nodes that it takes are back."""

    @property
    def failures(self) -> int:
        """Number of failures of all runs."""
        return len(self.run) - self.runs


def draw_failures(
    model: FailureModel, runs: int, seed: int, chunk_events: int | None = None
) -> Iterator[Failures]:
    """Draw the failures of the runs, in chunks of bounded memory."""
    chunk = max(1, int((chunk_events or CHUNK_EVENTS) / (model.expected + 1)))
    generator = np.random.default_rng(seed)
    for first in range(0, runs, chunk):
        yield _draw_chunk(model, min(chunk, runs - first), generator)


def _draw_chunk(model: FailureModel, runs: int, generator: np.random.Generator) -> Failures:
    events = generator.poisson(model.expected, runs) + 1
    run = np.repeat(np.arange(runs), events)
    starts = np.cumsum(events) - events
    place = generator.random(len(run))  # given their number, the times of Poisson events are uniform
    place[starts] = 0.0
    place += run
    place.sort()
    at_s = (place - run) * model.wall_s
    rates = np.array([model.rates_per_s.get(kind, 0.0) for kind in KINDS])
    shares = np.cumsum(rates) / max(model.rate_per_s, np.finfo(float).tiny)
    kind = np.minimum(np.searchsorted(shares, generator.random(len(run)), side="right"), len(KINDS) - 1)
    mark = generator.random(len(run))
    out_s = model.out_s[kind]
    if model.repair == "exponential":
        waits = np.where(kind == PREEMPTION, model.replace_s, model.repair_s)
        out_s = out_s + waits * (generator.standard_exponential(len(run)) - 1)
    kind[starts] = START
    return Failures(runs, run, at_s, kind, mark, out_s)
