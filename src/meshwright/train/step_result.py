"""The result of one optimizer step: sums over all ranks, and requests."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.train.bad_steps import BadStep
from meshwright.train.expert_balance import ExpertLoad
from meshwright.train.follow import Votes


@dataclass(frozen=True)
class StepResult:
    """Results of a step; sums are over all ranks."""

    loss_sum: float
    target_count: float
    """Targets that were trained on."""
    stop_requested: bool
    """A rank received a request to stop."""
    save_requested: bool
    """Rank 0 found a save due by ``checkpoint.every_minutes``; always False with one rank."""
    noise_sums: list[float]
    """Sums for the gradient noise scale."""
    loss_scale: float
    lr: float
    grad_norm: float
    """Before clipping."""
    bad: BadStep | None
    """Why the parameters did not change; None for a usual step."""
    expert_load: ExpertLoad | None
    """Tokens per expert; None without experts."""
    data_votes: Votes
    """Votes on data that have grown."""
