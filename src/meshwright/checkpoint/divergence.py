"""Errors of a diverged run: a value that is not finite, a gradient spike, a collapsed loss scale."""

from __future__ import annotations

import dataclasses

from meshwright.core.errors import Problem, RunFailedError


class DivergedError(RunFailedError):
    """A run diverged."""

    def with_cause(self, cause: str, advice: str = "") -> DivergedError:
        """The same error with its cause, and an advice that fits it."""
        (problem,) = self.problems
        resume = "; resume from the last checkpoint" if "resume" in problem.fix else ""
        fix = f"{advice}{resume}" if advice else problem.fix
        return DivergedError(dataclasses.replace(problem, rule=f"{problem.rule}; {cause}", fix=fix))


def non_finite_error(what: str, value: float, step: int, saved: bool) -> DivergedError:
    """A loss, a gradient norm or a weight is infinite or NaN.

    Args:
        what: Which one.
        value: Its value.
        step: Steps done.
        saved: Whether there is a checkpoint to resume from.
    """
    rule = f"is {value} at step {step}; {_kept(saved)}"
    fix = "Lower train.lr or lengthen train.warmup"
    if saved:
        fix = "Lower train.lr, lengthen train.warmup, or resume from the last checkpoint with either"
    return DivergedError(Problem("train-not-finite", rule, path=what, fix=fix))


def grad_spike_error(norm: float, median: float, factor: float, step: int, saved: bool) -> DivergedError:
    """A gradient norm is far above those of the last steps.

    Args:
        norm: The gradient norm.
        median: Median of the last steps.
        factor: ``train.spike_factor``.
        step: Steps done.
        saved: Whether there is a checkpoint to resume from.
    """
    rule = (
        f"{norm:.3g} at step {step} is above train.spike_factor={factor:g} times the median of the last "
        f"steps, {median:.3g}; {_kept(saved)}"
    )
    fix = "Check the rank and the samples, lower train.lr, or raise train.spike_factor"
    fix += "; resume from the last checkpoint" if saved else ""
    return DivergedError(Problem("train-grad-spike", rule, path="gradient norm", fix=fix))


def loss_scale_collapsed_error(step: int, scale: float, skipped: int, saved: bool) -> DivergedError:
    """The loss scale of fp16 fell below one.

    Args:
        step: Steps done.
        scale: The loss scale.
        skipped: Consecutive steps that overflowed.
        saved: Whether there is a checkpoint to resume from.
    """
    rule = (
        f"collapsed at step {step}: it fell to {scale:g} because the gradients of the last {skipped} steps, "
        f"from step {step - skipped + 1} on, overflowed in fp16 whatever the scale; {_kept(saved)}"
    )
    fix = "Use train.precision=bf16, a lower train.lr or a longer train.warmup"
    fix += "; resume from the last checkpoint" if saved else ""
    return DivergedError(Problem("train-fp16-collapsed", rule, path="loss scale", fix=fix))


def _kept(saved: bool) -> str:
    return "nothing was saved since" if saved else "no checkpoint was written before"
