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

In a pipeline each stage moves what its own blocks do, the first the embedding's too, the last the head's and
the loss's; sums of gradients are one call for all stages of a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.plan.decoder_memory import loss_chunk
from meshwright.plan.optimizer import STEP_COUNT, rule_of, state_keys
from meshwright.plan.parts import Part, held_parts, merge_parameters, saved_parameters
from meshwright.plan.shapes import FLOAT32_BYTES, Parameter, operand_bytes
from meshwright.plan.tensor import COPIES_AXIS, count_copies, is_copied, is_whole
from meshwright.plan.traffic import Traffic, count_micro_batches
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


def predict_tensor(job: Job, place: int) -> list[Traffic]:
    """All collectives over ``tp`` of a rank at one place of the pipelines."""
    parts = held_parts(job, place)
    steps = count_micro_batches(job, job.train.global_batch)
    evaluations = count_micro_batches(job, job.train.eval_samples)
    rows = []
    for part in parts:
        passes = _count_passes(job, part)
        rows += passes.rows("step", steps, backward=True)
        rows += passes.rows("eval", evaluations, backward=False)
    return [*rows, *_gradient_traffic(job, parts), _save_traffic(job, saved_parameters(job, place))]


@dataclasses.dataclass(frozen=True)
class _Passes:
    """Collectives of one micro-batch: sizes of the tensors, and how many."""

    tp: int
    sequence: bool
    layers: int
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

    def rows(self, phase: str, times: int, backward: bool) -> list[Traffic]:
        """The rows of ``times`` micro-batches."""
        again = {"none": (0, 0), "selective": (2, 0), "full": (2, 1)}[self.recompute if backward else "none"]
        passed = self.layers * (2 + 2 * backward)
        if not self.sequence:
            inner = passed + self.layers * again[1] + self.last * backward
            found = [self._row("all_reduce", phase, inner, self.first)]
        else:
            gathers, scatters = passed + self.layers * again[0], passed + self.layers * again[1]
            found = [
                self._row("all_gather", phase, gathers + self.last, self.first * backward),
                self._row("reduce_scatter", phase, scatters + self.last * backward, self.first),
            ]
        if self.last:
            losses = 3 * self.tokens * FLOAT32_BYTES
            found.append(Traffic("tp", "all_reduce", phase, self.tp, 2 * self.chunks, losses))
        return [dataclasses.replace(r, calls=r.calls * times, bytes=r.bytes * times) for r in found]

    def _row(self, op: str, phase: str, inner: int, outer: int) -> Traffic:
        """So many exchanges of blocks or head, and of the embedding."""
        size = inner * self.inner + outer * self.outer
        return Traffic("tp", op, phase, self.tp, inner + outer, size)


def _count_passes(job: Job, part: Part) -> _Passes:
    model = part.model
    assert isinstance(model, DecoderModel), "the legality table splits decoders only"
    tokens = (job.layout.micro_batch or 1) * job.data.seq_len
    low = operand_bytes(job.train.precision)
    return _Passes(
        tp=job.layout.tp,
        sequence=job.layout.sequence_parallel,
        layers=len(part.layers),
        recompute=job.layout.recompute,
        inner=tokens * model.hidden_size * low,
        outer=tokens * model.hidden_size * FLOAT32_BYTES,
        chunks=-(-tokens // loss_chunk(job, model)),
        tokens=tokens,
        first=part.first,
        last=part.last,
    )


def _gradient_traffic(job: Job, parts: tuple[Part, ...]) -> list[Traffic]:
    """Sums of gradients of which each rank has a part."""
    layout, rows = job.layout, []
    assert isinstance(job.model, DecoderModel), "the legality table splits decoders only"
    copies = count_copies(job.model, layout.tp)
    for wanted, axis, ranks in (
        (is_whole if layout.sequence_parallel else None, "tp", layout.tp),
        (is_copied if copies > 1 else None, COPIES_AXIS, copies),
    ):
        if wanted is not None:
            summed = [held_count(p, job) for p in merge_parameters(parts) if wanted(p.name)]
            rows.append(
                Traffic(axis, "all_reduce", "step", ranks, int(bool(summed)), sum(summed) * FLOAT32_BYTES)
            )
    return rows


def held_count(parameter: Parameter, job: Job) -> int:
    """Elements of its gradient on a rank: rows of it under ZeRO-2 and 3, filled up."""
    rows, shards = parameter.shape[0], job.layout.dp_shard if job.layout.zero >= 2 else 1
    return parameter.count // rows * -(-rows // shards)


def _save_traffic(job: Job, parameters: Sequence[Parameter]) -> Traffic:
    """A checkpoint holds whole tensors: each that is cut is gathered, one call a tensor."""
    calls = elements = 0
    for parameter in parameters:
        if not is_whole(parameter.name):
            keys = state_keys(rule_of(parameter.name, len(parameter.shape), job.train), job.train)
            tensors = 1 + sum(key != STEP_COUNT for key in keys)
            calls, elements = calls + tensors, elements + tensors * parameter.count
    return Traffic("tp", "all_gather", "save", job.layout.tp, calls, elements * job.layout.tp * FLOAT32_BYTES)
