"""Files: whether they can be written, are there after a crash, and how much room they take."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Flush a closed file, or the entries of a folder, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def can_write(path: Path) -> bool:
    """Whether a file can be made at a path, or written over; to be known before anything is measured."""
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; what vanishes meanwhile counts nothing."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size  # noqa: PTH118  (thousands of files)
            except OSError:
                continue
    return total
