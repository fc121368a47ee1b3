"""Checks of what a prediction needs to know of the cluster; the rows are in the legality table."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.core.errors import Problem
from meshwright.spec.job import Job

PEAKS = {"fp8": "peak_fp8_flops_per_s", "fp4": "peak_fp4_flops_per_s"}
"""Precisions that not every device computes in, and the key that says so."""


def check_links(job: Job) -> Problem | None:
    """Nodes are joined by something."""
    cluster = job.cluster
    missing = [key for key in ("nic_bytes_per_s", "nic_latency_s") if getattr(cluster, key) is None]
    if cluster.nodes == 1 or not missing:
        return None
    also = f", and so is cluster.{missing[1]}" if missing[1:] else ""
    rule = (
        f"is missing{also}: cluster.nodes={cluster.nodes} are joined by a network whose figures are not known"
    )
    fix = "Set cluster.nic_bytes_per_s=5e10 and cluster.nic_latency_s=4e-5 (one 400 Gb/s port a device), or "
    fix += "what your network has; or cluster.nodes=1"
    return Problem("cluster-links-missing", rule, path=f"cluster.{missing[0]}", fix=fix)


def check_precision_device(job: Job) -> Problem | None:
    """A GPU without fp8 or fp4 products does not train in them; torch has fp8 on cores too, to try it out."""
    cluster, precision = job.cluster, job.train.precision
    key = PEAKS.get(precision)
    on_cores = cluster.device == "cpu" and precision == "fp8"
    if key is None or on_cores or getattr(cluster, key) is not None:
        return None
    rule = f"needs a device that multiplies in {precision}, and cluster.{key} of "
    rule += f"{cluster.device_name or 'the device'} is not known"
    fix = f"Use train.precision=bf16, a newer device, or set cluster.{key}"
    return Problem("train-precision-device", rule, path="train.precision", value=precision, fix=fix)


Row = tuple[str, str, Callable[[Job], Problem | None]]

PLAN_CLUSTER_ROWS: tuple[Row, ...] = (
    (
        "cluster-links-missing",
        "More than one of `cluster.nodes` needs `nic_bytes_per_s` and `nic_latency_s`.",
        check_links,
    ),
)
"""Rows that only planning meets: such a run is refused as not for this machine."""
