"""The learning rate of every step: a pure function of the step, so a resumed run continues it exactly."""

from __future__ import annotations

import math

from meshwright.spec.job import Train
from meshwright.spec.train_defaults import count_decay_steps, setting


def scaled_lr(train: Train) -> float:
    """The peak learning rate after the job's scaling rule; ``none`` leaves it alone."""
    return setting(train, "lr") * scaling_factor(train)


def scaling_factor(train: Train) -> float:
    """What the scaling rule multiplies the rate by: the batch over its base, or the root of that."""
    if train.lr_scaling == "none" or train.lr_base_batch is None:
        return 1.0
    ratio = train.global_batch / train.lr_base_batch
    return ratio if train.lr_scaling == "linear" else math.sqrt(ratio)


def lr_at(step: int, train: Train) -> float:
    """Linear warm-up to the peak, then as the schedule says.

    The fall ends where the run does: it would reach its floor, ``min_lr_ratio`` of the peak, at
    ``train.steps``, one step after the last.

    Args:
        step: Optimizer steps done before this one.
        train: The section with schedule and rate.
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
    """What lr scaling made of the rate, and a warning where that is known to diverge."""
    if train.lr_scaling == "none":
        return []
    rule = "linear rule" if train.lr_scaling == "linear" else "square-root rule"
    made = f"lr {setting(train, 'lr'):g} x {scaling_factor(train):g} = {scaled_lr(train):g}"
    reasons = [f"{made}: {rule}, global batch {train.global_batch} over {train.lr_base_batch}"]
    if train.lr_scaling == "linear" and scaling_factor(train) > 1 and train.warmup == 0:
        reasons.append(
            "warning: linear lr scaling without warm-up (train.warmup=0): the first steps are the ones that "
            "a scaled rate makes diverge"
        )
    return reasons
