"""Which keys of ``[train]`` each optimizer and schedule reads, and what they are if left out.

A key that is not in the row of the chosen optimizer or schedule has no effect and is refused by the
legality table, so one table decides both. Keys stay ``None`` in the job when they are left out: a plan laid
over with another optimizer takes that one's defaults, not those of the first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.spec.job import Train

OPTIMIZERS: dict[str, dict[str, float]] = {
    "adamw": {"lr": 3e-4, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    "sgd": {"lr": 0.1, "weight_decay": 1e-4, "momentum": 0.9, "nesterov": False},
    "lion": {"lr": 1e-4, "weight_decay": 0.3, "beta1": 0.9, "beta2": 0.99},
    "muon": {
        "lr": 3e-4,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
    },
}
"""Keys that an optimizer reads, with its defaults. Muon's betas and ``eps`` are those of its AdamW part."""

SCHEDULES: dict[str, dict[str, float]] = {
    "constant": {},
    "linear": {"min_lr_ratio": 0.1},
    "cosine": {"min_lr_ratio": 0.1},
    "wsd": {"min_lr_ratio": 0.1, "decay_fraction": 0.2},
}
"""Keys that a schedule reads, with its defaults."""

BALANCE_LOSS = 0.01
"""Coefficient of the balance loss if nothing else balances experts (Fedus et al. 2021)."""

COMPILED_KEYS = (
    "block_backend",
    "compile_backend",
    "fp8_weight_grads",
    "gemm_autotune",
    "grad_dtype",
    "residual_dtype",
)
"""What compiled blocks alone read."""

DEFAULT_REASONS = {
    "sgd": "nothing scales its steps, so its rate is hundreds of times that of AdamW, and its decay smaller",
    "lion": "every element moves by the whole rate, so that is 3 times lower, and the decay 3 times higher, "
    "than for AdamW",
    "muon": "its steps on matrices are scaled to AdamW's size, so both parts share AdamW's rate and decay",
}
"""Why the defaults are not those of AdamW, for the plan's reasons."""


def defaults(train: Train) -> dict[str, float]:
    """The keys that the chosen optimizer and schedule read, with their defaults."""
    return OPTIMIZERS[train.optimizer] | SCHEDULES[train.schedule]


def setting(train: Train, key: str) -> float:
    """The value in force of a key: as given, else the default of the optimizer or schedule that reads it."""
    given: float | None = getattr(train, key)
    return defaults(train)[key] if given is None else given


def balance_coefficient(train: Train) -> float:
    """Of the balance loss, for a model with experts: as given, else none beside bias-based balancing."""
    if train.balance_loss is not None:
        return train.balance_loss
    return 0.0 if train.balance_rate else BALANCE_LOSS


def fill_defaults(train: Train) -> dict[str, Any]:
    """The whole section with every default in place; a key that nothing reads stays None."""
    return dataclasses.asdict(train) | {key: setting(train, key) for key in defaults(train)}


def with_eager_blocks(train: Train) -> Train:
    """The same without compiled blocks: what those alone read is as if nobody had set it."""
    first = {field.name: field.default for field in dataclasses.fields(train)}
    return dataclasses.replace(train, **{key: first[key] for key in COMPILED_KEYS})  # type: ignore[arg-type]


def readers(key: str) -> list[str]:
    """The optimizers or schedules that read a key."""
    return [name for table in (OPTIMIZERS, SCHEDULES) for name, keys in table.items() if key in keys]


def count_decay_steps(train: Train) -> int:
    """Steps of the fall at the end of a ``wsd`` schedule, at least one."""
    return max(1, round(setting(train, "decay_fraction") * train.steps))


def explain_defaults(train: Train) -> list[str]:
    """The defaults that an optimizer other than AdamW brings, and why."""
    if train.optimizer not in DEFAULT_REASONS:
        return []
    taken = {key: value for key, value in OPTIMIZERS[train.optimizer].items() if getattr(train, key) is None}
    if not taken:
        return []
    values = ", ".join(f"{key}={_shown(value)}" for key, value in taken.items())
    return [f"{train.optimizer} takes {values}: {DEFAULT_REASONS[train.optimizer]}"]


def _shown(value: float) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
