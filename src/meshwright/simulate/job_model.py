"""The failure model of a job; settings that are left out get assumed values, which are reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshwright.core.errors import Problem, UserError
from meshwright.core.units import format_bytes, format_plural, format_seconds
from meshwright.layout.checkpoint_interval import NODE_HOURS, daly_interval_s, failure_rate
from meshwright.layout.parameters import count_parameters
from meshwright.plan.sizing import (
    ASSUMED_STORAGE_BYTES_PER_S,
    CHECKPOINT_BYTES,
    RESTART_S,
    checkpoint_write_s,
)
from meshwright.simulate.downtime import loses_checkpoint
from meshwright.simulate.failures import FailureModel
from meshwright.simulate.node_throughput import NodePlanner, does_replan, least_nodes, replica_nodes
from meshwright.simulate.settings import FailureSettings
from meshwright.spec.job import Job

CAUSES = {
    "device": {"GPU": 148, "HBM": 72, "SRAM": 19, "GPU processor": 17, "silent corruption": 6, "thermal": 6},
    "node": {"host maintenance": 32, "NIC": 7, "other": 16},
    "switch": {"switch or cable": 35},
    "software": {"software": 54, "watchdog": 7},
}
"""The 419 unexpected interruptions of Llama 3 (54 days, 16,384 GPUs), by kind and cause."""
DAY_S = 86_400.0
SHOWN_THROUGHPUTS = 4
"""Numbers of nodes whose throughput is printed."""


def build_model(
    job: Job, days: float, settings: FailureSettings, planner: NodePlanner | None = None
) -> tuple[FailureModel, tuple[str, ...]]:
    """The failure model of a job, and what was assumed.

    Args:
        job: On the whole of its cluster.
        days: Length of a run.
        settings: What differs from the defaults.
        planner: Planner of the job on fewer nodes, if it has planned some already.

    Raises:
        UserError: No layout fits on as few nodes as the run should go on with.
    """
    cluster = job.cluster
    write_s = checkpoint_write_s(job, cluster.nodes)
    rates_per_s, rate_basis = find_rates(job, settings.rates)
    watch_s = job.elastic.heartbeat_timeout_s or job.elastic.collective_timeout_s
    detect_s = watch_s if settings.detect_s is None else settings.detect_s
    load_s = write_s if settings.load_s is None else settings.load_s
    rest_s = max(0.0, RESTART_S - detect_s - load_s)
    model = FailureModel(
        wall_s=days * DAY_S,
        nodes=cluster.nodes,
        rates_per_s=rates_per_s,
        detect_s=detect_s,
        restart_s=rest_s if settings.restart_s is None else settings.restart_s,
        load_s=load_s,
        save_s=write_s if settings.save_s is None else settings.save_s,
        interval_s=days * DAY_S,
        repair_s=settings.repair_hours * 3600,
        spares=settings.spares or 0,
        repair=settings.repair,
        nodes_per_switch=settings.nodes_per_switch,
        notice_s=settings.notice_s,
        replace_s=settings.replace_hours * 3600,
    )
    assumed = [rate_basis]
    if settings.save_s is None or settings.load_s is None:
        assumed.append(_storage_basis(job, write_s))
    if settings.restart_s is None:
        assumed.append(f"{format_seconds(RESTART_S)} from a failure to the next step, as in plan --tokens")
    mean = " on average" if model.repair == "exponential" else ""
    assumed.append(
        f"a failed node is repaired in {format_seconds(model.repair_s)}{mean}; software needs no repair"
    )
    for extend in (_with_snapshots, _with_preemption):
        model, basis = extend(job, model, settings)
        assumed += basis
    if does_replan(job, settings.replan):
        model, replanned = _with_replanning(planner or NodePlanner(job), model, settings)
        assumed.append(replanned)
    given_s = None if settings.every_minutes is None else settings.every_minutes * 60
    model = dataclasses.replace(model, interval_s=daly_s(model) if given_s is None else given_s)
    return model, tuple(assumed)


def checkpoint_mtbf_s(model: FailureModel) -> float:
    """Mean time between failures that go back to a checkpoint; infinite without such failures."""
    rate = sum(rate for kind, rate in model.rates_per_s.items() if loses_checkpoint(model, kind))
    return 1 / rate if rate else float("inf")


def daly_s(model: FailureModel) -> float:
    """Daly's interval for failures that go back to a checkpoint, no longer than the run."""
    mtbf_s = checkpoint_mtbf_s(model)
    if mtbf_s == float("inf"):
        return model.wall_s
    return min(daly_interval_s(model.save_s, mtbf_s), model.wall_s)


def _with_snapshots(
    job: Job, model: FailureModel, settings: FailureSettings
) -> tuple[FailureModel, list[str]]:
    if settings.snapshot_minutes is None:
        return model, []
    cluster = job.cluster
    copied = CHECKPOINT_BYTES * count_parameters(job.model) / cluster.world_size
    copy_s = copied / cluster.host_bytes_per_s
    cost_s = copy_s if settings.snapshot_cost_s is None else settings.snapshot_cost_s
    model = dataclasses.replace(
        model, snapshot_s=settings.snapshot_minutes * 60, snapshot_cost_s=cost_s, snapshot_load_s=copy_s
    )
    basis = "failures of devices and software go back to a snapshot, others to a checkpoint"
    size = f"{format_bytes(copied)} per device at {format_bytes(cluster.host_bytes_per_s)}/s"
    return model, [basis, f"a snapshot of {size}: {format_seconds(copy_s)}; state sharded over all devices"]


def _with_replanning(
    planner: NodePlanner, model: FailureModel, settings: FailureSettings
) -> tuple[FailureModel, str]:
    replica = settings.nodes_per_replica or replica_nodes(planner.job)
    fewest = settings.min_nodes
    if fewest is None:
        fewest, how = planner.find_fewest(), "the fewest tried on which the planner finds a layout"
    else:
        how = "as given"
        if planner.is_searched and planner.step_s(fewest) is None:
            fewest = None
    if fewest is None:
        raise UserError(_too_few_nodes(planner, settings))
    fewest = min(-(-fewest // replica) * replica, model.nodes)
    throughput = planner.find_throughput(fewest, model.most_missing, replica)
    model = dataclasses.replace(
        model, replans=True, min_nodes=fewest, nodes_per_replica=replica, throughput=throughput
    )
    nodes = format_plural(fewest, "node")
    each = f"multiples of {format_plural(replica, 'node')}"
    speed = f"{_describe_throughput(model)}; a node that is back costs a save and a restart"
    return model, f"goes on with {nodes} or more ({how}), {each}; {speed}"


def _describe_throughput(model: FailureModel) -> str:
    """The throughput of fewer nodes as text, those that help first."""
    if not model.throughput:
        return "throughput falls with the nodes"
    most, shown = 0.0, []
    for nodes, share in model.throughput[:-1]:
        if share > most:
            shown.append(f"{share:.1%} on {nodes}")
            most = share
    shown = shown[: -SHOWN_THROUGHPUTS - 1 : -1]
    return f"throughput by the planner: {', '.join(shown)} of {format_plural(model.nodes, 'node')}"


def _too_few_nodes(planner: NodePlanner, settings: FailureSettings) -> Problem:
    """No layout fits: on the nodes that are asked for, or on the whole cluster."""
    job, needed = planner.job, planner.find_fewest()
    which = settings.min_nodes or job.cluster.nodes
    rule = f"is too few: no layout of {job.name} without offloading fits on {format_plural(which, 'node')}"
    if needed is None:
        fix = (
            f"Use a larger cluster: the optimizer state alone needs {format_plural(least_nodes(job), 'node')}"
        )
        return Problem("simulate-min-nodes", rule, path="cluster.nodes", value=job.cluster.nodes, fix=fix)
    fix = f"Use {needed} or more"
    return Problem("simulate-min-nodes", rule, path="min_nodes", value=which, fix=fix, is_argument=True)


def _with_preemption(
    job: Job, model: FailureModel, settings: FailureSettings
) -> tuple[FailureModel, list[str]]:
    if not settings.rates.get("preemption"):
        return model, []
    fits = "a save fits" if model.saves_in_notice else "too short for a save"
    mean = " on average" if model.repair == "exponential" else ""
    basis = f"preemptions come with {format_seconds(model.notice_s)} notice ({fits}); another node is there "
    return model, [basis + f"after {format_seconds(model.replace_s)}{mean}"]


def _storage_basis(job: Job, write_s: float) -> str:
    rate = job.cluster.storage_bytes_per_s
    at = (
        f"{format_bytes(ASSUMED_STORAGE_BYTES_PER_S)}/s per node"
        if rate is None
        else f"{format_bytes(rate)}/s"
    )
    size = f"{CHECKPOINT_BYTES} bytes per parameter"
    return f"checkpoints of {size} at {at}: {format_seconds(write_s)}, synchronous"


def find_rates(job: Job, given: Mapping[str, float]) -> tuple[dict[str, float], str]:
    """Failures per second of the whole run by kind, and where they are from."""
    cluster = job.cluster
    found = failure_rate(cluster, cluster.world_size)
    counts = {kind: sum(causes.values()) for kind, causes in CAUSES.items()}
    total = sum(counts.values())
    rates = {kind: count / total / found.mtbf_s for kind, count in counts.items()}
    per_node_s = 1 / (NODE_HOURS * 3600)
    rates |= {kind: rate * cluster.nodes * per_node_s for kind, rate in given.items()}
    basis = f"failures: {found.basis.removeprefix('assumed: ')}; kinds as in Llama 3 ({total} failures)"
    if given:
        named = ", ".join(f"{kind} {rate:g}" for kind, rate in given.items())
        basis = f"failures per 1,000 node-days: {named}" + (
            "" if set(counts) <= set(given) else f"; other {basis}"
        )
    return rates, basis
