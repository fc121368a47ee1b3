"""A rank that ran out of memory: what was predicted, what was there, and which changes would fit."""

from __future__ import annotations

import dataclasses
import re
import resource
import socket
import traceback
from pathlib import Path
from typing import Any

import torch

from meshwright.core.errors import Problem, RunFailedError
from meshwright.core.units import format_bytes
from meshwright.plan.contract import Plan
from meshwright.plan.search.alternatives import Alternative, find_alternatives, memory_budget_after_oom
from meshwright.spec.cluster import machine_memory_bytes
from meshwright.train.step_audit import StepAudit
from meshwright.train.trainer import Trainer

OUT_OF_MEMORY_MESSAGES = ("can't allocate memory", "CUDA out of memory", "CUDA error: out of memory")
"""What torch's allocators say where they raise no error of their own kind."""
ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)")
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class OutOfMemoryRunError(RunFailedError):
    """A rank ran out of memory; carries the report for the event."""

    def __init__(self, problem: Problem, memory: dict[str, Any]) -> None:
        super().__init__(problem)
        self.memory = memory

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems[0], self.memory)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is that an allocator had nothing left."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
            s in str(error) for s in OUT_OF_MEMORY_MESSAGES
        ):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def requested_bytes(message: str) -> int | None:
    """What the allocator was asked for in vain, if it says so; CUDA's allocator rounds."""
    found = ASKED.search(message)
    return None if found is None else int(float(found[1]) * UNITS[found[2]])


def measure_free_memory(plan: Plan) -> tuple[int, int]:
    """Bytes that this rank can still take, and those of its device in all; before the model is built."""
    if plan.job.cluster.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(free), int(total)
    left = [machine_memory_bytes() // plan.world_size]
    for kind, held in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            left.append(max(0, limit - _held_bytes(held)))
    return min(left), plan.job.cluster.memory_bytes


def _held_bytes(kind: str) -> int:
    """What the system counts against a limit of this process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    kib = next((line.split()[1] for line in lines if line.startswith(f"{kind}:")), "0")
    return int(kib) * 1024


def explain_out_of_memory(
    error: Exception, plan: Plan, rank: int, room: tuple[int, int], trainer: Trainer | None
) -> OutOfMemoryRunError:
    """Turn an allocator's error into the ledger, what there was, and the cheapest changes.

    Args:
        error: What was raised.
        plan: What this rank follows.
        rank: Which one it is.
        room: Of :func:`measure_room`.
        trainer: If it was built already.
    """
    promised = plan.ranks[rank]
    predicted = promised.first_peak_bytes
    memory: dict[str, Any] = {
        "predicted_peak_bytes": predicted,
        "peak_at": promised.peak_at,
        "lines": [dataclasses.asdict(line) for line in promised.lines],
        "predicted_step_s": plan.step_s,
        "requested_bytes": requested_bytes(str(error)),
        "live_bytes": _live_bytes(plan, trainer),
        "free_bytes": room[0],
        "device_bytes": room[1],
        "step": None if trainer is None else trainer.step,
    }
    if error.__traceback__ is not None:
        traceback.clear_frames(
            error.__traceback__
        )  # lets go of the step's tensors: planning needs memory, too
    try:
        needed = promised.needed_bytes or predicted
        room_bytes = memory_budget_after_oom(needed, room[0], memory["requested_bytes"], memory["live_bytes"])
        changes = find_alternatives(plan.job, room_bytes)
    except MemoryError:  # not even for this
        changes = []
    memory["changes"] = [dataclasses.asdict(change) for change in changes]
    return OutOfMemoryRunError(_problem(plan, rank, memory, changes), memory)


def _live_bytes(plan: Plan, trainer: Trainer | None) -> int | None:
    """Bytes of live tensors; on CPU they are known in the audited step alone."""
    if plan.job.cluster.device == "cuda":
        return int(torch.cuda.memory_allocated())
    watch = None if trainer is None else trainer.audit
    return watch.live_bytes() if isinstance(watch, StepAudit) else None


def _problem(plan: Plan, rank: int, memory: dict[str, Any], changes: list[Alternative]) -> Problem:
    when = "before the first step" if memory["step"] is None else f"in step {memory['step'] + 1}"
    rule = f"rank {rank} of {plan.world_size} on {socket.gethostname()} ran out of memory {when}: "
    if memory["requested_bytes"] is not None:
        rule += f"{format_bytes(memory['requested_bytes'])} more were asked for"
        rule += (
            f" beside {format_bytes(memory['live_bytes'])} of live tensors; "
            if memory["live_bytes"]
            else "; "
        )
    rule += f"a peak of {format_bytes(memory['predicted_peak_bytes'])} was predicted, "
    rule += f"{format_bytes(memory['free_bytes'])} were free at the start"
    tried = [f"{change.overrides} ({change.price})" for change in changes]
    fix = f"Use {'; or '.join(tried)}" if tried else "Use a smaller model, or devices with more memory"
    return Problem("run-out-of-memory", rule, fix=fix)
