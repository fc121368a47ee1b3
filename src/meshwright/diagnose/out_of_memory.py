"""The report of a rank that ran out of memory: its facts (``train.out_of_memory``) and what would fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.core.errors import MeshwrightError, RunFailedError
from meshwright.core.units import format_bytes, format_seconds
from meshwright.plan.contract import PlanContract
from meshwright.plan.search.alternatives import find_alternatives, memory_budget_after_oom


def explain_oom(
    plan: PlanContract, memory: Mapping[str, Any], error: MeshwrightError
) -> tuple[dict[str, Any], RunFailedError]:
    """Add the fastest changes that fit to the facts of a rank, and to its error as the fix.

    Args:
        plan: Plan of the run.
        memory: Field ``memory`` of the rank's ``error`` event.
        error: Error of the rank.
    """
    predicted = plan.ranks[memory["rank"]]
    needed = predicted.needed_bytes or predicted.first_peak_bytes
    budget = memory_budget_after_oom(
        needed, memory["free_bytes"], memory["requested_bytes"], memory["live_bytes"]
    )
    try:
        changes = find_alternatives(plan.job, budget)
    except MemoryError:  # under torchrun this is the process that ran out of memory
        changes = []
    tried = [f"{change.overrides} ({change.step_and_memory})" for change in changes]
    fix = f"Use {'; or '.join(tried)}" if tried else "Use a smaller model, or devices with more memory"
    problem = dataclasses.replace(error.problems[0], fix=fix)
    facts = {**memory, "changes": [dataclasses.asdict(change) for change in changes]}
    return facts, RunFailedError(problem)


def describe_oom(memory: Mapping[str, Any]) -> list[str]:
    """The predicted memory of the rank, the free memory, and changes that would fit."""
    lines = ["predicted memory of this rank:"]
    lines += [
        f"  {format_bytes(line['bytes']):>8}  {line['name']} ({line['formula']})" for line in memory["lines"]
    ]
    peak = format_bytes(memory["predicted_peak_bytes"])
    lines.append(f"  {peak:>8}  peak, including the first step; otherwise at: {memory['peak_at']}")
    free, whole = format_bytes(memory["free_bytes"]), format_bytes(memory["device_bytes"])
    lines.append(f"available: {free} free when the rank started, of {whole} per device")
    live, size = memory["live_bytes"], memory["requested_bytes"]
    live_text = "measured in the audited step only" if live is None else format_bytes(live)
    requested = "unknown" if size is None else format_bytes(size)
    lines.append(f"live tensors: {live_text}; failed allocation: {requested}")
    if not memory["changes"]:
        return [*lines, "no single change would fit"]
    step = format_seconds(memory["predicted_step_s"])
    lines.append(
        f"changes that would fit, fastest first (the current layout was predicted to take {step} per step):"
    )
    for change in memory["changes"]:
        predicted = (
            f"{format_bytes(change['needed_bytes'])} per device, {format_seconds(change['step_s'])} per step"
        )
        lines.append(f"  {change['overrides']}  ({predicted})")
    return lines
