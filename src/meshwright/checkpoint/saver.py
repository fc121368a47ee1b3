"""Decides when to save a checkpoint, and writes it: rank 0 writes the full state into a fresh folder.

The folder is filled under a temporary name, flushed and renamed. So there is never a partial checkpoint.
``manifest`` describes its files. The writer holds one tensor at a time (``tensors``).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.manifest import (
    MANIFEST,
    FileFacts,
    Manifest,
    checkpoint_name,
    describe_sharding,
    list_checkpoints,
    mark_best,
    rotate,
)
from meshwright.checkpoint.state import CheckpointedState
from meshwright.checkpoint.state_snapshots import StateSnapshots
from meshwright.checkpoint.tensors import DTYPES, CheckpointTensors, list_checkpoint_tensors
from meshwright.core.events import Commit, EventWriter
from meshwright.core.files import folder_bytes, sync_path
from meshwright.core.tensor_header import TensorInfo, build_tensor_header
from meshwright.data.mixture import MixturePattern
from meshwright.spec.train_defaults import fill_defaults


class CheckpointSaver:
    """Saves by steps, by time, on the best evaluation, and at the end.

    Replicated state is saved by rank 0 alone; the other ranks wait for it in the next control all-reduce.
    Sharded state is all-gathered: all ranks must come to the same decision and take part.
    """

    def __init__(
        self,
        root: Path,
        state: CheckpointedState,
        rank: int,
        events: EventWriter,
        snapshots: StateSnapshots | None = None,
        commit: Commit = nullcontext,
    ) -> None:
        """Start without a checkpoint.

        Args:
            root: Folder of the checkpoints.
            state: To save.
            rank: Of this process.
            events: To report saves.
            snapshots: In memory, taken beside checkpoints.
            commit: Entered when a checkpoint gets its name; raises where this rank must write no more.
        """
        self._commit = commit
        self._root, self.state, self._rank, self._events = root, state, rank, events
        self._snapshots = snapshots
        self._settings = state.plan.job.checkpoint
        self.saved_step = -1
        """Steps done when the last save began."""
        self._saved_at = time.monotonic()
        self.saves = 0
        """Checkpoints that this rank took part in."""

    @property
    def needs_all_ranks(self) -> bool:
        """Whether a save is a collective."""
        return self.state.sharded.is_sharded

    @property
    def snapshot_bytes(self) -> int:
        """CPU memory that in-memory snapshots of this rank take."""
        return 0 if self._snapshots is None else self._snapshots.reserved_bytes

    def is_due_by_time(self) -> bool:
        """Whether ``checkpoint.every_minutes`` have passed since the last save."""
        return 0 < self._settings.every_minutes <= (time.monotonic() - self._saved_at) / 60

    def is_due_at(self, step: int) -> bool:
        """Whether ``checkpoint.every_steps`` asks for a save after a step."""
        return self._settings.every_steps > 0 and step % self._settings.every_steps == 0

    def has_checkpoint(self) -> bool:
        """Whether there is one to resume from; reads the folder, since only rank 0 knows what it saved."""
        return bool(list_checkpoints(self._root))

    def after_step(self, last: bool, eval_loss: float | None, save_requested: bool) -> None:
        """Save a checkpoint and take a snapshot, if they are due.

        Args:
            last: Whether the run ends with this step.
            eval_loss: Of this step, if it was evaluated.
            save_requested: Where all ranks take part: whether rank 0 found a save due by time.
        """
        if self._rank == 0 or self.needs_all_ranks:
            self._save_if_due(last, eval_loss, save_requested)
        if self._snapshots is not None and not last:
            self._snapshots.after_step()

    def _save_if_due(self, last: bool, eval_loss: float | None, save_requested: bool) -> None:
        counters = self.state.counters
        timely = save_requested if self.needs_all_ranks else self.is_due_by_time()
        best = self._settings.on_best and eval_loss is not None and eval_loss < counters.best_eval_loss
        if eval_loss is not None:
            counters.best_eval_loss = min(eval_loss, counters.best_eval_loss)
        if last or best or timely or self.is_due_at(counters.step):
            self.saves += 1
            self._saved_at, self.saved_step = time.monotonic(), counters.step
            self._save(eval_loss, best)

    def _save(self, eval_loss: float | None, best: bool) -> None:
        step, started = self.state.counters.step, time.perf_counter()
        tensors = list_checkpoint_tensors(self.state, self.has_checkpoint)
        if self._rank != 0:
            tensors.drain()
            return
        try:
            manifest = build_manifest(self.state, eval_loss)
            path = save_checkpoint(self._root, manifest, tensors, self.state.small_files, self._commit)
            with self._commit():
                if best:
                    mark_best(path.parent, path)
                rotate(path.parent, self._settings.keep_last, path)
        except OSError as error:  # a full disk costs a checkpoint, not the run
            tensors.drain()
            self._events.write("checkpoint_failed", step=step, reason=str(error))
            return
        seconds, size = time.perf_counter() - started, folder_bytes(path)
        self._events.write("checkpoint", step=step, path=str(path), bytes=size, seconds=seconds)


def build_manifest(state: CheckpointedState, eval_loss: float | None) -> Manifest:
    """The manifest of a checkpoint of the current step, before its files are written."""
    plan, job, counters = state.plan, state.plan.job, state.counters
    weights = {source.name: source.weight for source in job.data.sources}
    counts = MixturePattern(list(weights.values())).count(counters.position) if weights else []
    return Manifest(
        step=counters.step,
        position=counters.position,
        world_size=plan.world_size,
        model=asdict(job.model),
        train=fill_defaults(job.train),
        seq_len=job.data.seq_len,
        mask=job.data.mask,
        prompt_masking=job.data.prompt_masking,
        data_sha256=state.data_sha256,
        template=state.template,
        eval_fraction=job.data.eval_fraction,
        sources=weights,
        source_positions=dict(zip(weights, counts, strict=True)),
        buckets=[list(names) for names in plan.buckets],
        micro_batch=job.layout.micro_batch or 0,
        compression=job.compression.kind,
        sharding=describe_sharding(job),
        torch=torch.__version__,
        loss_scale=state.loss_scaler.state_dict(),
        grad_norms=counters.grad_norms,
        eval_loss=eval_loss,
        best_eval_loss=None if math.isinf(counters.best_eval_loss) else counters.best_eval_loss,
    )


def save_checkpoint(
    root: Path,
    manifest: Manifest,
    tensors: CheckpointTensors,
    small_files: Mapping[str, bytes] | None = None,
    commit: Commit = nullcontext,
) -> Path:
    """Write one checkpoint; on any failure the draft is removed and the error raised."""
    final = root / checkpoint_name(manifest.step)
    draft = root / f".{final.name}.{os.getpid()}.part"
    try:
        draft.mkdir(parents=True)
        files = {
            name: _write_tensors(draft / name, header, tensors.values())
            for name, header in tensors.headers().items()
        }
        for name, file_content in (small_files or {}).items():
            (draft / name).write_bytes(file_content)
            files[name] = FileFacts(len(file_content), hashlib.sha256(file_content).hexdigest())
        content = asdict(replace(manifest, files=files))
        (draft / MANIFEST).write_text(json.dumps(content, indent=1), encoding="utf-8")
        for written in draft.iterdir():
            sync_path(written)
        sync_path(draft)
        aside = root / f".{final.name}.old"
        with commit():
            if final.exists():  # a resumed run reached a step that it had saved before
                final.rename(aside)
            draft.rename(final)
            sync_path(root)
        shutil.rmtree(aside, ignore_errors=True)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return final


def _write_tensors(path: Path, header: Mapping[str, TensorInfo], tensors: Iterator[Tensor]) -> FileFacts:
    """Write one file and compute its checksum on the way, without reading it again."""
    first = build_tensor_header(header)
    digest = hashlib.sha256(first)
    with path.open("xb") as file:
        file.write(first)
        for name, facts in header.items():
            tensor = next(tensors).detach()
            found = (DTYPES.get(tensor.dtype), tuple(tensor.shape))
            assert found == (facts.dtype, facts.shape), f"{name} is {found}, its header says {facts}"
            values = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest.update(values)
            file.write(values)
            del tensor, values  # before the next one is produced
    return FileFacts(len(first) + sum(facts.bytes for facts in header.values()), digest.hexdigest())
