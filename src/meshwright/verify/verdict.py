"""The verdict of a proof: equal, or the first module at which the layout diverges from the reference.

First in the order of a run: initial weights, then step by step inputs, forward pass, loss, backward pass
(gradients in the order in which they become ready), update, gradient norm. Later differences may be
consequences. The update comes before the gradient norm because it names a parameter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.verify.proof_task import (
    ACTIVATION_TOLERANCE,
    EXACT,
    RELOAD_STEP,
    ROOT_NAME,
    UPDATE_STEPS,
    UPDATE_TOLERANCE,
    WEIGHT_TOLERANCE,
    RankFindings,
    ReferenceRecord,
    RunFigures,
    TensorDifference,
    Tolerances,
    UpdateDifference,
)

MAX_TOKENS = 5
"""Tokens that are named."""
SAME_FACTOR = 1e-3
"""Tolerance within which all gradients must share one factor for that factor to be reported."""


@dataclass(frozen=True)
class Divergence:
    """Where the layout first diverges from the reference."""

    kind: str
    """`weight` (initial), `token`, `input`, `activation`, `loss`, `gradient`, `update`, `gradient_norm`,
    `evaluation` or `checkpoint`."""
    module: str
    step: int
    difference: float | None
    """Relative; None if it is not finite or missing."""
    rank: int | None = None
    parameter: str | None = None
    note: str = ""
    term: str | None = None
    """The term of the update that is wrong, or the state in the checkpoint: `weight` or a moment."""

    def sentence(self) -> str:
        """The divergence as a sentence."""
        of = f"{self.parameter} in " if self.parameter else ""
        what = {
            "weight": f"the initial weight {of}".rstrip(),
            "token": "the output for some tokens of",
            "input": "the samples that go into",
            "activation": "the output of",
            "loss": "the",
            "gradient": f"the gradient of {of}".rstrip(),
            "update": f"the {self.term} of {of}".rstrip(),
            "gradient_norm": "the",
            "evaluation": "the",
            "checkpoint": f"the checkpoint's {self.term} of {of}".rstrip() if of else "the checkpoint's",
        }[self.kind]
        size = "not a finite number" if self.difference is None else f"off by {self.difference:.2g}"
        if self.kind == "checkpoint" and self.difference is None:
            size = "not the same"
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
    """Largest difference of the losses; None if one is missing or not finite."""
    max_grad_diff: float | None
    """Largest difference of the gradients, relative to their norms; 1 for a missing one, None for one that is
    not finite."""
    max_norm_diff: float | None
    """Largest difference of the gradient norms; None if one is missing or not finite."""
    max_update_diff: float | None
    """Largest difference of the updates, relative to their formula; None if one is not finite."""
    first_divergence: Divergence | None
    tolerance: dict[str, float]
    """By quantity."""

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        first = self.first_divergence
        return {
            "equal": self.equal,
            "max_rel_diff": self.max_rel_diff,
            "max_grad_diff": self.max_grad_diff,
            "max_norm_diff": self.max_norm_diff,
            "max_update_diff": self.max_update_diff,
            "first_divergence": None if first is None else asdict(first),
            "tolerance": self.tolerance,
        }


def judge(
    reference: ReferenceRecord,
    findings: Sequence[RankFindings],
    found: RunFigures,
    expected: RunFigures,
    tolerances: Tolerances = EXACT,
) -> Verdict:
    """Compare the findings of the ranks with the tolerances.

    Args:
        reference: What the reference recorded.
        findings: Findings of every rank of the layout.
        found: Losses and gradient norms of the layout.
        expected: Those of the reference.
        tolerances: Tolerances of the precision.
    """
    losses = [_relative(a, b) for a, b in zip(found.losses, expected.losses, strict=False)]
    lost = len(found.losses) != len(expected.losses)
    norms = {
        rank: [_relative(a, b) for a, b in zip(own, expected.grad_norms[0], strict=False)]
        for rank, own in found.grad_norms.items()
    }
    rows = {
        step: list(_gradients(reference, findings, step, tolerances)) for step in tolerances.gradient_steps
    }
    divergences = [
        *_weights(reference, findings),
        *_wrong_tokens(findings),
        *_losses(losses, tolerances.loss),
        *(wrong for step, table in rows.items() for wrong in _wrong_gradients(reference, table, step)),
        *_updates(reference, findings),
        *_norms(norms, tolerances.gradient_norm),
        *_evaluations(found, expected, tolerances.loss),
        *_checkpoint(reference, findings),
    ]
    equal = not lost and not divergences
    activation = None if equal else first_activation(reference, findings)
    if activation is not None:
        divergences.append(activation)
    if lost and not divergences:
        divergences.append(Divergence("loss", "loss", len(losses) + 1, None, note="missing"))
    updates = [row.difference for f in findings for table in f.updates.values() for row in table.values()]
    return Verdict(
        equal=equal,
        max_rel_diff=None if lost else _largest(losses),
        max_grad_diff=_largest([row.relative for table in rows.values() for row in table]),
        max_norm_diff=None if lost else _largest([off for own in norms.values() for off in own]),
        max_update_diff=_largest(updates),
        first_divergence=min(divergences, key=_moment, default=None),
        tolerance={
            "loss": tolerances.loss,
            "gradient": tolerances.gradient,
            "gradient_norm": tolerances.gradient_norm,
            "update": UPDATE_TOLERANCE,
        },
    )


KINDS = (
    *("weight", "token", "input", "activation", "loss", "gradient", "update", "gradient_norm"),
    *("evaluation", "checkpoint"),
)
"""In the order of a step."""


def _moment(divergence: Divergence) -> tuple[int, int, bool]:
    """When a divergence happens; of several at once, the first in the list counts.

    Clipping by a wrong norm is a consequence of the norm.
    """
    clipping = divergence.term == "clipping"
    kind = "gradient_norm" if clipping else divergence.kind
    return divergence.step, KINDS.index(kind), clipping


@dataclass(frozen=True)
class _Row:
    """One gradient of one rank."""

    parameter: str
    rank: int | None
    relative: float | None
    found: TensorDifference | None
    tolerance: float

    @property
    def missing(self) -> bool:
        return self.found is None or self.found.missing

    @property
    def wrong(self) -> bool:
        return self.missing or _exceeds(self.relative, self.tolerance)


def _gradients(
    reference: ReferenceRecord, findings: Sequence[RankFindings], step: int, tolerances: Tolerances
) -> Iterator[_Row]:
    """Every gradient on every rank that holds a shard of it, in the order of the backward pass."""
    norms = reference.gradient_norms[str(step)]
    noise = tolerances.rounding / tolerances.gradient * math.sqrt(sum(norm**2 for norm in norms.values()))
    unknown = {name for f in findings for name in f.gradients.get(str(step), {})} - set(reference.parameters)
    for name in (*sorted(unknown), *reference.parameters):
        held = [
            (f.rank, f.gradients[str(step)][name]) for f in findings if name in f.gradients.get(str(step), {})
        ]
        if not held and name in norms:
            yield _Row(name, None, 1.0, None, tolerances.gradient)
        for rank, found in held:
            size = max(norms.get(name, 0.0), noise)
            off = found.difference
            relative = 1.0 if found.missing else None if off is None else off / size if size else off
            yield _Row(name, rank, relative, found, tolerances.gradient)


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


def _weights(reference: ReferenceRecord, findings: Sequence[RankFindings]) -> Iterator[Divergence]:
    """Initial weights that differ."""
    for name in reference.parameters:
        for found in findings:
            row = found.weights.get(name)
            if row is not None:
                off = _scaled(row.difference, reference.weight_norms[name])
                if _exceeds(off, WEIGHT_TOLERANCE):
                    yield Divergence("weight", _module(name), 1, off, found.rank, name, row.note)


def _wrong_tokens(findings: Sequence[RankFindings]) -> Iterator[Divergence]:
    """Tokens whose embedding or loss is wrong."""
    for found in findings:
        for module, tokens in found.wrong_tokens.items():
            more = len(tokens) - MAX_TOKENS
            named = ", ".join(map(str, tokens[:MAX_TOKENS])) + (f" and {more} more" if more > 0 else "")
            yield Divergence("token", module, 1, 1.0, found.rank, note=f"tokens {named}")


def _losses(by_step: Sequence[float | None], tolerance: float) -> Iterator[Divergence]:
    for step, off in enumerate(by_step, start=1):
        if not _exceeds(off, tolerance):
            continue
        note = "all compared outputs are right, so the summation of losses is wrong" if step == 1 else ""
        yield Divergence("loss", "loss", step, off, note=note)


def _norms(by_rank: dict[int, list[float | None]], tolerance: float) -> Iterator[Divergence]:
    for rank, norms in by_rank.items():
        for step, off in enumerate(norms, start=1):
            if _exceeds(off, tolerance):
                note = "the gradients are right, so their norm is computed wrongly" if step == 1 else ""
                yield Divergence("gradient_norm", "gradient norm", step, off, rank, note=note)


def _wrong_gradients(reference: ReferenceRecord, rows: Sequence[_Row], step: int) -> Iterator[Divergence]:
    for row in rows:
        if not row.wrong:
            continue
        note = _factor_note(rows)
        if shared := reference.shared.get(row.parameter):
            note = "; ".join(part for part in (note, f"it is also {', '.join(shared)}") if part)
        if row.missing:
            note = "missing on every rank" if row.found is None else "missing"
        elif row.parameter not in reference.parameters:
            note = "not in the reference"
        relative = None if row.missing else row.relative
        yield Divergence("gradient", _module(row.parameter), step, relative, row.rank, row.parameter, note)


def _updates(reference: ReferenceRecord, findings: Sequence[RankFindings]) -> Iterator[Divergence]:
    """Updates that differ from their formula, with the number of parameters that share the wrong term."""
    for step in map(str, UPDATE_STEPS):
        tables = [(found.rank, found.updates.get(step, {})) for found in findings]
        wrong = {name: row.term for _, t in tables for name, row in t.items() if _is_wrong(row)}
        for name in reference.parameters:
            for rank, table in tables:
                row = table.get(name)
                if row is None or not _is_wrong(row):
                    continue
                same = sum(term == row.term for term in wrong.values())
                count = f"{same} of {len(reference.parameters)} parameters" if same > 1 else ""
                note = "; ".join(part for part in (row.note, count) if part)
                yield Divergence(
                    "update", _module(name), int(step), row.difference, rank, name, note, row.term
                )


def _evaluations(found: RunFigures, expected: RunFigures, tolerance: float) -> Iterator[Divergence]:
    """The loss on held-out samples, on every rank."""
    wanted = expected.eval_losses.get(0, [])
    for rank in found.grad_norms:
        own = found.eval_losses.get(rank, [])
        if len(own) < len(wanted) and len(found.losses) < RELOAD_STEP:
            continue  # the run ended before
        for off in (_relative(a, b) for a, b in itertools.zip_longest(own, wanted)):
            if _exceeds(off, tolerance):
                note = "the losses of training are right, so the held-out samples or their sum are wrong"
                yield Divergence("evaluation", "held-out loss", RELOAD_STEP, off, rank, note=note)


def _checkpoint(reference: ReferenceRecord, findings: Sequence[RankFindings]) -> Iterator[Divergence]:
    """Tensors that a checkpoint does not save or restore as they were, by parameter.

    A tensor that is wrong in the file is also wrong after the reload: the file comes first.
    """
    order = {name: index for index, name in enumerate(reference.parameters)}
    rows = [(found.rank, row) for found in findings for row in found.checkpoint]
    rows.sort(key=lambda item: (order.get(item[1].parameter or "", -1), item[1].note != "saved"))
    for rank, row in rows:
        module = row.what if row.parameter is None else _module(row.parameter)
        yield Divergence(
            "checkpoint", module, RELOAD_STEP, row.difference, rank, row.parameter, row.note, row.what
        )


def _is_wrong(row: UpdateDifference) -> bool:
    return _exceeds(row.difference, UPDATE_TOLERANCE)


def _factor_note(rows: Sequence[_Row]) -> str:
    """A note if one factor explains all differences: then the loss or its divisor is wrong."""
    wrong = [row.found for row in rows if row.wrong and row.found is not None]
    factors = [f.factor for f in wrong if f.factor is not None and (f.rest or 0.0) < SAME_FACTOR]
    if len(factors) < 2 or len(factors) < len(wrong) or 2 * len(wrong) < len(rows):
        return ""
    if max(factors) - min(factors) > SAME_FACTOR * abs(factors[0]):
        return ""
    return f"all gradients are {factors[0]:.4g} times the reference: a wrong divisor or loss scale"


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0] or ROOT_NAME


def _scaled(difference: float | None, norm: float) -> float | None:
    return difference / norm if difference is not None and norm else difference


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
