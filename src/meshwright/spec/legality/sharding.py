"""Rules of sharded data parallelism (ZeRO, FSDP2) and of offloading."""

from __future__ import annotations

from meshwright.core.errors import Problem
from meshwright.spec.job import Job
from meshwright.spec.legality.rule import Rule


def check_unsharded(job: Job) -> Problem | None:
    """ZeRO shards state over dp_shard x cp."""
    layout = job.layout
    if layout.zero == 0 or layout.dp_shard * layout.cp > 1:
        return None
    rule = "needs layout.dp_shard > 1 (or layout.cp > 1): there are no ranks to shard over"
    fix = "Leave layout.zero out, or use layout.dp_shard=2 or more"
    return Problem("layout-zero-unsharded", rule, path="layout.zero", value=layout.zero, fix=fix)


def check_zero_stage(job: Job) -> Problem | None:
    """ZeRO stage 0 is plain replication, which has its own axis."""
    layout = job.layout
    if layout.dp_shard == 1 or layout.zero > 0:
        return None
    rule = f"shards nothing over layout.dp_shard={layout.dp_shard}; ZeRO stage 0 is plain replication"
    fix = f"Use layout.dp_replicate={layout.dp_shard} instead, or layout.zero=1, 2 or 3"
    return Problem("layout-zero-dp-shard", rule, path="layout.zero", value=0, fix=fix)


def check_accumulate(job: Job) -> Problem | None:
    """Only ZeRO-2 and 3 shard gradients."""
    layout = job.layout
    if layout.accumulate == "sharded" or layout.zero >= 2:
        return None
    rule = f"has no effect with layout.zero={layout.zero}: gradients are sharded from stage 2 on"
    fix = "Leave layout.accumulate out, or use layout.zero=2 or 3"
    return Problem("layout-accumulate-zero", rule, path="layout.accumulate", value="deferred", fix=fix)


def check_prefetch(job: Job) -> Problem | None:
    """Only ZeRO-3 reshards blocks after the forward pass and gathers them again."""
    layout = job.layout
    if layout.prefetch == 1 or layout.zero == 3:
        return None
    rule = (
        f"has no effect with layout.zero={layout.zero}: only ZeRO-3 reshards blocks after the forward pass "
    )
    rule += "and gathers them again"
    fix = "Leave layout.prefetch out, or use layout.zero=3"
    return Problem("layout-prefetch-zero", rule, path="layout.prefetch", value=layout.prefetch, fix=fix)


def check_deferred_compression(job: Job) -> Problem | None:
    """FSDP2 accumulates deferred gradients in the dtype of the reduction."""
    layout, kind = job.layout, job.compression.kind
    if layout.zero < 2 or layout.accumulate == "sharded" or kind == "none":
        return None
    rule = f"would accumulate the gradients of micro-batches in 16 bits with compression.kind={kind}: FSDP2 "
    rule += "keeps deferred gradients in the dtype of the reduction"
    fix = "Leave layout.accumulate out, or compression.kind"
    return Problem("layout-accumulate-compression", rule, path="layout.accumulate", value="deferred", fix=fix)


def check_offload_fp16(job: Job) -> Problem | None:
    """The optimizer runs on the CPU, and torch copies the found-inf flag there without waiting for it."""
    if job.layout.offload != "all" or job.train.precision != "fp16":
        return None
    rule = "runs the optimizer on the CPU, which would not wait for the overflow check of fp16 on the device"
    fix = "Use train.precision=bf16, or layout.offload=optimizer"
    return Problem("layout-offload-fp16", rule, path="layout.offload", value="all", fix=fix)


def check_offload_all(job: Job) -> Problem | None:
    """FSDP2 streams sharded parameters from the CPU; nothing does so for unsharded ones."""
    if job.layout.offload != "all" or job.layout.zero >= 2:
        return None
    rule = "needs parameters in CPU memory without ZeRO-2 or 3, which is not implemented yet"
    fix = "Use layout.offload=optimizer, or layout.dp_shard above 1 with layout.zero=2 or 3"
    return Problem("layout-offload-not-built", rule, path="layout.offload", value="all", fix=fix)


RULES: tuple[Rule, ...] = (
    Rule(
        "layout-zero-unsharded",
        "`layout.zero` above 0 needs `dp_shard` > 1 or `cp` > 1: there are no ranks to shard over.",
        check_unsharded,
    ),
    Rule("layout-zero-dp-shard", "`dp_shard` > 1 needs ZeRO stage 1, 2 or 3.", check_zero_stage),
    Rule("layout-accumulate-zero", '`accumulate = "deferred"` needs `zero` 2 or 3.', check_accumulate),
    Rule("layout-prefetch-zero", "A `prefetch` other than 1 needs `zero = 3`.", check_prefetch),
    Rule(
        "layout-accumulate-compression",
        'Under ZeRO-2 and 3 a `compression.kind` needs `accumulate = "sharded"`.',
        check_deferred_compression,
    ),
    Rule(
        "layout-offload-fp16",
        '`offload = "all"` excludes fp16: the CPU optimizer would not wait for the overflow check.',
        check_offload_fp16,
    ),
    Rule(
        "layout-offload-not-built",
        'Parameters in CPU memory (`offload = "all"`) without ZeRO-2 or 3.',
        check_offload_all,
        built=False,
    ),
)
