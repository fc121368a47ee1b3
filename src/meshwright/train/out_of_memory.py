"""Reports an out-of-memory error of a rank: predicted memory, free memory, failed allocation.

The parent process adds changes that would fit (``diagnose.out_of_memory``): they need the planner.
"""

from __future__ import annotations

import dataclasses
import re
import resource
import socket
from pathlib import Path
from typing import Any

import torch

from meshwright.core.errors import Problem, RunFailedError
from meshwright.core.units import format_bytes
from meshwright.plan.contract import PlanContract
from meshwright.spec.cluster import machine_memory_bytes
from meshwright.train.step_audit import StepAudit
from meshwright.train.trainer import Trainer

OUT_OF_MEMORY_MESSAGES = ("can't allocate memory", "CUDA out of memory", "CUDA error: out of memory")
"""Messages of torch's allocators where they raise a plain RuntimeError."""
REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class OutOfMemoryRunError(RunFailedError):
    """A rank ran out of memory; carries the facts for the event."""

    def __init__(self, problem: Problem, memory: dict[str, Any]) -> None:
        super().__init__(problem)
        self.memory = memory

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems[0], self.memory)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, is a failed allocation."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
            message in str(error) for message in OUT_OF_MEMORY_MESSAGES
        ):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def requested_bytes(message: str) -> int | None:
    """The size of the failed allocation, if the message names it; CUDA's allocator rounds."""
    found = REQUESTED.search(message)
    return None if found is None else int(float(found[1]) * UNITS[found[2]])


def measure_free_memory(plan: PlanContract) -> tuple[int, int]:
    """Bytes that this rank can still allocate, and bytes of its device; before the model is built."""
    if plan.job.cluster.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(free), int(total)
    left = [machine_memory_bytes() // plan.world_size]
    for kind, field in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            left.append(max(0, limit - _process_bytes(field)))
    return min(left), plan.job.cluster.memory_bytes


def _process_bytes(field: str) -> int:
    """Bytes that the kernel counts against a limit of this process: a field of ``/proc/self/status``."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    kib = next((line.split()[1] for line in lines if line.startswith(f"{field}:")), "0")
    return int(kib) * 1024


def report_out_of_memory(
    error: Exception, plan: PlanContract, rank: int, free: tuple[int, int], trainer: Trainer | None
) -> OutOfMemoryRunError:
    """Turn an allocator's error into one with the predicted and the free memory.

    Args:
        error: What was raised.
        plan: Plan of the run.
        rank: Rank of this process.
        free: Result of :func:`measure_free_memory`.
        trainer: If it was built already.
    """
    predicted = plan.ranks[rank]
    memory: dict[str, Any] = {
        "rank": rank,
        "predicted_peak_bytes": predicted.first_peak_bytes,
        "peak_at": predicted.peak_at,
        "lines": [dataclasses.asdict(line) for line in predicted.lines],
        "predicted_step_s": plan.step_s,
        "requested_bytes": requested_bytes(str(error)),
        "live_bytes": _live_bytes(plan, trainer),
        "free_bytes": free[0],
        "device_bytes": free[1],
        "step": None if trainer is None else trainer.step,
    }
    return OutOfMemoryRunError(_problem(plan, memory), memory)


def _live_bytes(plan: PlanContract, trainer: Trainer | None) -> int | None:
    """Bytes of live tensors; on a CPU they are measured in the audited step only."""
    if plan.job.cluster.device == "cuda":
        return int(torch.cuda.memory_allocated())
    observer = None if trainer is None else trainer.observer
    return observer.live_bytes() if isinstance(observer, StepAudit) else None


def _problem(plan: PlanContract, memory: dict[str, Any]) -> Problem:
    when = "before the first step" if memory["step"] is None else f"in step {memory['step'] + 1}"
    rule = f"rank {memory['rank']} of {plan.world_size} on {socket.gethostname()} ran out of memory {when}: "
    if memory["requested_bytes"] is not None:
        live = f" beside {format_bytes(memory['live_bytes'])} of live tensors" if memory["live_bytes"] else ""
        rule += f"it could not allocate {format_bytes(memory['requested_bytes'])}{live}; "
    rule += f"predicted peak {format_bytes(memory['predicted_peak_bytes'])}, "
    rule += f"free at the start {format_bytes(memory['free_bytes'])}"
    return Problem("run-out-of-memory", rule)
