"""Layout changes of a run: writes the files of the next layout, and finds the state that it loads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from meshwright.checkpoint.manifest import parse_name
from meshwright.checkpoint.stores import CheckpointStores
from meshwright.core.events import EVENTS_FILE, Event, EventWriter
from meshwright.elastic.devices import DevicePool
from meshwright.elastic.layout_change import (
    EarlierLayout,
    LayoutChange,
    LayoutChoice,
    Snapshots,
    StateSource,
    newest_covering_step,
)
from meshwright.launch.assignment import ASSIGNMENT_FILE, Assignment
from meshwright.launch.placement import Placement
from meshwright.layout.snapshot_tensors import covers_state
from meshwright.plan.contract import (
    PLAN_FILE,
    PlanContract,
    keep_earlier_plan,
    layout_keys,
    name_earlier_plan,
    read_plan,
    write_plan,
)
from meshwright.plan.memory.cpu_memory import follow_layout
from meshwright.runs.nodes import place_ranks, read_files
from meshwright.runs.replan import find_layout, place_on
from meshwright.spec.layout import Layout

FindCheckpoint = Callable[[PlanContract, Assignment], str | None]
"""Finds the newest checkpoint that verifies."""


@dataclass(frozen=True)
class RunLayouts:
    """Chooses the layouts of a run, and writes their plans."""

    full: PlanContract
    """The plan for all devices."""
    choice: LayoutChoice

    @classmethod
    def of(cls, plan: PlanContract, assignment: Assignment) -> RunLayouts | None:
        """The layouts of a run; None if its layout may not change.

        Args:
            plan: The current one.
            assignment: Assignment of the run; names the plan for all devices, if it is another one.
        """
        elastic = plan.job.elastic
        if elastic.may_change == "nothing" or elastic.restarts == 0:
            return None
        full = plan
        if assignment.full_plan is not None:
            full = read_plan(Path(assignment.run_dir) / assignment.full_plan)
        devices = DevicePool(
            frozenset(place_ranks(full).devices),
            elastic.grow_after_s,
            elastic.retry_device_s,
            frozenset(place_ranks(plan, assignment).devices),
        )
        return cls(full, LayoutChoice(devices, partial(find_layout, full), plan))

    def change(
        self,
        before: PlanContract,
        assignment: Assignment,
        change: LayoutChange,
        listener: Callable[[Event], None],
        find_checkpoint: FindCheckpoint,
    ) -> tuple[PlanContract, Assignment, EarlierLayout]:
        """Write plan and assignment of the next layout, and the event of the change.

        Args:
            before: The plan of the layout that ended.
            assignment: Assignment of that layout.
            change: The next layout, and what is left of the one before.
            listener: Called with the event.
            find_checkpoint: Finds the newest checkpoint.
        """
        run_dir, plan = Path(assignment.run_dir), _follow(change.next.plan, before)
        self.choice.devices.plan(change.next.devices)
        self.choice.next, self.choice.current = None, plan
        keep_earlier_plan(run_dir, assignment.generation)
        earlier_file = name_earlier_plan(assignment.generation)
        placement = place_on(self.full, plan, change.next.devices)
        if change.next.plan is self.full:
            placement = place_ranks(self.full)
        devices = [list(device) for device in placement.devices]
        following = replace(
            assignment,
            generation=change.generation + 1,
            placement=devices,
            full_plan=None if change.next.plan is self.full else assignment.full_plan or earlier_file,
            attempt=time.time_ns() // 10**6,
        )
        write_plan(plan, run_dir / PLAN_FILE)
        following.write()
        events = EventWriter(run_dir / EVENTS_FILE, 0, change.generation, listener)
        events.write(
            "layout_changed",
            reason=change.next.reason,
            layout=_changed_keys(plan),
            ranks_before=before.world_size,
            ranks=plan.world_size,
            step=change.furthest_step,
            placement=devices,
        )
        events.close()
        change.agents.placement = placement
        plan_files = (earlier_file, *change.plan_files)
        files = read_files(run_dir, PLAN_FILE, ASSIGNMENT_FILE, *plan_files)
        find = partial(find_checkpoint, plan, following)
        stores = stores_of(plan, following)
        choose = partial(_choose_state, run_dir, stores, plan_files, placement, find)
        return plan, following, EarlierLayout(change, plan_files, files, choose)


def _follow(plan: PlanContract, before: PlanContract) -> PlanContract:
    """The plan of a layout after another one, whose snapshots are in memory until its ranks have loaded."""
    if plan.host_memory is None:
        return plan
    return replace(plan, host_memory=follow_layout(plan.host_memory, before.host_memory))


def _changed_keys(plan: PlanContract) -> dict[str, object]:
    """The layout without the keys that have their default."""
    default = {key: getattr(Layout(), key) for key in layout_keys(plan.job)}
    keys = {k: v for k, v in layout_keys(plan.job).items() if v != default[k]}
    return {key: value for key, value in keys.items() if key not in ("mode", "stage_layers")}


def stores_of(plan: PlanContract, assignment: Assignment) -> CheckpointStores:
    """The stores of a run's checkpoints that it has locked."""
    return CheckpointStores.of(plan.job.checkpoint, assignment.checkpoint_dir, assignment.stores)


def _choose_state(
    run_dir: Path,
    stores: CheckpointStores,
    plan_files: Sequence[str],
    placement: Placement,
    find_checkpoint: Callable[[], str | None],
    snapshots: Snapshots,
) -> StateSource:
    """The newest state that all ranks of the next layout can load: snapshots, or a checkpoint."""
    retained = _find_snapshots(run_dir, plan_files, placement, snapshots)
    step = retained.snapshot_step
    stores.finish_drafts()
    saved = max((_step_of(path.name) for path in stores.list_paths()), default=-1)
    if step is not None and step >= saved:
        return retained
    checkpoint = find_checkpoint()
    if checkpoint is None or (step is not None and step > _step_of(checkpoint.rpartition("/")[2])):
        return retained
    return StateSource(checkpoint=checkpoint)


def _find_snapshots(
    run_dir: Path, plan_files: Sequence[str], placement: Placement, snapshots: Snapshots
) -> StateSource:
    """The newest step of which each node has the whole state, by the ranks of one earlier layout."""
    of = {snapshots[node].retired_from for node in placement.nodes}
    plan_file = name_earlier_plan(min(of))
    if len(of) > 1 or plan_file not in plan_files:
        return StateSource()
    job = read_plan(run_dir / plan_file).job
    kept = [snapshots[node].steps for node in placement.nodes]
    step = newest_covering_step(kept, lambda ranks: covers_state(job, ranks))
    return StateSource(step, reshard_from=None if step is None else plan_file)


def _step_of(name: str) -> int:
    return (parse_name(name) or (-1, 0))[0]
