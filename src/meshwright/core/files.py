"""Files: atomic and durable writes, write access, and sizes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


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
