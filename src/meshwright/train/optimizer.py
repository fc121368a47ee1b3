"""Builds the optimizer and its parameter groups; it updates float32 master weights.

``layout.optimizer_state`` says by parameter name which update rule applies, whether the parameter decays, and
what state it has. The learning rate schedule is ``layout.lr_schedule``, gradient clipping is in ``amp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from meshwright.layout.lr_schedule import scaled_lr
from meshwright.layout.optimizer_state import STEP_COUNT, decays, rule_of, state_keys
from meshwright.parallel.rank_parameters import RankParameters
from meshwright.spec.job import Train
from meshwright.spec.train_defaults import setting
from meshwright.train.optimizers.adamw import FusedAdamW
from meshwright.train.optimizers.lion import Lion
from meshwright.train.optimizers.muon import Muon

Group = dict[str, Any]


def build_optimizer(
    rank_parameters: RankParameters | nn.Module,
    train: Train,
    copies: Mapping[nn.Parameter, Tensor] | None = None,
    fused: bool = False,
) -> Optimizer:
    """Build the optimizer of a job and allocate its state.

    Torch allocates the state in the first step. Then the first step would use less memory than the others,
    and a resumed run would have nothing to load into.

    Args:
        rank_parameters: The parameters to update.
        train: The settings.
        copies: 16-bit copies of parameters, which FusedAdamW writes with them.
        fused: Whether to use FusedAdamW (``spec.execution.uses_fused_adamw``).
    """
    named = [(name, p) for name, p in rank_parameters.named_parameters() if p.requires_grad]
    if fused:
        optimizer: Optimizer = _build_fused_adamw(train, named, copies)
    else:
        optimizer = _BUILDERS[train.optimizer](train, named)
    for name, parameter in named:
        keys = state_keys(rule_of(name, parameter.ndim, train), train)
        if keys:
            optimizer.state[parameter] = {key: _initial_state(key, parameter) for key in keys}
    return optimizer


def updates_weight_copies(optimizer: Optimizer) -> bool:
    """Whether its step also updates all 16-bit weight copies."""
    return isinstance(optimizer, FusedAdamW) and optimizer.updates_weight_copies


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def build_groups(train: Train, named: list[tuple[str, nn.Parameter]], rule: str) -> list[Group]:
    """The groups of one update rule: with weight decay, then without."""
    own = [(name, p) for name, p in named if rule_of(name, p.ndim, train) == rule]
    decayed = [p for name, p in own if decays(name, p.ndim, train)]
    others = [p for name, p in own if not decays(name, p.ndim, train)]
    groups = (
        {"params": decayed, "weight_decay": setting(train, "weight_decay")},
        {"params": others, "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]


def _initial_state(key: str, parameter: Tensor) -> Tensor:
    if key == STEP_COUNT:
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return torch.zeros_like(parameter)


def _build_adamw(train: Train, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    groups = build_groups(train, named, "adamw")
    return AdamW(groups, lr=scaled_lr(train), betas=_betas(train), eps=setting(train, "eps"), fused=True)


def _build_fused_adamw(
    train: Train, named: list[tuple[str, nn.Parameter]], copies: Mapping[nn.Parameter, Tensor] | None
) -> Optimizer:
    return FusedAdamW(
        build_groups(train, named, "adamw"),
        lr=scaled_lr(train),
        betas=_betas(train),
        eps=setting(train, "eps"),
        copies=copies,
    )


def _build_sgd(train: Train, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    groups = build_groups(train, named, "sgd")
    momentum, nesterov = setting(train, "momentum"), bool(setting(train, "nesterov"))
    return SGD(groups, lr=scaled_lr(train), momentum=momentum, nesterov=nesterov, fused=True)


def _build_lion(train: Train, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    return Lion(build_groups(train, named, "lion"), lr=scaled_lr(train), betas=_betas(train))


def _build_muon(train: Train, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    return Muon(
        matrices=build_groups(train, named, "muon"),
        others=build_groups(train, named, "adamw"),
        lr=scaled_lr(train),
        momentum=setting(train, "momentum"),
        nesterov=bool(setting(train, "nesterov")),
        betas=_betas(train),
        eps=setting(train, "eps"),
        dtype=torch.float32 if train.precision == "fp32" else torch.bfloat16,
    )


def _betas(train: Train) -> tuple[float, float]:
    return setting(train, "beta1"), setting(train, "beta2")


_BUILDERS = {"adamw": _build_adamw, "sgd": _build_sgd, "lion": _build_lion, "muon": _build_muon}
