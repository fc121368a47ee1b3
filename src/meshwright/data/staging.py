"""Writing a folder so that it is either whole or not there.

The folder is filled under a temporary name beside its place, flushed to the device, and renamed. Whatever
goes wrong before that, the temporary folder is removed and the place is as it was. Errors of the storage
become errors that say what to do.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import sync_path

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def storage_errors(shown: Path) -> Iterator[None]:
    """Turn errors of writing into a user's error about the folder ``shown``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            problem = Problem(
                code="data-disk-full",
                path=str(shown),
                rule=f"cannot be written: {reason}; what was written of it is removed",
                fix="Free some space, or set out to a folder on another disk",
            )
        else:
            problem = Problem(
                code="data-not-writable",
                path=str(shown),
                rule=f"cannot be written: {reason}",
                fix="Set out to a folder that the user who runs this may write",
            )
        raise UserError(problem) from error


@contextmanager
def staged_folder(out: Path, may_replace: Callable[[Path], bool]) -> Iterator[Path]:
    """Give a temporary folder; when the block ends well, it takes the place of ``out``.

    Args:
        out: Where the folder goes. A link is followed.
        may_replace: Whether the folder that is there now, not empty, may be removed.

    Yields:
        The temporary folder.

    Raises:
        UserError: Something else is at ``out``, or the storage refuses.
    """
    place = Path(os.path.realpath(out))
    with storage_errors(out):
        _check_place(out, place, may_replace)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = _sibling(place, "partial")
        temporary.mkdir()
    try:
        yield temporary
        with storage_errors(out):
            sync_path(temporary)
            _publish(temporary, place)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_place(out: Path, place: Path, may_replace: Callable[[Path], bool]) -> None:
    if not place.exists() or (place.is_dir() and (not any(place.iterdir()) or may_replace(place))):
        return
    raise UserError(
        Problem(
            code="data-out-exists",
            path=str(out),
            rule="exists and is not a folder of prepared data, so it is not replaced",
            fix="Set out to a new folder, or remove what is there",
        )
    )


def _publish(temporary: Path, place: Path) -> None:
    """Move the folder into place; what was there goes aside first, and back if the move fails."""
    aside = _sibling(place, "old")
    replaced = place.exists() and any(place.iterdir())
    if replaced:
        place.rename(aside)
    try:
        temporary.rename(place)
    except OSError:
        if replaced:
            aside.rename(place)
        raise
    sync_path(place.parent)
    if replaced:
        shutil.rmtree(aside, ignore_errors=True)


def _sibling(place: Path, what: str) -> Path:
    return place.with_name(f".{place.name}.{os.getpid()}-{secrets.token_hex(4)}.{what}")
