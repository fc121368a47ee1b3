"""Which checkpoints are kept: the newest, the best, and every one at a multiple of a number of steps.

One rule for the rotation after a save (``manifest.rotate``) and for ``meshwright checkpoint prune``. It reads
names only; without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Revision = tuple[int, int]
"""Step of a checkpoint, and its revision: a step that is saved again gets the next one."""


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep besides the best one."""

    keep_last: int
    """Number of the newest, at least one."""
    keep_every: int = 0
    """Also all whose step is a multiple of it; 0 for none."""

    def __post_init__(self) -> None:
        assert self.keep_last >= 1, "the newest is never removed"

    def choose_removed(
        self, found: Iterable[Revision], newest: Revision, best: Revision | None = None
    ) -> set[Revision]:
        """The checkpoints to remove; never the newest or a later one.

        Args:
            found: All checkpoints that are good.
            newest: The one just written, or the newest good one. Later ones are left from an attempt that a
                resume skipped: they are neither counted nor removed.
            best: The one with the lowest evaluation loss; kept, unless its step was saved again.
        """
        counted = sorted({revision for revision in found if revision < newest} | {newest})
        current = {step: (step, number) for step, number in counted}  # the last revision of each step
        kept = set(list(current.values())[-self.keep_last :])
        if self.keep_every:
            kept |= {current[step] for step in current if step % self.keep_every == 0}
        if best is not None and (best in current.values() or best[0] != newest[0]):
            kept.add(best)
        return set(counted) - kept
