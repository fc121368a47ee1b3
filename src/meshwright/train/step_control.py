"""The control all-reduce of a step: which values it sums over all ranks, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from meshwright.parallel.mesh import ControlAllReduce, Mesh
from meshwright.train.follow import Votes

_BAD_STEP_INDEX = 2
"""Index of the bad-step flag, after loss and targets."""


@dataclass(frozen=True)
class StepSums:
    """Sums over all ranks, read back from the device."""

    loss: float
    targets: float
    bad_ranks: float
    """Ranks that found the step bad."""
    stop_requests: float
    save_requests: float
    data_votes: Votes
    noise: list[float]
    """Sums for the gradient noise scale."""
    grad_norm: float
    """Of the whole model, not summed."""


@dataclass(frozen=True)
class StepControl:
    """A control all-reduce that was started."""

    work: ControlAllReduce
    sends_save_request: bool
    sends_votes: bool

    @classmethod
    def start(
        cls,
        mesh: Mesh,
        *,
        loss: Tensor | float,
        targets: float,
        bad: Tensor,
        stop: bool,
        save_due: bool | None,
        data_votes: Votes | None,
        noise: Sequence[Tensor | float],
        grad_norm: Tensor,
    ) -> StepControl:
        """Start it.

        Args:
            mesh: This rank's groups.
            loss: Summed loss of this rank.
            targets: Its target tokens.
            bad: Whether this rank finds the step bad, on the device.
            stop: Whether it was asked to stop.
            save_due: Whether a save is due by time; None if no rank sends that.
            data_votes: Votes on grown data; None if the job does not follow its data.
            noise: Terms of the gradient noise scale.
            grad_norm: Read back with the sums.
        """
        values = [loss, targets, bad, float(stop)]
        if save_due is not None:
            values.append(float(save_due))
        if data_votes is not None:
            values += [data_votes.proposed, data_votes.ready]
        work = mesh.start_control_all_reduce([*values, *noise], local_values=[grad_norm])
        return cls(work, save_due is not None, data_votes is not None)

    @property
    def is_bad(self) -> Tensor:
        """Whether any rank found the step bad, on the device."""
        return self.work.values[_BAD_STEP_INDEX] > 0

    def start_copy(self) -> None:
        """Start to copy the sums to the CPU."""
        self.work.start_copy()

    def wait(self) -> StepSums:
        """The sums; waits for the device."""
        loss, targets, bad, stop, *rest, grad_norm = self.work.wait()
        save = rest.pop(0) if self.sends_save_request else 0.0
        votes = Votes(rest.pop(0), rest.pop(0)) if self.sends_votes else Votes()
        return StepSums(loss, targets, bad, stop, save, votes, rest, grad_norm)
