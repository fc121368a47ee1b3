"""The stores of a run's checkpoints: ``checkpoint.dir`` and further ones, each with a full copy.

A checkpoint is committed when ``checkpoint.quorum`` stores have it. On reading, the newest one of all stores
is used, from any store that has a good copy. If as many stores as the quorum cannot be reached, they may hold
a newer checkpoint than all others. Then nothing is resumed. Works without torch.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.checkpoint.drafts import finish_drafts, list_drafts
from meshwright.checkpoint.manifest import list_checkpoints, parse_name, read_manifest
from meshwright.checkpoint.store_lock import StoreLock
from meshwright.core.errors import Problem, UserError
from meshwright.core.events import Commit
from meshwright.core.object_path import AnyPath, ObjectPath, parse_location
from meshwright.launch.lock import RunLock
from meshwright.spec.job import Checkpoint, ReadStrategy


@dataclass(frozen=True)
class _Copy:
    """One copy of a checkpoint."""

    path: AnyPath
    store: int
    order: tuple[int, float]
    """Step and time of the save, which are equal for the copies of one checkpoint."""


@dataclass
class _Listing:
    """The copies in all stores."""

    copies: list[_Copy] = field(default_factory=list)
    unreached: dict[int, str] = field(default_factory=dict)
    """Stores that cannot be read, and why."""
    seconds: dict[int, float] = field(default_factory=dict)
    """How long a store took to answer."""


@dataclass(frozen=True)
class OpenStores:
    """Stores that a run has locked."""

    locks: contextlib.ExitStack
    locked: list[str]
    """The stores that the run may write."""
    notes: list[str]
    """Which others are not reached, and why; the quorum can do without them."""


@dataclass(frozen=True)
class CheckpointStores:
    """All stores of a run."""

    roots: tuple[AnyPath, ...]
    """The first is ``checkpoint.dir``."""
    quorum: int
    """How many must have a checkpoint before it counts as committed."""
    read: ReadStrategy = "primary"

    @classmethod
    def of(
        cls, settings: Checkpoint, first: str | AnyPath, locked: Sequence[str] | None = None
    ) -> CheckpointStores:
        """The stores that a job names.

        Args:
            settings: The section ``[checkpoint]``.
            first: Its ``dir``, or the folder of a run without one.
            locked: Those that the run has locked, and may write; None for all.
        """
        roots = (parse_location(first), *(parse_location(store) for store in settings.stores))
        quorum = settings.quorum or len(roots) // 2 + 1
        usable = tuple(root for root in roots if locked is None or str(root) in locked)
        return cls(usable, quorum, settings.read)

    @classmethod
    def single(cls, root: AnyPath) -> CheckpointStores:
        """A folder or prefix of checkpoints by itself."""
        return cls((root,), 1)

    def has_checkpoints(self) -> AnyPath | None:
        """A store that holds a checkpoint; None if none that can be reached does."""
        for root in self.roots:
            with contextlib.suppress(OSError):
                if list_checkpoints(root):
                    return root
        return None

    def list_paths(self) -> list[AnyPath]:
        """All checkpoints of the stores that can be reached."""
        found: list[AnyPath] = []
        for root in self.roots:
            with contextlib.suppress(OSError):
                found += list_checkpoints(root)
        return found

    def open(self, run_dir: Path | None = None) -> OpenStores:
        """Create the folders, check that the stores are reached, and lock them: one run writes there.

        Args:
            run_dir: Run folder; None for a command without one.

        Raises:
            UserError: Another process has a lock, or too few stores can be reached.
            OSError: A single folder cannot be written.
        """
        unreached: dict[int, str] = {}
        with contextlib.ExitStack() as locks:
            for number, root in enumerate(self.roots):
                try:
                    root.mkdir(parents=True, exist_ok=True)
                    if isinstance(root, ObjectPath):
                        locks.enter_context(StoreLock.take(root))
                    else:
                        locks.enter_context(RunLock.take_checkpoints(root, run_dir))
                except OSError as error:
                    if len(self.roots) == 1 and not isinstance(root, ObjectPath):
                        raise
                    unreached[number] = str(error)
            if len(self.roots) - len(unreached) < self.quorum:
                raise self._too_few(unreached)
            locked = [str(root) for number, root in enumerate(self.roots) if number not in unreached]
            notes = [
                f"{self.roots[n]} gets no copies until the run is resumed: {why}"
                for n, why in unreached.items()
            ]
            return OpenStores(locks.pop_all(), locked, notes)

    def _too_few(self, unreached: dict[int, str]) -> UserError:
        store, reason = next(iter(unreached.items()))
        rule = f"cannot be used: {reason}"
        if len(self.roots) > 1:
            missing = f"{len(unreached)} of {len(self.roots)} stores"
            rule = f"is one of {missing} that cannot be used; the quorum is {self.quorum}: {reason}"
        return unreachable_store(self.roots[store], rule)

    def has_drafts(self) -> bool:
        """Whether an earlier process has left a draft."""
        for root in self.roots:
            with contextlib.suppress(OSError):
                if list_drafts(root):
                    return True
        return False

    def finish_drafts(self, guard: Commit = contextlib.nullcontext) -> None:
        """Commit or remove what earlier processes left. A store that cannot be reached is left as it is."""
        for root in self.roots:
            with contextlib.suppress(OSError):
                finish_drafts(root, guard)

    def find_newest(self) -> tuple[AnyPath, list[str]] | None:
        """The newest checkpoint that verifies, and why newer ones and other copies do not.

        Raises:
            UserError: There are checkpoints, but none verifies; or too few stores can be reached.
        """
        listing = self._list()
        self._require_readable(listing.unreached)
        refused = [f"{self.roots[n]}: {why}" for n, why in listing.unreached.items()]
        for copy in self._order(listing):
            if copy.store in listing.unreached:
                continue
            try:
                read_manifest(copy.path)
            except UserError as error:
                refused.append(f"{copy.path} {error.problems[0].rule}")
            except OSError as error:
                listing.unreached[copy.store] = str(error)
                self._require_readable(listing.unreached)
                refused.append(f"{self.roots[copy.store]}: {error}")
            else:
                return copy.path, refused
        if listing.copies:
            rule = f"holds no intact checkpoint: {refused[0]}"
            raise UserError(Problem("checkpoint-none-good", rule, path=str(self.roots[0])))
        return None

    def _require_readable(self, unreached: dict[int, str]) -> None:
        if len(unreached) >= self.quorum:
            raise self._too_few(unreached)

    def _list(self) -> _Listing:
        found = _Listing()
        for number, root in enumerate(self.roots):
            began = time.perf_counter()
            try:
                if len(self.roots) > 1 and not isinstance(root, ObjectPath) and not root.is_dir():
                    raise FileNotFoundError(f"{root}: there is no such folder")
                for path in list_checkpoints(root):
                    found.copies.append(_Copy(path, number, self._read_order(path)))
            except OSError as error:
                found.unreached[number] = str(error)
            found.seconds[number] = time.perf_counter() - began
        return found

    def _read_order(self, path: AnyPath) -> tuple[int, float]:
        """Step, and what orders several saves of it; of one that cannot be read, by its name."""
        step, revision = parse_name(path.name) or (0, 0)
        if len(self.roots) == 1:  # no clock is needed
            return step, float(revision)
        try:  # revisions of different stores cannot be compared
            manifest = read_manifest(path, verify=False)
        except UserError:
            return step, 0.0
        return manifest.step, manifest.saved_at

    def _order(self, listing: _Listing) -> Sequence[_Copy]:
        """Newest first; copies of the same checkpoint in the order of the read strategy."""
        if self.read == "nearest":
            rank = listing.seconds
        elif self.read == "any":
            rank = {number: random.random() for number in range(len(self.roots))}  # noqa: S311
        else:
            rank = {number: float(number) for number in range(len(self.roots))}
        by_store = sorted(listing.copies, key=lambda copy: rank[copy.store])
        return sorted(by_store, key=lambda copy: copy.order, reverse=True)


def unreachable_store(root: AnyPath, rule: str) -> UserError:
    """The error of a store that cannot be used."""
    fix = "Make it reachable; credentials and the address come from the environment (AWS_...)"
    return UserError(Problem("store-unreachable", rule, path=str(root), fix=fix))


def find_newest(root: AnyPath) -> tuple[AnyPath, list[str]] | None:
    """The newest checkpoint of one folder or prefix that verifies, and why each newer one does not."""
    return CheckpointStores.single(root).find_newest()
