"""Checks of what ZeRO does not run with yet; the rows are in the legality table."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.spec.job import Job


def check_sharded_compile(job: Job) -> Problem | None:
    """Compiled blocks whose parameters come and go were not tried."""
    if not job.train.compile or job.layout.dp_shard == 1:
        return None
    rule = f"with layout.dp_shard={job.layout.dp_shard} asks for compiled blocks whose parameters are cut, "
    rule += "which is not built yet"
    fix = "Use layout.dp_replicate, or leave train.compile out"
    return Problem("train-compile-sharded-not-built", rule, path="train.compile", value=True, fix=fix)


def check_sharded_compression(job: Job) -> Problem | None:
    """FSDP2 reduces in float32 here; DDP's hooks, which compress, are ZeRO-1's too."""
    kind, zero = job.compression.kind, job.layout.zero
    if kind == "none" or zero < 2:
        return None
    rule = f"with layout.zero={zero} asks for compressed reduce-scatters, which are not built yet"
    fix = "Use layout.zero=1 or layout.dp_replicate, or leave compression.kind out"
    code = "compression-kind-sharded-not-built"
    return Problem(code, rule, path="compression.kind", value=kind, fix=fix)
