"""Monte Carlo simulation of failures: many months at once, as numpy arrays.

Failures are a Poisson process in wall-clock time. Their times do not depend on the checkpoint interval or on
the number of spare nodes, so all alternatives are compared under the same failures (common random numbers).

After a failure the run is restored: detection, restart, load of the last checkpoint. A failure before the
load is over starts the restoration again. A failure of a device, node or switch takes one node out of service
for a fixed repair time; the run waits while fewer nodes are left than it needs. A save stops training, and
its checkpoint counts from the end of the save. Nodes that wait can fail, software that does not run cannot.
Idle spare nodes do not fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

KINDS = ("device", "node", "switch", "software")
"""What fails. All but software take a node out of service."""
SOFTWARE = KINDS.index("software")
START = -1
"""The kind of the event that begins a run."""
LOSSES = ("checkpoints", "lost work", "detection and restart", "waiting for nodes")
"""Reasons of lost time."""
CHUNK_EVENTS = 1_000_000
"""Events that are simulated at once: about 200 MB."""


@dataclass(frozen=True)
class FailureModel:
    """A run that fails: rates, times and spare nodes."""

    wall_s: float
    """Length of each simulated run."""
    nodes: int
    """Nodes that the run needs."""
    rates_per_s: Mapping[str, float]
    """Failures of the whole run by kind."""
    detect_s: float
    restart_s: float
    load_s: float
    save_s: float
    """Training that a save costs."""
    interval_s: float
    """Training between the end of a save and the start of the next one."""
    repair_s: float
    """From detection until the node can be used again."""
    spares: int
    """Spare nodes."""

    @property
    def rate_per_s(self) -> float:
        """Failures of the whole run, all kinds."""
        return sum(self.rates_per_s.values())

    @property
    def between_s(self) -> float:
        """Mean time between failures; infinite without failures."""
        return 1 / self.rate_per_s if self.rate_per_s else float("inf")

    @property
    def expected(self) -> float:
        """Expected failures of a run."""
        return self.rate_per_s * self.wall_s


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


def draw_failures(model: FailureModel, runs: int, seed: int) -> Iterator[Failures]:
    """Draw the failures of the runs, in chunks of bounded memory."""
    chunk = max(1, int(CHUNK_EVENTS / (model.expected + 1)))
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
    kind[starts] = START
    return Failures(runs, run, at_s, kind)


@dataclass(frozen=True)
class Downtime:
    """When the runs train, with a number of spare nodes; independent of the checkpoint interval."""

    starts: Ints
    """Position of the first event of each run."""
    train_s: Floats
    """Training after each event, until the next failure or the end of the run."""
    is_last: npt.NDArray[np.bool_]
    """Whether the run ends after the event: no work is lost then."""
    restore_s: Floats
    """Detection, restart and load of each run."""
    wait_s: Floats
    """Each run waits this long for nodes."""
    failures: Ints
    """Of each run."""


def find_downtime(failures: Failures, model: FailureModel, spares: int) -> Downtime:
    """The time that runs train, wait and are restored."""
    complete_s = _complete_at(failures, model, spares)
    kept = (failures.kind != SOFTWARE) | (failures.at_s >= complete_s)
    at_s, kind, complete_s = failures.at_s[kept], failures.kind[kept], complete_s[kept]
    starts = np.flatnonzero(kind == START)
    last = np.append(starts[1:], len(kind)) - 1
    next_s = np.append(at_s[1:], 0.0)
    next_s[last] = model.wall_s
    failed = kind != START
    found_s = at_s + model.detect_s * failed
    nodes_s = np.maximum(found_s, complete_s)
    ready_s = nodes_s + (model.restart_s + model.load_s) * failed
    wait_s = np.maximum(np.minimum(next_s, nodes_s) - found_s, 0.0)
    train_s = np.maximum(next_s - ready_s, 0.0)
    restore_s = next_s - at_s - wait_s - train_s
    is_last = np.zeros(len(kind), dtype=bool)
    is_last[last] = True
    return Downtime(
        starts,
        train_s,
        is_last,
        restore_s=np.add.reduceat(restore_s, starts),
        wait_s=np.add.reduceat(wait_s, starts),
        failures=last - starts,
    )


def _complete_at(failures: Failures, model: FailureModel, spares: int) -> Floats:
    """For each event, when the run has as many nodes as it needs; 0 if nothing is missing.

    Repairs take a fixed time, so nodes come back in the order in which they failed: with S spares the run is
    complete again when the node that failed S failures before the last one is back.
    """
    takes_node = (failures.kind != START) & (failures.kind != SOFTWARE)
    position = np.flatnonzero(takes_node)
    if not len(position):
        return np.zeros(len(failures.run))
    run = failures.run[position]
    first = np.searchsorted(run, np.arange(failures.runs))  # of each run, among the failures that take a node
    number = np.arange(len(position)) - first[run]
    back_s = failures.at_s[position] + model.detect_s + model.repair_s
    complete_s = np.where(number >= spares, back_s[np.maximum(np.arange(len(position)) - spares, 0)], 0.0)
    newest = np.cumsum(takes_node) - 1
    has_one = newest >= first[failures.run]
    return np.where(has_one, complete_s[np.maximum(newest, 0)], 0.0)


@dataclass(frozen=True)
class Outcomes:
    """Each run: useful share of the time, interruptions, and seconds lost by reason."""

    goodput: Floats
    interruptions: Ints
    lost_s: dict[str, Floats]
    """By ``LOSSES``."""


def evaluate(downtime: Downtime, model: FailureModel, interval_s: float) -> Outcomes:
    """What the runs achieve with a checkpoint interval."""
    trained = downtime.train_s
    saves = np.floor(trained / (interval_s + model.save_s))
    rest = trained - saves * (interval_s + model.save_s)
    unsaved = np.minimum(rest, interval_s)
    lost = np.where(downtime.is_last, 0.0, unsaved)
    useful = saves * interval_s + (unsaved - lost)
    saving = saves * model.save_s + (rest - unsaved)
    useful_s, lost_s, saving_s = (np.add.reduceat(x, downtime.starts) for x in (useful, lost, saving))
    losses = (saving_s, lost_s, downtime.restore_s, downtime.wait_s)
    return Outcomes(useful_s / model.wall_s, downtime.failures, dict(zip(LOSSES, losses, strict=True)))


def simulate(model: FailureModel, runs: int, seed: int) -> Outcomes:
    """Simulate many runs of a model."""
    found = [
        evaluate(find_downtime(failures, model, model.spares), model, model.interval_s)
        for failures in draw_failures(model, runs, seed)
    ]
    return Outcomes(
        np.concatenate([one.goodput for one in found]),
        np.concatenate([one.interruptions for one in found]),
        {reason: np.concatenate([one.lost_s[reason] for one in found]) for reason in LOSSES},
    )
