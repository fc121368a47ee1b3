"""The experts that the reference of a proof chose: written down, and taken over by the layout where two tie.

Which expert a token is sent to is a jump: two scores that differ by less than rounding may come out the other
way round in another layout, and the token then goes through other matrices. That is no error of the layout.
Where the last chosen expert and the first not chosen one tie within ``TIE``, ranks take the reference's
choice, if its scores are as good; how often is counted.

A token is known by the place of its sample in the global batch and by its position in the sequence.

Shape suffixes: N tokens of this rank, E experts, K experts of a token.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.full_tensors import canonical_name
from meshwright.train.batches import split_into_micro_batches
from meshwright.train.trainer import Trainer
from meshwright.verify.proof_task import TIE, routing_file


class RoutingDecisions(ABC):
    """What the choices of a step belong to."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        """Hook every router of the trainer's model.

        Args:
            trainer: Of the rank.
            folder: Where the reference's choices are, or are to be.
        """
        self._trainer, self._folder = trainer, folder
        batches = trainer.data.train
        places = np.arange(trainer.job.train.global_batch)
        parts = split_into_micro_batches(places, batches.rank, batches.ranks, batches.micro_batch)
        self._parts = [torch.from_numpy(part) for part in parts]
        self.micro_batch = 0
        """The one whose pass is running."""
        for layer, module in self._list_mixtures():
            module.router.choose = functools.partial(self.choose, layer, module)

    @abstractmethod
    def choose(self, layer: str, module: MixtureOfExperts, scores_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """The experts to take; see :class:`meshwright.models.routing.Router`."""

    @abstractmethod
    def end_step(self) -> None:
        """The weights are updated."""

    def _list_mixtures(self) -> Iterator[tuple[str, MixtureOfExperts]]:
        for name, module in self._trainer.model.named_modules():
            if isinstance(module, MixtureOfExperts):
                yield canonical_name(name), module

    def _find(self, module: MixtureOfExperts, chosen_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Which of the rank's tokens are real, and for those the sample's place and the position."""
        part, batch = self._parts[self.micro_batch], self._trainer.data.train.micro_batch
        own, device = len(chosen_NK), chosen_NK.device
        sequence_N = module.tokens.sequence_of(own, batch, device)
        real_N = sequence_N < len(part)
        position_N = module.tokens.position_of(own, batch, device)
        return real_N, part.to(device)[sequence_N[real_N]], position_N[real_N]


class RecordedRouting(RoutingDecisions):
    """Keeps the choices of each step in a file."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        super().__init__(trainer, folder)
        self._tables: dict[str, Tensor] = {}

    def choose(self, layer: str, module: MixtureOfExperts, scores_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """As chosen; written down."""
        if layer not in self._tables:
            job = self._trainer.job
            shape = (job.train.global_batch, job.data.seq_len, chosen_NK.shape[1])
            self._tables[layer] = torch.zeros(shape, dtype=torch.int32)
        real_N, place_N, position_N = self._find(module, chosen_NK)
        self._tables[layer][place_N, position_N] = chosen_NK[real_N].to("cpu", torch.int32)
        return chosen_NK

    def end_step(self) -> None:
        """Write the step's."""
        if self._tables:
            save_file(self._tables, self._folder / routing_file(self._trainer.step))
            self._tables = {}


class ReplayedRouting(RoutingDecisions):
    """Takes the reference's choice where experts tie."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        super().__init__(trainer, folder)
        self.replayed = 0
        """Tokens of this rank, in all steps and layers, whose choice was the reference's."""
        self._step, self._tables = -1, dict[str, Tensor]()

    def choose(self, layer: str, module: MixtureOfExperts, scores_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """As chosen, or as the reference did where nothing decides between the two."""
        per_token = chosen_NK.shape[1]
        if per_token == scores_NE.shape[1]:
            return chosen_NK
        best = scores_NE.topk(per_token + 1, dim=-1).values
        tied_N = best[:, -2] - best[:, -1] < TIE
        if not tied_N.any():
            return chosen_NK
        real_N, place_N, position_N = self._find(module, chosen_NK)
        taken_NK = chosen_NK.clone()
        taken_NK[real_N] = self._read(layer)[place_N, position_N].to(chosen_NK)
        theirs_NK = scores_NE.gather(1, taken_NK).sort(dim=-1, descending=True).values
        tied_N &= real_N & ((best[:, :-1] - theirs_NK).amax(-1) < TIE)
        if module.router.is_counting:
            self.replayed += int(tied_N.sum())
        return torch.where(tied_N.unsqueeze(1), taken_NK, chosen_NK)

    def end_step(self) -> None:
        """Nothing is kept of it."""

    def _read(self, layer: str) -> Tensor:
        step = self._trainer.step + 1
        if self._step != step:
            self._step, self._tables = step, load_file(self._folder / routing_file(step))
        return self._tables[layer]
