"""``meshwright checkpoint``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.cli.output import Output
from meshwright.cli.reporter import ConsoleReporter
from meshwright.core.errors import CheckFailedError
from meshwright.core.units import format_bytes, format_plural
from meshwright.saved import (
    copy_checkpoints,
    export_checkpoint,
    find_checkpoint,
    list_checkpoints,
    prune_checkpoints,
)

if TYPE_CHECKING:
    from meshwright.results import StoredCheckpoint

BYTES_PER_GB = 10**9
COLUMNS = ("step", "size", "held-out loss", "state", "")


def list_folder(output: Output, path: str) -> int:
    """List the checkpoints of a folder or a run, without reading their files."""
    found = list_checkpoints(path)
    _describe(output, path, [(stored, stored.reason or "complete") for stored in found])
    output.result({"dir": str(path), "checkpoints": [_facts(stored) for stored in found]})
    return 0


def verify_folder(output: Output, path: str) -> int:
    """Verify all checksums; status 3 if a checkpoint does not match its manifest."""
    found = list_checkpoints(path, verify=True, reporter=ConsoleReporter(output))
    _describe(output, path, [(stored, "verified" if stored.complete else "BROKEN") for stored in found])
    broken = [stored for stored in found if not stored.complete]
    for stored in broken:
        output.print(f"{stored.path} {stored.reason} [checkpoint-broken]")
    facts = [_facts(stored) for stored in found]
    output.result({"dir": str(path), "ok": not broken, "checkpoints": facts})
    return CheckFailedError.exit_status if broken else 0


def prune_folder(output: Output, path: str, keep: int, keep_every: int) -> int:
    """Delete old checkpoints; fails while a run writes to the folder."""
    done = prune_checkpoints(path, keep, keep_every)
    for stored in done.broken:
        output.warn(f"kept: {stored.path} {stored.reason} [checkpoint-broken]")
    for stored in done.removed:
        output.print(f"removed {stored.path} ({format_bytes(stored.bytes)})")
    drafts = f" and {format_plural(len(done.leftovers), 'draft')}" if done.leftovers else ""
    output.print(
        f"{format_plural(len(done.kept), 'checkpoint')} kept, {len(done.removed)} removed{drafts}; "
        f"{format_bytes(done.freed_bytes)} freed"
    )
    output.result(
        {
            "dir": str(done.kept[0].path.parent),
            "kept": [_facts(stored) for stored in done.kept],
            "removed": [_facts(stored) for stored in done.removed],
            "broken": [_facts(stored) for stored in done.broken],
            "leftovers": [str(path) for path in done.leftovers],
            "freed_bytes": done.freed_bytes,
        }
    )
    return 0


def copy_to(output: Output, source: str, target: str, every: bool) -> int:
    """Copy checkpoints to another folder or object store."""
    copied = copy_checkpoints(source, target, every=every, reporter=ConsoleReporter(output))
    for one in copied:
        if one.copy is None:
            output.print(f"{one.source} is in {target} already")
        else:
            output.print(f"{one.source} copied to {one.copy} ({format_bytes(one.bytes)}), checksums verified")
    facts = [
        {"source": str(one.source), "copy": None if one.copy is None else str(one.copy), "bytes": one.bytes}
        for one in copied
    ]
    output.result({"target": target, "copied": facts})
    return 0


def _describe(output: Output, path: str, found: list[tuple[StoredCheckpoint, str]]) -> None:
    """Print a table of checkpoints with their states."""
    rows = [
        (
            str(stored.step),
            format_bytes(stored.bytes),
            "-" if stored.eval_loss is None else f"{stored.eval_loss:.4f}",
            word,
            "best" if stored.best else "",
        )
        for stored, word in found
    ]
    output.table(f"Checkpoints in {path}", COLUMNS, rows)


def _facts(stored: StoredCheckpoint) -> dict[str, Any]:
    return {**dataclasses.asdict(stored), "path": str(stored.path), "complete": stored.complete}


def export_folder(
    output: Output,
    path: str,
    out: Path,
    dtype: Literal["float32", "bfloat16", "float16"] | None,
    shard_gb: float,
) -> int:
    """Export a checkpoint as a Hugging Face folder."""
    checkpoint = find_checkpoint(path)
    done = export_checkpoint(checkpoint, out, dtype, int(shard_gb * BYTES_PER_GB), ConsoleReporter(output))
    output.print(f"{checkpoint}, step {done.step}, as {done.architecture} in {out}")
    output.print(f"{format_bytes(done.bytes)} of {done.dtype}; files: {', '.join(done.files)}")
    facts = dataclasses.asdict(done)
    output.result({"checkpoint": str(checkpoint), "out": str(out), **facts})
    return 0
