"""What sharded data parallelism (ZeRO) holds and moves, rank by rank, written down without torch.

Every tensor is cut along its first dim, as torch.chunk does: R rows over N ranks are chunks of ceil(R / N)
rows, the last ranks' shorter or empty. Stages 2 and 3 are torch's FSDP2, which gathers and reduces a
**group** of parameters in one call, and pads every chunk to ceil(R / N) rows: in the buffers that travel,
and in the memory of parameters and gradients. Optimizer state is not padded. With P the padded elements of a
group, L blocks, m micro-batches and e bytes of a product's operand (2 under bf16 and fp16, else 4):

=====  ==========================  ============================================  ============================
stage  a rank keeps                a step moves, over dp_shard                   in the blocks' gathers
=====  ==========================  ============================================  ============================
1      P, G, O / N                 all-reduce of G (buckets), all-gather of P    4 bytes an element
2      (P + G + O) / N, P in step  all-gather of P; m reduce-scatters of G       e bytes
3      (P + G + O) / N             m x (2 all-gathers of P, reduce-scatter of G)  e bytes
=====  ==========================  ============================================  ============================

The group around the blocks (embedding, positions, final norm, head) is gathered once a micro-batch, in
float32, and kept from forward to backward. With replicas of the shards (``dp_replicate``), stage 1 reduces
over all ranks at once; stages 2 and 3 all-reduce each rank's shard over its replicas, once a step. With
``accumulate = "deferred"`` gradients are reduced and scattered in the last micro-batch alone: 1 for m.

In a pipeline a rank shards the stages that it holds, each with its own blocks and, at the ends, what lies
around them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.plan.optimizer import STEP_COUNT, rule_of, state_keys
from meshwright.plan.parts import (
    Part,
    held_buckets,
    held_parameters,
    held_parts,
    merge_parameters,
    pipeline_rank,
    saved_parameters,
    schedule_of,
)
from meshwright.plan.shapes import FLOAT32_BYTES, Parameter, operand_bytes
from meshwright.plan.traffic import (
    WIRE_BYTES,
    Traffic,
    count_micro_batches,
    fixed_buckets,
)
from meshwright.schedule.actions import Kind
from meshwright.spec.job import Job, Train

ALL_DATA = "dp_replicate+dp_shard"
"""The axis of all ranks of data at once."""


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered and reduced together."""

    name: str
    parameters: tuple[Parameter, ...]
    block: bool
    """Whether it is one of the blocks; the other is what lies around them."""

    def padded(self, ranks: int) -> int:
        """Elements of all ranks' chunks."""
        return sum(padded_count(p, ranks) for p in self.parameters)

    def gathered_bytes(self, ranks: int, precision: str) -> int:
        """What one gather gives."""
        return self.padded(ranks) * (operand_bytes(precision) if self.block else FLOAT32_BYTES)


def list_groups(part: Part) -> tuple[Group, ...]:
    """The groups of a stage: each block, then what lies around them, if anything does."""
    blocks: dict[str, list[Parameter]] = {}
    around: list[Parameter] = []
    for parameter in part.parameters:
        first, _, rest = parameter.name.partition(".")
        if first == "blocks":
            blocks.setdefault(f"blocks.{rest.partition('.')[0]}", []).append(parameter)
        else:
            around.append(parameter)
    found = [Group(name, tuple(parts), block=True) for name, parts in blocks.items()]
    return (*found, *([Group("around the blocks", tuple(around), block=False)] if around else ()))


def chunk_rows(rows: int, ranks: int, rank: int) -> range:
    """The rows that a rank keeps."""
    size = -(-rows // ranks)
    return range(min(rank * size, rows), min((rank + 1) * size, rows))


def padded_count(parameter: Parameter, ranks: int) -> int:
    """Elements of a tensor whose chunks are filled up to the first one's rows."""
    rows = parameter.shape[0]
    return parameter.count // rows * -(-rows // ranks) * ranks


def shard_rank(job: Job, rank: int) -> int:
    """Which shard a rank holds: pipelines and replicas are the outer axes, ``tp`` the inner one."""
    return rank // job.layout.tp % job.layout.dp_shard


def sharded_state(job: Job, rank: int) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state of one rank, after the backward pass."""
    parameters, ranks = held_parameters(job, pipeline_rank(job, rank)), job.layout.dp_shard
    count = gradients = sum(p.count for p in parameters)
    if job.layout.zero >= 2:
        count = gradients = sum(padded_count(p, ranks) for p in parameters) // ranks
    if sends_gradients(job):  # row by row, without the padding of what they arrived in
        shard = shard_rank(job, rank)
        gradients = sum(p.count // p.shape[0] * len(chunk_rows(p.shape[0], ranks, shard)) for p in parameters)
    return {
        "parameters": count * FLOAT32_BYTES,
        "gradients": gradients * FLOAT32_BYTES,
        "optimizer": _optimizer_bytes(job, rank),
    }


def sends_gradients(job: Job) -> bool:
    """Whether shards of gradients leave the device when they are reduced; a core's are on the host."""
    return job.layout.offload == "all" and job.cluster.device == "cuda"


def _optimizer_bytes(job: Job, rank: int) -> int:
    total, parts = 0, held_parts(job, pipeline_rank(job, rank))
    for (rows, width, keys), times in _count_kinds(parts, job.train).items():
        own = width * len(chunk_rows(rows, job.layout.dp_shard, shard_rank(job, rank)))
        total += times * sum(1 if key == STEP_COUNT else own for key in keys) * FLOAT32_BYTES
    return total


@functools.lru_cache(maxsize=64)
def _count_kinds(parts: tuple[Part, ...], train: Train) -> Counter[tuple[int, int, tuple[str, ...]]]:
    """Parameters by rows, elements of a row, and state: few kinds, as blocks are alike."""
    return Counter(
        (p.shape[0], p.count // p.shape[0], state_keys(rule_of(p.name, len(p.shape), train), train))
        for p in merge_parameters(parts)
    )


def predict_sharded(job: Job, place: int) -> list[Traffic]:
    """All collectives over ``dp_shard`` and replicas of shards, of a rank at one place of the pipelines."""
    rows = _optimizer_traffic(job, place) if job.layout.zero == 1 else _group_traffic(job, place)
    return [*rows, _save_traffic(job, saved_parameters(job, place))]


def _optimizer_traffic(job: Job, place: int) -> list[Traffic]:
    """Stage 1: whole gradients are summed over all data ranks; what each updated is gathered."""
    layout, parameters, buckets = job.layout, held_parameters(job, place), held_buckets(job, place)
    axis, ranks = ("dp_shard", layout.dp_shard)
    if layout.dp_replicate > 1:
        axis, ranks = ALL_DATA, layout.data_degree
    wire = sum(p.count for p in parameters) * WIRE_BYTES[job.compression.kind]
    gathered = sum(padded_count(p, layout.dp_shard) for p in parameters) * FLOAT32_BYTES
    return [
        fixed_buckets(job, len(parameters), buckets, axis, ranks),
        Traffic(axis, "all_reduce", "step", ranks, len(buckets), wire),
        Traffic("dp_shard", "all_gather", "step", layout.dp_shard, len(buckets), gathered),
    ]


def _group_traffic(job: Job, place: int) -> list[Traffic]:
    """Stages 2 and 3: groups are gathered to be used, their gradients reduced and scattered."""
    layout, ranks = job.layout, job.layout.dp_shard
    groups = [group for part in held_parts(job, place) for group in list_groups(part)]
    blocks = [g.gathered_bytes(ranks, job.train.precision) for g in groups if g.block]
    around = [g.gathered_bytes(ranks, job.train.precision) for g in groups if not g.block]
    reduced = sum(g.padded(ranks) for g in groups) * WIRE_BYTES[job.compression.kind]
    micro_batches = count_micro_batches(job, job.train.global_batch)
    reductions = 1 if layout.accumulate == "deferred" else micro_batches
    evaluations = count_micro_batches(job, job.train.eval_samples)
    if layout.zero == 2:  # gathered until the last backward pass, or until the evaluation ends
        times = evaluations = outer = 1
    else:
        times, outer = 2 * micro_batches, micro_batches

    def gathers(phase: str, of_blocks: int, of_around: int, more: int = 0) -> Traffic:
        calls = of_blocks * len(blocks) + of_around * len(around) + more
        size = of_blocks * sum(blocks) + of_around * sum(around) + more * sum(around[:1])
        return Traffic("dp_shard", "all_gather", phase, ranks, calls, size)

    rows = [
        gathers("step", times, outer, _count_lent_gathers(job, place, micro_batches)),
        gathers("eval", evaluations, 1),
        Traffic("dp_shard", "reduce_scatter", "step", ranks, reductions * len(groups), reductions * reduced),
    ]
    if layout.dp_replicate > 1:
        replicas = layout.dp_replicate
        # Sums of micro-batches wait in float32 for their replicas; 16-bit ones would be rounded, and do not.
        times = 1 if job.compression.kind == "none" else micro_batches
        calls, size = times * len(groups), times * reduced // ranks
        rows.append(Traffic("dp_replicate", "all_reduce", "step", replicas, calls, size))
    return rows


def _count_lent_gathers(job: Job, place: int, micro_batches: int) -> int:
    """How often ZeRO-3 gathers an embedding for the last stage, which uses the first one's.

    It stays until the first stage's next backward pass; what is gathered for that one is counted with it.
    """
    parts = held_parts(job, place)
    if job.layout.zero < 3 or not parts or not parts[-1].lent:
        return 0
    gathered, gathers, last = False, 0, parts[-1].stage
    for kind, stage, _ in schedule_of(job, micro_batches).ranks[place]:
        uses = (kind is Kind.FORWARD and stage in (0, last)) or (kind is Kind.BACKWARD and stage == 0)
        if uses and not gathered:
            gathered, gathers = True, gathers + 1
        if kind is Kind.BACKWARD and stage == 0:
            gathered = False
    return gathers - micro_batches


def _save_traffic(job: Job, parameters: Sequence[Parameter]) -> Traffic:
    """A checkpoint holds whole tensors: each that is cut is gathered, one call a tensor."""
    ranks, calls, elements = job.layout.dp_shard, 0, 0
    for parameter in parameters:
        keys = state_keys(rule_of(parameter.name, len(parameter.shape), job.train), job.train)
        tensors = sum(key != STEP_COUNT for key in keys) + (job.layout.zero >= 2)
        calls, elements = calls + tensors, elements + tensors * padded_count(parameter, ranks)
    return Traffic("dp_shard", "all_gather", "save", ranks, calls, elements * FLOAT32_BYTES)
