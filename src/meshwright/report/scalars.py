"""Which figures of an event become curves, and what the curves are called; the same for every tracker."""

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
"""Fields of a ``step`` event and the names of their curves; another number is called ``step/FIELD``."""
EVAL_LOSS = "loss/eval"


def scalars_of(event: Event) -> dict[str, float]:
    """The named figures of rank 0's steps and evaluations; nothing for any other event."""
    if event.get("rank") != 0:
        return {}
    if event["event"] == "eval":
        return {} if event["loss"] is None else {EVAL_LOSS: float(event["loss"])}
    if event["event"] != "step":
        return {}
    return {
        STEP_SCALARS.get(name, f"step/{name}"): float(value)
        for name, value in event.items()
        if name not in NOT_CURVES and isinstance(value, int | float)
    }
