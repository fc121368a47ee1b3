"""The reaction to a bad step: names its cause and applies ``train.on_bad_step``.

======== =======================================================================================
skip     the run goes on with the next samples; ``MAX_IN_A_ROW`` bad steps in a row end it
rollback all ranks regroup from the newest step of which every rank has an in-memory snapshot, or from the
         newest checkpoint, and go on with the samples after the bad step (``elastic.policy``)
stop     the run ends
======== =======================================================================================

Parameters, optimizer state and loss scale are those before the step, on all ranks (``bad_steps``).
"""

from __future__ import annotations

from meshwright.checkpoint.divergence import DivergedError
from meshwright.core.errors import Problem
from meshwright.train.bad_steps import BadStep
from meshwright.train.finite_checks import name_cause
from meshwright.train.gradient_spikes import name_spike
from meshwright.train.trainer import Trainer

MAX_IN_A_ROW = 3
"""Bad steps in a row that are skipped: weights that are not finite make every step bad."""


class RollbackError(DivergedError):
    """Ends a generation: the ranks restore an earlier state and continue with later samples."""

    def __init__(self, *problems: Problem, position: int) -> None:
        """Take the problem of the bad step.

        Args:
            problems: For the error of the run, if it does not go on.
            position: Samples consumed after the bad step, which no rank reads again.
        """
        super().__init__(*problems)
        self.position = position


class BadStepPolicy:
    """Applies ``train.on_bad_step``; all ranks call it together after every step."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def after_step(self, trainer: Trainer, bad: BadStep | None) -> None:
        """Name the cause of a bad step and act on it; nothing after a usual step.

        Raises:
            DivergedError: The run ends.
            RollbackError: The ranks roll back.
        """
        if bad is None:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        action = trainer.job.train.on_bad_step
        if action == "skip" and self._in_a_row > MAX_IN_A_ROW:
            action = "stop"
        error = bad.as_error(trainer.job.train.spike_factor, trainer.saver.has_checkpoint())
        if bad.kind == "spike":
            error = name_spike(trainer, error, bad, action)
        else:
            error = name_cause(trainer, error, action)
        trainer.rank_parameters.zero_grads()
        trainer.restore_forward_state()
        if action == "rollback":
            raise RollbackError(*error.problems, position=trainer.state.position)
        if action == "stop" and self._in_a_row > 1:
            raise error.with_cause(f"{self._in_a_row} bad steps in a row")
        if action == "stop":
            raise error
