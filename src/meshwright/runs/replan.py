"""Finds a layout for the devices that a run has left."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterable

from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_plural
from meshwright.launch.placement import Device, Placement, keep_blocks
from meshwright.plan.build import build_plan
from meshwright.plan.contract import PlanContract
from meshwright.plan.search.fewer_devices import list_data_layouts, list_fewer
from meshwright.plan.search.find import SIMPLICITY_MARGIN
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job, MayChange
from meshwright.spec.layout import Layout, PlacementRule
from meshwright.spec.legality.table import find_problems, with_layout

MOST_TRIALS = 16
"""Numbers of devices that are tried to say how many a run needs."""
SEARCH_S = 8.0
"""CPU seconds after which layouts for fewer devices are not searched, if there is one."""


def find_layout(full: PlanContract, devices: frozenset[Device]) -> PlanContract:
    """The best layout for some of a run's devices; for all of them, the first one.

    Args:
        full: The plan for all devices; its ``elastic.may_change`` says what may differ.
        devices: Those that are left.

    Raises:
        UserError: No layout fits them; the error has the number that would do.
    """
    if len(devices) >= full.world_size:
        return full
    try:
        plan = _search_any(full, devices) if full.job.elastic.may_change == "any" else _try(full, devices)
    except UserError as error:
        raise _no_layout(full, devices, error) from None
    reasons = [f"{len(devices)} of {full.world_size} devices are left (elastic.may_change)"]
    before, after = full.job.layout.backup_replicas, plan.job.layout.backup_replicas
    if after != before:
        reasons.append(f"layout.backup_replicas={after} instead of {before}: backups are left out first")
    if plan.job.train.all_reduce != full.job.train.all_reduce:
        reasons.append("train.all_reduce=backend: the layout cannot run the hierarchical all-reduce")
    return dataclasses.replace(plan, reasons=(*reasons, *plan.reasons))


def _search_any(full: PlanContract, devices: frozenset[Device]) -> PlanContract:
    """The fastest layout of all, which may leave devices idle: 7 devices have few layouts, 6 have more.

    Of layouts that are about as fast, the one on most devices.
    """
    best: PlanContract | None = None
    refused: UserError | None = None
    began, margin = time.process_time(), SIMPLICITY_MARGIN[full.job.cluster.device]
    for count in list_fewer(len(devices)) or (0,):
        if best is not None and (2 * count < len(devices) or time.process_time() > began + SEARCH_S):
            break
        try:
            plan = _try(full, choose_devices(devices, count))
        except UserError as error:
            refused = refused or error
            continue
        if best is None or plan.step_s < (1 - margin) * best.step_s:
            best = plan
    if best is None:
        assert refused is not None, "a number was tried"
        raise refused
    return best


def _try(full: PlanContract, devices: frozenset[Device]) -> PlanContract:
    """The best layout for these devices."""
    if not devices:
        raise UserError(Problem("elastic-no-layout", "no device is left", "elastic.may_change"))
    may_change: MayChange = full.job.elastic.may_change
    devices = usable_devices(full, devices)
    job = dataclasses.replace(full.job, cluster=shrink_cluster(full.job.cluster, devices))
    if may_change == "any":
        return _plan(job, Layout(placement=_placement_rule(full)))
    refused: UserError | None = None
    for layout in list_data_layouts(_unassigned(full), len(devices), job):
        try:
            return _plan(job, layout)
        except UserError as error:
            refused = refused or error
    if refused is not None:
        raise refused
    inner = full.job.layout.pp * full.job.layout.cp * full.job.layout.tp
    rule = f"one replica needs {format_plural(inner, 'device')} (pp x cp x tp)"
    raise UserError(Problem("elastic-no-layout", rule, "elastic.may_change", may_change))


def _plan(job: Job, layout: Layout) -> PlanContract:
    """Plan a layout. If it cannot run the job's all-reduce, the backend runs it."""
    backend = dataclasses.replace(job, train=dataclasses.replace(job.train, all_reduce="backend"))
    plan = build_plan(with_layout(backend, layout))[0]
    wanted = dataclasses.replace(plan.job, train=job.train)
    if job.train.all_reduce == "backend" or find_problems(wanted):
        return plan
    return build_plan(wanted)[0]


def usable_devices(full: PlanContract, devices: frozenset[Device]) -> frozenset[Device]:
    """The devices that a layout is planned for: groups that communicate most stay on one node."""
    if full.job.elastic.may_change == "data":
        return frozenset(keep_blocks(devices, block_of(full.job.layout)))
    return devices


def choose_devices(devices: Iterable[Device], count: int) -> frozenset[Device]:
    """Some of these devices: nodes with most of them first."""
    counts = Counter(device.node for device in devices)
    return frozenset(sorted(devices, key=lambda d: (-counts[d.node], d))[:count])


def place_on(full: PlanContract, plan: PlanContract, devices: frozenset[Device]) -> Placement:
    """The device of each rank of a layout that was planned for some of a run's devices."""
    chosen = choose_devices(usable_devices(full, devices), plan.job.cluster.world_size)
    if plan.placement:
        return Placement.from_slots(chosen, plan.placement)
    return Placement.on(chosen, plan.world_size, block_of(plan.job.layout))


def _placement_rule(full: PlanContract) -> PlacementRule:
    """How other layouts place their ranks: a list of slots is that of one layout."""
    rule = full.job.layout.placement
    return rule if isinstance(rule, str) else "auto"


def block_of(layout: Layout) -> int:
    """Consecutive ranks that communicate most: those of one tensor and context parallel group."""
    return layout.tp * layout.cp


def _unassigned(full: PlanContract) -> Layout:
    """The layout, without what the planner assigns anew: the layers of stages, and slots."""
    layout = dataclasses.replace(full.job.layout, placement=_placement_rule(full))
    return dataclasses.replace(layout, stage_layers=None) if full.layers_assigned else layout


def shrink_cluster(cluster: Cluster, devices: frozenset[Device]) -> Cluster:
    """The cluster with these devices only.

    If nodes have different numbers of them, it is planned as more nodes with the largest common divisor.
    """
    counts = Counter(device.node for device in devices)
    per_node = math.gcd(*counts.values())
    return dataclasses.replace(cluster, nodes=len(devices) // per_node, devices_per_node=per_node)


def _no_layout(full: PlanContract, devices: frozenset[Device], error: UserError) -> UserError:
    """The error of devices that no layout fits, with the smallest number that would do."""
    first, value = error.problems[0], full.job.elastic.may_change
    left = format_plural(len(devices), "device")
    rule = f"finds no layout for {left}: {first.path} {first.rule}".replace("elastic.may_change ", "")
    needed = _count_needed(full, devices)
    fix = f"{format_plural(needed, 'device')} would do"
    return UserError(Problem("elastic-no-layout", rule, "elastic.may_change", value, fix))


def _count_needed(full: PlanContract, devices: frozenset[Device]) -> int:
    """The smallest number of devices for which there is a layout; those of the whole run at most."""
    per_node = max(1, math.ceil(full.world_size / full.job.cluster.nodes))
    everything = [Device(*divmod(number, per_node)) for number in range(full.world_size)]
    between = range(len(devices) + 1, full.world_size)
    stride = max(1, math.ceil(len(between) / MOST_TRIALS))
    for count in between[::stride]:
        try:
            _try(full, frozenset(everything[:count]))
        except UserError:
            continue
        return count
    return full.world_size
