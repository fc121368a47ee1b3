"""Files: atomic and durable writes, write access, and sizes."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of ``linux/fcntl.h`` and ``linux/fs.h``."""
_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})


def sync_path(path: Path) -> None:
    """Sync a closed file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old contents or the new ones.

    Args:
        path: In an existing folder.
        text: The contents.
    """
    replace_bytes(path, text.encode(), durable=False)


def replace_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file atomically: a reader sees the old contents or the new ones.

    Args:
        path: In an existing folder.
        content: The contents.
        durable: Also sync the file to disk before it gets its name.
    """
    # Other processes, also on other machines, may write the same file.
    draft = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.part")
    try:
        draft.write_bytes(content)
        if durable:
            sync_path(draft)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def exchange_paths(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders in one step; False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # a C library without it
        return False
    first, second = (ctypes.c_char_p(os.fsencode(path)) for path in (one, other))
    done = bool(rename(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE) == 0)
    if not done and ctypes.get_errno() not in _NO_EXCHANGE:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))
    return done


def can_write(path: Path) -> bool:
    """Whether a file can be created or overwritten at a path."""
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; files that vanish during the scan are skipped."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size  # noqa: PTH118  (thousands of files)
            except OSError:
                continue
    return total
