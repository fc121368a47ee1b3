"""Loads a checkpoint into a rank's state: each rank reads its own shards of the full tensors.

The layout may differ from the one that saved. What then changes the loss curve is returned as notes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from meshwright.checkpoint.manifest import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    SELECTION_BIAS,
    Manifest,
    describe_sharding,
    read_manifest,
)
from meshwright.checkpoint.state import CheckpointedState
from meshwright.core.errors import Problem, UserError
from meshwright.spec.execution import autotunes_gemms
from meshwright.spec.job import Train
from meshwright.spec.train_defaults import fill_defaults

DEFAULTS = {f.name: f.default for f in dataclasses.fields(Train) if f.default is not dataclasses.MISSING}
"""Values of keys of ``train`` that a checkpoint older than the key does not name."""
HARMLESS_KEYS = ("eval_every", "eval_samples", "noise_scale_every", "replica_check_every")
"""Keys of ``train`` that do not change the loss curve."""


@torch.no_grad()
def resume(state: CheckpointedState, checkpoint: Path) -> list[str]:
    """Restore tensors and counters from a checkpoint.

    Args:
        state: Of this rank; overwritten.
        checkpoint: A folder that was verified already.

    Returns:
        Why the loss curve will not continue bit by bit; empty if it will.
    """
    manifest = read_manifest(checkpoint, verify=False)
    named = dict(state.sharded.named_parameters())
    optimizer = {
        f"{name}:{key}": value
        for name, parameter in named.items()
        for key, value in state.optimizer.state.get(parameter, {}).items()
    }
    weights = dict(zip(named, state.sharded.local_parameters(), strict=True))
    if state.plan.job.mixes_samples:
        weights |= dict(state.model.named_buffers())
    if state.expert_biases is not None and (biases := load_selection_bias(checkpoint)) is not None:
        # Part of the model: with train.balance_rate=0 they stay fixed and still select experts.
        state.expert_biases.use_biases(state.model, biases)
    _load_tensors(state, checkpoint, MODEL_FILE, weights)
    _load_tensors(state, checkpoint, OPTIMIZER_FILE, optimizer)
    counters = state.counters
    counters.step = counters.first_step = manifest.step
    counters.position, counters.grad_norms = manifest.position, list(manifest.grad_norms)
    if manifest.best_eval_loss is not None:
        counters.best_eval_loss = manifest.best_eval_loss
    if manifest.train.get("loss_scale") == state.plan.job.train.loss_scale:  # a new initial scale starts over
        state.loss_scaler.load_state_dict(manifest.loss_scale)
    return list_differences(manifest, state)


def open_tensors(checkpoint: Path, name: str) -> Any:
    """Open one file of a checkpoint as a context that reads a tensor at a time."""
    return safe_open(checkpoint / name, framework="pt")


def load_selection_bias(checkpoint: Path) -> Tensor | None:
    """The biases of expert selection (layers with experts, experts), if the checkpoint has them."""
    with open_tensors(checkpoint, MODEL_FILE) as saved:
        return saved.get_tensor(SELECTION_BIAS) if SELECTION_BIAS in set(saved.keys()) else None


def _load_tensors(state: CheckpointedState, checkpoint: Path, file: str, targets: dict[str, Tensor]) -> None:
    with open_tensors(checkpoint, file) as saved:
        missing = targets.keys() - set(saved.keys())
        assert not missing, f"{file} lacks tensors of the model: {checkpoint}: {sorted(missing)}"
        for key, target in targets.items():
            full = saved.get_slice(key)  # nothing is read yet
            if full.get_shape() == list(target.shape):
                target.copy_(saved.get_tensor(key))
            else:
                target.copy_(state.sharded.shard_to(key.partition(":")[0], full, target.shape))
            require_finite(checkpoint / file, key, target)


def require_finite(file: Path, name: str, values: Tensor) -> None:
    """Check a tensor that was read from a checkpoint.

    Raises:
        UserError: It holds a NaN or an Inf.
    """
    if values.is_floating_point() and not torch.isfinite(values).all():
        rule, fix = f"has a NaN or an Inf in the tensor {name}", "Use an older checkpoint"
        raise UserError(Problem("checkpoint-not-finite", rule, path=str(file), fix=fix))


def list_differences(manifest: Manifest, state: CheckpointedState) -> list[str]:
    """What differs from the run that saved and changes the loss curve, in sentences."""
    plan, job, notes = state.plan, state.plan.job, []
    if manifest.world_size != plan.world_size:
        notes.append(f"{manifest.world_size} ranks before, {plan.world_size} now: equal up to rounding")
    elif manifest.buckets != [list(names) for names in plan.buckets]:
        notes.append("the gradient buckets differ: equal up to rounding")
    facts = (
        ("layout.micro_batch", manifest.micro_batch, job.layout.micro_batch),
        ("compression.kind", manifest.compression, job.compression.kind),
        ("the sharding", manifest.sharding or "none", describe_sharding(job) or "none"),
        ("torch", manifest.torch, torch.__version__),
    )
    notes += [
        f"{name} was {before}, is {now}: equal up to rounding" for name, before, now in facts if before != now
    ]
    if autotunes_gemms(job):
        notes.append("GEMM autotuning may choose other algorithms: equal up to rounding")
    if manifest.data_sha256 != state.data_sha256:
        notes.append("the data changed")
    for key, value in fill_defaults(job.train).items():
        before = manifest.train.get(key, DEFAULTS.get(key))
        if key not in HARMLESS_KEYS and before != value:
            notes.append(f"train.{key} was {before}, is {value}")
    return notes
