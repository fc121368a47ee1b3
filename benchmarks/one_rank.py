"""The session of a single rank without a launcher, for benchmarks that time its steps.

It imports torch: set the environment first.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from meshwright.core.events import EVENTS_FILE, EventWriter, Listener
from meshwright.launch.assignment import Assignment
from meshwright.layout.parameters import list_parameters
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.models.init import WeightSource, parameter_seed
from meshwright.parallel.mesh import init_mesh
from meshwright.plan.build import build_plan
from meshwright.spec.job import Job
from meshwright.train.build import build_trainer
from meshwright.train.trainer import RankContext, Trainer


class DeviceWeights:
    """First values drawn where they will lie: billions of them take a moment there and a minute on a core.

    They are spread as a run's own are, so that nothing runs faster for them; zeros would. Like those they
    depend on the job's seed and the parameter's name alone: two kinds of a job begin alike.
    """

    def __init__(self, job: Job) -> None:
        self._shapes = {parameter.name: parameter.shape for parameter in list_parameters(job.model)}
        self._device, self._std = torch.device(job.cluster.device), job.model.init_std
        self._seed = job.train.seed

    def whole(self, name: str) -> Tensor:
        """Norms are one, everything else is drawn."""
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
    """A session as a rank builds it.

    Args:
        job: With a layout of one process.
        folder: Where its events go.
        data_dir: A prepared folder.
        listener: Told every event.
        weights: First values in place of the job's.
    """
    plan, _ = build_plan(job)
    counter = CollectiveCounter()
    counter.install()
    assignment = Assignment(str(folder), str(data_dir), str(folder / "checkpoints"))
    events = EventWriter(folder / EVENTS_FILE, 0, listener=listener)
    mesh = init_mesh(plan.job, counter)
    return build_trainer(RankContext(plan, assignment, mesh, counter, events), weights=weights)
