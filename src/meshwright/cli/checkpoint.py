"""``meshwright checkpoint``."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from meshwright.checkpoint.inventory import StoredCheckpoint, find_root, list_stored, prune
from meshwright.cli.app import require_packages
from meshwright.cli.audit import CHECK_FAILED
from meshwright.cli.generate import find_checkpoint
from meshwright.cli.output import Output
from meshwright.core.errors import Problem, UserError
from meshwright.core.events import EVENTS_FILE
from meshwright.core.units import format_bytes, format_plural
from meshwright.launch.environment import prepare_environment
from meshwright.launch.lock import RunLock
from meshwright.spec.cluster import count_cores

BYTES_PER_GB = 10**9
COLUMNS = ("step", "size", "held-out loss", "state", "")


def list_folder(output: Output, path: Path) -> int:
    """Show the checkpoints that a path means; files are looked at, not read."""
    found = list_stored(path, verify=False)
    _describe(output, path, [(stored, stored.reason or "complete") for stored in found])
    output.result({"dir": str(path), "checkpoints": [_facts(stored) for stored in found]})
    return 0


def verify_folder(output: Output, path: Path) -> int:
    """Read every file and compare its checksum; status 3 if a checkpoint is not what its manifest says."""
    found = list_stored(path, verify=True)
    _describe(output, path, [(stored, "verified" if stored.complete else "BROKEN") for stored in found])
    broken = [stored for stored in found if not stored.complete]
    for stored in broken:
        output.print(f"{stored.path} {stored.reason} [checkpoint-broken]")
    facts = [_facts(stored) for stored in found]
    output.result({"dir": str(path), "ok": not broken, "checkpoints": facts})
    return CHECK_FAILED if broken else 0


def prune_folder(output: Output, path: Path, keep: int) -> int:
    """Remove old checkpoints; a run that goes on in the folder has to end first."""
    root = find_root(path)
    runs = [folder for folder in (root, root.absolute().parent) if (folder / EVENTS_FILE).exists()]
    with _lock_run(runs[0]) if runs else contextlib.nullcontext():
        done = prune(root, keep, sweep=bool(runs))  # elsewhere nobody knows who is writing
    for stored in done.broken:
        output.warn(f"left alone: {stored.path} {stored.reason} [checkpoint-broken]")
    for stored in done.removed:
        output.print(f"removed {stored.path} ({format_bytes(stored.bytes)})")
    drafts = f" and {format_plural(len(done.leftovers), 'draft')}" if done.leftovers else ""
    output.print(
        f"{format_plural(len(done.kept), 'checkpoint')} kept, {len(done.removed)} removed{drafts}; "
        f"{format_bytes(done.freed_bytes)} freed"
    )
    output.result(
        {
            "dir": str(root),
            "kept": [_facts(stored) for stored in done.kept],
            "removed": [_facts(stored) for stored in done.removed],
            "broken": [_facts(stored) for stored in done.broken],
            "leftovers": [str(path) for path in done.leftovers],
            "freed_bytes": done.freed_bytes,
        }
    )
    return 0


def _lock_run(run_dir: Path) -> RunLock:
    try:
        return RunLock.take(run_dir)
    except OSError as error:
        rule, fix = f"cannot be locked: {error.strerror or error}", "Use an account that may write there"
        raise UserError(Problem("checkpoint-not-removed", rule, path=str(run_dir), fix=fix)) from None


def _describe(output: Output, path: Path, found: list[tuple[StoredCheckpoint, str]]) -> None:
    """A table with a word about each."""
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


def export_folder(output: Output, path: Path, out: Path, dtype: str, shard_gb: float) -> int:
    """Write the checkpoint that a path means as a Hugging Face folder."""
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="exporting a checkpoint")
    checkpoint = find_checkpoint(path)
    prepare_environment(threads=count_cores())
    from meshwright.checkpoint.hf.export import export_checkpoint  # noqa: PLC0415

    done = export_checkpoint(checkpoint, out, dtype, max(1, int(shard_gb * BYTES_PER_GB)))
    output.print(f"{checkpoint}, step {done.step}, as {done.architecture} in {out}")
    output.print(f"{format_bytes(done.bytes)} of {dtype}; files: {', '.join(done.files)}")
    facts = dataclasses.asdict(done)
    output.result({"checkpoint": str(checkpoint), "out": str(out), "dtype": dtype, **facts})
    return 0
