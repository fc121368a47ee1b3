"""What sharded data parallelism (ZeRO) holds and moves, rank by rank, written down without torch.

Every tensor is cut along its first dim, as torch.chunk does: R rows over N ranks are chunks of ceil(R / N)
rows, the last ranks' shorter or empty. Stages 2 and 3 are torch's FSDP2, which gathers and reduces a
**group** of parameters in one call, and pads every chunk to ceil(R / N) rows: in the buffers that travel,
and in the memory of parameters and gradients. Optimizer state is not padded. With P the padded elements of a
group, L blocks, m micro-batches and e bytes of a product's operand (2 under bf16 and fp16, else 4):

=====  ==========================  ============================================  ============================
stage  a rank keeps                a step moves, over the N ranks                in the blocks' gathers
=====  ==========================  ============================================  ============================
1      P, G, O / N                 all-reduce of G (buckets), all-gather of P    4 bytes an element
2      (P + G + O) / N, P in step  all-gather of P; m reduce-scatters of G       e bytes
3      (P + G + O) / N             m x (2 all-gathers of P, reduce-scatter of G)  e bytes
=====  ==========================  ============================================  ============================

The N ranks are those of ``dp_shard`` x ``cp``; routed experts that have axes of their own are groups of their
own, each before its block, and are cut over ``ep_shard`` (``plan.axes``). Over one rank nothing is called.

The group around the blocks (embedding, positions, final norm, head) is gathered once a micro-batch, in
float32, and kept from forward to backward. With replicas of the shards (``dp_replicate``), stage 1 reduces
over all ranks at once (``plan.bucket_traffic``); stages 2 and 3 all-reduce each rank's shard over its
replicas, once a step. With
``accumulate = "deferred"`` gradients are reduced and scattered in the last micro-batch alone: 1 for m.

In a pipeline a rank shards the stages that it holds, each with its own blocks and, at the ends, what lies
around them.
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
    """Whether it is one of the blocks, or its experts; the other is what lies around them."""
    experts: bool = False
    """Whether it is a block's routed experts, which have axes of their own."""

    def padded(self, ranks: int) -> int:
        """Elements of all ranks' chunks."""
        return sum(padded_count(p, ranks) for p in self.parameters)

    def gathered_bytes(self, ranks: int, precision: str) -> int:
        """What one gather gives."""
        return self.padded(ranks) * (operand_bytes(precision) if self.block else FLOAT32_BYTES)


def list_groups(part: StageSpec) -> tuple[FsdpGroup, ...]:
    """The groups of a stage: each block, its experts before it, then what lies around, if anything does."""
    return (*(group for layer in part.layers for group in group_block(part, layer)), *group_root(part))


def group_block(part: StageSpec, layer: int) -> list[FsdpGroup]:
    """The groups of a block: its experts if they have axes of their own, and the rest of it."""
    assert isinstance(part.model, DecoderModel), "the legality table shards decoders only"
    name, parameters = f"{BLOCK_PREFIX}{layer}", list_block(part.model, layer)
    routed = [p for p in parameters if is_expert(p.name) and isinstance(part.model, LocalDecoder)]
    experts = (
        [FsdpGroup(f"{name}.{EXPERTS_PREFIX}", tuple(routed), block=True, experts=True)] if routed else []
    )
    return [*experts, FsdpGroup(name, tuple(p for p in parameters if p not in routed), block=True)]


def group_root(part: StageSpec) -> list[FsdpGroup]:
    """The group around the blocks of a stage, if anything lies there."""
    around = tuple(p for p in part.parameter_kinds if not p.name.startswith(BLOCK_PREFIX))
    return [FsdpGroup("around the blocks", around, block=False)] if around else []


def group_axis(job: Job, group: FsdpGroup) -> Axis:
    """Over which a group is gathered, and its gradients are reduced and scattered."""
    return expert_shard_axis(job.layout) if group.experts else dense_shard_axis(job.layout)


def chunk_rows(rows: int, ranks: int, rank: int) -> range:
    """The rows that a rank keeps."""
    size = -(-rows // ranks)
    return range(min(rank * size, rows), min((rank + 1) * size, rows))


def padded_count(parameter: Parameter, ranks: int) -> int:
    """Elements of a tensor whose chunks are filled up to the first one's rows."""
    rows = parameter.shape[0]
    return parameter.count // rows * -(-rows // ranks) * ranks


def shard_ranks(job: Job, rank: int) -> tuple[int, int]:
    """Which shard a rank holds: of dense parameters, and of experts that have axes of their own."""
    layout = job.layout
    dense = axis_rank(layout, rank, dense_shard_axis(layout).name)
    return dense, axis_rank(layout, rank, expert_shard_axis(layout).name) if has_expert_axes(job) else dense


def count_sharded(job: Job, parameter: Parameter, rank: int) -> int:
    """Elements of a parameter whose optimizer state a rank has."""
    axis, rows = state_axis(job, parameter.name), parameter.shape[0]
    return parameter.count // rows * len(chunk_rows(rows, axis.size, axis_rank(job.layout, rank, axis.name)))


def local_count(job: Job, parameter: Parameter) -> int:
    """Elements of a parameter, or of its gradient, on a rank: rows of it under ZeRO-2 and 3, filled up."""
    ranks = state_axis(job, parameter.name).size if job.layout.zero >= 2 else 1
    return padded_count(parameter, ranks) // ranks


def sharded_state(job: Job, rank: int) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state of one rank, after the backward pass."""
    parameters = local_parameter_kinds(job, pp_rank_of(job, rank))
    count = gradients = sum(local_count(job, p) for p in parameters)
    if offloads_gradients(job):  # row by row, without the padding of what they arrived in
        gradients = sum(count_sharded(job, p, rank) for p in parameters)
    return {
        "parameters": count * FLOAT32_BYTES,
        "gradients": gradients * FLOAT32_BYTES,
        "optimizer": sum(optimizer_bytes(job, p, rank) for p in parameters),
    }


def offloads_gradients(job: Job) -> bool:
    """Whether shards of gradients leave the device when they are reduced; a core's are on the host."""
    return job.layout.offload == "all" and job.cluster.device == "cuda"


def optimizer_bytes(job: Job, parameter: Parameter, rank: int) -> int:
    """Bytes of a parameter's optimizer state on a rank."""
    own = count_sharded(job, parameter, rank)
    keys = state_keys(rule_of(parameter.name, len(parameter.shape), job.train), job.train)
    return sum(parameter.repeats if key == STEP_COUNT else own for key in keys) * FLOAT32_BYTES
