"""Checkpoints of a few tensors, written by ranks in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from meshwright.checkpoint import saver
from meshwright.checkpoint.drafts import new_draft
from meshwright.checkpoint.manifest import Manifest, TensorFacts
from meshwright.checkpoint.saver import CheckpointSaver
from meshwright.checkpoint.state import TrainState
from meshwright.checkpoint.stores import CheckpointStores
from meshwright.checkpoint.tensor_files import DTYPES, WriteItem
from meshwright.checkpoint.writer import CheckpointWrite
from meshwright.layout.state_chunks import TensorSlice
from meshwright.spec.job import Checkpoint

TENSORS = {
    "blocks.10.weight": torch.arange(6.0).reshape(2, 3),
    "blocks.9.weight": torch.arange(8.0).reshape(4, 2).T,  # not contiguous
    "blocks.9.weight:exp_avg": torch.full((2, 4), 0.5),
    "blocks.9.weight:step": torch.tensor(3.0),
    "count": torch.tensor(7),
    "none": torch.zeros(0, 5),
    "low": torch.ones(3, dtype=torch.bfloat16),
}


def manifest_of(tensors=TENSORS, step: int = 1, world_size: int = 1) -> Manifest:
    facts = {name: TensorFacts(DTYPES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    return Manifest(
        step=step, position=0, world_size=world_size, model={}, train={}, seq_len=8, data_sha256="",
        buckets=[], tensors=facts,
    )  # fmt: skip


def split_rows(tensors, rank: int, ranks: int) -> list[WriteItem]:
    """The items of a rank: an equal share of the rows; scalars and short tensors are rank 0's."""
    items = []
    for name, tensor in tensors.items():
        shape, whole = tuple(tensor.shape), TensorSlice.full(tuple(tensor.shape))
        if not shape or shape[0] < ranks:
            if rank == 0:
                items.append(WriteItem(name, whole, shape, tensor))
            continue
        first, stop = shape[0] * rank // ranks, shape[0] * (rank + 1) // ranks
        items.append(WriteItem(name, whole.rows(first, stop), shape, tensor[first:stop]))
    return items


def build_write(
    root: Path, rank: int = 0, ranks: int = 1, step: int = 1, tensors=TENSORS, **more
) -> CheckpointWrite:
    """One rank's write of a checkpoint."""
    write = CheckpointWrite(new_draft(root, step, 0), rank, split_rows(tensors, rank, ranks), **more)
    if rank == 0:
        write.manifest = manifest_of(tensors, step, ranks)
    return write


def save(root: Path, ranks: int = 1, step: int = 1, tensors=TENSORS, small_files=None) -> Path:
    """Save a checkpoint; raises what a rank raised."""
    writes = [build_write(root, rank, ranks, step, tensors) for rank in range(ranks)]
    writes[0].small_files = small_files or {}
    for write in writes:
        write.start()
    for write in writes:
        write.wait()
        if write.error is not None:
            raise write.error
    assert writes[0].path is not None
    return writes[0].path


def build_saver(root: Path, monkeypatch, events: list, generation: int = 0, **settings) -> CheckpointSaver:
    """The saver of one rank whose state is a few tensors; it appends name and fields of its events."""
    job = SimpleNamespace(checkpoint=Checkpoint(**settings))
    state = SimpleNamespace(
        plan=SimpleNamespace(job=job, world_size=1, host_memory=None),
        counters=TrainState(),
        sharded=SimpleNamespace(local_parameters=lambda: [torch.zeros(1)]),
        small_files={},
    )
    log = SimpleNamespace(generation=generation, write=lambda name, **fields: events.append((name, fields)))
    monkeypatch.setattr(saver, "list_write_items", lambda state, rank: split_rows(TENSORS, rank, 1))
    monkeypatch.setattr(
        saver,
        "build_manifest",
        lambda state, loss: replace(manifest_of(step=state.counters.step), eval_loss=loss),
    )
    return CheckpointSaver(CheckpointStores.single(root), state, 0, log)
