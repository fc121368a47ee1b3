"""Checkpoints of a few tensors, written with the code of the ranks but without training.

All elements of a save have one value, so that a mixture of two saves is seen when it is read.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from meshwright.checkpoint.drafts import finish_drafts, new_draft
from meshwright.checkpoint.manifest import Manifest, TensorFacts, list_checkpoints, read_manifest, rotate
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.saver import CheckpointSaver
from meshwright.checkpoint.state import TrainState
from meshwright.checkpoint.stores import CheckpointStores, find_newest
from meshwright.checkpoint.tensor_files import DTYPES, CheckpointReader, WriteItem
from meshwright.checkpoint.writer import CheckpointWrite
from meshwright.core.object_path import AnyPath
from meshwright.layout.state_chunks import TensorSlice
from meshwright.runs.faults.checks.check import require
from meshwright.spec.job import Checkpoint

TENSORS: Mapping[str, Tensor] = {
    "blocks.10.weight": torch.arange(6.0).reshape(2, 3),
    "blocks.9.weight": torch.arange(8.0).reshape(4, 2).T,  # not contiguous
    "blocks.9.weight:exp_avg": torch.full((2, 4), 0.5),
    "blocks.9.weight:step": torch.tensor(3.0),
    "count": torch.tensor(7),
    "none": torch.zeros(0, 5),
    "low": torch.ones(3, dtype=torch.bfloat16),
}
WRITERS = 4


def fill_tensors(value: float, rows: int = 64) -> dict[str, Tensor]:
    """Tensors whose elements all have one value."""
    return {
        "w": torch.full((rows, 256), value),
        "w:exp_avg": torch.full((rows, 256), value),
        "w:step": torch.tensor(value),
        "bias": torch.full((rows,), value),
    }


def read_value(checkpoint: AnyPath) -> float:
    """Verify and load a checkpoint; returns the one value of all its elements."""
    saved = CheckpointReader(checkpoint, read_manifest(checkpoint))
    found = {float(value) for name in saved.names() for value in saved.read(name).flatten().tolist()}
    require(len(found) == 1, f"{checkpoint.name} mixes the states {found}")
    return found.pop()


def build_manifest(tensors: Mapping[str, Tensor] = TENSORS, step: int = 1, world_size: int = 1) -> Manifest:
    """The manifest of some tensors, without files."""
    facts = {name: TensorFacts(DTYPES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    return Manifest(
        step=step,
        position=0,
        world_size=world_size,
        model={},
        train={},
        seq_len=8,
        data_sha256="",
        buckets=[],
        tensors=facts,
    )


def split_rows(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> list[WriteItem]:
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
    root: Path,
    rank: int = 0,
    ranks: int = 1,
    step: int = 1,
    tensors: Mapping[str, Tensor] = TENSORS,
    **more: Any,
) -> CheckpointWrite:
    """One rank's write of a checkpoint."""
    write = CheckpointWrite(new_draft(root, step, 0), rank, split_rows(tensors, rank, ranks), **more)
    if rank == 0:
        write.manifest = build_manifest(tensors, step, ranks)
    return write


def save(
    root: Path,
    ranks: int = 1,
    step: int = 1,
    tensors: Mapping[str, Tensor] = TENSORS,
    small_files: Mapping[str, bytes] | None = None,
) -> Path:
    """Save a checkpoint; raises what a rank raised."""
    writes = [build_write(root, rank, ranks, step, tensors) for rank in range(ranks)]
    writes[0].small_files = small_files or {}
    for write in writes:
        write.start()
    for write in writes:
        write.wait()
        if write.error is not None:
            raise write.error
    assert writes[0].path is not None, "it is committed"
    return cast(Path, writes[0].path)


class SmallSaver(CheckpointSaver):
    """The saver of one rank whose state is a few tensors."""

    tensors: Mapping[str, Tensor] = TENSORS

    def __init__(
        self, root: Path, events: list[tuple[str, dict[str, Any]]], generation: int = 0, **settings: Any
    ) -> None:
        """Make one.

        Args:
            root: Folder of the checkpoints.
            events: Gets name and fields of the events.
            generation: Generation of the run.
            settings: Settings of ``checkpoint``.
        """
        job = SimpleNamespace(checkpoint=Checkpoint(**settings))
        state = SimpleNamespace(
            plan=SimpleNamespace(job=job, world_size=1, host_memory=None),
            counters=TrainState(),
            sharded=SimpleNamespace(local_parameters=lambda: [torch.zeros(1)]),
            small_files={},
        )
        log = SimpleNamespace(
            generation=generation, write=lambda name, **fields: events.append((name, fields))
        )
        super().__init__(CheckpointStores.single(root), cast(Any, state), 0, cast(Any, log))

    def _list_items(self) -> list[WriteItem]:
        return split_rows(self.tensors, self._rank, 1)

    def _build_manifest(self, eval_loss: float | None) -> Manifest:
        return replace(build_manifest(step=self.state.counters.step), eval_loss=eval_loss)


class InlineSaver(SmallSaver):
    """Writes in the thread of its caller, so that its system calls can be counted."""

    def _prepare_write(
        self, root: AnyPath, items: list[WriteItem], manifest: Manifest | None
    ) -> CheckpointWrite:
        write = super()._prepare_write(root, items, manifest)
        write.start, write.wait = write._run, lambda: None  # type: ignore[method-assign]
        return write


def fork(work: Callable[[], None]) -> int:
    """Run something in another process; returns its number."""
    child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
    finally:
        os._exit(0)


class Writers:
    """A process per rank, which saves one checkpoint."""

    def __init__(self, root: Path, step: int, value: float) -> None:
        def write(rank: int) -> None:
            def keep_one(path: AnyPath) -> None:
                rotate(root, Retention(1), path)

            build_write(root, rank, WRITERS, step, fill_tensors(value), on_commit=keep_one)._run()

        self.pids = [fork(lambda rank=rank: write(rank)) for rank in range(WRITERS)]  # type: ignore[misc]

    def wait(self) -> list[int]:
        """Exit statuses of all."""
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]

    def kill(self, order: random.Random) -> list[int]:
        """SIGKILL, in random order: a machine that goes down."""
        for pid in order.sample(self.pids, WRITERS):
            os.kill(pid, signal.SIGKILL)
        return self.wait()


def require_good(root: Path, allowed: set[float]) -> float:
    """All that is there is whole, before and after the successor's clean-up; returns the newest's value.

    An older revision may be there too, where a kill came before its removal.
    """
    for _ in range(2):
        require(list_checkpoints(root), "neither the old nor the new checkpoint is there")
        for path in list_checkpoints(root):
            read_value(path)
        finish_drafts(root)
    found = find_newest(root)
    require(found is not None, "no checkpoint is found")
    assert found is not None, "required before"
    require(found[1] == [], f"a checkpoint that does not verify: {found[1]}")
    value = read_value(found[0])
    require(value in allowed, f"the newest checkpoint has the state {value}, expected one of {allowed}")
    return value
