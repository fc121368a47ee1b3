"""Evaluation: the loss on held-out samples."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.parallel.batch import Batch
from meshwright.train.trainer import Trainer


@torch.no_grad()
def evaluate(trainer: Trainer) -> float | None:
    """Loss on the first held-out samples, the same ones every time; None if there are none."""
    trainer.counter.phase = "eval"
    held_out, eval_samples = trainer.data.eval, trainer.job.train.eval_samples
    samples = trainer.data.eval_samples(eval_samples)
    if not len(samples):
        trainer.events.write("no_evaluation", reason="the held-out split has less than one sample")
        return None
    # Micro-batches with collectives: as many as the plan counts, however few samples are held out.
    layout = trainer.job.layout
    has_collectives = layout.zero == 3 or max(layout.pp, layout.cp, layout.tp, layout.ep * layout.etp) > 1
    batches = held_out.micro_batches(samples, eval_samples if has_collectives else 0)
    found: tuple[Tensor | float, int]
    if trainer.pipeline is not None:
        found = trainer.pipeline.evaluate(batches)
    else:
        found = _sum_losses(trainer, batches)
    trainer.sharded_state.reshard_after_eval()
    loss_sum, targets = trainer.mesh.all_reduce_scalars(found if trainer.mesh.reports_loss else (0.0, 0.0))
    if not targets:
        reason = f"the first {len(samples)} held-out samples hold masked prompts only"
        trainer.events.write("no_evaluation", reason=reason)
        return None
    trainer.events.write("eval", step=trainer.step, loss=loss_sum / targets, samples=len(samples))
    return loss_sum / targets


def _sum_losses(trainer: Trainer, batches: Iterable[Batch]) -> tuple[Tensor, int]:
    """Summed loss and number of targets of micro-batches, without a pipeline."""
    device = trainer.mesh.device
    loss_sum, targets = torch.zeros((), dtype=torch.float64, device=device), 0
    trainer.model.train(not trainer.job.mixes_samples)  # batch norm: use the running statistics
    for batch in batches:
        with trainer.amp.autocast():
            loss_sum += trainer.model(*batch.to_device(device))
        targets += int((batch.targets >= 0).sum())
    trainer.model.train()
    return loss_sum, targets
