"""What every run keeps under faults, checked from its folder: events, manifests and processes.

Each check returns sentences, one per violation. The samples of a step are a function of its number
(``data.order``): each step once in the final history, and a position in every manifest that is the step times
the global batch, mean that each sample was used exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import (
    Manifest,
    list_checkpoints,
    read_manifest,
)
from meshwright.checkpoint.stores import find_newest
from meshwright.core.errors import UserError
from meshwright.core.events import Event
from meshwright.core.units import format_plural

LAYOUT_ROUNDING = 1e-5
"""Relative difference of the losses of a step in two layouts, in float32."""
COMMITS = ("ready", "step", "eval", "checkpoint")


@dataclass(frozen=True)
class History:
    """The final history of a run: what counts after all rollbacks."""

    losses: Mapping[int, Any]
    """By step; of a replayed step, the newest."""
    violations: tuple[str, ...]


def read_history(events: Sequence[Event]) -> History:
    """Check the steps of all generations.

    In each generation a rank does each step once, in order, from where all ranks became ready. A later
    generation goes back only by a recorded rollback. A replayed step has the same loss; in another
    layout, the same up to rounding.
    """
    changed = [e["generation"] for e in events if e["event"] == "layout_changed"]
    found: list[str] = []
    losses: dict[int, Any] = {}
    done_in: dict[int, int] = {}
    generations = sorted({e["generation"] for e in events if e["event"] == "ready"})
    for generation in generations:
        of = [e for e in events if e["generation"] == generation]
        starts = {e["rank"]: e["step"] for e in of if e["event"] == "ready"}
        start = min(starts.values())
        if len(set(starts.values())) > 1:
            found.append(f"generation {generation}: ranks start after different steps {starts}")
        found += _check_rollback(generation, start, max(losses, default=0), of)
        new = _follow_ranks(generation, starts, of, found)
        for step, loss in new.items():
            before = done_in.get(step, generation)
            rounding = LAYOUT_ROUNDING if any(before <= g < generation for g in changed) else 0.0
            done_in[step] = generation
            if step in losses and not _is_equal(loss, losses[step], rounding):
                found.append(f"step {step} was replayed with loss {loss} instead of {losses[step]}")
        losses |= new
    found += _check_fences(events)
    missing = sorted(set(range(1, max(losses, default=0) + 1)) - set(losses))
    if missing:
        found.append(f"steps {missing} are missing in the final history")
    return History(losses, tuple(found))


def _is_equal(loss: Any, before: Any, rounding: float) -> bool:
    if rounding and isinstance(loss, float) and isinstance(before, float):
        return math.isclose(loss, before, rel_tol=rounding)
    return bool(loss == before)


def _check_rollback(generation: int, start: int, furthest: int, events: Iterable[Event]) -> list[str]:
    """A generation starts where the one before ended, or where a recorded rollback says."""
    recorded = {e["restored_step"] for e in events if e["event"] == "recovered"}
    recorded |= {e["step"] for e in events if e["event"] in ("resumed", "resharded")}
    stepped = any(e["event"] == "step" for e in events)
    if start > furthest:
        return [f"generation {generation} starts after step {start}, but only {furthest} steps were done"]
    if furthest and stepped and start not in recorded:
        return [f"generation {generation} starts after step {start}, which no event records"]
    return []


def _follow_ranks(
    generation: int, starts: Mapping[int, int], events: Sequence[Event], found: list[str]
) -> dict[int, Any]:
    """The losses of one generation; every rank must have the same ones, in order."""
    losses: dict[int, Any] = {}
    last = dict(starts)
    for event in events:
        if event["event"] != "step":
            continue
        rank, step, loss = event["rank"], event["step"], event["loss"]
        if step != last.get(rank, -1) + 1:
            found.append(
                f"generation {generation}: rank {rank} committed step {step} after step {last.get(rank)}"
            )
        last[rank] = step
        if losses.setdefault(step, loss) != loss:
            found.append(f"step {step}: rank {rank} has loss {loss}, another rank has {losses[step]}")
    return losses


def _check_fences(events: Sequence[Event]) -> list[str]:
    """A process that was replaced commits nothing for its old generation."""
    found, newest = [], dict[int, int]()
    for event in events:
        if event["event"] in COMMITS:
            rank, generation = event["rank"], event["generation"]
            if generation < newest.get(rank, generation):
                found.append(
                    f"rank {rank} wrote {event['event']} of step {event['step']} after it was fenced"
                )
            newest[rank] = max(generation, newest.get(rank, 0))
    return found


def check_checkpoints(root: Path, global_batch: int) -> list[str]:
    """The newest manifest verifies, and every position is that of its step."""
    try:
        newest = find_newest(root)
    except UserError as error:
        return [str(error)]
    if newest is None:
        return []
    found = list(newest[1])
    for step, manifest in read_manifests(root).items():
        if manifest.position != step * global_batch:
            used = f"{manifest.position} samples used, {step * global_batch} expected"
            found.append(f"checkpoint of step {step}: {used}")
    return found


def read_manifests(root: Path) -> dict[int, Manifest]:
    """The manifests of a folder of checkpoints, by step."""
    manifests = [read_manifest(path, verify=False) for path in list_checkpoints(root)]
    return {manifest.step: manifest for manifest in manifests}


def compare_runs(
    losses: Mapping[int, Any], expected: Mapping[int, Any], root: Path, expected_root: Path
) -> list[str]:
    """Every loss, and the parameters and optimizer state of every common checkpoint, are equal bit by bit."""
    extra = sorted(set(losses) - set(expected))
    steps = format_plural(len(extra), "step")
    found = [f"not in the fault-free run: {steps} from {extra[0]} on"] if extra else []
    differing = [step for step in sorted(losses) if step in expected and losses[step] != expected[step]]
    if differing:
        step = differing[0]
        found.append(f"step {step}: loss {losses[step]} instead of {expected[step]} of the fault-free run")
    theirs = read_manifests(expected_root)
    common = {step: m for step, m in read_manifests(root).items() if step in theirs}
    if not common:
        found.append("no checkpoint of the same step as in the fault-free run")
    differs = [
        (step, name)
        for step, manifest in common.items()
        for name in sorted({*manifest.tensor_files, *theirs[step].tensor_files})
        if manifest.files.get(name) != theirs[step].files.get(name)
    ]
    found += [f"checkpoint of step {step}: {name} differs from the fault-free run" for step, name in differs]
    return found
