"""Writes this rank's part of a checkpoint in a thread, and on rank 0 commits the checkpoint.

The protocol is in ``draft``. The thread uses no process group: ranks communicate through files.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.checkpoint.draft import Draft, DraftError, add_files
from meshwright.checkpoint.manifest import PROPOSAL, TENSORS_SUFFIX, FileFacts, Manifest, find_wrong_file
from meshwright.checkpoint.tensor_files import WriteItem, write_tensors
from meshwright.core.events import Commit
from meshwright.core.object_path import AnyPath, ObjectPath

FINITE_ELEMENTS = 2**20
"""Checked for NaN and Inf at a time."""


class WeightNotFiniteError(Exception):
    """A weight has a NaN or an Inf: it must not replace a good checkpoint."""

    def __init__(self, name: str) -> None:
        super().__init__(f"weight {name} is not finite")
        self.name = name


class _CancelledError(Exception):
    """The generation has ended."""


@dataclass
class CheckpointWrite:
    """One checkpoint in flight to the disk, as seen by one rank."""

    draft: Draft
    rank: int
    items: list[WriteItem]
    manifest: Manifest | None = None
    """On rank 0, which commits: the manifest without its files."""
    small_files: Mapping[str, bytes] = field(default_factory=dict)
    guard: Commit = nullcontext
    on_commit: Callable[[AnyPath], None] = lambda path: None
    """Called on rank 0 with the new checkpoint."""
    path: AnyPath | None = None
    """On rank 0: the checkpoint, once it is committed."""
    bytes: int = 0
    """On rank 0: of its files, once it is committed."""
    error: BaseException | None = None
    seconds: float = 0.0
    """From the start of the thread to the commit; on other ranks to the vote."""

    def __post_init__(self) -> None:
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def is_done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the thread."""
        self._thread.join()

    def cancel(self) -> None:
        """Let the thread end: this generation commits no more. A draft with all votes is left to the next."""
        self._cancelled.set()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            has_voted = self._write_and_vote()
            if self.manifest is not None and has_voted:
                self._commit(self.manifest)
            elif self.manifest is not None:  # the folder cannot be written: other ranks cannot vote either
                self._discard()
        except BaseException as error:  # the training loop handles it
            self.error = self.error or error
        self.seconds = time.perf_counter() - started
        self.items = []  # views of the live state would keep it alive

    def _write_and_vote(self) -> bool:
        """Write the files of this rank and vote, for it or against it; returns whether it could vote."""
        name = f"rank-{self.rank:05d}{TENSORS_SUFFIX}"
        files: dict[str, FileFacts] = {}
        is_complete = False
        try:
            with self.guard():  # a fenced process must not create again what its successor has removed
                self.draft.open()
            if self.manifest is not None:
                self.draft.propose(self.manifest)
                for small, content in self.small_files.items():
                    files[small] = self.draft.write_small_file(small, content)
            files[name] = write_tensors(self.draft.folder / name, self.items, self._check)
            is_complete = True
            self.draft.vote(self.rank, files)
        except (OSError, WeightNotFiniteError) as error:
            self.error = error
            # In an object store a vote may be there although its answer was lost: then the files stay.
            keeps = is_complete and isinstance(self.draft.folder, ObjectPath)
            mine = [] if keeps else [name, *([PROPOSAL] if self.manifest else ()), *self.small_files]
            try:
                self.draft.refuse(self.rank, str(error), mine)
            except OSError:
                return False
        return True

    def _check(self, item: WriteItem, values: Tensor) -> None:
        if self._cancelled.is_set():
            raise _CancelledError
        if ":" not in item.name and values.is_floating_point() and values.numel():
            for piece in values.reshape(-1).split(FINITE_ELEMENTS):
                extremes = torch.stack(torch.aminmax(piece))  # NaN if one is; 10 times as fast as isfinite
                if not bool(torch.isfinite(extremes).all()):
                    raise WeightNotFiniteError(item.name)

    def _commit(self, manifest: Manifest) -> None:
        """Commit the draft if all ranks have voted for it; else remove it."""
        try:
            ranks = range(1 if self.error else 0, manifest.world_size)
            votes = self.draft.wait_for_votes(ranks, self._cancelled.wait)
            if against := [vote for vote in votes.values() if vote.refused]:
                raise DraftError(f"rank {against[0].rank}: {against[0].refused}")
            if self.error:
                self._discard()
                return
            manifest = add_files(manifest, votes)
            if (name := find_wrong_file(self.draft.folder, manifest)) is not None:
                raise DraftError(f"{name} is missing or has another size")
            self.path = self.draft.commit(manifest, self.guard)
            self.bytes = sum(facts.bytes for facts in manifest.files.values())
        except OSError:
            if not self._cancelled.is_set():
                self._discard()
            raise
        try:
            self.on_commit(self.path)
        except OSError as error:  # the checkpoint is committed
            os.write(2, f"warning: older checkpoints of {self.draft.root} stay: {error}\n".encode())

    def _discard(self) -> None:
        with self.guard():  # a successor may have committed it
            self.draft.discard()
