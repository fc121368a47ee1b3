"""Writes a folder atomically.

The files are written to a temporary sibling folder, which is synced to disk and renamed. If anything fails
before, the temporary folder is removed and the target is unchanged. Storage errors become user errors.
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
from meshwright.core.files import exchange_paths, sync_path

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def storage_errors(shown: Path) -> Iterator[None]:
    """Turn write errors into a user error about the folder ``shown``."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            problem = Problem(
                code="data-disk-full",
                path=str(shown),
                rule=f"cannot be written: {reason}; partial output is removed",
                fix="Free some space, or set out to a folder on another disk",
            )
        else:
            problem = Problem(
                code="data-not-writable",
                path=str(shown),
                rule=f"cannot be written: {reason}",
                fix="Set out to a writable folder",
            )
        raise UserError(problem) from error


@contextmanager
def staged_folder(out: Path, may_replace: Callable[[Path], bool]) -> Iterator[Path]:
    """A temporary folder that replaces ``out`` when the block succeeds.

    Args:
        out: The target folder. Links are followed.
        may_replace: Whether an existing, non-empty folder may be replaced.

    Yields:
        The temporary folder.

    Raises:
        UserError: ``out`` may not be replaced, or the storage fails.
    """
    target = Path(os.path.realpath(out))
    with storage_errors(out):
        check_target(out, may_replace)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _sibling(target, "partial")
        temporary.mkdir()
    try:
        yield temporary
        with storage_errors(out):
            sync_path(temporary)
            _publish(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def publish_folder(folder: Path, out: Path, may_replace: Callable[[Path], bool]) -> None:
    """Give a complete folder its final name, in place of an earlier one.

    Args:
        folder: On the same file system as ``out``; its files are synced to disk.
        out: The target folder. Links are followed.
        may_replace: Whether an existing, non-empty folder may be replaced.
    """
    with storage_errors(out):
        check_target(out, may_replace)
        sync_path(folder)
        _publish(folder, Path(os.path.realpath(out)))


def check_target(out: Path, may_replace: Callable[[Path], bool]) -> None:
    """Refuse a target that exists and may not be replaced.

    Raises:
        UserError: With the reason.
    """
    target = Path(os.path.realpath(out))
    if not target.exists() or (target.is_dir() and (not any(target.iterdir()) or may_replace(target))):
        return
    raise UserError(
        Problem(
            code="data-out-exists",
            path=str(out),
            rule="exists and is not a folder of prepared data, so it is not replaced",
            fix="Set out to a new folder, or remove this one",
        )
    )


def _publish(temporary: Path, target: Path) -> None:
    """Rename the folder in place of an existing one, in one step where the file system can.

    Elsewhere the existing one is moved aside first, and back if that fails: readers miss it for a moment.
    """
    aside = _sibling(target, "old")
    replaced = target.exists() and any(target.iterdir())
    if replaced:
        temporary.rename(aside)
        if exchange_paths(aside, target):
            sync_path(target.parent)
            shutil.rmtree(aside, ignore_errors=True)
            return
        aside.rename(temporary)
        target.rename(aside)
    try:
        temporary.rename(target)
    except OSError:
        if replaced:
            aside.rename(target)
        raise
    sync_path(target.parent)
    if replaced:
        shutil.rmtree(aside, ignore_errors=True)


def _sibling(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.{what}")
