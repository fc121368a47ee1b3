"""What tensor and sequence parallelism move, written down without torch.

Attention and feed-forward each **enter** with an input that all ranks have and **leave** with a sum over
them. With N tokens in a micro-batch, D hidden, e bytes of an operand (2 under bf16 and fp16, else 4):

=====================  ======================================  ==============================================
a micro-batch moves    tensor parallel                         with sequence parallel
=====================  ======================================  ==============================================
a block, forward       2 all-reduces of N D e                  2 all-gathers, 2 reduce-scatters of N D e
a block, backward      2 all-reduces of N D e                  2 all-gathers, 2 reduce-scatters of N D e
embedding              1 all-reduce of N D 4                   1 reduce-scatter; 1 all-gather in the backward
head                   1 all-reduce of N D e in the backward   1 all-gather; 1 reduce-scatter in the backward
loss, a chunk of C     2 all-reduces: C 4 and 2 C 4            the same
=====================  ======================================  ==============================================

With sequence parallelism a rank keeps N / tp tokens of the residual stream, so that what it adds to the
gradients of the norms, of positions and of biases behind a sum is a part: they are summed over ``tp`` once a
step, in one call. Copies of a key head see other queries each: their gradients are summed over the ranks that
hold it (``tp_kv``), once a step.

What recomputation repeats: ``full`` all that a block receives before its last product; ``selective`` keeps
what sums gave, and gathers again.

A block with experts enters and leaves for its shared experts alone, and without any for attention alone: each
rank routes its own run of N / tp tokens (``plan.expert_traffic``). What it adds to the router's gradient is a
part, too, which is summed with the others, or alone without sequence parallelism.

In a pipeline each stage moves what its own blocks do, the first the embedding's too, the last the head's and
the loss's; sums of gradients are one call for all stages of a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.layout.fsdp_groups import local_count
from meshwright.layout.loss_chunks import loss_chunk
from meshwright.layout.optimizer_state import count_state_tensors
from meshwright.layout.parameters import FLOAT32_BYTES, Parameter, operand_bytes
from meshwright.layout.stages import StageSpec, list_parameter_kinds, local_stages, saved_parameter_kinds
from meshwright.layout.tensor_parallel import (
    KV_REPLICA_AXIS,
    count_kv_replicas,
    count_tokens,
    is_kv_projection,
    is_tp_replicated,
    needs_tp_grad_sync,
)
from meshwright.plan.contract import CollectiveTraffic
from meshwright.spec.job import Job
from meshwright.spec.micro_batches import count_micro_batches
from meshwright.spec.model import DecoderModel


def predict_tensor(job: Job, pp_rank: int) -> list[CollectiveTraffic]:
    """All collectives over ``tp`` of a rank at one place of the pipelines."""
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
        _save_traffic(job, saved_parameter_kinds(job, pp_rank, parts)),
    ]


@dataclasses.dataclass(frozen=True)
class _Passes:
    """Collectives of one micro-batch: sizes of the tensors, and how many."""

    tp: int
    sequence: bool
    layers: int
    halves: int
    """Attentions and feed-forwards, which enter and leave: two a block, one with no shared experts."""
    recompute: str
    inner: int
    """Bytes of what blocks and head exchange: N D e."""
    outer: int
    """Bytes of what the embedding gives: N D 4."""
    chunks: int
    """Of the loss."""
    tokens: int
    first: bool
    """Whether the embedding is here."""
    last: bool
    """Whether the head and the loss are."""

    def rows(self, phase: str, times: int, backward: bool) -> list[CollectiveTraffic]:
        """The rows of ``times`` micro-batches."""
        recompute, passed = self.recompute if backward else "none", self.halves * (1 + backward)
        # Computed again: every entrance, and attention's leave.
        entered = 0 if recompute == "none" else self.halves
        left = self.layers if recompute == "full" else 0
        if not self.sequence:
            inner = passed + left + self.last * backward
            found = [self._row("all_reduce", phase, inner, self.first)]
        else:
            gathers, scatters = passed + entered, passed + left
            found = [
                self._row("all_gather", phase, gathers + self.last, self.first * backward),
                self._row("reduce_scatter", phase, scatters + self.last * backward, self.first),
            ]
        if self.last:
            losses = 3 * self.tokens * FLOAT32_BYTES
            found.append(CollectiveTraffic("tp", "all_reduce", phase, self.tp, 2 * self.chunks, losses))
        return [dataclasses.replace(r, calls=r.calls * times, bytes=r.bytes * times) for r in found]

    def _row(self, op: str, phase: str, inner: int, outer: int) -> CollectiveTraffic:
        """So many exchanges of blocks or head, and of the embedding."""
        size = inner * self.inner + outer * self.outer
        return CollectiveTraffic("tp", op, phase, self.tp, inner + outer, size)


def _count_passes(job: Job, part: StageSpec) -> _Passes:
    model = part.model
    assert isinstance(model, DecoderModel), "the legality table splits decoders only"
    tokens = count_tokens(job)
    low = operand_bytes(job.train.precision)
    return _Passes(
        tp=job.layout.tp,
        sequence=job.layout.sequence_parallel,
        layers=len(part.layers),
        halves=2 * len(part.layers) - (0 if model.shared_experts else part.expert_layers),
        recompute=job.layout.recompute,
        inner=tokens * model.hidden_size * low,
        outer=tokens * model.hidden_size * FLOAT32_BYTES,
        chunks=-(-tokens // loss_chunk(job, model)),
        tokens=tokens,
        first=part.first,
        last=part.last,
    )


def _gradient_traffic(job: Job, parts: tuple[StageSpec, ...]) -> list[CollectiveTraffic]:
    """Sums of gradients of which each rank has a part."""
    layout, rows = job.layout, []
    assert isinstance(job.model, DecoderModel), "the legality table splits decoders only"
    copies = count_kv_replicas(job.model, layout.tp)
    parameters = list_parameter_kinds(parts)
    parted = [p for p in parameters if needs_tp_grad_sync(p.name, layout.sequence_parallel)]
    copied = [p for p in parameters if copies > 1 and is_kv_projection(p.name)]
    for summed, axis, ranks in ((parted, "tp", layout.tp), (copied, KV_REPLICA_AXIS, copies)):
        size = sum(local_count(job, p) for p in summed) * FLOAT32_BYTES
        rows.append(CollectiveTraffic(axis, "all_reduce", "step", ranks, int(bool(summed)), size))
    return rows


def _save_traffic(job: Job, parameters: Sequence[Parameter]) -> CollectiveTraffic:
    """A checkpoint holds whole tensors: each that is cut is gathered, one call a tensor."""
    calls = elements = 0
    for parameter in parameters:
        if not is_tp_replicated(parameter.name):
            tensors = 1 + count_state_tensors(parameter, job.train)
            calls, elements = calls + tensors * parameter.repeats, elements + tensors * parameter.count
    return CollectiveTraffic(
        "tp", "all_gather", "save", job.layout.tp, calls, elements * job.layout.tp * FLOAT32_BYTES
    )
