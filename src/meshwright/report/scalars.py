"""Names of the scalars of step and eval events, the same for all trackers."""

from __future__ import annotations

from meshwright.core.events import Event
from meshwright.report.history import NOT_CURVES

STEP_SCALARS = {
    "loss": "loss/train",
    "lr": "optimizer/lr",
    "grad_norm": "optimizer/grad_norm",
    "noise_scale": "optimizer/noise_scale",
    "loss_scale": "optimizer/loss_scale",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "utilisation": "speed/device_utilisation",
}
"""Scalar names by field of a ``step`` event; other numbers are called ``step/FIELD``."""
EVAL_LOSS = "loss/eval"
"""Loss of the held-out split; that of a further set is ``loss/eval/NAME``."""


def scalars_of(event: Event) -> dict[str, float]:
    """Scalars of rank 0's step and eval events; empty for other events."""
    if event.get("rank") != 0:
        return {}
    if event["event"] == "eval":
        name = EVAL_LOSS if event.get("set") is None else f"{EVAL_LOSS}/{event['set']}"
        return {} if event["loss"] is None else {name: float(event["loss"])}
    if event["event"] != "step":
        return {}
    return {
        STEP_SCALARS.get(name, f"step/{name}"): float(value)
        for name, value in event.items()
        if name not in NOT_CURVES and isinstance(value, int | float)
    }
