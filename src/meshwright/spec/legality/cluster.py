"""Rules of the cluster: number of devices, their precisions, links and racks."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.legality.rule import ANY_VALUE, Rule, needs_setting

PEAKS = {"fp8": "peak_fp8_flops_per_s", "fp4": "peak_fp4_flops_per_s"}
"""Precisions that only some devices have, and the key with their peak rate."""
SPINE_KEYS = ("spine_oversubscription", "spine_latency_s")
"""Keys that have an effect with `nodes_per_rack` only."""


def check_world_size(job: Job) -> Problem | None:
    """One rank per device. Local CPU cores may be shared: that is a warning elsewhere."""
    world, devices = job.layout.world_size, job.cluster.world_size
    if world <= devices or (job.cluster.device == "cpu" and job.cluster.preset == "local"):
        return None
    rule = f"needs {world} devices, the cluster has {devices} ({job.cluster.device_name})"
    return Problem("layout-world-size", rule, path="layout", fix="Use fewer ranks or more nodes")


def check_links(job: Job) -> Problem | None:
    """Several nodes need the bandwidth and latency of the network between them."""
    cluster = job.cluster
    missing = [key for key in ("nic_bytes_per_s", "nic_latency_s") if getattr(cluster, key) is None]
    if cluster.nodes == 1 or not missing:
        return None
    also = f", and so is cluster.{missing[1]}" if missing[1:] else ""
    rule = f"is missing{also}: cluster.nodes={cluster.nodes} needs the figures of the network between nodes"
    fix = (
        "Set cluster.nic_bytes_per_s=5e10 and cluster.nic_latency_s=4e-5 (one 400 Gb/s port per device), or "
    )
    fix += "the figures of your network; or cluster.nodes=1"
    return Problem("cluster-links-missing", rule, path=f"cluster.{missing[0]}", fix=fix)


def check_precision(job: Job) -> Problem | None:
    """A GPU needs fp8 or fp4 GEMMs to train in them. torch emulates fp8 on CPUs, for tests."""
    cluster, precision = job.cluster, job.train.precision
    key = PEAKS.get(precision)
    on_cpu = cluster.device == "cpu" and precision == "fp8"
    if key is None or on_cpu or getattr(cluster, key) is not None:
        return None
    rule = f"needs a device with {precision} GEMMs; cluster.{key} of "
    rule += f"{cluster.device_name or 'the device'} is not set"
    fix = f"Use train.precision=bf16, a newer device, or set cluster.{key}"
    return Problem("train-precision-device", rule, path="train.precision", value=precision, fix=fix)


RULES: tuple[Rule, ...] = (
    Rule("layout-world-size", "The world size is at most the cluster's devices.", check_world_size),
    Rule(
        "train-precision-device",
        "`precision` fp8 or fp4 needs `peak_fp8_flops_per_s` or `peak_fp4_flops_per_s` of a GPU.",
        check_precision,
    ),
    *(
        needs_setting(
            Cluster, f"cluster.{key}", "cluster.nodes_per_rack", ANY_VALUE, "all nodes are in one rack"
        )
        for key in SPINE_KEYS
    ),
    Rule(
        "cluster-links-missing",
        "More than one of `cluster.nodes` needs `nic_bytes_per_s` and `nic_latency_s`.",
        check_links,
        plan_only=True,  # a run goes on without them; its predictions then lack the network
    ),
)
