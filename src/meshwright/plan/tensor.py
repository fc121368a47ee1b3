"""What tensor and sequence parallelism hold and move, written down without torch.

A rank of ``tp`` holds a **narrower model**: its heads, its part of the feed-forward, its rows of the
vocabulary (filled up to the same number on every rank); norms, positions and the biases behind a sum are
whole on all. Where key heads are fewer than ranks, each lies on several of them.

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
"""

from __future__ import annotations

import dataclasses
import functools

from meshwright.plan.decoder_memory import loss_chunk
from meshwright.plan.optimizer import STEP_COUNT, rule_of, state_keys
from meshwright.plan.shapes import FLOAT32_BYTES, Parameter, list_parameters, operand_bytes
from meshwright.plan.traffic import Traffic, count_micro_batches
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel, Model

COPIES_AXIS = "tp_kv"
"""The ranks that hold copies of the same key heads."""
_WHOLE = ("attention_norm", "ffn_norm", "norm", "positions")
"""Modules that no rank cuts."""


def held_model(job: Job) -> Model:
    """The model as the matrices of one rank make it."""
    if job.layout.tp == 1 or not isinstance(job.model, DecoderModel):
        return job.model
    return narrow(job.model, job.layout.tp)


@functools.lru_cache(maxsize=64)
def narrow(model: DecoderModel, tp: int) -> DecoderModel:
    """What one of ``tp`` ranks holds of a decoder, as a decoder."""
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // tp,
        num_kv_heads=max(1, model.num_kv_heads // tp),
        head_dim=model.head_size,
        ffn_size=model.ffn_size // tp,
        vocab_size=-(-model.vocab_size // tp),
    )


def count_copies(model: DecoderModel, tp: int) -> int:
    """Ranks that hold the same key heads."""
    return max(1, tp // model.num_kv_heads)


def is_whole(name: str) -> bool:
    """Whether every rank of ``tp`` holds all of a parameter."""
    owner, _, leaf = name.rpartition(".")
    module = owner.rpartition(".")[2]
    return module in _WHOLE or (leaf == "bias" and module in ("wo", "down"))


def is_copied(name: str) -> bool:
    """Whether a parameter makes keys or values."""
    return name.split(".")[-2] in ("wk", "wv")


def predict_tensor(job: Job) -> list[Traffic]:
    """All collectives over ``tp``."""
    model = held_model(job)
    assert isinstance(model, DecoderModel), "the legality table splits decoders only"
    passes = _count_passes(job, model)
    return [
        *passes.rows("step", count_micro_batches(job, job.train.global_batch), backward=True),
        *passes.rows("eval", count_micro_batches(job, job.train.eval_samples), backward=False),
        *_gradient_traffic(job, model),
        _save_traffic(job, model),
    ]


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

    def rows(self, phase: str, times: int, backward: bool) -> list[Traffic]:
        """The rows of ``times`` micro-batches."""
        loss = Traffic("tp", "all_reduce", phase, self.tp, 2 * self.chunks, 3 * self.tokens * FLOAT32_BYTES)
        again = {"none": (0, 0), "selective": (2, 0), "full": (2, 1)}[self.recompute if backward else "none"]
        if not self.sequence:
            blocks = self.layers * (2 + 2 * backward + again[1])
            calls, size = blocks + backward, (blocks + backward) * self.inner
            found = [Traffic("tp", "all_reduce", phase, self.tp, calls + 1, size + self.outer), loss]
        else:
            gathers = self.layers * (2 + 2 * backward + again[0]) + 1
            scatters = self.layers * (2 + 2 * backward + again[1]) + backward
            found = [
                Traffic(
                    "tp",
                    "all_gather",
                    phase,
                    self.tp,
                    gathers + backward,
                    gathers * self.inner + backward * self.outer,
                ),
                Traffic(
                    "tp", "reduce_scatter", phase, self.tp, scatters + 1, scatters * self.inner + self.outer
                ),
                loss,
            ]
        return [dataclasses.replace(r, calls=r.calls * times, bytes=r.bytes * times) for r in found]


def _count_passes(job: Job, model: DecoderModel) -> _Passes:
    tokens = (job.layout.micro_batch or 1) * job.data.seq_len
    low = operand_bytes(job.train.precision)
    return _Passes(
        tp=job.layout.tp,
        sequence=job.layout.sequence_parallel,
        layers=model.num_layers,
        recompute=job.layout.recompute,
        inner=tokens * model.hidden_size * low,
        outer=tokens * model.hidden_size * FLOAT32_BYTES,
        chunks=-(-tokens // loss_chunk(job, model)),
        tokens=tokens,
    )


def _gradient_traffic(job: Job, model: DecoderModel) -> list[Traffic]:
    """Sums of gradients of which each rank has a part."""
    layout, rows = job.layout, []
    assert isinstance(job.model, DecoderModel), "the legality table splits decoders only"
    copies = count_copies(job.model, layout.tp)
    for wanted, axis, ranks in (
        (is_whole if layout.sequence_parallel else None, "tp", layout.tp),
        (is_copied if copies > 1 else None, COPIES_AXIS, copies),
    ):
        if wanted is not None:
            size = sum(_held_count(p, job) for p in list_parameters(model) if wanted(p.name)) * FLOAT32_BYTES
            rows.append(Traffic(axis, "all_reduce", "step", ranks, 1, size))
    return rows


def _held_count(parameter: Parameter, job: Job) -> int:
    """Elements of its gradient on a rank: rows of it under ZeRO-2 and 3, filled up."""
    rows, shards = parameter.shape[0], job.layout.dp_shard if job.layout.zero >= 2 else 1
    return parameter.count // rows * -(-rows // shards)


def _save_traffic(job: Job, model: DecoderModel) -> Traffic:
    """A checkpoint holds whole tensors: each that is cut is gathered, one call a tensor."""
    calls = elements = 0
    for parameter in list_parameters(model):
        if not is_whole(parameter.name):
            keys = state_keys(rule_of(parameter.name, len(parameter.shape), job.train), job.train)
            tensors = 1 + sum(key != STEP_COUNT for key in keys)
            calls, elements = calls + tensors, elements + tensors * parameter.count
    return Traffic("tp", "all_gather", "save", job.layout.tp, calls, elements * job.layout.tp * FLOAT32_BYTES)
