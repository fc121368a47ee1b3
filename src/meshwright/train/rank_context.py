"""What the launcher passes to a rank: plan, mesh, reporting, and what it starts from."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch.distributed as dist

from meshwright.checkpoint.retired_snapshots import RetiredSnapshots
from meshwright.core.events import Commit, EventWriter
from meshwright.launch.assignment import Assignment
from meshwright.launch.snapshot_slots import SnapshotSlots
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.mesh import Mesh
from meshwright.plan.contract import PlanContract
from meshwright.train.setup_times import SetupTimes


@dataclass(frozen=True)
class RankContext:
    """Plan and mesh of a rank, where it reports, and what it starts from."""

    plan: PlanContract
    assignment: Assignment
    mesh: Mesh
    counter: CollectiveCounter
    events: EventWriter
    snapshot_slots: SnapshotSlots | None = None
    """Where this rank keeps in-memory snapshots."""
    restore_step: int | None = None
    """The step of the in-memory snapshot to start from."""
    setup: SetupTimes = field(default_factory=SetupTimes)
    """Times of the parts of the start-up."""
    commit: Commit = nullcontext
    """Context manager around each commit; raises FencedError if another process has this rank."""
    min_position: int = 0
    """Position in the data to continue from after a rollback; earlier samples are skipped."""
    retired: RetiredSnapshots | None = None
    """Snapshots of another layout to start from."""
    store: dist.Store | None = None
    """Small values that all ranks of the generation see; None for one process."""
