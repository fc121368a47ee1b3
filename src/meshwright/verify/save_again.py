"""A rank that saves its state again after it has loaded a checkpoint, before the first update.

Its checkpoint must have the tensors of the one that was loaded, in any layout. It is a part of
``meshwright faults`` only.
"""

from __future__ import annotations

from meshwright.launch.rank_process import RankLink
from meshwright.train.loop import train
from meshwright.train.trainer import StepHooks, Trainer
from meshwright.train.worker import run_with_trainer


def run_rank(run_dir: str, link: RankLink) -> int:
    """Train as this rank; returns the exit status."""
    return run_with_trainer(_train, run_dir, link)


def _train(trainer: Trainer) -> None:
    trainer.register_hooks(SaveBeforeFirstUpdate())
    train(trainer)


class SaveBeforeFirstUpdate(StepHooks):
    """Saves a checkpoint of the state that was loaded."""

    def before_update(self, trainer: Trainer) -> None:
        """Save before the first update."""
        if trainer.step == trainer.state.first_step:
            trainer.saver.save_now()
