"""Evaluation: the loss on held-out samples."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from meshwright.parallel.batch import Batch
from meshwright.train.batches import Batcher, Samples
from meshwright.train.data import first_samples
from meshwright.train.image_batches import ImageBatcher
from meshwright.train.trainer import Trainer


def evaluate(trainer: Trainer) -> dict[str | None, float | None]:
    """Evaluate the held-out split, under the key None, and the sets of ``data.eval``, by name.

    Returns:
        The loss of each; None without targets. A set without samples is left out: it was not evaluated.
    """
    trainer.counter.phase = "eval"
    trainer.flight_recorder.enter("evaluation")
    sets = [(None, trainer.data.eval), *trainer.data.eval_sets.items()]
    eval_samples = trainer.job.train.eval_samples
    losses = dict[str | None, float | None]()
    for name, held_out in sets:
        samples = first_samples(held_out, eval_samples)
        what = "the held-out split" if name is None else f"the set {name}"
        if len(samples):
            losses[name] = _evaluate_samples(trainer, name, what, held_out, samples)
        else:
            trainer.events.write("no_evaluation", reason=f"{what} has nothing to predict")
    return losses


@torch.no_grad()
def _evaluate_samples(
    trainer: Trainer, name: str | None, what: str, held_out: Batcher | ImageBatcher, samples: Samples
) -> float | None:
    """Loss on the samples of a set, the same ones every time; None without targets."""
    started = time.perf_counter()
    eval_samples = trainer.job.train.eval_samples
    # Micro-batches with collectives: as many as the plan counts, however few samples are held out.
    layout = trainer.job.layout
    has_collectives = layout.zero == 3 or max(layout.pp, layout.cp, layout.tp, layout.ep * layout.etp) > 1
    read = held_out.micro_batches(samples, eval_samples if has_collectives else 0)
    batches = trainer.flight_recorder.read_data(read, "evaluation")
    found: tuple[Tensor | float, int]
    if trainer.pipeline is not None:
        found = trainer.pipeline.evaluate(batches)
    else:
        found = _sum_losses(trainer, batches)
    trainer.rank_parameters.reshard_after_eval()
    loss_sum, targets = trainer.mesh.all_reduce_scalars(found if trainer.mesh.reports_loss else (0.0, 0.0))
    if not targets:
        reason = f"the first {len(samples)} samples of {what} hold masked prompts only"
        trainer.events.write("no_evaluation", reason=reason)
        return None
    trainer.events.write(
        "eval",
        step=trainer.step,
        set=name,
        loss=loss_sum / targets,
        samples=len(samples),
        seconds=time.perf_counter() - started,
    )
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
