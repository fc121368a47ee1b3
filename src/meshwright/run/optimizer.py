"""The optimizer, its parameter groups and the learning rate of each step."""

from __future__ import annotations

import math

import torch
from torch import nn

from meshwright.spec.job import Train


def scaled_lr(train: Train) -> float:
    """The peak learning rate after the job's scaling rule; ``none`` leaves it alone."""
    if train.lr_scaling == "none" or train.lr_base_batch is None:
        return train.lr
    ratio = train.global_batch / train.lr_base_batch
    return train.lr * (ratio if train.lr_scaling == "linear" else math.sqrt(ratio))


def lr_at(step: int, train: Train) -> float:
    """Linear warm-up to the peak, then constant or a cosine down to ``min_lr_ratio`` of it."""
    peak = scaled_lr(train)
    if step < train.warmup:
        return peak * (step + 1) / train.warmup
    if train.schedule == "constant":
        return peak
    progress = (step - train.warmup) / max(1, train.steps - train.warmup)
    floor = peak * train.min_lr_ratio
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def build_optimizer(module: nn.Module, train: Train) -> torch.optim.AdamW:
    """AdamW with decay on matrices only, its state made at once.

    Torch makes the state in the first step; then the first step would hold less than the others and a
    resumed run would load into nothing.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    decayed = [p for _, p in named if p.ndim >= 2]
    plain = [p for _, p in named if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": train.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=scaled_lr(train), betas=(train.beta1, train.beta2), eps=train.eps, fused=True
    )
    for parameter in (*decayed, *plain):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
