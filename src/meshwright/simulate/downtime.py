"""When simulated runs train, wait and are restored, with a number of spare nodes.

A failure takes nodes out of service until they are repaired. The run trains on the nodes that are left, if
its policy allows that, or waits. The time of a run is divided into segments. A segment begins with a failure,
or when a node is back and the run can use it. Then come detection (or, before a planned change, a save), the
restart, the load, and training until the next segment.

- A failure before the load is over starts the restoration again.
- Nodes that wait can fail, software that does not run cannot. Idle spare nodes do not fail.
- While nodes are missing beyond the spares, fewer nodes can fail: each drawn failure has a mark between 0 and
  1, and happens if the share of nodes that can fail is larger (thinning of the Poisson process).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.simulate.failures import (
    DEVICE,
    KINDS,
    PREEMPTION,
    SOFTWARE,
    START,
    FailureModel,
    Failures,
    Flags,
    Floats,
    Ints,
)

GROW = -2
"""The kind of a segment that begins because a node is back."""
SAVED, SNAPSHOT, CHECKPOINT = 0, 1, 2
"""From where a run goes on: nothing is lost, the last snapshot, the last checkpoint."""


@dataclass(frozen=True)
class Downtime:
    """Segments of several runs, one after another; independent of the checkpoint interval."""

    starts: Ints
    """Position of the first segment of each run."""
    train_s: Floats
    """Training in each segment."""
    speed: Floats
    """Share of the complete run's throughput."""
    begins: Ints
    """``SAVED``, ``SNAPSHOT`` or ``CHECKPOINT``: from where the segment goes on."""
    ends: Ints
    """The same for the next segment; the end of a run loses nothing."""
    restore_s: Floats
    """Detection, restart and load of each run."""
    wait_s: Floats
    """Each run waits this long for nodes."""
    failures: Ints
    """Failures of each run."""


@dataclass(frozen=True)
class Events:
    """Failures and returns of nodes in order of time, run by run; independent of spares and policy."""

    failures: Failures
    source: Ints
    """The failure, as an index."""
    is_back: Flags
    at_s: Floats
    run: Ints
    first: Ints
    """Position of the first event of each run."""

    @classmethod
    def of(cls, failures: Failures, model: FailureModel) -> Events:
        """The failures of some runs, and when their nodes are back."""
        taken = model.taken[failures.kind] * (failures.kind != START)
        back_s = failures.at_s + failures.out_s
        returns = np.flatnonzero((taken > 0) & (back_s < model.wall_s))
        source = np.concatenate((np.arange(len(failures.run)), returns))
        at_s = np.concatenate((failures.at_s, back_s[returns]))
        is_back = np.zeros(len(source), dtype=bool)
        is_back[len(failures.run) :] = True
        run = failures.run[source]
        order = np.argsort(run + at_s / model.wall_s, kind="stable")  # a start stays the first of its run
        source, run = source[order], run[order]
        first = np.searchsorted(run, np.arange(failures.runs))
        return cls(failures, source, is_back[order], at_s[order], run, first)


def find_downtime(events: Events, model: FailureModel, spares: int) -> Downtime:
    """The time that runs train, wait and are restored."""
    happens, before, after = _thin(events, model, spares)
    kind = np.where(events.is_back, GROW, events.failures.kind[events.source])
    kept = happens[events.source] & (~events.is_back | (after > before))
    return _divide(model, kind[kept], events.at_s[kept], after[kept])


def _thin(events: Events, model: FailureModel, spares: int) -> tuple[Flags, Ints, Ints]:
    """Flags of the failures that happen, and the nodes that train before and after each event.

    Whether a failure happens depends on earlier ones only. So repeating the pass until nothing changes gives
    the one solution; one or two passes are enough where nodes are rarely missing.
    """
    failures = events.failures
    taken = model.taken[failures.kind] * (failures.kind != START)
    change = taken[events.source] * np.where(events.is_back, 1, -1)
    is_failure = ~events.is_back
    source = events.source[is_failure]
    is_software, least = failures.kind[source] == SOFTWARE, failures.mark[source] * model.nodes
    happens = np.ones(len(failures.run), dtype=bool)
    starts = failures.kind == START
    while True:
        moved = np.where(happens[events.source], change, 0)
        total = np.cumsum(moved)
        in_service = model.nodes + spares + total - total[events.first][events.run]
        earlier = in_service - moved
        before, after = model.usable(earlier), model.usable(in_service)
        can_fail = np.where(is_software, before[is_failure], np.minimum(earlier[is_failure], model.nodes))
        found = starts.copy()
        found[source] |= least < can_fail
        if np.array_equal(found, happens):
            return happens, before, after
        happens = found


def _divide(model: FailureModel, kind: Ints, at_s: Floats, nodes: Ints) -> Downtime:
    """Segments: their training, the time before it, and what was lost.

    Args:
        model: Times.
        kind: What each segment begins with.
        at_s: When it begins.
        nodes: Nodes that train in it; 0: the run waits.
    """
    starts = np.flatnonzero(kind == START)
    last = np.append(starts[1:], len(kind)) - 1
    next_s = np.append(at_s[1:], 0.0)
    next_s[last] = model.wall_s
    grows = kind == GROW
    failure = np.maximum.accumulate(np.where(grows, 0, np.arange(len(kind))))  # the last one
    # A planned change (a node is back, a preemption with notice) saves first if the run is up.
    was_up = np.append(False, nodes[:-1] > 0) & (kind != START)
    begins = _resume_from(model, kind)
    begins = np.where(grows & ~was_up, begins[failure], begins)
    delay_s = np.where(kind == START, 0.0, model.detect_s)
    delay_s = np.where((kind == PREEMPTION) & (begins == SAVED), model.save_s, delay_s)
    found_s = at_s + np.where(grows, 0.0, delay_s)
    found_s = np.maximum(found_s, found_s[failure])  # a node may be back before a failure is detected
    load_s = np.where(begins == SNAPSHOT, model.snapshot_load_s, model.load_s)
    restore_s = np.where(kind == START, 0.0, model.restart_s + load_s)
    ready_s = found_s + restore_s + np.where(grows & was_up, model.save_s, 0.0)
    trains = nodes > 0
    train_s = np.where(trains, np.maximum(next_s - ready_s, 0.0), 0.0)
    wait_s = np.where(trains, 0.0, np.maximum(next_s - found_s, 0.0))
    ends = np.append(begins[1:], SAVED)
    ends[last] = SAVED
    rest_s = next_s - at_s - wait_s - train_s
    return Downtime(
        starts,
        train_s,
        model.speed(nodes),
        begins,
        ends,
        restore_s=np.add.reduceat(rest_s, starts),
        wait_s=np.add.reduceat(wait_s, starts),
        failures=np.add.reduceat((kind >= 0).astype(np.int64), starts),
    )


def loses_checkpoint(model: FailureModel, kind: str) -> bool:
    """Whether a failure of a kind goes back to a checkpoint."""
    return bool(_resume_from(model, np.array([KINDS.index(kind)]))[0] == CHECKPOINT)


def _resume_from(model: FailureModel, kind: Ints) -> Ints:
    """From where a segment goes on: failures of nodes and switches lose the snapshots."""
    found = np.full(len(kind), CHECKPOINT)
    if model.snapshot_s:
        found[(kind == DEVICE) | (kind == SOFTWARE)] = SNAPSHOT
    if model.saves_in_notice:
        found[kind == PREEMPTION] = SAVED
    found[(kind == START) | (kind == GROW)] = SAVED
    return found
