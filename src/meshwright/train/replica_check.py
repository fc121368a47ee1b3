"""Finds silent corruption: compares checksums of replicated parameters over the data-parallel ranks.

Replicas are equal bit by bit after every step. A wrong bit in the memory or the arithmetic of one device
makes them differ, and no loss shows it. Every ``train.replica_check_every`` steps each rank adds up the bits
of its parameters as integers, and an all-gather over all ranks compares the sums. A single wrong bit always
changes the sum. The check comes before a checkpoint is saved.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.core.errors import Problem, RunFailedError
from meshwright.layout.axes import has_expert_axes, is_expert
from meshwright.layout.replicas import find_differing_ranks, has_replicas, list_replica_axes
from meshwright.parallel.collectives import all_gather_into
from meshwright.parallel.json_gather import all_gather_json
from meshwright.train.finite_checks import CHECK_PHASE, wait_for_event
from meshwright.train.trainer import Trainer

REPLICA_CHECK_PHASE = "replica_check"
"""Phase of the all-gather of checksums; it is planned and audited."""
CHUNK = 2**20
"""Elements that are converted to int64 at once."""
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by element size."""


class ReplicaCheck:
    """Compares the replicas every few steps; all ranks call it together after every step."""

    def __init__(self, trainer: Trainer) -> None:
        job = trainer.job
        self._every = job.train.replica_check_every if has_replicas(job) else 0
        self._equal_at: int | None = None
        """The last step at which all replicas were equal."""
        self.checks = 0

    def after_step(self, trainer: Trainer) -> None:
        """Compare the replicas, if it is due.

        Raises:
            RunFailedError: They differ. All ranks raise it.
        """
        if not self._every or trainer.step % self._every:
            return
        self.checks += 1
        differing = find_differing_ranks(trainer.job, _gather_checksums(trainer))
        if differing:
            raise self._name(trainer, differing)
        self._equal_at = trainer.step

    def _name(self, trainer: Trainer, differing: list[int]) -> RunFailedError:
        """The error with ranks, hosts and parameters; writes the event ``replicas_differ``."""
        own = (socket.gethostname(), {name: checksum(p) for name, p in _list_parameters(trainer)})
        with trainer.counter.during(CHECK_PHASE):
            gathered = all_gather_json(own, trainer.mesh)
        names = _find_parameters(trainer, [sums for _, sums in gathered])
        step, equal_at = trainer.step, self._equal_at
        if trainer.mesh.rank == 0:
            facts = {"ranks": differing, "parameters": names, "equal_at": equal_at}
            trainer.events.write("replicas_differ", step=step, **facts)
        wait_for_event(trainer)
        where = ", ".join(f"{rank} on {gathered[rank][0]}" for rank in differing)
        more = f" and {len(names) - 1} more parameters" if len(names) > 1 else ""
        before = (
            "they were not compared before" if equal_at is None else f"they were equal at step {equal_at}"
        )
        rule = f"Replicas of parameters differ at step {step}: rank {where} ({names[0]}{more}); {before}"
        good = "an older checkpoint" if equal_at is None else f"a checkpoint of step {equal_at} or before"
        fix = f"Check the memory and the device of the rank, and resume from {good}"
        return RunFailedError(Problem("train-replicas-differ", rule, fix=fix))


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """The sum of the bits of all elements, taken as integers, modulo 2^64."""
    return int(_sum_bits(tensor))


def _sum_bits(tensor: Tensor) -> Tensor:
    bits = tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])
    sums = [chunk.sum(dtype=torch.int64) for chunk in bits.split(CHUNK)]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=tensor.device)


def _list_parameters(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """The parameters in the memory of this rank, by name."""
    names = [name for name, _ in trainer.rank_parameters.named_parameters()]
    yield from zip(names, trainer.rank_parameters.local_parameters(), strict=True)


@torch.no_grad()
def _gather_checksums(trainer: Trainer) -> list[list[int]]:
    """Every rank sends one checksum per axis of replicas and gets those of all ranks."""
    mesh, apart = trainer.mesh, has_expert_axes(trainer.job)
    own = torch.zeros(len(list_replica_axes(trainer.job)), dtype=torch.int64, device=mesh.device)
    for name, parameter in _list_parameters(trainer):
        own[int(apart and is_expert(name))] += _sum_bits(parameter).to(mesh.device)
    gathered = own.new_empty(mesh.world_size * len(own))
    with trainer.counter.during(REPLICA_CHECK_PHASE):
        all_gather_into(gathered, own, group=mesh.control)
    return gathered.view(mesh.world_size, -1).tolist()


def _find_parameters(trainer: Trainer, sums: list[dict[str, int]]) -> list[str]:
    """The parameters that differ between replicas, in the order of their names on the ranks."""
    job, apart = trainer.job, has_expert_axes(trainer.job)
    found: list[str] = []
    for name in dict.fromkeys(name for one in sums for name in one):
        column = int(apart and is_expert(name))
        rows = [[0] * column + [one.get(name, 0)] + [0] * (not column and apart) for one in sums]
        if find_differing_ranks(job, rows):
            found.append(name)
    return found
