"""Settings that have no effect in a job: one table of keys, conditions and reasons.

``plan`` and ``train`` report them. The legality table refuses combinations that are certainly mistakes; a
setting of this table is harmless, and often stays in a job file while its layout or length changes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.units import format_plural
from meshwright.layout.axes import (
    dense_reduce_axis,
    dense_shard_axis,
    expert_reduce_axis,
    expert_shard_axis,
    has_expert_axes,
    reduces_full_grads,
)
from meshwright.layout.hierarchy import explain_flat
from meshwright.layout.replicas import has_replicas
from meshwright.layout.stages import list_stages
from meshwright.spec.execution import (
    autotunes_gemms,
    find_triton_obstacle,
    keeps_bf16_grads,
    resolve_block_backend,
    resolve_transport,
    uses_triton_blocks,
)
from meshwright.spec.job import Job
from meshwright.spec.layout import AXES
from meshwright.spec.micro_batches import count_micro_batches
from meshwright.spec.paths import PREPARED_INDEX
from meshwright.spec.train_defaults import defaults, setting

PLAIN_TEXT = (".txt", ".md")
"""Endings of files without records."""
Reason = Callable[[Job], str | None]
"""Why a setting has no effect in a job with a settled layout; None if it has one."""


@dataclass(frozen=True)
class UnusedSetting:
    """A setting that has no effect in a job."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key}={_toml(self.value)} has no effect: {self.reason}"

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return dataclasses.asdict(self)


def find_unused_settings(job: Job) -> list[UnusedSetting]:
    """The settings of a job that have no effect, among those whose value is not the default.

    Args:
        job: With its layout settled.
    """
    found = []
    for key, explain in REASONS.items():
        table, _, name = key.partition(".")
        section = getattr(job, table)
        default = next(field.default for field in dataclasses.fields(section) if field.name == name)
        value = getattr(section, name)
        if value != default and (reason := explain(job)) is not None:
            found.append(UnusedSetting(key, value, reason))
    return found


def _explain_compression(job: Job) -> str | None:
    layout, axes = job.layout, [dense_reduce_axis(job.layout), dense_shard_axis(job.layout)]
    if has_expert_axes(job):
        axes += [expert_reduce_axis(layout), expert_shard_axis(layout)]
    if max(axis.size for axis in axes) > 1:
        return None
    return f"no gradients are reduced over data-parallel ranks with {layout.named_degrees()}"


def _explain_bucket_size(job: Job) -> str | None:
    layout = job.layout
    if reduces_full_grads(job) or layout.offload == "optimizer":
        return None
    if layout.zero >= 2:
        return f"layout.zero={layout.zero} reduces gradients block by block (FSDP2), not in DDP buckets"
    return f"no gradients are reduced over data-parallel ranks with {layout.named_degrees()}"


def _explain_accumulate(job: Job) -> str | None:
    return "a step has one micro-batch per rank" if count_micro_batches(job) == 1 else None


def _explain_offload(job: Job) -> str | None:
    train, stateless = job.train, job.train.optimizer == "sgd" and setting(job.train, "momentum") == 0
    if job.cluster.device == "cpu":
        return "the device is a CPU, so all state is in CPU memory either way; the copies cost time"
    if job.layout.offload != "optimizer" or not stateless:
        return None
    return f"train.optimizer={train.optimizer} without momentum has no state"


def _explain_prefetch(job: Job) -> str | None:
    layers = max(len(stage.layers) for stage in list_stages(job))
    if job.layout.prefetch <= layers:
        return None
    where = "model" if job.layout.pp == 1 else "largest stage"
    return f"the {where} has {format_plural(layers, 'layer')}; it runs as layout.prefetch={layers}"


def _explain_block_backend(job: Job) -> str | None:
    if job.train.block_backend != "triton" or uses_triton_blocks(job):
        return None
    backend = resolve_block_backend(job)
    return f"it needs {find_triton_obstacle(job)}; the blocks run as train.block_backend={backend}"


def _explain_grad_dtype(job: Job) -> str | None:
    if keeps_bf16_grads(job):
        return None
    return "it needs Triton blocks on one GPU, one micro-batch per step and layout.offload=none"


def _explain_gemm_autotune(job: Job) -> str | None:
    if autotunes_gemms(job):
        return None
    return f"it tunes Triton blocks, which need {find_triton_obstacle(job)}"


def _explain_decay(job: Job) -> str | None:
    return "train.weight_decay=0" if setting(job.train, "weight_decay") == 0 else None


def _explain_transport(job: Job) -> str | None:
    if resolve_transport(job) == "none":
        return "one rank has no collectives"
    lone = job.train.transport == "shared_memory" and resolve_transport(job) == "gloo"
    return "every node has one rank" if lone else None


def _explain_lr_schedule(job: Job) -> str | None:
    train = job.train
    if train.warmup + 1 < train.steps:
        return None
    return f"at most one step follows the warm-up (train.warmup={train.warmup}, train.steps={train.steps})"


def _explain_min_lr(job: Job) -> str | None:
    return _explain_lr_schedule(job) if "min_lr_ratio" in defaults(job.train) else None


def _longer_than_run(key: str, instead: str) -> Reason:
    """An interval in steps that is longer than the run."""
    table, _, name = key.partition(".")

    def explain(job: Job) -> str | None:
        steps = job.train.steps
        interval = getattr(getattr(job, table), name)
        return f"the run ends after train.steps={steps}; {instead}" if interval > steps else None

    return explain


def _explain_on_best(job: Job) -> str | None:
    train = job.train
    if 0 < train.eval_every < train.steps:
        return None
    return "the only evaluation is the one at the end, so the newest checkpoint is the best"


def _explain_every_minutes(job: Job) -> str | None:
    return "checkpoint.auto sets the minutes between checkpoints" if job.checkpoint.auto else None


def _explain_keep_every(job: Job) -> str | None:
    saved = {"checkpoint.every_steps": job.checkpoint.every_steps}
    if job.checkpoint.on_best:
        saved["train.eval_every"] = job.train.eval_every
    multiples = {
        f"{key}={every}": math.lcm(every, job.checkpoint.keep_every) for key, every in saved.items() if every
    }
    if not multiples:
        return "checkpoints are saved by time, not at given steps; set checkpoint.every_steps"
    key, first = min(multiples.items(), key=lambda item: item[1])
    if first < job.train.steps:  # the last one is kept anyway
        return None
    return f"with {key} the first multiple of both is step {first}, and the run ends at {job.train.steps}"


def _explain_one_store(job: Job) -> str | None:
    return None if job.checkpoint.stores else "there is one store of checkpoints, checkpoint.dir"


def _explain_replica_check(job: Job) -> str | None:
    if not has_replicas(job):
        return f"no parameters are replicated over data-parallel ranks with {job.layout.named_degrees()}"
    return _longer_than_run("train.replica_check_every", "there is no comparison")(job)


def _explain_timeout(job: Job) -> str | None:
    return "one process waits for no others" if job.layout.world_size == 1 else None


def _explain_spares(job: Job) -> str | None:
    return "the first failure ends the run (elastic.restarts=0)" if job.elastic.restarts == 0 else None


def _explain_straggler(job: Job) -> str | None:
    return "one process has no peers" if job.layout.world_size == 1 else None


def _explain_metrics_token(job: Job) -> str | None:
    return "nothing is served without elastic.metrics" if job.elastic.metrics is None else None


def _explain_snapshots(job: Job) -> str | None:
    return _explain_spares(job) or _longer_than_run("elastic.snapshot_every", "no snapshot is taken")(job)


def _explain_text_field(job: Job) -> str | None:
    data = job.data
    paths = [data.path, *(one.path for one in data.eval), *(one.path for one in data.sources)]
    if not all(Path(path).suffix in PLAIN_TEXT for path in paths if path):
        return None
    return "all data are plain text without fields"


def _explain_one_node(job: Job) -> str | None:
    return "the run has one node" if job.cluster.nodes == 1 else None


def _explain_policy(job: Job) -> str | None:
    may_wait = job.elastic.may_change != "nothing" and job.layout.world_size > 1
    return (None if may_wait else _explain_one_node(job)) or _explain_spares(job)


def _explain_node_wait(job: Job) -> str | None:
    if job.elastic.policy == "give-up":
        return "the run does not wait for a lost node (elastic.policy=give-up)"
    return _explain_policy(job)


def _explain_may_change(job: Job) -> str | None:
    alone = "the run has one device" if job.layout.world_size == 1 else None
    return alone or _explain_spares(job)


def _explain_device_times(job: Job) -> str | None:
    if job.elastic.may_change == "nothing":
        return "the layout does not change (elastic.may_change=nothing)"
    return _explain_may_change(job)


def _explain_placement(job: Job) -> str | None:
    """A list of slots has an effect; so has rank order where another placement may be faster."""
    if not isinstance(job.layout.placement, str):
        return None
    if job.cluster.nodes == 1:
        return "all ranks are on one node"
    axes = [axis for axis in AXES if getattr(job.layout, axis) > 1]
    full = job.layout.world_size >= job.cluster.world_size
    return "the layout has no two axes to choose from" if len(axes) < 2 and full else None


def _explain_preparation(job: Job) -> str | None:
    """Prepared folders are used where they are."""
    paths = [job.data.path, *(one.path for one in job.data.eval)]
    if job.data.sources or not all((Path(path) / PREPARED_INDEX).is_file() for path in paths):
        return None
    return f"data.path={job.data.path} is already prepared"


REASONS: dict[str, Reason] = {
    "compression.kind": _explain_compression,
    "layout.bucket_mb": _explain_bucket_size,
    "layout.accumulate": _explain_accumulate,
    "layout.offload": _explain_offload,
    "layout.placement": _explain_placement,
    "layout.prefetch": _explain_prefetch,
    "train.block_backend": _explain_block_backend,
    "train.grad_dtype": _explain_grad_dtype,
    "train.gemm_autotune": _explain_gemm_autotune,
    "train.transport": _explain_transport,
    "train.all_reduce": explain_flat,
    "train.decay_embeddings": _explain_decay,
    "train.schedule": _explain_lr_schedule,
    "train.min_lr_ratio": _explain_min_lr,
    "train.noise_scale_every": _longer_than_run("train.noise_scale_every", "nothing is measured"),
    "train.eval_every": _longer_than_run("train.eval_every", "there is one evaluation, at the end"),
    "train.replica_check_every": _explain_replica_check,
    "checkpoint.every_steps": _longer_than_run("checkpoint.every_steps", "there is one save, at the end"),
    "checkpoint.every_minutes": _explain_every_minutes,
    "checkpoint.keep_every": _explain_keep_every,
    "checkpoint.quorum": _explain_one_store,
    "checkpoint.read": _explain_one_store,
    "checkpoint.on_best": _explain_on_best,
    "elastic.collective_timeout_s": _explain_timeout,
    "elastic.spares": _explain_spares,
    "elastic.snapshot_every": _explain_snapshots,
    "elastic.straggler": _explain_straggler,
    "elastic.metrics_token_file": _explain_metrics_token,
    "elastic.join_timeout_s": _explain_one_node,
    "elastic.policy": _explain_policy,
    "elastic.node_wait_s": _explain_node_wait,
    "elastic.may_change": _explain_may_change,
    "elastic.grow_after_s": _explain_device_times,
    "elastic.retry_device_s": _explain_device_times,
    "data.cache": _explain_preparation,
    "data.text_field": _explain_text_field,
    "data.on_bad_records": _explain_preparation,
}
"""Why a key has no effect. A key that is not here has an effect in every legal job."""


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
