"""Sharded data parallelism (ZeRO): the parameter groups of FSDP2, and the shards of each rank.

Every tensor is sharded along dim 0, as torch.chunk does: R rows over N ranks are chunks of ceil(R / N) rows;
the last ones are shorter or empty. Stages 2 and 3 are torch's FSDP2. It gathers and reduces a **group** of
parameters in one call, and pads every chunk to ceil(R / N) rows, in communication buffers and in the memory
of parameters and gradients. Optimizer state is not padded. With P the padded elements of a group, m
micro-batches and e bytes per GEMM operand (2 under bf16 and fp16, else 4):

=====  ==========================  ============================================  ============================
stage  state per rank              communication of a step over N ranks          all-gathers of blocks
=====  ==========================  ============================================  ============================
1      P, G, O / N                 all-reduce of G (buckets), all-gather of P    4 bytes per element
2      (P + G + O) / N, P in step  all-gather of P; m reduce-scatters of G       e bytes
3      (P + G + O) / N             m x (2 all-gathers of P, reduce-scatter of G)  e bytes
=====  ==========================  ============================================  ============================

The N ranks are those of ``dp_shard`` x ``cp``. Routed experts with separate axes are separate groups,
each before its block, sharded over ``ep_shard`` (``layout.axes``). A single rank makes no calls.

The root group (embeddings, final norm, head) is gathered once per micro-batch, in float32, and kept from
forward to backward. With hybrid sharding (``dp_replicate``), stage 1 reduces over all ranks at once
(``plan.traffic.ddp``); stages 2 and 3 all-reduce each shard over its replicas, once per step. With
``accumulate = "deferred"`` gradients are reduce-scattered in the last micro-batch only: 1 instead of m.

In a pipeline each stage has its own groups, and the root group has what the stage has of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.layout.axes import (
    Axis,
    axis_rank,
    dense_shard_axis,
    expert_shard_axis,
    has_expert_axes,
    is_expert,
    state_axis,
)
from meshwright.layout.optimizer_state import STEP_COUNT, rule_of, state_keys
from meshwright.layout.parameters import (
    BLOCK_PREFIX,
    EXPERTS_PREFIX,
    FLOAT32_BYTES,
    Parameter,
    list_block,
    operand_bytes,
)
from meshwright.layout.stages import (
    StageSpec,
    local_parameter_kinds,
    pp_rank_of,
)
from meshwright.layout.tensor_parallel import LocalDecoder
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class FsdpGroup:
    """Parameters that are gathered and reduced together."""

    name: str
    parameters: tuple[Parameter, ...]
    block: bool
    """Whether it is a block or its experts; the other one is the root group."""
    experts: bool = False
    """Whether it is the routed experts of a block, with separate axes."""

    def padded(self, ranks: int) -> int:
        """Elements of all chunks, with padding."""
        return sum(padded_count(p, ranks) for p in self.parameters)

    def gathered_bytes(self, ranks: int, precision: str) -> int:
        """Bytes of one all-gather."""
        return self.padded(ranks) * (operand_bytes(precision) if self.block else FLOAT32_BYTES)


def list_groups(part: StageSpec) -> tuple[FsdpGroup, ...]:
    """The groups of a stage: each block after its experts, then the root group."""
    return (*(group for layer in part.layers for group in group_block(part, layer)), *group_root(part))


def group_block(part: StageSpec, layer: int) -> list[FsdpGroup]:
    """The groups of a block: its experts if they have separate axes, and the rest."""
    assert isinstance(part.model, DecoderModel), "the legality table shards decoders only"
    name, parameters = f"{BLOCK_PREFIX}{layer}", list_block(part.model, layer)
    routed = [p for p in parameters if is_expert(p.name) and isinstance(part.model, LocalDecoder)]
    experts = (
        [FsdpGroup(f"{name}.{EXPERTS_PREFIX}", tuple(routed), block=True, experts=True)] if routed else []
    )
    return [*experts, FsdpGroup(name, tuple(p for p in parameters if p not in routed), block=True)]


def group_root(part: StageSpec) -> list[FsdpGroup]:
    """The root group of a stage, if it has parameters outside its blocks."""
    around = tuple(p for p in part.parameter_kinds if not p.name.startswith(BLOCK_PREFIX))
    return [FsdpGroup("around the blocks", around, block=False)] if around else []


def group_axis(job: Job, group: FsdpGroup) -> Axis:
    """The axis of a group's all-gathers and reduce-scatters."""
    return expert_shard_axis(job.layout) if group.experts else dense_shard_axis(job.layout)


def chunk_rows(rows: int, ranks: int, rank: int) -> range:
    """The rows of a rank's shard."""
    size = -(-rows // ranks)
    return range(min(rank * size, rows), min((rank + 1) * size, rows))


def padded_count(parameter: Parameter, ranks: int) -> int:
    """Elements of a tensor whose chunks are padded to the size of the first."""
    rows = parameter.shape[0]
    return parameter.count // rows * -(-rows // ranks) * ranks


def shard_ranks(job: Job, rank: int) -> tuple[int, int]:
    """A rank's shard index: of dense parameters, and of experts with separate axes."""
    layout = job.layout
    dense = axis_rank(layout, rank, dense_shard_axis(layout).name)
    return dense, axis_rank(layout, rank, expert_shard_axis(layout).name) if has_expert_axes(job) else dense


def count_sharded(job: Job, parameter: Parameter, rank: int) -> int:
    """Elements of a parameter in a rank's optimizer shard."""
    axis, rows = state_axis(job, parameter.name), parameter.shape[0]
    return parameter.count // rows * len(chunk_rows(rows, axis.size, axis_rank(job.layout, rank, axis.name)))


def local_count(job: Job, parameter: Parameter) -> int:
    """Elements of a parameter or its gradient on a rank: a padded shard under ZeRO-2 and 3."""
    ranks = state_axis(job, parameter.name).size if job.layout.zero >= 2 else 1
    return padded_count(parameter, ranks) // ranks


def sharded_state_bytes(job: Job, rank: int) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state of one rank, after the backward pass."""
    parameters = local_parameter_kinds(job, pp_rank_of(job, rank))
    count = gradients = sum(local_count(job, p) for p in parameters)
    if offloads_gradients(job):  # copied to the CPU without padding
        gradients = sum(count_sharded(job, p, rank) for p in parameters)
    return {
        "parameters": count * FLOAT32_BYTES,
        "gradients": gradients * FLOAT32_BYTES,
        "optimizer": sum(optimizer_bytes(job, p, rank) for p in parameters),
    }


def offloads_gradients(job: Job) -> bool:
    """Whether gradient shards are copied to CPU memory after the reduction."""
    return job.layout.offload == "all" and job.cluster.device == "cuda"


def optimizer_bytes(job: Job, parameter: Parameter, rank: int) -> int:
    """Bytes of a parameter's optimizer state on a rank."""
    own = count_sharded(job, parameter, rank)
    keys = state_keys(rule_of(parameter.name, len(parameter.shape), job.train), job.train)
    return sum(parameter.repeats if key == STEP_COUNT else own for key in keys) * FLOAT32_BYTES
