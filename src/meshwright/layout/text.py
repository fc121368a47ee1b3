"""A layout as text: a one-line description, and overrides for the command line."""

from __future__ import annotations

import dataclasses

from meshwright.spec.layout import AXES, Layout


def describe_layout(layout: Layout) -> str:
    """One line: degrees above 1, then settings that differ from their defaults."""
    degrees = [*AXES, "ep", "etp"]
    parts = [f"{axis}={getattr(layout, axis)}" for axis in degrees if getattr(layout, axis) > 1]
    parts = parts or ["one device"]
    if layout.backup_replicas:
        parts.append(f"backup_replicas={layout.backup_replicas}")
    if layout.zero:
        parts.append(f"zero={layout.zero}")
    if layout.pp > 1:
        stages = f" x{layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        parts.append(f"{layout.schedule}{stages}")
    if layout.cp > 1:
        parts.append(layout.context)
    if layout.sequence_parallel:
        parts.append("sequence_parallel")
    if layout.recompute != "none":
        parts.append(f"recompute={layout.recompute}")
    if layout.offload != "none":
        parts.append(f"offload={layout.offload}")
    if layout.micro_batch is not None:
        parts.append(f"micro_batch={layout.micro_batch}")
    return " ".join(parts)


def layout_overrides(layout: Layout) -> str:
    """Overrides that set exactly this layout."""
    names = [*AXES, "backup_replicas", "ep", "etp", "zero", "sequence_parallel", "schedule", "virtual_stages"]
    names += ["context", "micro_batch", "recompute", "offload"]
    plain = Layout()
    changed = [n for n in names if getattr(layout, n) != getattr(plain, n)]
    shown = changed if any(n in AXES for n in changed) else ["dp_replicate", *changed]
    return " ".join(f"layout.{n}={str(getattr(layout, n)).lower()}" for n in shown)


def overrides_from(before: Layout, layout: Layout) -> str:
    """Overrides that turn a job with one layout into one with another; they set the whole layout."""
    named = layout_overrides(layout)
    for field in dataclasses.fields(Layout):
        value = getattr(layout, field.name)
        named_by_planner = field.name in ("mode", "stage_layers")
        changed = not named_by_planner and value is not None and value != getattr(before, field.name)
        if changed and f"layout.{field.name}=" not in named:  # reset to its default
            named += f" layout.{field.name}={str(value).lower()}"
    return named
