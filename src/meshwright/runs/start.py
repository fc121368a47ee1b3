"""Starts a training run: torch is loaded for the ranks while this process loads the planner.

Reading the job is quick and tells what the ranks need. Planning and data preparation run in parallel to the
import of torch in the fork server, which takes longer than all of it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from meshwright.core.packages import require_packages
from meshwright.launch.local import end_server, start_server
from meshwright.launch.network import ListenOptions
from meshwright.runs.loaded_job import LoadedJob
from meshwright.runs.ranks import apply_environment, list_preload
from meshwright.runs.reporter import Reporter

if TYPE_CHECKING:
    from meshwright.runs.train import TrainedRun


def start_training(
    job: LoadedJob,
    resume: bool,
    reporter: Reporter,
    entry: str | None = None,
    listen: ListenOptions = ListenOptions(),  # noqa: B008  (immutable)
) -> TrainedRun:
    """Train on this machine, or as one rank of a launcher that has set torchrun's variables.

    Args:
        job: To train.
        resume: Whether to continue from the newest checkpoint.
        reporter: Receives messages and events.
        entry: ``module:function`` of a rank, for fault tests; None for training.
        listen: Where the agents of other nodes join.
    """
    require_packages(("torch", "run"), ("safetensors", "run"), needed_for="training")
    job.require_runnable()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        listen.refuse("under torchrun", fix="Leave it out: torchrun starts the ranks of all nodes")
        from meshwright.runs.torchrun import train_as_rank  # noqa: PLC0415

        return train_as_rank(job, resume, reporter)
    try:
        apply_environment(job.spec, reporter)
        start_server(list_preload(job.spec))
        from meshwright.runs.train import train_locally  # noqa: PLC0415  (the planner: a third of a second)

        return train_locally(job, resume, reporter, entry, listen)
    except BaseException:
        end_server()  # it holds our output pipes open
        raise
