"""What this machine must have before it starts ranks, and how they are started, whatever the command."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.cli.output import Output
from meshwright.core.errors import Problem, UserError
from meshwright.core.events import Event
from meshwright.launch.environment import prepare_environment
from meshwright.launch.local import LocalLaunch
from meshwright.spec.cluster import find_gpus
from meshwright.spec.execution import uses_eager_blocks
from meshwright.spec.job import Job

PRELOAD = (
    "meshwright.launch.forkserver_preload",
    "torch",
    "torch.distributed",
    "meshwright.cli",
    "meshwright.train.worker",
)
"""What a rank is born with."""
PRELOAD_SHARED = ("torch._dynamo", "torch.distributed.fsdp")
"""What several ranks share besides: DDP loads torch's compiler, sharded layouts FSDP2; one rank does not."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Ranks that compute on cores do not wake up the GPUs beside them."""


def build_launch(
    entry: str,
    job: Job,
    run_dir: Path,
    listener: Callable[[Event], None],
    generation: int = 0,
    preload: Sequence[str] = (*PRELOAD, *PRELOAD_SHARED),
) -> LocalLaunch:
    """The ranks of a job's layout on this machine, ready to run.

    Args:
        entry: ``module:function`` of a rank.
        job: With its layout settled.
        run_dir: Where what they are told lies.
        listener: Told every event.
        generation: Which attempt this is.
        preload: Modules that are imported before the ranks are started.
    """
    return LocalLaunch(
        entry=entry,
        run_dir=run_dir,
        world_size=job.layout.world_size,
        generation=generation,
        stop_grace_s=job.elastic.stop_grace_s,
        listener=listener,
        environment=NO_GPU if job.cluster.device == "cpu" else {},
        preload=preload,
    )


def list_preload(job: Job) -> tuple[str, ...]:
    """What the ranks of a training run are born with; of a job whose layout is open, what they may be."""
    ranks = job.layout.world_size if job.layout.mode == "given" else job.cluster.world_size
    return PRELOAD if ranks == 1 else (*PRELOAD, *PRELOAD_SHARED)


def apply_environment(output: Output, job: Job) -> None:
    """Set what torch reads on import, and say what concerns this job."""
    for notice in prepare_environment(threads=1):
        if job.train.precision != "fp32":
            output.print(notice)


def require_devices(job: Job, world_size: int) -> None:
    """The local launcher starts ranks here: what is planned for elsewhere can be planned, not trained."""
    cluster = job.cluster
    if cluster.nodes > 1:
        rule = f"cannot be trained from here: {cluster.nodes} nodes need a launcher that starts ranks on each"
        fix = "Use torchrun on every node, or cluster.nodes=1"
        raise UserError(Problem("cluster-not-here", rule, path="cluster.nodes", value=cluster.nodes, fix=fix))
    if cluster.device == "cuda" and (found := len(find_gpus())) < world_size:
        rule = f"needs {world_size} GPUs here, and there are {found}"
        fix = "Use cluster.preset=local, or cluster.device=cpu"
        raise UserError(Problem("cluster-not-here", rule, path="cluster.device", value="cuda", fix=fix))


def require_compiler(job: Job) -> None:
    """Torch's compiler writes C++, and Triton calls one: without it a first step fails in a page of text."""
    if uses_eager_blocks(job) or job.train.compile_backend != "inductor":
        return
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        rule = f"needs a C++ compiler, and there is no {compiler}"
        fix = (
            "Install one (Debian and Ubuntu: apt-get install g++), set CXX, or leave train.block_backend out"
        )
        path, value = "train.block_backend", job.train.block_backend
        raise UserError(Problem("train-compile-no-compiler", rule, path=path, value=value, fix=fix))
