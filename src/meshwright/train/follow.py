"""Follows data that grow during a run: all ranks take up the same index at the end of the same step.

Rank 0 looks for another ``index.json`` after each step, checks that the data have only grown, and puts the
name of the new index into the control all-reduce of the next steps. A rank that has opened this index adds
one to a counter in the same all-reduce. All ranks get the same sums, so they change to the new index at the
end of the same step, when all are ready. If the data did not only grow, rank 0 asks all ranks to stop, and
reports the error after the last checkpoint. Folders on several nodes may be copied one after the other; until
the last one has grown, the run goes on with the old data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.data.dataset import TokenDataset
from meshwright.data.epochs import CorpusState
from meshwright.data.growth import DataChangedError, check_growth, identify_corpus
from meshwright.data.mixture import read_mixture
from meshwright.parallel.mesh import Mesh
from meshwright.spec.job import Job
from meshwright.spec.paths import PREPARED_INDEX

_NAME_DIGITS = 12
"""Hexadecimal digits of a name: 48 bits are exact in a float64."""

Stamp = tuple[tuple[int, int, int], ...]
OpenFolder = Callable[[], TokenDataset]


def name_of(corpus: CorpusState) -> float:
    """The name of an index in the control all-reduce; never 0."""
    return float(int(corpus.sha256[:_NAME_DIGITS], 16) + 1)


@dataclass(frozen=True)
class Votes:
    """A rank's values in the control all-reduce, or their sums over all ranks."""

    proposed: float = 0.0
    """Rank 0's name of the new index; 0 for none."""
    ready: float = 0.0
    """Ranks that have opened it."""


class DataFollower:
    """Finds out on one rank when all ranks can read data that have grown."""

    def __init__(
        self, folder: Path, current: CorpusState, rank: int, ranks: int, open_folder: OpenFolder
    ) -> None:
        """Start with the current data; nothing is read.

        Args:
            folder: Folder of the prepared data, on this rank's node.
            current: The data that are read.
            rank: Rank of this process.
            ranks: Ranks in the run.
            open_folder: Opens the training samples that are in the folder now.
        """
        self._folder, self._current, self._rank, self._ranks = folder, current, rank, ranks
        self._open_folder = open_folder
        self._seen: Stamp = ()
        """The index files when the folder was opened last."""
        self._opened: CorpusState | None = None
        self._proposed = 0.0
        """In the all-reduce of the previous step."""
        self.refused: UserError | None = None
        """On rank 0: the data changed, and did not only grow. The run saves a checkpoint and ends."""

    def vote(self) -> Votes:
        """The values of this rank for the next control all-reduce."""
        if self._opened is None:
            return Votes()
        name = name_of(self._opened)
        return Votes(name if self._rank == 0 else 0.0, float(name == self._proposed))

    def after_step(self, sums: Votes) -> CorpusState | None:
        """The data to go on with, if all ranks have opened them; else looks for grown data.

        Args:
            sums: Sums of the votes of all ranks in this step.
        """
        opened, proposed = self._opened, self._proposed
        self._proposed = sums.proposed
        if opened is not None and proposed and sums.proposed == proposed and sums.ready == self._ranks:
            self._current, self._opened, self._proposed = opened, None, 0.0
            return opened
        if self._rank == 0 or (sums.proposed and (opened is None or name_of(opened) != sums.proposed)):
            self._look()
        return None

    def _look(self) -> None:
        """Open the folder, if an index changed since it was opened last."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            found = identify_corpus(self._folder, self._open_folder())
        except (OSError, UserError):  # it is just being replaced: the next step looks again
            return
        self._seen = stamp
        if found.sha256 == self._current.sha256:
            self._opened = None
            return
        if self._rank == 0 and self._find_change():
            return
        self._opened = found

    def _stamp(self) -> Stamp:
        files = [(Path(one.folder) / PREPARED_INDEX).stat() for one in read_mixture(self._folder)]
        return tuple((file.st_ino, file.st_mtime_ns, file.st_size) for file in files)

    def _find_change(self) -> bool:
        """Whether the data did not only grow; keeps the error."""
        try:
            check_growth(self._current.sources, self._folder)
        except DataChangedError as error:
            rule = f"was replaced during the run by other data: {error}"
            fix = (
                "Prepare the old documents again, with new ones only after them, and resume from the "
                "checkpoint that the run saved; or start a new run"
            )
            self.refused = UserError(Problem("data-follow-changed", rule, path=str(self._folder), fix=fix))
            self._opened = None
            return True
        return False


def build_follower(job: Job, folder: Path, current: CorpusState, mesh: Mesh) -> DataFollower | None:
    """The follower of a rank; None for a job that does not follow, and for data from elsewhere."""
    if not job.data.follow or not current.sources:
        return None
    data = job.data

    def open_folder() -> TokenDataset:
        return TokenDataset.open(folder, "train", data.seq_len, data.mask, data.prompt_masking)

    return DataFollower(folder, current, mesh.rank, mesh.world_size, open_folder)
