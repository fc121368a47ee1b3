"""Routing decisions of the reference of a proof: recorded, and replayed by the layout where experts tie.

Routing is discontinuous: two scores that differ by less than rounding may swap in another layout, and the
token then goes to another expert. That is not an error of the layout. If the last chosen expert and the first
rejected one tie within the tolerance, ranks replay the decision of the reference, provided that its scores
are as good. The number of replayed decisions is counted.

A token is identified by the position of its sample in the global batch and its position in the sequence.

Shape suffixes: N tokens of this rank, E experts, K experts of a token.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.models.moe import MixtureOfExperts
from meshwright.parallel.full_tensors import canonical_name
from meshwright.train.batches import split_into_micro_batches
from meshwright.train.data import first_samples
from meshwright.train.trainer import Trainer
from meshwright.verify.proof_task import routing_file


class RoutingDecisions(ABC):
    """Hooks the routers of a model."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        """Hook every router.

        Args:
            trainer: Trainer of the rank.
            folder: Folder of the reference, which has the recorded decisions or will have them.
        """
        self._trainer, self._folder = trainer, folder
        self._parts = self._split(trainer.job.train.global_batch)
        self.micro_batch = 0
        """Index of the running micro-batch."""
        self._evaluated: Counter[str] | None = None
        """Micro-batches of a running evaluation that a layer has seen."""
        self._steps = 0
        for layer, module in self._list_moe_layers():
            module.router.choose = functools.partial(self.choose, layer, module)

    def _split(self, samples: int, min_samples: int = 0) -> list[Tensor]:
        """The positions of this rank's samples, by micro-batch."""
        batches, every = self._trainer.data.train, np.arange(samples)
        parts = split_into_micro_batches(every, batches.rank, batches.ranks, batches.micro_batch, min_samples)
        return [torch.from_numpy(part) for part in parts]

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """While held-out samples are evaluated: a layer's micro-batches come one after the other."""
        wanted, train_parts = self._trainer.job.train.eval_samples, self._parts
        samples = len(first_samples(self._trainer.data.eval, wanted))
        self._parts, self._evaluated = self._split(samples, wanted), Counter()
        yield
        self.end_step()
        self._parts, self._evaluated = train_parts, None

    @property
    def _number(self) -> int:
        """Number of the running step; an evaluation has number 0."""
        return 0 if self._evaluated is not None else self._steps + 1

    @abstractmethod
    def choose(self, layer: str, module: MixtureOfExperts, scores_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """The experts to use; see :class:`meshwright.models.routing.Router`."""

    def end_step(self) -> None:
        """The weights are updated, or an evaluation has ended."""
        self._steps += self._evaluated is None

    def _list_moe_layers(self) -> Iterator[tuple[str, MixtureOfExperts]]:
        for name, module in self._trainer.model.named_modules():
            if isinstance(module, MixtureOfExperts):
                yield canonical_name(name), module

    def _begin(self, layer: str) -> Tensor:
        """The positions of the samples of a layer's micro-batch; called once for each."""
        index = self.micro_batch
        if self._evaluated is not None:
            index = self._evaluated[layer]
            self._evaluated[layer] += 1
        return self._parts[index]

    def _find(
        self, part: Tensor, module: MixtureOfExperts, chosen_NK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A mask of real tokens, and of those the position of their sample and in the sequence."""
        batch = self._trainer.data.train.micro_batch
        own, device = len(chosen_NK), chosen_NK.device
        sequence_N = module.tokens.sequence_of(own, batch, device)
        real_N = sequence_N < len(part)
        position_N = module.tokens.position_of(own, batch, device)
        return real_N, part.to(device)[sequence_N[real_N]], position_N[real_N]


class RecordedRouting(RoutingDecisions):
    """Saves the decisions of each step to a file."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        super().__init__(trainer, folder)
        self._tables: dict[str, Tensor] = {}
        self._used: dict[str, set[int]] = {}

    def choose(self, layer: str, module: MixtureOfExperts, scores_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """Record the chosen experts, and return them unchanged."""
        part = self._begin(layer)
        if layer not in self._tables:
            job = self._trainer.job
            samples = max(job.train.global_batch, job.train.eval_samples)
            shape = (samples, job.data.seq_len, chosen_NK.shape[1])
            self._tables[layer] = torch.zeros(shape, dtype=torch.int32)
        real_N, sample_N, position_N = self._find(part, module, chosen_NK)
        self._tables[layer][sample_N, position_N] = chosen_NK[real_N].to("cpu", torch.int32)
        if self._evaluated is None:
            self._used.setdefault(layer, set()).update(chosen_NK[real_N].unique().tolist())
        return chosen_NK

    def list_idle(self) -> dict[str, list[int]]:
        """The experts that got no token in any step, by layer."""
        idle = {
            layer: sorted({*range(module.router.num_experts)} - self._used.get(layer, set()))
            for layer, module in self._list_moe_layers()
        }
        return {layer: experts for layer, experts in idle.items() if experts}

    def end_step(self) -> None:
        """Save the decisions of the step."""
        if self._tables:
            save_file(self._tables, self._folder / routing_file(self._number))
            self._tables = {}
        super().end_step()


class ReplayedRouting(RoutingDecisions):
    """Replays the decision of the reference where experts tie."""

    def __init__(self, trainer: Trainer, folder: Path, tie: float) -> None:
        super().__init__(trainer, folder)
        self._tie = tie
        self.replayed = 0
        """Replayed decisions of this rank, over all steps and layers."""
        self._step, self._tables = -1, dict[str, Tensor]()

    def choose(self, layer: str, module: MixtureOfExperts, scores_NE: Tensor, chosen_NK: Tensor) -> Tensor:
        """The chosen experts; where experts tie, those of the reference."""
        part = self._begin(layer)
        per_token = chosen_NK.shape[1]
        if per_token == scores_NE.shape[1]:
            return chosen_NK
        best = scores_NE.topk(per_token + 1, dim=-1).values
        tied_N = best[:, -2] - best[:, -1] < self._tie
        if not tied_N.any():
            return chosen_NK
        real_N, sample_N, position_N = self._find(part, module, chosen_NK)
        taken_NK = chosen_NK.clone()
        taken_NK[real_N] = self._read(layer)[sample_N, position_N].to(chosen_NK)
        theirs_NK = scores_NE.gather(1, taken_NK).sort(dim=-1, descending=True).values
        tied_N &= real_N & ((best[:, :-1] - theirs_NK).amax(-1) < self._tie)
        if module.router.is_counting:
            self.replayed += int(tied_N.sum())
        return torch.where(tied_N.unsqueeze(1), taken_NK, chosen_NK)

    def _read(self, layer: str) -> Tensor:
        if self._step != self._number:
            self._step, self._tables = self._number, load_file(self._folder / routing_file(self._number))
        return self._tables[layer]
