"""The optimizer's state in bytes, its memory traffic and its FLOPs, by parameter.

``train.optimizer`` builds its parameter groups and state from the same table.

=========  ======================================  ===========================  ========================
optimizer  parameters                              rule                         state of each parameter
=========  ======================================  ===========================  ========================
adamw      all                                     adamw                        two moments, step count
sgd        all                                     sgd                          momentum, none if that is 0
lion       all                                     lion                         momentum
muon       2-D and named ``blocks.*``, not routed  muon                         momentum
muon       embedding, head, norms, biases, routed  adamw                        two moments, step count
=========  ======================================  ===========================  ========================

A weight of routed experts is a concatenation of matrices, and a rank may have only some of them. Muon
orthogonalises whole matrices, so AdamW updates experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.layout.parameters import (
    BLOCK_PREFIX,
    EXPERTS_PREFIX,
    FLOAT32_BYTES,
    Parameter,
    count_gradient_bytes,
)
from meshwright.spec.job import Train
from meshwright.spec.train_defaults import setting

EMBEDDINGS = ("embed.weight", "positions.weight")
"""Embeddings, of which a step reads only some rows."""
STEP_COUNT = "step"
"""The state that is a scalar."""
STATE_KEYS = {
    "adamw": (STEP_COUNT, "exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),
}
"""State tensors per parameter; each has the parameter's shape, except the step count."""
STATE_NAMES = {"adamw": "moments", "sgd": "momentum", "lion": "momentum", "muon": "momentum of matrices"}
UPDATE_PASSES = {"adamw": 7, "sgd": 5, "lion": 13, "muon": 11}
"""Float32 reads and writes per element in one step, counted from the code; one of them reads the gradient."""
UPDATE_PASSES_WITHOUT_MOMENTUM = 3
NEWTON_SCHULZ_STEPS = 5
UPDATE_CHUNK, UPDATE_CHUNK_BYTES = 1024, 8
"""Elements per program of the fused AdamW kernel, and the bytes of its index entry."""


def rule_of(name: str, dims: int, train: Train) -> str:
    """The update rule of a parameter."""
    if train.optimizer != "muon":
        return train.optimizer
    is_matrix = dims == 2 and name.startswith(BLOCK_PREFIX) and EXPERTS_PREFIX not in name
    return "muon" if is_matrix else "adamw"


def decays(name: str, dims: int, train: Train) -> bool:
    """Whether a parameter has weight decay: norms and biases have none."""
    return dims >= 2 and (train.decay_embeddings or name not in EMBEDDINGS)


def state_keys(rule: str, train: Train) -> tuple[str, ...]:
    """The state tensors of an update rule."""
    if rule == "sgd" and setting(train, "momentum") == 0:
        return ()
    return STATE_KEYS[rule]


def count_state_tensors(parameter: Parameter, train: Train) -> int:
    """State tensors with the shape of the parameter."""
    keys = state_keys(rule_of(parameter.name, len(parameter.shape), train), train)
    return sum(key != STEP_COUNT for key in keys)


@dataclass(frozen=True)
class OptimizerCost:
    """The optimizer of one rank with unsharded state."""

    state_bytes: int
    formula: str
    """The state bytes as a formula."""
    moved_bytes: int
    """Bytes that one step reads and writes."""
    flops: int
    """FLOPs of one step: Muon's Newton-Schulz iterations."""


def predict_optimizer(parameters: Sequence[Parameter], train: Train) -> OptimizerCost:
    """State and cost of the optimizer."""
    by_rule: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        by_rule.setdefault(rule_of(parameter.name, len(parameter.shape), train), []).append(parameter)
    state = moved = 0
    terms: list[str] = []
    for rule, group in sorted(by_rule.items(), reverse=True):  # muon before its adamw part
        count = sum(p.count for p in group)
        keys = state_keys(rule, train)
        arrays = len([key for key in keys if key != STEP_COUNT])
        counts = len(keys) - arrays
        tensors = sum(p.repeats for p in group)
        state += (count * arrays + tensors * counts) * FLOAT32_BYTES
        terms += [f"{count} x {arrays * FLOAT32_BYTES} ({STATE_NAMES[rule]})"] if arrays else []
        terms += [f"{tensors} x {FLOAT32_BYTES} (step counts)"] if counts else []
        moved += count * (UPDATE_PASSES[rule] if keys else UPDATE_PASSES_WITHOUT_MOMENTUM) * FLOAT32_BYTES
        moved -= count * FLOAT32_BYTES - count_gradient_bytes(group)
    flops = count_newton_schulz_flops(by_rule.get("muon", ()))
    return OptimizerCost(state, " + ".join(terms) or "0 (no momentum, no state)", moved, flops)


def count_newton_schulz_flops(matrices: Iterable[Parameter]) -> int:
    """FLOPs of orthogonalising each matrix once: with m <= n its sides, 5 x 2 x (2 m^2 n + m^3)."""
    total = 0
    for matrix in matrices:
        short, long = sorted(matrix.shape)
        each = 2 * (2 * short * short * long + short**3)
        total += matrix.repeats * NEWTON_SCHULZ_STEPS * each
    return total
