"""Starts the ranks of a job on this machine, and checks first that it can run them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.core.events import Event
from meshwright.core.packages import package_version
from meshwright.elastic.policy import Budget
from meshwright.elastic.straggler_policy import StragglerHandling, build_straggler_handling
from meshwright.elastic.supervisor import Supervisor
from meshwright.launch.environment import prepare_environment
from meshwright.runs.reporter import Reporter
from meshwright.spec.cluster import find_gpus
from meshwright.spec.execution import uses_eager_blocks, wanted_block_backend
from meshwright.spec.job import Job
from meshwright.spec.legality.table import find_problems

PRELOAD = (
    "meshwright.launch.forkserver_preload",
    "torch",
    "torch.distributed",
    "meshwright.train.worker",
    "meshwright.plan.contract_preload",
)
"""Modules that the fork server imports before it forks ranks."""
PRELOAD_SHARED = ("torch._dynamo", "torch.distributed.fsdp")
"""Also for several ranks: DDP imports torch's compiler, sharded layouts import FSDP2."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Ranks on CPU do not initialise the GPUs of the machine."""


def build_launch(
    entry: str,
    job: Job,
    run_dir: Path,
    listener: Callable[[Event], None],
    generation: int = 0,
    preload: Sequence[str] = (*PRELOAD, *PRELOAD_SHARED),
    find_checkpoint: Callable[[], str | None] | None = None,
) -> Supervisor:
    """The ranks of a job's layout on this machine, ready to run.

    Args:
        entry: ``module:function`` of a rank.
        job: With its layout chosen.
        run_dir: Folder with the plan and the assignment.
        listener: Called with every event.
        generation: Which attempt this is.
        preload: Modules that the fork server imports.
        find_checkpoint: Finds the checkpoint to go on from after a failure, where there is no snapshot.
            None: the first failure ends the run.
    """
    return Supervisor(
        entry=entry,
        run_dir=run_dir,
        world_size=job.layout.world_size,
        generation=generation,
        stop_grace_s=job.elastic.stop_grace_s,
        heartbeat_timeout_s=job.elastic.heartbeat_timeout_s,
        listener=listener,
        environment=NO_GPU if job.cluster.device == "cpu" else {},
        preload=preload,
        budget=Budget(
            0 if find_checkpoint is None else job.elastic.restarts,
            job.elastic.policy,
            job.elastic.node_wait_s,
            job.elastic.may_change != "nothing",
        ),
        find_checkpoint=find_checkpoint or (lambda: None),
        spares=0 if find_checkpoint is None else job.elastic.spares,
        fences_unresponsive=job.cluster.device == "cpu",
        orphan_s=0.0 if find_checkpoint is None else job.elastic.orphan_s,
        join_timeout_s=job.elastic.join_timeout_s,
        stragglers=StragglerHandling() if find_checkpoint is None else build_straggler_handling(job),
    )


CPU_FP8_TORCH = (2, 13)
"""First version of torch that is known to run fp8 GEMMs with row scales on CPUs; 2.11 does not."""


def list_preload(job: Job) -> tuple[str, ...]:
    """Modules to preload for a training run; for an open layout, those that any number of ranks may need."""
    ranks = job.layout.world_size if job.layout.mode == "given" else job.cluster.world_size
    return PRELOAD if ranks == 1 else (*PRELOAD, *PRELOAD_SHARED)


def apply_environment(job: Job, reporter: Reporter) -> None:
    """Set the variables that torch reads on import, and report those that concern this job."""
    for notice in prepare_environment(threads=1):
        if job.train.precision != "fp32":
            reporter.message(notice)


def refuse_nodes(nodes: int) -> UserError:
    """The error of a run on several nodes that has no agents."""
    rule = f"needs an agent on {nodes - 1} other node{'s' if nodes > 2 else ''}"
    fix = (
        "Train with --listen HOST:PORT --token-file FILE, and run meshwright agent on the other nodes; "
        "or use torchrun on every node, or cluster.nodes=1"
    )
    return UserError(Problem("cluster-not-here", rule, path="cluster.nodes", value=nodes, fix=fix))


def require_devices(job: Job, world_size: int, with_agents: bool = False) -> None:
    """Check that the devices of the job's cluster are on this machine.

    Args:
        job: The job.
        world_size: Ranks of its layout.
        with_agents: Whether the agents of other nodes join.
    """
    cluster = job.cluster
    if cluster.nodes > 1 and not with_agents:
        raise refuse_nodes(cluster.nodes)
    needed = min(world_size, cluster.devices_per_node) if with_agents else world_size
    if cluster.device == "cuda" and (found := len(find_gpus())) < needed:
        rule = f"needs {needed} GPUs on this machine, which has {found}"
        fix = "Use cluster.preset=local, or cluster.device=cpu"
        raise UserError(Problem("cluster-not-here", rule, path="cluster.device", value="cuda", fix=fix))


def find_fp8_obstacle() -> str | None:
    """Why fp8 GEMMs do not run on CPUs with this torch; None if they do."""
    found = package_version("torch")
    if found is None or found >= CPU_FP8_TORCH:
        return None
    needed, installed = (".".join(map(str, version)) for version in (CPU_FP8_TORCH, found))
    return f"on CPUs needs torch {needed} or newer; torch {installed} has no fp8 GEMMs with row scales there"


def settle_block_backend(job: Job, reporter: Reporter) -> Job:
    """The job, with eager blocks if the default backend needs a C++ compiler that this machine does not have.

    Inductor and Triton call the compiler in the first step.

    Raises:
        UserError: There is no compiler, and the job names its backend or has settings that need it; or the
            job is in fp8, and torch has no fp8 GEMMs for this device.
    """
    on_cpu = job.train.precision == "fp8" and job.cluster.device == "cpu"
    if on_cpu and (obstacle := find_fp8_obstacle()):
        fix = "Install a newer torch, use a GPU, or use train.precision=bf16"
        raise UserError(Problem("train-fp8-torch", obstacle, path="train.precision", value="fp8", fix=fix))
    compiler = os.environ.get("CXX", "g++")
    needs_one = not uses_eager_blocks(job) and job.train.compile_backend == "inductor"
    if not needs_one or shutil.which(compiler) is not None:
        return job
    path, value = "train.block_backend", wanted_block_backend(job)
    rule, install = (
        f"needs a C++ compiler; {compiler} was not found",
        "(Debian and Ubuntu: apt-get install g++)",
    )
    eager = replace(job, train=replace(job.train, block_backend="eager"))
    if job.train.block_backend is None and not find_problems(eager):
        reporter.warning(
            f"{path}=eager: {value}, the default here, {rule}. Install one {install}, or set CXX"
        )
        return eager
    fix = f"Install one {install}, set CXX, or set train.block_backend=eager"
    raise UserError(Problem("train-compile-no-compiler", rule, path=path, value=value, fix=fix))
