"""The GEMMs of a training step: their shapes, and which run in FP8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from meshwright.layout.loss_chunks import loss_chunk
from meshwright.layout.parameters import (
    runs_in_fp8,
)
from meshwright.spec.execution import uses_bf16_weight_copies
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

Kind = Literal["forward", "input", "weight"]


KINDS: tuple[Kind, ...] = ("forward", "input", "weight")


class Linear(NamedTuple):
    """A linear layer with a weight of columns x depth, and how often a step applies it."""

    rows: int
    columns: int
    depth: int
    times: int
    in_block: bool = False
    """Whether it is in a block: full activation checkpointing recomputes it, and fp8 may apply."""


def list_linears(job: Job, model: DecoderModel, micro_batches: int) -> Iterator[Linear]:
    """The linear layers of a step; with bf16 weight copies, layers that share an input are merged."""
    rows, layers = (job.layout.micro_batch or 1) * job.data.seq_len, micro_batches * model.num_layers
    width, inner = model.hidden_size, model.ffn_size
    merged = uses_bf16_weight_copies(job)
    qkv = [model.query_size, model.kv_size, model.kv_size]
    gate_up = [inner, inner] if model.activation == "swiglu" else [inner]
    for widths, bias in ((qkv, model.attention_bias), (gate_up, model.ffn_bias)):
        for columns in [sum(widths)] if merged and not bias else widths:
            yield Linear(rows, columns, width, layers, in_block=True)
    yield Linear(rows, width, model.query_size, layers, in_block=True)
    yield Linear(rows, width, inner, layers, in_block=True)
    chunk = min(rows, loss_chunk(job, model))
    whole, rest = divmod(rows, chunk)
    yield Linear(chunk, model.vocab_size, width, micro_batches * whole)
    if rest:
        yield Linear(rest, model.vocab_size, width, micro_batches)


def is_fp8_gemm(job: Job, linear: Linear, kind: Kind) -> bool:
    """Whether a GEMM of a linear layer runs in fp8."""
    in_fp8 = linear.in_block and runs_in_fp8(job, linear.columns, linear.depth)
    return in_fp8 and (kind != "weight" or job.train.fp8_weight_grads)
