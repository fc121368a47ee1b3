"""One checkpoint in flight to several stores: a thread per store writes the same staging memory."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.checkpoint.draft import DraftError
from meshwright.checkpoint.writer import CheckpointWrite
from meshwright.core.object_path import AnyPath


class ReplicatedWrite:
    """The writes of one rank. On rank 0 the checkpoint is committed when a quorum of stores has it."""

    def __init__(self, writes: Sequence[CheckpointWrite], quorum: int) -> None:
        """Start nothing yet.

        Args:
            writes: One per store; the first is that of ``checkpoint.dir``.
            quorum: How many of them must commit.
        """
        self._writes, self._quorum = writes, quorum

    @property
    def step(self) -> int:
        """Steps done when it was saved."""
        return self._writes[0].draft.step

    def start(self) -> None:
        """Start the threads."""
        for write in self._writes:
            write.start()

    def is_done(self) -> bool:
        """Whether all threads have ended."""
        return all(write.is_done() for write in self._writes)

    def wait(self) -> None:
        """Wait for the threads."""
        for write in self._writes:
            write.wait()

    def cancel(self) -> None:
        """End the threads: this generation commits no more."""
        for write in self._writes:
            write.cancel()
        self.wait()

    @property
    def copies(self) -> list[AnyPath]:
        """On rank 0: the checkpoint in all stores that have it."""
        return [write.path for write in self._writes if write.path is not None]

    @property
    def bytes(self) -> int:
        """On rank 0: of one copy."""
        return max(write.bytes for write in self._writes)

    @property
    def failures(self) -> dict[str, str]:
        """On rank 0: why the other stores do not have it."""
        return {str(w.draft.root): str(w.error or "not committed") for w in self._writes if w.path is None}

    @property
    def path(self) -> AnyPath | None:
        """On rank 0: the first copy, if a quorum of stores has one."""
        return self.copies[0] if len(self.copies) >= self._quorum else None

    @property
    def error(self) -> BaseException | None:
        """The error of the write; one that ends training comes before others."""
        errors = [write.error for write in self._writes if write.error is not None]
        fatal = [error for error in errors if not isinstance(error, OSError)]
        if fatal or len(self._writes) == 1:
            return next(iter(fatal or errors), None)
        if len(self.copies) < self._quorum and errors:
            store, reason = next(iter(self.failures.items()))
            have = (
                f"{len(self.copies)} of {len(self._writes)} stores have it, and the quorum is {self._quorum}"
            )
            return DraftError(f"{have}; {store}: {reason}")
        return None

    @property
    def seconds(self) -> float:
        """From the start to the commit by a quorum; on other ranks to the last vote."""
        committed = sorted(write.seconds for write in self._writes if write.path is not None)
        if len(committed) >= self._quorum:
            return committed[self._quorum - 1]
        return max(write.seconds for write in self._writes)
