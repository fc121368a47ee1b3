"""What a block that our own kernels compute keeps and makes, to the byte (``run.models.fused``).

With T tokens in a micro-batch, D hidden, Q and K the widths of all query and key heads, H heads, F
feed-forward, e bytes of what products read and r of the residual stream, a block keeps from forward to
backward::

    selective  T x (2 (r D + 4) + (Q + 2 K) e + Q e + 4 H + 2 F e)
                    both norms    q, k, v       attention   gate, up
    none       the same, and T x (2 D e + F e); in fp8 nothing more, as 8 bits do not serve weights' gradients
    full       T x r D, its input; in its backward pass what selective keeps is made again first

On the way back a node of the graph lets go of what it kept when it is done; so a block has four points, each
the widest moment of a node. Nobody but us decides any of this. What attention's kernels take beside it is
theirs: float32 sums for the gradient of queries, and keys' and values' gradients of every query head where
those share keys. A norm's partial sums over tokens (at most a row for each resident program) and scales of 8
bits are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.layout.parameters import (
    FLOAT32_BYTES,
    FP8_ALIGNED,
    matrix_gradient_bytes,
    operand_bytes,
    residual_bytes,
    runs_in_fp8,
)
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class Point:
    """A wide moment of a block's backward pass, in bytes."""

    name: str
    """Empty, or with a comma and a space behind it."""
    part: str
    """As a moment's."""
    held: int
    """What still lives of what the block kept, or made again."""
    made: int
    """What lives beside that: gradients of activations, of weights that are not handed over yet, casts."""
    complete: int = 0
    """Gradients of weights that this block handed over before."""


@dataclass(frozen=True)
class _Matrix:
    """One matrix of a block, or several below each other."""

    outputs: int
    inputs: int
    scaled: bool
    """Whether its products are of 8 bits."""
    gradient_scaled: bool
    """Whether that of its gradient is."""
    tokens: int
    gradient: int
    """Bytes of its gradient."""

    @classmethod
    def of(cls, job: Job, outputs: Sequence[int], inputs: int, tokens: int) -> _Matrix:
        """Of a job's block: of 8 bits if each of those below each other can be."""
        scaled = all(runs_in_fp8(job, rows, inputs) for rows in outputs)
        exact = not job.train.fp8_weight_grads or tokens % FP8_ALIGNED
        gradient = sum(outputs) * inputs * matrix_gradient_bytes(job)
        return cls(sum(outputs), inputs, scaled, scaled and not exact, tokens, gradient)

    @property
    def back(self) -> int:
        """What the gradient of its input takes beside it, cast: gradient and matrix."""
        return (self.tokens + self.inputs) * self.outputs if self.scaled else 0

    @property
    def making(self) -> int:
        """Bytes of its gradient while it is made: with both operands cast, where it is of 8 bits."""
        return self.gradient + (self.tokens * (self.outputs + self.inputs) if self.gradient_scaled else 0)


@dataclass(frozen=True)
class TritonBlock:
    """Bytes of one micro-batch's tensors in a block of our own kernels."""

    residual: int
    """What comes back to the embedding: T x D x r; a deterministic run casts it to float32 there."""
    last_norm: int
    """What the last norm keeps."""
    kept: int
    """From forward to backward."""
    formula: str
    points: tuple[Point, ...]

    @classmethod
    def of(cls, job: Job, model: DecoderModel, micro_batch: int) -> TritonBlock:
        """Of a block of the model."""
        tokens, recompute = micro_batch * job.data.seq_len, job.layout.recompute
        low, residual = operand_bytes(job.train.precision), residual_bytes(job.train)
        width, queries, keys, inner = model.hidden_size, model.query_size, model.kv_size, model.ffn_size
        all_heads, row = queries + 2 * keys, tokens * low
        projection = _Matrix.of(job, (queries, keys, keys), width, tokens)
        out = _Matrix.of(job, (width,), queries, tokens)
        entry = _Matrix.of(job, (inner, inner), width, tokens)
        exit_ = _Matrix.of(job, (width,), inner, tokens)
        norm = tokens * (residual * width + FLOAT32_BYTES)
        # What "none" keeps; else the backward pass makes it again.
        kept_normal = row * width if recompute == "none" and not projection.scaled else 0
        kept_inner = row * (width + inner) if recompute == "none" and not entry.scaled else 0
        mixed = row * queries + tokens * model.num_heads * FLOAT32_BYTES
        first_half = norm + kept_normal + row * all_heads + mixed
        second_half = norm + kept_inner + row * 2 * inner
        whole = first_half + second_half
        kept = tokens * residual * width if recompute == "full" else whole
        # The stream's gradient, and as products read it: one tensor where both have the same precision.
        rounded = row * width if residual != low else 0
        arriving = tokens * residual * width + rounded
        leaving = arriving  # a norm's way back makes it anew
        again = 0 if kept_inner else row * inner
        normal = 0 if kept_inner else row * width
        both = row * 2 * inner  # gradients of gate and up
        feed_forward = (
            row * inner + exit_.back,
            row * inner + both + again,
            both + again + exit_.making,
            both + exit_.gradient + row * width + max(entry.back, leaving + normal),
            both + exit_.gradient + leaving + normal + entry.making,
        )
        # Of the projection: its gradients as attention gave them, and turned back.
        turned = row * 2 * all_heads
        normal = 0 if kept_normal else row * width
        projected = (
            turned + row * width + max(projection.back, leaving + normal),
            turned + leaving + normal + projection.making,
        )
        sums = tokens * (queries + model.num_heads) * FLOAT32_BYTES
        sums += 2 * row * queries if keys < queries else 0
        behind = entry.gradient + exit_.gradient
        cast = FLOAT32_BYTES if job.train.deterministic and residual != FLOAT32_BYTES else 0
        return cls(
            residual=tokens * width * (residual + cast),
            last_norm=norm,
            kept=kept,
            formula=f"{tokens} tokens x {kept // tokens}",
            points=(
                Point("", "block", whole, arriving + max(feed_forward)),
                Point(
                    "output of attention, ",
                    "attention",
                    first_half,
                    arriving + row * queries + max(out.back, out.making),
                    behind,
                ),
                Point(
                    "attention, ",
                    "attention",
                    first_half,
                    arriving - rounded + row * (queries + all_heads) + sums,
                    behind + out.gradient,
                ),
                Point(
                    "projection, ",
                    "attention",
                    norm + kept_normal,
                    arriving - rounded + max(projected),
                    behind + out.gradient,
                ),
            ),
        )
