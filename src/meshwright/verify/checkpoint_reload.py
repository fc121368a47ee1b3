"""Saves a checkpoint in the middle of a proof, overwrites the state of the ranks, and reloads it.

Every rank then holds what it held before, bit by bit: weights, moments, step counts, selection biases,
counters, loss scale. The file itself holds the tensors of one process, so it can be resumed in any layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from meshwright.checkpoint.manifest import checkpoint_name
from meshwright.checkpoint.resume import resume
from meshwright.checkpoint.tensor_files import CheckpointReader
from meshwright.layout.optimizer_state import STEP_COUNT
from meshwright.parallel.full_tensors import is_dtensor
from meshwright.train.trainer import Trainer
from meshwright.verify.local_state import LocalState, list_local_state
from meshwright.verify.proof_task import (
    CHANGE_TOLERANCE,
    CHECKPOINTS,
    NOISE_GRADIENT,
    PROOF_PHASE,
    ROUNDING,
    UPDATE_TOLERANCE,
    WEIGHTS_FILE,
    ReferenceRecord,
    StateDifference,
)
from meshwright.verify.tensor_difference import describe_rows, tensor_norm

WEIGHT = "weight"


def can_save(trainer: Trainer) -> bool:
    """Whether every rank has the state of all its parameters: one without gradient may have none."""
    frozen = sum(not parameter.requires_grad for _, parameter in trainer.rank_parameters.named_parameters())
    with trainer.counter.during(PROOF_PHASE):
        return trainer.mesh.all_reduce_scalars([float(frozen)])[0] == 0


def save_and_reload(trainer: Trainer) -> list[StateDifference]:
    """Save, overwrite and reload the state of this rank; returns what differs afterwards."""
    step = trainer.step
    before = {name: state.copy() for name, state in list_local_state(trainer).items()}
    others = _list_others(trainer)
    trainer.saver.after_step(last=True, eval_loss=None, save_requested=False)
    with trainer.counter.during(PROOF_PHASE):
        trainer.mesh.all_reduce_scalars([0.0])  # rank 0 has committed the checkpoint
    _overwrite(trainer)
    checkpoint = Path(trainer.assignment.checkpoint_dir) / checkpoint_name(step)
    resume(trainer.saver.state, checkpoint, trainer.mesh.rank)
    trainer.state.first_step = 0  # the events count all steps of the proof
    found = list(_compare_local(before, list_local_state(trainer)))
    for name, value in _list_others(trainer).items():
        if not torch.equal(value, others[name]):
            found.append(StateDifference(None, name, None, "reloaded"))
    return found


@torch.no_grad()
def _overwrite(trainer: Trainer) -> None:
    """A reload that does nothing must not pass."""
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    for tensor in (*trainer.rank_parameters.local_parameters(), *moments):
        tensor.fill_(math.nan)
    if trainer.balancer is not None and trainer.balancer.bias_LE is not None:
        trainer.balancer.bias_LE.fill_(math.nan)
    trainer.state.step = trainer.state.position = 0


def _list_others(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of the state that no parameter has."""
    found = {"step": torch.tensor(trainer.step), "sample position": torch.tensor(trainer.state.position)}
    if trainer.balancer is not None and trainer.balancer.bias_LE is not None:
        found["selection bias"] = trainer.balancer.bias_LE.clone()
    if scale := trainer.amp.state_dict():
        found["loss scale"] = torch.tensor(list(scale.values()))
    return found


def _compare_local(before: dict[str, LocalState], after: dict[str, LocalState]) -> Iterator[StateDifference]:
    for name, old in before.items():
        new = after[name]
        pairs = {WEIGHT: (old.parameter, new.parameter)}
        pairs |= {key: (value, new.moments[key]) for key, value in old.moments.items()}
        for what, (one, other) in pairs.items():
            wanted, found = _local(one), _local(other)
            if not torch.equal(wanted, found):
                size, off = tensor_norm(wanted), tensor_norm(found - wanted)
                relative = off / size if size and math.isfinite(off) else None
                rows = describe_rows(found, wanted)
                yield StateDifference(name, what, relative, f"reloaded; {rows}" if rows else "reloaded")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def compare_checkpoints(checkpoint: Path, reference: Path, step: int) -> Iterator[StateDifference]:
    """Compare the files of a checkpoint with those of the reference.

    Weights are compared by their change. Where a gradient is rounding only, so is the change: not compared.

    Args:
        checkpoint: Checkpoint of the layout.
        reference: Folder of the reference.
        step: Step of both checkpoints.
    """
    record, theirs = ReferenceRecord.read(reference), reference / CHECKPOINTS / checkpoint_name(step)
    norms = record.gradient_norms["1"]
    noise = NOISE_GRADIENT * math.hypot(*norms.values())
    found, expected = CheckpointReader(checkpoint), CheckpointReader(theirs)
    with safe_open(reference / WEIGHTS_FILE, framework="pt") as initial:
        for name in record.parameters:
            if norms.get(name, 0.0) < noise:
                continue
            wanted = expected.read(name)
            change = tensor_norm(wanted.double() - initial.get_tensor(name).double())
            floor = ROUNDING * tensor_norm(wanted)
            yield from _compare_saved(name, WEIGHT, found, wanted, CHANGE_TOLERANCE * change + floor, change)
    sizes = {key: tensor_norm(expected.read(key)) for key in expected.names() if ":" in key}
    for key, size in sizes.items():
        name, _, what = key.rpartition(":")
        whole = math.hypot(*(size for other, size in sizes.items() if other.endswith(f":{what}")))
        limit = 0.0 if what == STEP_COUNT else UPDATE_TOLERANCE * size + ROUNDING * whole
        yield from _compare_saved(name, what, found, expected.read(key), limit, size)


def _compare_saved(
    name: str, what: str, found: CheckpointReader, wanted: Tensor, limit: float, size: float
) -> Iterator[StateDifference]:
    key = name if what == WEIGHT else f"{name}:{what}"
    tensor = found.read(key)
    off = tensor_norm(tensor.double() - wanted.double()) if tensor.shape == wanted.shape else math.inf
    if not off <= limit:
        yield StateDifference(name, what, off / size if size and math.isfinite(off) else None, "saved")
