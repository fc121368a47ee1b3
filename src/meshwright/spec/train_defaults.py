"""The keys of ``[train]`` that each optimizer and schedule reads, with their defaults.

The legality table refuses a key that the chosen optimizer or schedule does not read. A key that is left out
stays ``None`` in the job, so that a plan with another optimizer takes the defaults of that one.
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
"""Keys of each optimizer, with defaults. Muon's betas and ``eps`` are those of its AdamW part."""

SCHEDULES: dict[str, dict[str, float]] = {
    "constant": {},
    "linear": {"min_lr_ratio": 0.1},
    "cosine": {"min_lr_ratio": 0.1},
    "wsd": {"min_lr_ratio": 0.1, "decay_fraction": 0.2},
}
"""Keys of each learning rate schedule, with defaults."""

BALANCE_LOSS = 0.01
"""Default coefficient of the load-balancing loss (Fedus et al. 2021)."""

BLOCK_BACKEND_KEYS = (
    "block_backend",
    "compile_backend",
    "fp8_weight_grads",
    "gemm_autotune",
    "grad_dtype",
    "residual_dtype",
)
"""Keys that have an effect with compiled or Triton blocks only."""

DEFAULT_REASONS = {
    "sgd": "its steps are not normalised, so lr is hundreds of times AdamW's, and weight decay smaller",
    "lion": "every element moves by the full lr, so lr is 3 times lower, "
    "and weight decay 3 times higher, than AdamW's",
    "muon": "its matrix updates are scaled to AdamW's size, so both parts use AdamW's lr and weight decay",
}
"""Why the defaults differ from AdamW's, for the plan's reasons."""


def defaults(train: Train) -> dict[str, float]:
    """The keys that the chosen optimizer and schedule read, with their defaults."""
    return OPTIMIZERS[train.optimizer] | SCHEDULES[train.schedule]


def setting(train: Train, key: str) -> float:
    """The value of a key: as given, or the default of the optimizer or schedule."""
    given: float | None = getattr(train, key)
    return defaults(train)[key] if given is None else given


def balance_coefficient(train: Train) -> float:
    """Coefficient of the load-balancing loss: as given, or the default; 0 with bias-based balancing."""
    if train.balance_loss is not None:
        return train.balance_loss
    return 0.0 if train.balance_rate else BALANCE_LOSS


def fill_defaults(train: Train) -> dict[str, Any]:
    """The section with all defaults; a key that nothing reads stays None."""
    return dataclasses.asdict(train) | {key: setting(train, key) for key in defaults(train)}


def with_eager_blocks(train: Train) -> Train:
    """The section with eager blocks, and defaults for the keys of other block backends."""
    first = {field.name: field.default for field in dataclasses.fields(train)}
    plain = {key: first[key] for key in BLOCK_BACKEND_KEYS} | {"block_backend": "eager"}
    return dataclasses.replace(train, **plain)  # type: ignore[arg-type]


def readers(key: str) -> list[str]:
    """The optimizers or schedules that read a key."""
    return [name for table in (OPTIMIZERS, SCHEDULES) for name, keys in table.items() if key in keys]


def count_decay_steps(train: Train) -> int:
    """Steps of the final decay of a ``wsd`` schedule, at least one."""
    return max(1, round(setting(train, "decay_fraction") * train.steps))


def explain_defaults(train: Train) -> list[str]:
    """The defaults of an optimizer other than AdamW, with their reason."""
    if train.optimizer not in DEFAULT_REASONS:
        return []
    taken = {key: value for key, value in OPTIMIZERS[train.optimizer].items() if getattr(train, key) is None}
    if not taken:
        return []
    values = ", ".join(f"{key}={_shown(value)}" for key, value in taken.items())
    return [f"{train.optimizer} takes {values}: {DEFAULT_REASONS[train.optimizer]}"]


def _shown(value: float) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
