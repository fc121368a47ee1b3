"""Whether two machines have the same data: a fingerprint of a folder without reading all of it.

Names and sizes of all files count, and the content of small ones. Prepared data have an index with the
checksum of every shard, so other tokens give another fingerprint.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from meshwright.data.mixture import MIXTURE_FILE, read_mixture

SMALL_BYTES = 2**20
MISSING = "missing"


def fingerprint_folder(folder: Path) -> str:
    """The fingerprint of a folder or a file; of a mixture, with its sources. ``MISSING`` if there is none."""
    if not folder.exists():
        return MISSING
    digest = hashlib.sha256()
    for path in sorted(_list_files(folder)):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        if size <= SMALL_BYTES:
            digest.update(path.read_bytes())
    if (folder / MIXTURE_FILE).exists():
        for source in read_mixture(folder):
            digest.update(fingerprint_folder(Path(source.folder)).encode())
    return digest.hexdigest()


def _list_files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    return [Path(where, name) for where, _, names in os.walk(folder) for name in names]
