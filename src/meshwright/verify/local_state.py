"""The local shard of each parameter on one rank: values, gradient and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshwright.layout.optimizer_state import STEP_COUNT
from meshwright.parallel.full_tensors import canonical_name, full_tensor, named_parameters
from meshwright.parallel.rank_parameters import RankParameters
from meshwright.train.trainer import Trainer
from meshwright.verify.update_formulas import ParameterState


@dataclass
class LocalState:
    """This rank's shard of a parameter."""

    parameter: Tensor
    gradient: Tensor | None
    moments: dict[str, Tensor]

    def copy(self) -> LocalState:
        """In memory of its own."""
        gradient = None if self.gradient is None else self.gradient.clone()
        moments = {key: value.clone() for key, value in self.moments.items()}
        return LocalState(self.parameter.clone(), gradient, moments)

    def full(self, sharded: RankParameters, name: str) -> ParameterState:
        """All-gather the parameter and its moments."""
        moments = {
            key: value if key == STEP_COUNT else sharded.full_tensor(name, full_tensor(value))
            for key, value in self.moments.items()
        }
        return ParameterState(sharded.unshard(name, full_tensor(self.parameter)), moments)


def list_local_state(trainer: Trainer) -> dict[str, LocalState]:
    """Parameters, gradients and moments of this rank, by parameter."""
    shards = {canonical_name(name): shard for name, shard in trainer.rank_parameters.named_parameters()}
    return {
        name: LocalState(
            p.detach(),
            None if p.grad is None else p.grad.detach(),
            trainer.optimizer.state.get(shards[name], {}),
        )
        for name, p in named_parameters(trainer.model)
    }
