"""A rank that saves its state again after it has loaded a checkpoint, before the first update.

Its checkpoint must have the tensors of the one that was loaded, in any layout. It is a part of
``meshwright faults`` only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwright.launch.rank_process import RankLink
from meshwright.train.loop import train
from meshwright.train.trainer import Trainer
from meshwright.train.worker import run_with_trainer


def run_rank(run_dir: str, link: RankLink) -> int:
    """Train as this rank; returns the exit status."""
    return run_with_trainer(_train, run_dir, link)


def _train(trainer: Trainer) -> None:
    original = trainer.update

    def update(*arguments: Any) -> Tensor | None:
        if trainer.step == trainer.state.first_step:
            trainer.saver._save(None)
            trainer.saver._collect(wait=True)
        return original(*arguments)

    trainer.update = update  # type: ignore[method-assign, assignment]
    train(trainer)
