"""What each framework has to choose from: a search for it stays within; a layout that is given does not."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.job import Job
from meshwright.spec.layout import DEGREES


@dataclass(frozen=True)
class RuntimeSupport:
    """Settings that a framework knows."""

    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zb-h1", "zbv")
    """Pipeline schedules; none: it has no pipelines."""
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages."""
    axes: tuple[str, ...] = DEGREES
    """Degrees that may be above one."""


DATA_AXES = ("dp_replicate", "dp_shard")
RUNTIME_SUPPORT = {
    "meshwright": RuntimeSupport(),
    "megatron-deepspeed": RuntimeSupport(("1f1b",), (0, 1), (*DATA_AXES, "pp", "tp", "ep")),
    "megatron-lm": RuntimeSupport(("1f1b", "interleaved"), (0, 1), (*DATA_AXES, "pp", "tp")),
    "megatron": RuntimeSupport(("1f1b", "interleaved"), (0, 1)),
    "torchtitan": RuntimeSupport(zeros=(0, 2, 3)),
    "composer": RuntimeSupport((), (0, 2, 3), DATA_AXES),
    "deepspeed": RuntimeSupport((), axes=(*DATA_AXES, "cp", "ep")),
}
"""By how a runtime's name begins. Megatron's distributed optimizer is ZeRO-1; FSDP is ZeRO-3, or 2 where it
keeps gathered weights. Megatron-LM, the one of 2020 to 2022, had neither context nor expert parallelism."""


def runtime_support(job: Job) -> RuntimeSupport:
    """What the job's runtime knows; everything for one that is not listed."""
    runtime = job.train.runtime
    return next(
        (support for name, support in RUNTIME_SUPPORT.items() if runtime.startswith(name)), RuntimeSupport()
    )
