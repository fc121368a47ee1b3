"""Traffic of tensor and sequence parallelism.

Attention and feed-forward each start from an input that all ranks have (column-parallel) and end in a sum
over ranks (row-parallel). With N tokens in a micro-batch, D hidden, e bytes of an operand (2 under bf16 and
fp16, else 4):

=====================  ======================================  ==============================================
a micro-batch moves    tensor parallel                         with sequence parallel
=====================  ======================================  ==============================================
a block, forward       2 all-reduces of N D e                  2 all-gathers, 2 reduce-scatters of N D e
a block, backward      2 all-reduces of N D e                  2 all-gathers, 2 reduce-scatters of N D e
embedding              1 all-reduce of N D 4                   1 reduce-scatter; 1 all-gather in the backward
head                   1 all-reduce of N D e in the backward   1 all-gather; 1 reduce-scatter in the backward
loss, a chunk of C     2 all-reduces: C 4 and 2 C 4            the same
=====================  ======================================  ==============================================

With sequence parallelism a rank has N / tp tokens of the residual stream, so its gradients of norms,
positions and row-parallel biases are partial: they are all-reduced over ``tp`` once per step, in one call.
Replicated key heads see different queries: their gradients are all-reduced over the ranks that hold them
(``tp_kv``), once per step.

Activation checkpointing: ``full`` repeats all forward collectives of a block before its last GEMM;
``selective`` saves the reduced outputs and repeats the all-gathers.

In an expert block only attention and shared experts have these collectives: each rank routes its own N / tp
tokens (``plan.traffic.expert``). The router's gradient is partial, too; it is reduced in the same call, or
alone without sequence parallelism.

In a pipeline each stage has the traffic of its own blocks; the first also that of the embedding, the last
that of head and loss. Gradients are reduced in one call for all stages of a rank.
"""

from __future__ import annotations

import dataclasses

from meshwright.layout.fsdp_groups import local_count
from meshwright.layout.loss_chunks import loss_chunk
from meshwright.layout.parameters import FLOAT32_BYTES, operand_bytes
from meshwright.layout.stages import StageSpec, list_parameter_kinds, local_stages
from meshwright.layout.tensor_parallel import (
    KV_REPLICA_AXIS,
    count_kv_replicas,
    count_tokens,
    is_kv_projection,
    needs_tp_grad_sync,
)
from meshwright.plan.contract import CollectiveTraffic
from meshwright.spec.job import Job
from meshwright.spec.micro_batches import count_micro_batches
from meshwright.spec.model import DecoderModel


def predict_tensor(job: Job, pp_rank: int) -> list[CollectiveTraffic]:
    """All collectives of a rank over ``tp``."""
    parts = local_stages(job, pp_rank)
    steps = count_micro_batches(job)
    evaluations = count_micro_batches(job, job.train.eval_samples)
    rows = []
    for part in parts:
        passes = _count_passes(job, part)
        rows += passes.rows("step", steps, backward=True)
        rows += passes.rows("eval", evaluations, backward=False)
    return [
        *rows,
        *_gradient_traffic(job, parts),
    ]


@dataclasses.dataclass(frozen=True)
class _Passes:
    """Collectives of one micro-batch: tensor sizes and counts."""

    tp: int
    sequence: bool
    layers: int
    parallel_pairs: int
    """Column-parallel / row-parallel pairs: two per block, one in an expert block without shared experts."""
    recompute: str
    inner: int
    """Bytes of an input or output of a block or the head: N D e."""
    outer: int
    """Bytes of the embedding's output: N D 4."""
    chunks: int
    """Chunks of the loss."""
    tokens: int
    first: bool
    """Whether the embedding is here."""
    last: bool
    """Whether the head and the loss are here."""

    def rows(self, phase: str, times: int, backward: bool) -> list[CollectiveTraffic]:
        """Traffic of ``times`` micro-batches."""
        recompute, passed = self.recompute if backward else "none", self.parallel_pairs * (1 + backward)
        # Activation checkpointing repeats every input gather, and the reduction after attention.
        repeated_gathers = 0 if recompute == "none" else self.parallel_pairs
        repeated_reductions = self.layers if recompute == "full" else 0
        if not self.sequence:
            inner = passed + repeated_reductions + self.last * backward
            found = [self._row("all_reduce", phase, inner, self.first)]
        else:
            gathers, scatters = passed + repeated_gathers, passed + repeated_reductions
            found = [
                self._row("all_gather", phase, gathers + self.last, self.first * backward),
                self._row("reduce_scatter", phase, scatters + self.last * backward, self.first),
            ]
        if self.last:
            losses = 3 * self.tokens * FLOAT32_BYTES
            found.append(CollectiveTraffic("tp", "all_reduce", phase, self.tp, 2 * self.chunks, losses))
        return [dataclasses.replace(r, calls=r.calls * times, bytes=r.bytes * times) for r in found]

    def _row(self, op: str, phase: str, inner: int, outer: int) -> CollectiveTraffic:
        """Calls of one operation: of blocks and head (``inner``), and of the embedding (``outer``)."""
        size = inner * self.inner + outer * self.outer
        return CollectiveTraffic("tp", op, phase, self.tp, inner + outer, size)


def _count_passes(job: Job, part: StageSpec) -> _Passes:
    model = part.model
    assert isinstance(model, DecoderModel), "the legality rules allow it for decoders only"
    tokens = count_tokens(job)
    low = operand_bytes(job.train.precision)
    return _Passes(
        tp=job.layout.tp,
        sequence=job.layout.sequence_parallel,
        layers=len(part.layers),
        parallel_pairs=2 * len(part.layers) - (0 if model.shared_experts else part.expert_layers),
        recompute=job.layout.recompute,
        inner=tokens * model.hidden_size * low,
        outer=tokens * model.hidden_size * FLOAT32_BYTES,
        chunks=-(-tokens // loss_chunk(job, model)),
        tokens=tokens,
        first=part.first,
        last=part.last,
    )


def _gradient_traffic(job: Job, parts: tuple[StageSpec, ...]) -> list[CollectiveTraffic]:
    """All-reduces of partial gradients."""
    layout, rows = job.layout, []
    assert isinstance(job.model, DecoderModel), "the legality rules allow it for decoders only"
    copies = count_kv_replicas(job.model, layout.tp)
    parameters = list_parameter_kinds(parts)
    parted = [p for p in parameters if needs_tp_grad_sync(p.name, layout.sequence_parallel)]
    copied = [p for p in parameters if copies > 1 and is_kv_projection(p.name)]
    for summed, axis, ranks in ((parted, "tp", layout.tp), (copied, KV_REPLICA_AXIS, copies)):
        size = sum(local_count(job, p) for p in summed) * FLOAT32_BYTES
        rows.append(CollectiveTraffic(axis, "all_reduce", "step", ranks, int(bool(summed)), size))
    return rows
