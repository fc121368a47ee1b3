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
