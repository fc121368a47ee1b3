"""A layout as text: in one line for people, and as overrides for the command line."""

from __future__ import annotations

import dataclasses

from meshwright.spec.layout import AXES, Layout


def describe_layout(layout: Layout) -> str:
    """A layout in one line: degrees above one, then settings that differ from their defaults."""
    degrees = [*AXES, "ep", "etp"]
    words = [f"{axis}={getattr(layout, axis)}" for axis in degrees if getattr(layout, axis) > 1]
    words = words or ["one device"]
    if layout.zero:
        words.append(f"zero={layout.zero}")
    if layout.pp > 1:
        stages = f" x{layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        words.append(f"{layout.schedule}{stages}")
    if layout.cp > 1:
        words.append(layout.context)
    if layout.sequence_parallel:
        words.append("sequence_parallel")
    if layout.recompute != "none":
        words.append(f"recompute={layout.recompute}")
    if layout.offload != "none":
        words.append(f"offload={layout.offload}")
    if layout.micro_batch is not None:
        words.append(f"micro_batch={layout.micro_batch}")
    return " ".join(words)


def layout_overrides(layout: Layout) -> str:
    """The overrides that ask for exactly this layout."""
    names = [*AXES, "ep", "etp", "zero", "sequence_parallel", "schedule", "virtual_stages"]
    names += ["context", "micro_batch", "recompute", "offload"]
    plain = Layout()
    changed = [n for n in names if getattr(layout, n) != getattr(plain, n)]
    shown = changed if any(n in AXES for n in changed) else ["dp_replicate", *changed]
    return " ".join(f"layout.{n}={str(getattr(layout, n)).lower()}" for n in shown)


def overrides_from(before: Layout, layout: Layout) -> str:
    """The overrides that lead from a job with one layout to another; they name the whole new one."""
    named = layout_overrides(layout)
    for field in dataclasses.fields(Layout):
        value = getattr(layout, field.name)
        named_by_planner = field.name in ("mode", "stage_layers")
        changed = not named_by_planner and value is not None and value != getattr(before, field.name)
        if changed and f"layout.{field.name}=" not in named:  # back to its default
            named += f" layout.{field.name}={str(value).lower()}"
    return named
