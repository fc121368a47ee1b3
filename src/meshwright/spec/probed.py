"""Measurements of ``meshwright probe`` on one device: the table ``probed`` of a cluster file.

It has the times of single operations as a run calls them; ``plan.time.probed`` adds them up to a step.
Without the table a step is predicted from the cluster's rates.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from meshwright.spec.fields import SECTION_CONFIG, Count, Natural, NonNegative, Positive

Precision = Literal["fp32", "bf16", "fp8"]
CollectiveOp = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]


@dataclass(frozen=True)
class GemmTime:
    """The three GEMMs of a linear layer with a weight of columns x depth."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    precision: Precision
    """Precision of the operands; fp8 includes the casts of weight and gradient."""
    rows: Count
    """Tokens."""
    columns: Count
    """Output features."""
    depth: Count
    """Input features."""
    forward_s: Positive
    """Time of the forward GEMM."""
    input_s: Positive
    """Time of the input-gradient GEMM."""
    weight_s: Positive
    """Time of the weight-gradient GEMM, with float32 output."""


@dataclass(frozen=True)
class AttentionTime:
    """Causal attention."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    precision: Literal["fp32", "bf16"]
    """Precision of queries, keys and values."""
    batch: Count
    """Sequences."""
    heads: Count
    """Query heads."""
    kv_heads: Count
    """Key heads."""
    head_size: Count
    """Size of a head."""
    seq_len: Count
    """Sequence length."""
    forward_s: Positive
    """Time of the forward pass."""
    backward_s: Positive
    """Time of the backward pass."""


@dataclass(frozen=True)
class CollectiveTime:
    """A collective between ranks of this machine: alpha_s + bytes / bytes_per_s."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    op: CollectiveOp
    """The operation."""
    transport: Literal["gloo", "shared_memory", "nccl"]
    """What runs it."""
    ranks: Annotated[int, Field(ge=2, strict=True)]
    """Number of ranks."""
    alpha_s: NonNegative
    """Time of a call without bytes."""
    bytes_per_s: Positive
    """Bytes of the larger tensor, over the time that grows with them."""


@dataclass(frozen=True, kw_only=True)
class OperationTimes:
    """Times of single operations and of a few training steps on one device or core."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    gemms: tuple[GemmTime, ...]
    """GEMMs of several shapes."""
    attention: tuple[AttentionTime, ...]
    """Attention of several lengths and head sizes."""
    copy_bytes_per_s: Positive
    """Bandwidth of a large copy, read and written bytes together."""
    optimizer_bytes_per_s: Positive
    """Bandwidth of an AdamW step as a run takes it, read and written bytes together."""
    launch_s: Positive
    """Time of an operation on a tiny tensor."""
    elementwise: Positive = 1.0
    """Time of elementwise kernels relative to their bytes at the copy bandwidth; fitted to training steps."""
    parameter_passes: NonNegative = 0.0
    """Passes over the parameters outside the optimizer step on a CPU (zeroing, accumulating, norm, clipping),
    in bytes at the copy bandwidth over the bytes of the parameters; fitted to training steps."""
    block_s: NonNegative = 0.0
    """CPU launch time of forward and backward of a block; hidden where the GPU takes longer."""
    step_s: NonNegative = 0.0
    """Fixed time per step."""


@dataclass(frozen=True, kw_only=True)
class Probed(OperationTimes):
    """Measurements of ``meshwright probe`` on one device, with one rank alone."""

    device: Literal["cpu", "cuda"]
    """Device type; steps on another type are predicted from the cluster's rates."""
    triton_elementwise: Positive = 1.08
    """The same as ``elementwise`` for the Triton kernels, timed alone; the default is that of an H200
    (November 2026)."""
    compiled: bool = False
    """Whether the steps had compiled or Triton blocks; others are predicted from the cluster's rates."""
    multiprocessors: Natural = 0
    """Streaming multiprocessors of the GPU; 0 on a CPU."""
    collectives: tuple[CollectiveTime, ...] = ()
    """Collectives between ranks on this machine, by operation and transport."""
    all_cores: OperationTimes | None = None
    """The same times with the same work on all cores: cores share memory bandwidth and caches. Used for
    several ranks on a CPU."""

    def select(self, ranks: int) -> Probed:
        """The times of one of several ranks on this machine: with all cores busy, if that was measured."""
        if ranks == 1 or self.all_cores is None:
            return self
        names = [one.name for one in dataclasses.fields(OperationTimes)]
        return dataclasses.replace(self, **{name: getattr(self.all_cores, name) for name in names})
