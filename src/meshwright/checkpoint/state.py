"""Everything of one rank that a checkpoint saves and a resumed run restores.

This package is below ``models`` and ``parallel``. It sees their objects through the protocols here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.data.epochs import CorpusState
from meshwright.plan.contract import PlanContract


@dataclass
class TrainState:
    """The counters of a run, which change from step to step."""

    step: int = 0
    """Optimizer steps done."""
    position: int = 0
    """Samples consumed."""
    best_eval_loss: float = math.inf
    first_step: int = 0
    """Optimizer steps done when this attempt began."""
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norms of the last steps that were not bad, oldest first (``train.bad_steps``)."""
    corpus: str = ""
    """The data that the position counts in, by their key (``data.corpus_file``)."""

    def advance(self, samples: int) -> None:
        """Count one step."""
        self.step += 1
        self.position += samples


class ShardedTensors(Protocol):
    """The parameters that this rank updates (``parallel.rank_parameters``)."""

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """The shards that the optimizer updates, by parameter name."""

    def local_parameters(self) -> list[Tensor]:
        """The parameters in this rank's memory, in the same order."""


class LossScaler(Protocol):
    """The loss scale of fp16 (``train.amp``)."""

    def state_dict(self) -> dict[str, float] | None:
        """The scale; None in other precisions."""

    def load_state_dict(self, state: dict[str, float] | None) -> None:
        """Restore it."""


class ExpertBiases(Protocol):
    """The biases of expert selection, the same on every rank (``train.expert_balance``)."""

    bias_LE: Tensor | None  # noqa: N815

    def use_biases(self, network: nn.Module, bias_LE: Tensor) -> None:  # noqa: N803
        """Select experts with these biases."""


@dataclass
class CheckpointedState:
    """The tensors and counters of one rank."""

    plan: PlanContract
    counters: TrainState
    model: nn.Module
    sharded: ShardedTensors
    optimizer: torch.optim.Optimizer
    loss_scaler: LossScaler
    expert_biases: ExpertBiases | None
    corpus: CorpusState
    """The data that the position counts in; they may grow during the run."""
    template: str | None
    """Chat template, see :class:`Manifest`."""
    small_files: Mapping[str, bytes]
    """Files that every checkpoint holds besides the tensors: tokenizer, chat template, HF source."""
    transport: str = ""
    """What runs the collectives, see :class:`Manifest`."""
