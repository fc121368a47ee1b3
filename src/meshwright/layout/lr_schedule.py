"""The learning rate schedule (warmup and decay): a pure function of the step; a resumed run continues it."""

from __future__ import annotations

import math

from meshwright.spec.job import Train
from meshwright.spec.train_defaults import count_decay_steps, setting


def scaled_lr(train: Train) -> float:
    """The peak learning rate after batch size scaling."""
    return setting(train, "lr") * scaling_factor(train)


def scaling_factor(train: Train) -> float:
    """The factor of batch size scaling: batch / base batch (linear), or its square root."""
    if train.lr_scaling == "none" or train.lr_base_batch is None:
        return 1.0
    ratio = train.global_batch / train.lr_base_batch
    return ratio if train.lr_scaling == "linear" else math.sqrt(ratio)


def lr_at(step: int, train: Train) -> float:
    """The learning rate of a step: linear warm-up to the peak, then the schedule.

    The decay would reach its floor, ``min_lr_ratio`` of the peak, one step after the last.

    Args:
        step: Number of optimizer steps before this one.
        train: The section ``[train]``.
    """
    peak = scaled_lr(train)
    if step < train.warmup:
        return peak * (step + 1) / train.warmup
    if train.schedule == "constant":
        return peak
    start = train.steps - count_decay_steps(train) if train.schedule == "wsd" else train.warmup
    progress = min(1.0, max(0.0, (step - start) / max(1, train.steps - start)))
    floor = peak * setting(train, "min_lr_ratio")
    left = 0.5 * (1 + math.cos(math.pi * progress)) if train.schedule == "cosine" else 1 - progress
    return floor + (peak - floor) * left


def explain_lr(train: Train) -> list[str]:
    """The scaled learning rate, and a warning where it is known to diverge."""
    if train.lr_scaling == "none":
        return []
    rule = "linear rule" if train.lr_scaling == "linear" else "square-root rule"
    made = f"lr {setting(train, 'lr'):g} x {scaling_factor(train):g} = {scaled_lr(train):g}"
    reasons = [f"{made}: {rule}, global batch {train.global_batch} over {train.lr_base_batch}"]
    if train.lr_scaling == "linear" and scaling_factor(train) > 1 and train.warmup == 0:
        reasons.append(
            "warning: linear lr scaling without warm-up (train.warmup=0): the first steps "
            "are likely to diverge"
        )
    return reasons
