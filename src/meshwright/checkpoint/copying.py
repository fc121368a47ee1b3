"""Copies a checkpoint to another folder or object store; works without torch.

Every file is hashed on the way. The copy is committed like any other checkpoint (``draft``): it is there as a
whole or not at all.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.checkpoint.drafts import new_draft
from meshwright.checkpoint.manifest import (
    FileFacts,
    Manifest,
    broken_checkpoint,
    list_checkpoints,
    read_manifest,
)
from meshwright.core.errors import UserError
from meshwright.core.object_path import AnyPath, ObjectPath, open_new

BLOCK_BYTES = 2**24
"""Read and written at a time."""


def copy_checkpoint(
    source: AnyPath, root: AnyPath, on_bytes: Callable[[int], None] = lambda count: None
) -> AnyPath | None:
    """Copy one checkpoint. The caller has the lock of the target.

    Args:
        source: The checkpoint.
        root: The folder or prefix of checkpoints that gets the copy.
        on_bytes: Called with the number of bytes after each block.

    Returns:
        The copy; None if the target has the same checkpoint already.

    Raises:
        UserError: The source does not verify.
        OSError: The target cannot be written; then nothing of the copy is left.
    """
    manifest = read_manifest(source, verify=False)
    for path in list_checkpoints(root):
        try:
            if read_manifest(path, verify=False) == manifest:
                return None
        except UserError:
            continue  # a broken one is no copy
    draft = new_draft(root, manifest.step, 0, time.time_ns() // 10**6)
    draft.discard()  # what a copy that was killed has left
    try:
        draft.open()
        for name, facts in manifest.files.items():
            _copy_file(source, draft.folder, name, facts, on_bytes)
        return draft.commit(manifest)
    except BaseException:
        draft.discard()
        raise


@contextmanager
def fetch_small_files(checkpoint: AnyPath, manifest: Manifest) -> Iterator[Path]:
    """A folder with the files of a checkpoint that are not made of tensors, for code that needs paths.

    Raises:
        UserError: One has another checksum.
        OSError: The store cannot be read.
    """
    if not isinstance(checkpoint, ObjectPath):
        yield checkpoint
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, facts in manifest.files.items():
            if name not in manifest.tensor_files:
                _copy_file(checkpoint, Path(folder), name, facts, lambda count: None)
        yield Path(folder)


def _copy_file(
    source: AnyPath, target: AnyPath, name: str, facts: FileFacts, on_bytes: Callable[[int], None]
) -> None:
    digest = hashlib.sha256()
    with (source / name).open("rb") as reader, open_new(target / name, facts.bytes) as writer:
        while block := reader.read(BLOCK_BYTES):
            digest.update(block)
            writer.write(block)
            on_bytes(len(block))
    if digest.hexdigest() != facts.sha256:
        raise broken_checkpoint(source, f"is damaged: the checksum of {name} differs from the manifest")
