"""One rank that trains and makes one wrong collective: another op, another shape, or none.

No signal from outside can cause that. This entry exists only for ``meshwright faults``; the entry of training
does not import it.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from meshwright.elastic.faults.schedule import FAULT_VARIABLE, Fault, parse_fault
from meshwright.launch.rank_process import RankLink
from meshwright.train.loop import train
from meshwright.train.trainer import StepHooks, Trainer
from meshwright.train.worker import run_with_trainer

AXES = ("dp_replicate", "dp_shard", "tp", "pp")
"""The call is made on the first of them that the layout has."""
ELEMENTS, OTHER_ELEMENTS = 3, 5000


def run_rank(run_dir: str, link: RankLink) -> int:
    """Train as this rank, with the fault of the environment; returns the exit status."""
    fault = parse_fault(os.environ[FAULT_VARIABLE])
    return run_with_trainer(lambda trainer: _train(trainer, fault), run_dir, link)


def _train(trainer: Trainer, fault: Fault) -> None:
    trainer.register_hooks(ExtraAllReduce(fault))
    train(trainer)


class ExtraAllReduce(StepHooks):
    """An all-reduce before every update; in one step one rank does something else."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def before_update(self, trainer: Trainer) -> None:
        """Make the call of this rank."""
        fault, mesh = self._fault, trainer.mesh
        wrong = (mesh.rank, trainer.step + 1) == (fault.rank, fault.step)
        if wrong:
            trainer.events.write("injected", fault=str(fault))
        axis = next(axis for axis in AXES if axis in mesh.groups)
        _reduce(mesh.group(axis), fault.call if wrong else None)


def _reduce(group: dist.ProcessGroup, instead: str | None) -> None:
    if instead == "skip":
        return
    if instead == "other op":
        dist.all_gather_into_tensor(torch.zeros(ELEMENTS * group.size()), torch.zeros(ELEMENTS), group=group)
        return
    dist.all_reduce(torch.zeros(OTHER_ELEMENTS if instead == "other shape" else ELEMENTS), group=group)
