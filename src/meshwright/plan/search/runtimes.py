"""The layouts that each framework supports. A search stays within them; a given layout need not."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.spec.job import Job
from meshwright.spec.layout import DEGREES


@dataclass(frozen=True)
class RuntimeSupport:
    """Settings that a framework supports."""

    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zb-h1", "zbv")
    """Pipeline schedules; empty: no pipeline parallelism."""
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages."""
    axes: tuple[str, ...] = DEGREES
    """Axes that may have a degree above 1."""


DATA_AXES = ("dp_replicate", "dp_shard")
RUNTIME_SUPPORT = {
    "meshwright": RuntimeSupport(),
    "megatron-deepspeed": RuntimeSupport(("1f1b",), (0, 1), (*DATA_AXES, "pp", "tp", "ep")),
    "megatron-lm": RuntimeSupport(("1f1b", "interleaved"), (0, 1), (*DATA_AXES, "pp", "tp")),
    "megatron": RuntimeSupport(("1f1b", "interleaved"), (0, 1)),
    "aleph-alpha-scaling": RuntimeSupport(("1f1b",), (0, 1), (*DATA_AXES, "pp", "tp")),
    "torchtitan": RuntimeSupport(zeros=(0, 2, 3)),
    "composer": RuntimeSupport((), (0, 2, 3), DATA_AXES),
    "hai-llm": RuntimeSupport(("1f1b", "dualpipe-v"), (0, 1)),
    "huggingface": RuntimeSupport((), axes=(*DATA_AXES, "cp")),
    "deepspeed": RuntimeSupport((), axes=(*DATA_AXES, "cp", "ep")),
}
"""By prefix of the runtime's name. Megatron's distributed optimizer is ZeRO-1. FSDP is ZeRO-3, or ZeRO-2 if
it does not reshard after the forward pass. Megatron-LM of 2020 to 2022 had no context or expert
parallelism."""


def runtime_support(job: Job) -> RuntimeSupport:
    """Support of the job's runtime; everything for a runtime that is not listed."""
    runtime = job.train.runtime
    return next(
        (support for name, support in RUNTIME_SUPPORT.items() if runtime.startswith(name)), RuntimeSupport()
    )
