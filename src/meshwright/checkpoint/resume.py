"""Loads a checkpoint into a rank's state: each rank reads its own chunks of the full tensors.

The layout may differ from the one that saved. What then changes the loss curve is returned as notes.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import Manifest, describe_sharding, read_manifest
from meshwright.checkpoint.state import CheckpointedState
from meshwright.checkpoint.tensor_files import CheckpointReader
from meshwright.core.errors import Problem, UserError
from meshwright.core.object_path import AnyPath
from meshwright.data.growth import describe_growth
from meshwright.layout.parameters import list_parameters
from meshwright.layout.state_chunks import SELECTION_BIAS, Chunk, TensorSlice, local_chunks, shard_chunks
from meshwright.spec.execution import autotunes_gemms
from meshwright.spec.job import Train
from meshwright.spec.train_defaults import fill_defaults

DEFAULTS = {f.name: f.default for f in dataclasses.fields(Train) if f.default is not dataclasses.MISSING}
"""Values of keys of ``train`` that a checkpoint older than the key does not name."""
HARMLESS_KEYS = ("eval_every", "eval_samples", "noise_scale_every", "replica_check_every", "transport")
"""Keys of ``train`` that do not change the loss curve, or whose effect is compared apart."""


@torch.no_grad()
def resume(state: CheckpointedState, checkpoint: AnyPath, rank: int) -> list[str]:
    """Restore tensors and counters from a checkpoint.

    Args:
        state: State of this rank; overwritten.
        rank: Rank of this process.
        checkpoint: A folder that was verified already.

    Returns:
        Why the loss curve will not continue bit by bit; empty if it will.
    """
    manifest = read_manifest(checkpoint, verify=False)
    load_tensors(state, CheckpointReader(checkpoint, manifest, prefer=rank), rank)
    counters = state.counters
    counters.step = counters.first_step = manifest.step
    counters.position, counters.grad_norms = manifest.position, list(manifest.grad_norms)
    state.corpus = manifest.corpus.continued(state.corpus, manifest.positions)
    if manifest.best_eval_loss is not None:
        counters.best_eval_loss = manifest.best_eval_loss
    if manifest.train.get("loss_scale") == state.plan.job.train.loss_scale:  # a new initial scale starts over
        state.loss_scaler.load_state_dict(manifest.loss_scale)
    return list_differences(manifest, state)


class TensorSource(Protocol):
    """Where full tensors are read from: a checkpoint, or in-memory snapshots of another layout."""

    @property
    def location(self) -> str:
        """For errors."""

    def names(self) -> list[str]:
        """The names of all full tensors."""

    def read(self, name: str, tensor_slice: TensorSlice | None = None) -> Tensor:
        """Read a full tensor, or a part of it, into new memory."""


@torch.no_grad()
def load_tensors(state: CheckpointedState, saved: TensorSource, rank: int) -> None:
    """Fill the parameters, the optimizer state and the buffers of a rank.

    Args:
        state: State of this rank; overwritten.
        saved: Has all full tensors.
        rank: Rank of this process.
    """
    job = state.plan.job
    shapes = {parameter.name: parameter.shape for parameter in list_parameters(job.model)}
    weights = state.sharded.local_parameters()
    for (name, parameter), weight in zip(state.sharded.named_parameters(), weights, strict=True):
        chunks = shard_chunks if job.layout.zero >= 2 else local_chunks
        _load_chunks(saved, name, weight, chunks(job, rank, name, shapes[name]))
        shard = shard_chunks(job, rank, name, shapes[name])
        for key, tensor in state.optimizer.state.get(parameter, {}).items():
            _load_chunks(saved, f"{name}:{key}", tensor, shard)
    if job.mixes_samples:  # running statistics of batch norms
        for name, buffer in state.model.named_buffers():
            buffer.copy_(saved.read(name))
    if state.expert_biases is not None and (biases := load_selection_bias(saved)) is not None:
        # Part of the model: with train.balance_rate=0 they stay fixed and still select experts.
        state.expert_biases.use_biases(state.model, biases)


def load_selection_bias(saved: TensorSource) -> Tensor | None:
    """The biases of expert selection (layers with experts, experts), if the checkpoint has them."""
    return saved.read(SELECTION_BIAS) if SELECTION_BIAS in saved.names() else None


def _load_chunks(saved: TensorSource, name: str, target: Tensor, chunks: tuple[Chunk, ...]) -> None:
    """Fill a tensor of this rank; rows after the last chunk are padding, which is zero."""
    if target.ndim == 0:
        target.copy_(saved.read(name))
        return
    target[sum(chunk.rows for chunk in chunks) :].zero_()
    for chunk in chunks:
        values = saved.read(name, chunk.tensor_slice)
        if ":" not in name:  # optimizer state may be infinite: a run that is not interrupted goes on with it
            require_finite(saved.location, name, values)
        target[chunk.first : chunk.first + chunk.rows].copy_(values)


def require_finite(location: str, name: str, values: Tensor) -> None:
    """Check a tensor that was read from a checkpoint.

    Raises:
        UserError: It holds a NaN or an Inf.
    """
    if values.is_floating_point() and not torch.isfinite(values).all():
        rule, fix = f"has a NaN or an Inf in the tensor {name}", "Use an older checkpoint"
        raise UserError(Problem("checkpoint-not-finite", rule, path=location, fix=fix))


def list_differences(manifest: Manifest, state: CheckpointedState) -> list[str]:
    """Settings that differ from the saved run and change the loss curve, in sentences."""
    plan, job, notes = state.plan, state.plan.job, []
    if manifest.world_size != plan.world_size:
        notes.append(f"{manifest.world_size} ranks before, {plan.world_size} now: equal up to rounding")
    elif manifest.buckets != [list(names) for names in plan.buckets]:
        notes.append("the gradient buckets differ: equal up to rounding")
    facts = (
        ("layout.micro_batch", manifest.micro_batch, job.layout.micro_batch),
        ("compression.kind", manifest.compression, job.compression.kind),
        ("the sharding", manifest.sharding or "none", describe_sharding(job) or "none"),
        ("the transport", manifest.transport or state.transport, state.transport),
        ("torch", manifest.torch, torch.__version__),
    )
    notes += [
        f"{name} was {before}, is {now}: equal up to rounding" for name, before, now in facts if before != now
    ]
    if autotunes_gemms(job):
        notes.append("GEMM autotuning may choose other algorithms: equal up to rounding")
    if manifest.data_sha256 != state.corpus.sha256:
        now = state.corpus
        notes += describe_growth(manifest.data, now.sources, now.epochs) or ["the data changed"]
    for key, value in fill_defaults(job.train).items():
        before = manifest.train.get(key, DEFAULTS.get(key))
        if key not in HARMLESS_KEYS and before != value:
            notes.append(f"train.{key} was {before}, is {value}")
    return notes
