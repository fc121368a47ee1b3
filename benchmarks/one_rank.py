"""A trainer of a single rank without a launcher, for benchmarks that time its steps.

Imports torch: set the environment first.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from meshwright.core.events import EVENTS_FILE, EventWriter, Listener
from meshwright.launch.assignment import Assignment
from meshwright.layout.parameters import list_parameters
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.models.weight_source import WeightSource, parameter_seed
from meshwright.parallel.mesh import init_mesh
from meshwright.plan.build import build_plan
from meshwright.spec.job import Job
from meshwright.train.build import build_trainer
from meshwright.train.trainer import RankContext, Trainer


class DeviceWeights(WeightSource):
    """Random initial weights drawn on the device; a CPU core needs minutes for billions of values.

    The distribution is that of a run: zeros would make the GPU faster. The values depend on the job's seed
    and the parameter's name only, so that all kinds of a job start from the same weights.
    """

    def __init__(self, job: Job) -> None:
        self._shapes = {parameter.name: parameter.shape for parameter in list_parameters(job.model)}
        self._device, self._std = torch.device(job.cluster.device), job.model.init_std
        self._seed = job.train.seed

    def full_tensor(self, name: str) -> Tensor:
        """Norms are one; everything else is random."""
        shape = self._shapes[name]
        values = torch.ones(shape, device=self._device)
        if len(shape) == 1:
            return values
        generator = torch.Generator(self._device).manual_seed(parameter_seed(self._seed, name))
        return values.normal_(0.0, self._std, generator=generator)


def build_rank(
    job: Job,
    folder: Path,
    data_dir: Path,
    listener: Listener | None = None,
    weights: WeightSource | None = None,
) -> Trainer:
    """The trainer of a single rank.

    Args:
        job: A job with a layout of one process.
        folder: Folder for its events.
        data_dir: A prepared data folder.
        listener: Gets every event.
        weights: Initial weights instead of the job's.
    """
    plan, _ = build_plan(job)
    counter = CollectiveCounter()
    counter.install()
    assignment = Assignment(str(folder), str(data_dir), str(folder / "checkpoints"))
    events = EventWriter(folder / EVENTS_FILE, 0, listener=listener)
    mesh = init_mesh(plan.job, counter)
    return build_trainer(RankContext(plan, assignment, mesh, counter, events), weights=weights)
