"""The verdict of a proof: equal, or the first module at which the layout diverges from the reference.

First in the order of a step: inputs, forward pass, loss, backward pass (gradients in the order in which they
become ready), update, later steps. Later differences may be consequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.verify.proof_task import (
    ACTIVATION_TOLERANCE,
    GRADIENT_STEPS,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    ROOT_NAME,
    ROUNDING,
    WEIGHT_TOLERANCE,
    RankFindings,
    ReferenceRecord,
    TensorDifference,
)

TOLERANCE = {"loss": LOSS_TOLERANCE, "gradient": GRADIENT_TOLERANCE}
SAME_FACTOR = 1e-3
"""Tolerance within which all gradients must share one factor for that factor to be reported."""


@dataclass(frozen=True)
class Divergence:
    """Where the layout first diverges from the reference."""

    kind: str
    """`input`, `activation`, `loss`, `gradient` or `weight`."""
    module: str
    step: int
    difference: float | None
    """Relative; None if it is not finite or missing."""
    rank: int | None = None
    parameter: str | None = None
    note: str = ""

    def sentence(self) -> str:
        """As a sentence."""
        what = {
            "input": "the samples that go into",
            "activation": "the output of",
            "loss": "the",
            "gradient": f"the gradient of {self.parameter} in" if self.parameter else "the gradient of",
            "weight": f"the update of {self.parameter} in" if self.parameter else "the update of",
        }[self.kind]
        size = "not a finite number" if self.difference is None else f"off by {self.difference:.2g}"
        where = f"at step {self.step}" + ("" if self.rank is None else f" on rank {self.rank}")
        note = f": {self.note}" if self.note else ""
        if self.note.startswith(("missing", "not in")):
            return f"{what} {self.module} {where}{note}"
        return f"{what} {self.module} {where} is {size}{note}"


@dataclass(frozen=True)
class Verdict:
    """The result of a proof."""

    equal: bool
    max_rel_diff: float | None
    """Of the losses; None if one is missing or not finite."""
    max_grad_diff: float | None
    """Of the gradients, relative to their norms; 1 for a missing one, None for one that is not finite."""
    first_divergence: Divergence | None

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        first = self.first_divergence
        return {
            "equal": self.equal,
            "max_rel_diff": self.max_rel_diff,
            "max_grad_diff": self.max_grad_diff,
            "first_divergence": None if first is None else asdict(first),
        }


def judge(
    reference: ReferenceRecord,
    findings: Sequence[RankFindings],
    losses: Sequence[float | None],
    reference_losses: Sequence[float | None],
) -> Verdict:
    """Compare the findings of the ranks with the tolerances.

    Args:
        reference: What the reference recorded.
        findings: Of every rank of the layout.
        losses: Of the layout, by step.
        reference_losses: Of the reference.
    """
    by_step = [_relative(a, b) for a, b in zip(losses, reference_losses, strict=False)]
    lost = len(losses) != len(reference_losses)
    gradients = {step: list(_gradients(reference, findings, step)) for step in GRADIENT_STEPS}
    rows = [row for step in GRADIENT_STEPS for row in gradients[step]]
    equal = (
        not lost
        and not any(_exceeds(off, LOSS_TOLERANCE) for off in by_step)
        and not any(row.wrong for row in rows)
    )
    first = None if equal else _first(reference, findings, by_step, gradients)
    return Verdict(
        equal=equal,
        max_rel_diff=None if lost else _largest(by_step),
        max_grad_diff=_largest([row.relative for row in rows]),
        first_divergence=first,
    )


@dataclass(frozen=True)
class _Row:
    """One gradient of one rank."""

    parameter: str
    rank: int | None
    relative: float | None
    found: TensorDifference | None

    @property
    def missing(self) -> bool:
        return self.found is None or self.found.missing

    @property
    def wrong(self) -> bool:
        return self.missing or _exceeds(self.relative, GRADIENT_TOLERANCE)


def _gradients(reference: ReferenceRecord, findings: Sequence[RankFindings], step: int) -> Iterator[_Row]:
    """Every gradient on every rank that holds a shard of it, in the order of the backward pass."""
    norms = reference.gradient_norms[str(step)]
    noise = ROUNDING / GRADIENT_TOLERANCE * math.sqrt(sum(norm**2 for norm in norms.values()))
    unknown = {name for f in findings for name in f.gradients.get(str(step), {})} - set(reference.parameters)
    for name in (*sorted(unknown), *reference.parameters):
        held = [
            (f.rank, f.gradients[str(step)][name]) for f in findings if name in f.gradients.get(str(step), {})
        ]
        if not held and name in norms:
            yield _Row(name, None, 1.0, None)
        for rank, found in held:
            size = max(norms.get(name, 0.0), noise)
            off = found.difference
            relative = 1.0 if found.missing else None if off is None else off / size if size else off
            yield _Row(name, rank, relative, found)


def _first(
    reference: ReferenceRecord,
    findings: Sequence[RankFindings],
    by_step: Sequence[float | None],
    gradients: dict[int, list[_Row]],
) -> Divergence:
    """The earliest difference."""
    first_step, last_step = GRADIENT_STEPS[0], GRADIENT_STEPS[-1]
    later = [step for step, off in enumerate(by_step, start=1) if _exceeds(off, LOSS_TOLERANCE)]
    tries: tuple[Callable[[], Divergence | None], ...] = (
        lambda: first_activation(reference, findings),
        lambda: _loss(by_step, later) if later[:1] == [first_step] else None,
        lambda: _first_gradient(reference, gradients[first_step], first_step),
        lambda: _first_weight(reference, findings),
        lambda: _loss(by_step, later) if later else None,
        lambda: _first_gradient(reference, gradients[last_step], last_step),
    )
    found = (find() for find in tries)
    nothing = Divergence("loss", "loss", len(by_step) + 1, None, note="missing")
    return next((divergence for divergence in found if divergence is not None), nothing)


def first_activation(reference: ReferenceRecord, findings: Sequence[RankFindings]) -> Divergence | None:
    """The innermost module with a correct input and a wrong output.

    Modules are in the order of their outputs. If the first one with a wrong output also had a wrong input,
    the cause is between it and the modules before it: then the module around it is named.
    """
    worst: dict[tuple[str, str], tuple[float, int]] = {}
    for found in findings:
        for row in found.activations:
            size = math.inf if row.difference is None else row.difference
            if size > ACTIVATION_TOLERANCE:
                key = (row.module, row.what)
                worst[key] = max(worst.get(key, (0.0, 0)), (size, found.rank))
    wrong_module = next((name for name in reference.modules if (name, "output") in worst), None)
    if wrong_module is None:
        # The output of the outermost module is a loss without a sample dim: only its input is compared.
        return _input(worst) if ("", "input") in worst else None
    size, rank = worst[wrong_module, "output"]
    while (wrong_module, "input") in worst:
        if not wrong_module:
            return _input(worst)
        wrong_module = _around(wrong_module, reference.modules)
    difference = None if math.isinf(size) else size
    return Divergence("activation", wrong_module or ROOT_NAME, 1, difference, rank)


def _around(name: str, modules: Sequence[str]) -> str:
    """The nearest enclosing module that is called itself; a ``ModuleList`` is not."""
    outer = name.rpartition(".")[0]
    while outer and outer not in modules:
        outer = outer.rpartition(".")[0]
    return outer


def _input(worst: dict[tuple[str, str], tuple[float, int]]) -> Divergence:
    size, rank = worst["", "input"]
    return Divergence("input", ROOT_NAME, 1, None if math.isinf(size) else size, rank)


def _loss(by_step: Sequence[float | None], later: Sequence[int]) -> Divergence:
    note = "" if later[0] > 1 else "all compared outputs are right, so the summation of losses is wrong"
    return Divergence("loss", "loss", later[0], by_step[later[0] - 1], note=note)


def _first_gradient(reference: ReferenceRecord, rows: Sequence[_Row], step: int) -> Divergence | None:
    row = next((row for row in rows if row.wrong), None)
    if row is None:
        return None
    module, known = row.parameter.rpartition(".")[0], row.parameter in reference.parameters
    note = _factor_note(rows)
    if shared := reference.shared.get(row.parameter):
        note = "; ".join(part for part in (note, f"it is also {', '.join(shared)}") if part)
    if row.missing:
        note = "missing on every rank" if row.found is None else "missing"
    elif not known:
        note = "not in the reference"
    relative = None if row.missing else row.relative
    return Divergence("gradient", module or ROOT_NAME, step, relative, row.rank, row.parameter, note)


def _factor_note(rows: Sequence[_Row]) -> str:
    """A note if one factor explains all differences: then the loss or its divisor is wrong."""
    wrong = [row.found for row in rows if row.wrong and row.found is not None]
    factors = [f.factor for f in wrong if f.factor is not None and (f.rest or 0.0) < SAME_FACTOR]
    if len(factors) < 2 or len(factors) < len(wrong) or 2 * len(wrong) < len(rows):
        return ""
    if max(factors) - min(factors) > SAME_FACTOR * abs(factors[0]):
        return ""
    return f"all gradients are {factors[0]:.4g} times the reference: a wrong divisor or loss scale"


def _first_weight(reference: ReferenceRecord, findings: Sequence[RankFindings]) -> Divergence | None:
    """The first parameter, in the order of the backward pass, whose first update differs."""
    for name in reference.parameters:
        norm = reference.update_norms.get(name, 0.0)
        for found in findings:
            off = found.weights[name].difference if name in found.weights else 0.0
            relative = None if off is None else off / norm if norm else off
            if _exceeds(relative, WEIGHT_TOLERANCE):
                module, note = name.rpartition(".")[0], "its gradient was right"
                return Divergence("weight", module or ROOT_NAME, 1, relative, found.rank, name, note)
    return None


def _relative(value: float | None, reference: float | None) -> float | None:
    if value is None and reference is None:  # a batch without targets has no loss in either
        return 0.0
    if value is None or reference is None or not math.isfinite(value + reference):
        return None
    return abs(value - reference) / abs(reference) if reference else abs(value)


def _exceeds(difference: float | None, tolerance: float) -> bool:
    return difference is None or not difference <= tolerance


def _largest(differences: Sequence[float | None]) -> float | None:
    known = [d for d in differences if d is not None]
    return max(known, default=0.0) if len(known) == len(differences) else None
