"""The report of a rank that ran out of memory, in lines for people; see ``train/out_of_memory.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.units import format_bytes, format_seconds


def describe_oom(memory: Mapping[str, Any]) -> list[str]:
    """What was predicted, what was there, what would fit."""
    lines = ["predicted, of this rank:"]
    lines += [
        f"  {format_bytes(line['bytes']):>8}  {line['name']} ({line['formula']})" for line in memory["lines"]
    ]
    peak = format_bytes(memory["predicted_peak_bytes"])
    lines.append(f"  {peak:>8}  peak, the first step's included; otherwise at: {memory['peak_at']}")
    free, whole = format_bytes(memory["free_bytes"]), format_bytes(memory["device_bytes"])
    lines.append(f"there: {free} free when the rank started, of {whole} a device")
    live, asked = memory["live_bytes"], memory["requested_bytes"]
    held = "not measured outside of the audited step" if live is None else format_bytes(live)
    wanted = "an amount that the allocator did not name" if asked is None else format_bytes(asked)
    lines.append(f"live tensors: {held}; asked for in vain: {wanted}")
    if not memory["changes"]:
        return [*lines, "no single change fits"]
    step = format_seconds(memory["predicted_step_s"])
    lines.append(f"changes that fit, the cheapest first (as it is, a step was predicted to take {step}):")
    for change in memory["changes"]:
        price = (
            f"{format_bytes(change['needed_bytes'])} per device, {format_seconds(change['step_s'])} per step"
        )
        lines.append(f"  {change['overrides']}  ({price})")
    return lines
