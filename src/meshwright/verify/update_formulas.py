"""The update of one parameter by the formula of its optimizer, and the term that explains a wrong update.

A rank of a proof applies the formula to its own gradient and moments, in float64. So rounding of the gradient
does not matter: AdamW's first update depends on the sign of a gradient, and a gradient of 1e-12 may have
either sign. What differs is a term of the update: weight decay, moment, bias correction, clipping, lr.

w parameter, g clipped gradient, m, v moments, t number of updates::

    adamw  m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g^2
           w = w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
    sgd    d = g + decay w            m = momentum m + d
           w = w - lr m               nesterov: w - lr (d + momentum m)
    lion   w = w - lr (sign(b1 m + (1 - b1) g) + decay w)      m = b2 m + (1 - b2) g
    muon   m = momentum m + (1 - momentum) g                   n = nesterov: momentum m + (1 - momentum) g
           w = w - lr (scale orthogonalise(n) + decay w)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.layout.optimizer_state import STEP_COUNT
from meshwright.spec.job import Train
from meshwright.spec.train_defaults import setting
from meshwright.train.optimizers.muon import orthogonalise, step_scale
from meshwright.verify.proof_task import UPDATE_TOLERANCE, UpdateDifference
from meshwright.verify.tensor_difference import tensor_norm

ROUNDING = 2.0**-23
"""Rounding of a float32 parameter, relative to its norm: it is rounded after the decay and after the step."""
DECAY_SHARE = 100.0
"""A tenth of the weight decay is an error, although the decay may be a thousandth of the update."""
SIGN_ROUNDING = 1e-5
"""Where Lion's two terms cancel up to this share, rounding decides the sign: the element is not judged."""
UNEXPLAINED = 0.05
"""Share of an update that a fitted factor may leave, for that factor to be reported."""


@dataclass
class ParameterState:
    """A full parameter with its optimizer state."""

    parameter: Tensor
    moments: dict[str, Tensor]
    """Also the step count."""


@dataclass(frozen=True)
class UpdateRule:
    """The scalars of the update of one parameter in one step."""

    train: Train
    rule: str
    """A rule of ``layout.optimizer_state``."""
    lr: float
    weight_decay: float
    """0 for a parameter that does not decay."""
    clipping: float
    """Factor of the gradient."""
    count: int
    """Updates, including this one."""
    bias_count: int | None = None
    """AdamW: the same for the bias correction, if it differs."""
    corrects_bias: tuple[bool, bool] = (True, True)
    """AdamW: of the first and the second moment."""
    keeps_moments: bool = True


def compare_update(
    before: ParameterState, gradient: Tensor, after: ParameterState, rule: UpdateRule
) -> UpdateDifference:
    """Compare an update with its formula; a wrong one is explained if one term explains it.

    Args:
        before: Of the update.
        gradient: Before clipping; with noise, if the job adds some, divided by the clipping factor.
        after: Of the update.
        rule: What should have been done.
    """
    found = _differences(before, gradient, after, rule)
    if not all(map(math.isfinite, found.values())):
        return UpdateDifference(None, "update")
    worst = max(found.values())
    if worst <= UPDATE_TOLERANCE:
        return UpdateDifference(worst)
    for term, note, other in _explanations(before, gradient, after, rule):
        if max(_differences(before, gradient, after, other).values()) <= UPDATE_TOLERANCE:
            return UpdateDifference(worst, term, note)
    wrong = next(key for key, off in found.items() if off > UPDATE_TOLERANCE)  # moments before the parameter
    if wrong == PARAMETER:
        return UpdateDifference(worst, *_explain_by_lr(before, gradient, after, rule))
    return UpdateDifference(worst, "step count" if wrong == STEP_COUNT else f"moment {wrong}")


PARAMETER, WANTED = "parameter", " by formula"
CHUNK = 1 << 16
"""Elements that are compared at once."""


def _differences(
    before: ParameterState, gradient: Tensor, after: ParameterState, rule: UpdateRule
) -> dict[str, float]:
    """The relative difference of each moment and of the parameter from the formula."""
    sums: dict[str, float] = {}
    for chunk in _split(before, gradient, after, rule):
        for key, square in _squares(*chunk, rule).items():
            sums[key] = sums.get(key, 0.0) + square
    norms = {key: math.sqrt(square) for key, square in sums.items()}
    start, size = norms.pop("start"), norms.pop("change")
    rest = norms.pop(PARAMETER)
    keys = [key for key in norms if not key.endswith(WANTED)]
    offs = {key: _relative(norms[key], norms[key + WANTED]) for key in keys}
    # Of a parameter without decay: what a decay would be.
    decay = rule.lr * setting(rule.train, "weight_decay") * start
    if decay:
        size = min(size, DECAY_SHARE * decay) if size else DECAY_SHARE * decay
    offs[PARAMETER] = _relative(rest, size, ROUNDING * start)
    return offs


Chunk = tuple[ParameterState, Tensor, ParameterState]


def _split(
    before: ParameterState, gradient: Tensor, after: ParameterState, rule: UpdateRule
) -> Iterator[Chunk]:
    """Rows that fit into a cache; Muon needs the whole matrix."""
    if rule.rule == "muon" or gradient.numel() <= CHUNK:
        yield before, gradient, after
        return
    rows = max(1, CHUNK // gradient[0].numel())

    def part(state: ParameterState, start: int) -> ParameterState:
        moments = {k: v if k == STEP_COUNT else v[start : start + rows] for k, v in state.moments.items()}
        return ParameterState(state.parameter[start : start + rows], moments)

    for start in range(0, len(gradient), rows):
        yield part(before, start), gradient[start : start + rows], part(after, start)


def _squares(
    before: ParameterState, gradient: Tensor, after: ParameterState, rule: UpdateRule
) -> dict[str, float]:
    """Squared norms of a chunk: differences of moments and parameter, and what they are relative to."""
    expected, unsure = _expected(before, gradient, rule)
    start, wanted = before.parameter.double(), expected.parameter
    tensors = {"start": start, "change": wanted - start}
    tensors[PARAMETER] = (after.parameter.double() - wanted).masked_fill(unsure, 0.0)
    for key, value in expected.moments.items():
        tensors[key], tensors[key + WANTED] = after.moments[key].double() - value, value
    return {key: tensor_norm(tensor) ** 2 for key, tensor in tensors.items()}


def _relative(difference: float, size: float, rounding: float = 0.0) -> float:
    if difference <= rounding:
        return 0.0
    return (difference - rounding) / size if size else 1.0


def _expected(before: ParameterState, gradient: Tensor, rule: UpdateRule) -> tuple[ParameterState, Tensor]:
    """The parameter and its moments after the update, and the elements that rounding decides."""
    w, g = before.parameter.double(), gradient.double() * rule.clipping
    old = {key: value.double() * rule.keeps_moments for key, value in before.moments.items()}
    unsure = torch.zeros((), dtype=torch.bool)
    if rule.rule == "adamw":
        moments, direction = _adamw(old, g, rule)
    elif rule.rule == "sgd":
        moments, direction = _sgd(old, g + rule.weight_decay * w, rule.train)
        return ParameterState(w - rule.lr * direction, moments), unsure
    elif rule.rule == "lion":
        moments, direction, unsure = _lion(old["exp_avg"], g, rule.train)
    else:
        moments, direction = _muon(old["momentum_buffer"], g, rule.train)
    return ParameterState(w * (1 - rule.lr * rule.weight_decay) - rule.lr * direction, moments), unsure


def _adamw(old: dict[str, Tensor], g: Tensor, rule: UpdateRule) -> tuple[dict[str, Tensor], Tensor]:
    beta1, beta2 = setting(rule.train, "beta1"), setting(rule.train, "beta2")
    m = beta1 * old["exp_avg"] + (1 - beta1) * g
    v = beta2 * old["exp_avg_sq"] + (1 - beta2) * g * g
    first, second = rule.corrects_bias
    updates = rule.count if rule.bias_count is None else rule.bias_count
    m_hat = m / (1 - beta1**updates) if first and updates else m
    v_hat = v / (1 - beta2**updates) if second and updates else v
    count = torch.tensor(float(rule.count), dtype=torch.float64)
    moments = {STEP_COUNT: count, "exp_avg": m, "exp_avg_sq": v}
    return moments, m_hat / (v_hat.sqrt() + setting(rule.train, "eps"))


def _sgd(old: dict[str, Tensor], d: Tensor, train: Train) -> tuple[dict[str, Tensor], Tensor]:
    momentum = setting(train, "momentum")
    if not old:
        return {}, d
    m = momentum * old["momentum_buffer"] + d
    return {"momentum_buffer": m}, d + momentum * m if setting(train, "nesterov") else m


def _lion(old: Tensor, g: Tensor, train: Train) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    beta1, beta2 = setting(train, "beta1"), setting(train, "beta2")
    c = beta1 * old + (1 - beta1) * g
    unsure = c.abs() < SIGN_ROUNDING * (beta1 * old.abs() + (1 - beta1) * g.abs())
    return {"exp_avg": beta2 * old + (1 - beta2) * g}, c.sign(), unsure


def _muon(old: Tensor, g: Tensor, train: Train) -> tuple[dict[str, Tensor], Tensor]:
    momentum = setting(train, "momentum")
    m = momentum * old + (1 - momentum) * g
    ahead = momentum * m + (1 - momentum) * g if setting(train, "nesterov") else m
    dtype = torch.float32 if train.precision == "fp32" else torch.bfloat16
    direction = orthogonalise(ahead.float(), dtype).double()
    return {"momentum_buffer": m}, step_scale(ahead.shape) * direction


def _explanations(
    before: ParameterState, gradient: Tensor, after: ParameterState, rule: UpdateRule
) -> Iterator[tuple[str, str, UpdateRule]]:
    """Terms that may be wrong, with a note and the rule with that error."""
    change = dataclasses.replace
    if rule.weight_decay:
        yield "weight decay", "not applied", change(rule, weight_decay=0.0)
    else:
        decay = setting(rule.train, "weight_decay")
        yield "weight decay", "applied to a parameter without decay", change(rule, weight_decay=decay)
    if rule.rule == "adamw":
        yield "bias correction", "not applied", change(rule, corrects_bias=(False, False))
        yield "bias correction", "not applied to the first moment", change(rule, corrects_bias=(False, True))
        yield "bias correction", "not applied to the second moment", change(rule, corrects_bias=(True, False))
        count = int(after.moments[STEP_COUNT])
        yield "bias correction", f"that of update {count} instead of {rule.count}", change(rule, count=count)
        for other in {rule.count - 1, rule.count + 1} - {0}:
            note = f"that of update {other} instead of {rule.count}"
            yield "bias correction", note, change(rule, bias_count=other)
    yield "moment", "restarted from zero", change(rule, keeps_moments=False)
    yield "gradient", "zero in the update", change(rule, clipping=0.0)
    factor = _fit_clipping(before, gradient, after, rule)
    if factor is not None:
        note = f"the gradient is multiplied by {factor:.4g} instead of {rule.clipping:.4g}"
        yield "clipping", note, change(rule, clipping=factor)


def _fit_clipping(
    before: ParameterState, gradient: Tensor, after: ParameterState, rule: UpdateRule
) -> float | None:
    """The factor of the gradient that fits the first moment, or the parameter without one."""
    with_gradient, _ = _expected(before, gradient, rule)
    without, _ = _expected(before, torch.zeros_like(gradient), rule)

    def linear(state: ParameterState) -> Tensor:
        keys = [key for key in ("exp_avg", "momentum_buffer") if key in state.moments]
        return (state.moments[keys[0]] if keys else state.parameter).double()

    part = linear(with_gradient) - linear(without)
    square = float((part * part).sum())
    found = float(((linear(after) - linear(without)) * part).sum())
    return rule.clipping * found / square if square and math.isfinite(found) else None


def _explain_by_lr(
    before: ParameterState, gradient: Tensor, after: ParameterState, rule: UpdateRule
) -> tuple[str, str]:
    """All moments are right: the step was not taken, or was longer or shorter."""
    start = before.parameter.double()
    wanted, found = _expected(before, gradient, rule)[0].parameter - start, after.parameter.double() - start
    if not found.any():
        return "update", "not applied"
    square = float((wanted * wanted).sum())
    factor = float((found * wanted).sum()) / square if square else 0.0
    if factor and tensor_norm(found - factor * wanted) <= UNEXPLAINED * tensor_norm(found):
        return "lr", f"the step is {factor:.4g} times that of lr={rule.lr:g}"
    return "update", "its gradient and its moments are right"
