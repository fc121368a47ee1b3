"""Checks of what does not go together under ZeRO; the rows are in the legality table."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.spec.job import Job


def check_deferred_compression(job: Job) -> Problem | None:
    """FSDP2 keeps what waits for a reduction in the type that it is reduced in."""
    layout, kind = job.layout, job.compression.kind
    if layout.zero < 2 or layout.accumulate == "sharded" or kind == "none":
        return None
    rule = f"would add up the gradients of micro-batches in 16 bits with compression.kind={kind}: what waits "
    rule += "for a reduction is kept in its type"
    fix = "Leave layout.accumulate out, or compression.kind"
    return Problem("layout-accumulate-compression", rule, path="layout.accumulate", value="deferred", fix=fix)


def check_offload_all(job: Job) -> Problem | None:
    """FSDP2 brings shards of parameters from the host; nothing does it for whole ones."""
    if job.layout.offload != "all" or job.layout.zero >= 2:
        return None
    rule = "asks for parameters on the host without ZeRO-2 or 3, which is not built yet"
    fix = "Use layout.offload=optimizer, or layout.dp_shard above 1 with layout.zero=2 or 3"
    return Problem("layout-offload-not-built", rule, path="layout.offload", value="all", fix=fix)


def check_offload_scale(job: Job) -> Problem | None:
    """The update runs on the host, and torch copies the device's verdict on overflows there unawaited."""
    if job.layout.offload != "all" or job.train.precision != "fp16":
        return None
    rule = "updates on the host, which would not wait for what the device finds of fp16's overflows"
    fix = "Use train.precision=bf16, or layout.offload=optimizer"
    return Problem("layout-offload-fp16", rule, path="layout.offload", value="all", fix=fix)
