"""Bytes of one micro-batch's tensors in the second half of a block: a dense feed-forward, or an MoE layer.

With N local tokens per micro-batch, D the hidden size, F the feed-forward size and e bytes per GEMM operand
(2 under bf16 and fp16, else 4), a dense SwiGLU saves N x (D + 4 F) e; GELU saves 2 F instead of 4 F.

In an MoE layer a rank routes n of its tokens (N / tp) to k of E experts each. Its local experts, F' wide,
read R rows: an even share is n k etp, less the tokens that a capacity drops. The layer saves::

    n x (D 4 + 2 E 4)  +  n k x (D e + 4 + 24)            +  R x (D + 4 F') e
        router's input,       expert outputs, weights and     rows, inside
        logits, gradient      three indices per choice        the experts

and 16 more per row where rows are exchanged over ``ep``: their order before and after the all-to-all. A
sigmoid router with k > 1 saves 4 (k + 1) more per token. Without auxiliary losses logits have no gradient.
Under bf16 and fp16 the routing weights are also saved rounded, and so is a copy of the experts' weights.
Shared experts save what a dense feed-forward of their width saves; they read the router's input, plus the
tokens that other tp ranks route.

Selective activation checkpointing saves n E 4 + R x (2 F' + D) e: the output of every GEMM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.layout.axes import expert_axis
from meshwright.layout.parameters import FLOAT32_BYTES, INT64_BYTES, operand_bytes, residual_bytes
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel
from meshwright.spec.train_defaults import balance_coefficient


@dataclass(frozen=True)
class FeedForwardSizes:
    """Bytes of one micro-batch's tensors after a block's second norm."""

    saved: int
    """Saved for backward without activation checkpointing, with the norm's output."""
    gemm_outputs: int
    """Saved by selective activation checkpointing."""
    weight_copies: int
    """16-bit weight copies that autocast makes; experts make their own, counted in `saved`."""
    forward_temp: int
    """Temporary bytes at the largest point of a forward pass that backward recomputes."""
    backward_temp: int
    """Temporary bytes at the largest point of backward, beside a whole block and the residual's gradient."""
    first_backward_temp: int
    """The same in the first backward pass, whose expert gradients stay."""
    input_grad_temp: int
    """The same in the input-gradient half of a split backward: weight gradients of experts only."""
    deferred: int
    """Inputs and output gradients of linear layers that the weight-gradient half needs."""
    experts_temp: int = 0
    """Temporary bytes when the experts' backward begins, beside a block and the residual's gradient."""
    after_experts: int = 0
    """Live bytes when the experts' backward is done; 0 for a dense feed-forward."""


def balanced_rows(job: Job, model: DecoderModel, micro_batch: int) -> int:
    """Rows that a rank's experts read in one layer if all experts are chosen equally often."""
    layout, experts = job.layout, model.num_experts or 1
    choices = job.data.seq_len * (model.experts_per_token or 0)
    if model.capacity_factor is not None:  # capacity is per sequence
        choices = min(choices, experts * math.ceil(model.capacity_factor * choices / experts))
    return micro_batch * choices * layout.etp // (layout.cp * layout.tp)


def row_bytes(job: Job, model: DecoderModel) -> int:
    """Activations that one row of the experts saves in one layer."""
    one, none = (_MoE(job, model, micro_batch=1, rows=rows) for rows in (1, 0))
    return {
        "none": one.saved - none.saved,
        "selective": one.gemm_outputs - none.gemm_outputs,
        "full": 0,
    }[job.layout.recompute]


def size_feed_forward(job: Job, model: DecoderModel, micro_batch: int) -> FeedForwardSizes:
    """A rank's dense feed-forward."""
    return _Dense(job, model, micro_batch, model.ffn_size).sizes()


def size_experts(
    job: Job, model: DecoderModel, micro_batch: int, rows: int | None = None
) -> FeedForwardSizes:
    """A rank's router and experts.

    Args:
        job: With its layout settled.
        model: As the rank has it.
        micro_batch: Samples of one forward pass.
        rows: Rows that the experts read; None for an even share.
    """
    rows = balanced_rows(job, model, micro_batch) if rows is None else rows
    return _MoE(job, model, micro_batch, rows).sizes()


class _Dense:
    """A dense feed-forward of some width; all sizes are 0 for width 0."""

    def __init__(self, job: Job, model: DecoderModel, micro_batch: int, ffn: int) -> None:
        self.job, self.tokens = job, micro_batch * job.data.seq_len // job.layout.cp
        self.elem, self.fsdp = operand_bytes(job.train.precision), job.layout.zero >= 2
        self.gated = model.activation == "swiglu"
        self.copied = self.elem != FLOAT32_BYTES and not self.fsdp
        """Whether GEMMs read 16-bit copies; under ZeRO-2 and 3 they read the all-gathered parameters."""
        self.width = self.tokens * model.hidden_size * self.elem if ffn else 0
        """T x D x e."""
        self.inner = self.tokens * ffn * self.elem
        """T x F x e."""
        self.matrix = model.hidden_size * ffn
        """Elements of one of its weights."""

    @property
    def inside(self) -> int:
        """Saved between its first linear layers and its last."""
        return (4 if self.gated else 2) * self.inner

    def sizes(self) -> FeedForwardSizes:
        """All sizes."""
        layout = self.job.layout
        second, gathered = self.inner * self.gated, self.width * layout.sequence_parallel
        down = self.matrix * (self.elem if self.fsdp else FLOAT32_BYTES)
        # Beside the inner gradient: the weight gradient of down; or, with a gate, one more inner gradient. An
        # FSDP block keeps all its gradients until they are reduced.
        largest = down + max(second, gathered) if self.fsdp else max(second, down + gathered)
        copy = self.matrix * self.elem if self.copied else 0
        linears = 3 if self.gated else 2
        # Split backward defers the weight gradient of down: its input stays beside the inner gradients, and
        # so does its output gradient where that is not the residual's gradient itself.
        cast = self.elem != residual_bytes(self.job.train)
        output = self.width if cast or layout.sequence_parallel else 0
        recomputed = {"none": 0, "selective": 1, "full": 2}[layout.recompute]
        return FeedForwardSizes(
            saved=self.width + self.inside,
            gemm_outputs=(linears - 1) * self.inner,
            weight_copies=linears * copy,
            forward_temp=(recomputed + self.gated) * self.inner,
            backward_temp=self.inner + largest,
            first_backward_temp=self.inner + largest,
            input_grad_temp=output + self.inner + max((linears - 1) * self.inner, copy),
            deferred=2 * self.width + linears * self.inner,
        )


class _MoE:
    """A router, routed experts that read some rows, and shared experts."""

    def __init__(self, job: Job, model: DecoderModel, micro_batch: int, rows: int) -> None:
        self.job, self.model, self.rows = job, model, rows
        self.shared = _Dense(job, model, micro_batch, model.shared_width)
        self.elem, self.gated, self.fsdp = self.shared.elem, self.shared.gated, self.shared.fsdp
        self.routed_tokens = self.shared.tokens // job.layout.tp
        """Tokens that this rank routes."""
        self.choices = self.routed_tokens * (model.experts_per_token or 0)
        self.row = model.hidden_size * self.elem
        """One row: D x e."""
        self.inner = rows * model.local_expert_width * self.elem
        self.matrix = model.local_experts * model.local_expert_width * model.hidden_size
        """Elements of one weight of all local experts."""
        self.exchanged = expert_axis(job.layout).size > 1

    @property
    def saved(self) -> int:
        """Saved for backward."""
        inside = self.rows * self.row + (4 if self.gated else 2) * self.inner
        if self.exchanged:  # order of the rows, as received and by expert
            inside += 2 * self.rows * INT64_BYTES
        if self.shared.copied:
            inside += (3 if self.gated else 2) * self.matrix * self.elem
        return self._router + self._choices + inside + self._shared

    @property
    def _normalizes_scores(self) -> bool:
        """Whether the router divides sigmoid scores by their sum; the weight of a single choice is 1."""
        return self.model.router == "sigmoid" and self.model.experts_per_token != 1

    @property
    def _router(self) -> int:
        """Its input and logits in float32, and the auxiliary losses' gradient of the logits."""
        model, train = self.model, self.job.train
        experts = model.num_experts or 0
        injected = bool(balance_coefficient(train) or train.z_loss)
        each = model.hidden_size + (1 + injected) * experts
        if self._normalizes_scores:  # the scores, and their sum
            each += (model.experts_per_token or 0) + 1
        matrix = experts * model.hidden_size * FLOAT32_BYTES
        weight = matrix if self.fsdp and self.elem != FLOAT32_BYTES else 0
        return self.routed_tokens * each * FLOAT32_BYTES + weight

    @property
    def _choices(self) -> int:
        """Per choice: the expert's output, its weight, also rounded, its index, its position in two orders.

        A sigmoid router does not save the unrounded weight, but the scores it is made of (with the router).
        """
        weight = self.elem
        if self.elem != FLOAT32_BYTES and not self._normalizes_scores:
            weight += FLOAT32_BYTES
        return self.choices * (self.row + weight + 3 * INT64_BYTES)

    @property
    def _shared(self) -> int:
        """Saved by shared experts; they share the router's input if that is all tokens in float32."""
        same = self.elem == FLOAT32_BYTES and self.job.layout.tp == 1
        return self.shared.inside + (0 if same else self.shared.width)

    @property
    def gemm_outputs(self) -> int:
        """Outputs of all GEMMs."""
        scores = self.routed_tokens * (self.model.num_experts or 0) * FLOAT32_BYTES
        outputs = self.rows * self.row + (2 if self.gated else 1) * self.inner
        return scores + outputs + (2 if self.gated else 1) * self.shared.inner

    def _backward(self, stay: bool) -> int:
        """Temporary bytes at the largest point, beside a block less its shared experts.

        Args:
            stay: Whether new weight gradients stay.
        """
        outputs, rows = self.choices * self.row, self.rows * self.row
        gradient = self.matrix * (self.elem if self.fsdp else FLOAT32_BYTES)
        # The outputs get their gradient and are freed. The all-to-all sends rows back. The last linear layer
        # makes its input and weight gradients, the activation the inner ones; then come the first layers.
        found = [
            outputs,
            2 * rows * self.exchanged - outputs,
            rows + self.inner + gradient - outputs,
            2 * self.inner * self.gated + gradient * stay - outputs,
        ]
        if stay and self.gated:
            found.append(2 * rows - 3 * self.inner + 3 * gradient - outputs)
        elif stay:
            found.append(rows - self.inner + 2 * gradient - outputs)
        return max(found)

    def sizes(self) -> FeedForwardSizes:
        """All sizes."""
        shared, rows, outputs = self.shared.sizes(), self.rows * self.row, self.choices * self.row
        recomputed = {"none": 0, "selective": 1, "full": 2}[self.job.layout.recompute] + self.gated
        # Backward of the shared experts comes first; then only their gradients are left.
        after = self.shared.width - self.shared.inside
        if self.fsdp:
            after += (3 if self.gated else 2) * self.shared.matrix * self.elem
        backward = after + self._backward(stay=self.fsdp)
        return FeedForwardSizes(
            saved=self.saved,
            gemm_outputs=self.gemm_outputs,
            weight_copies=shared.weight_copies,
            forward_temp=max(shared.forward_temp, recomputed * self.inner + rows),
            backward_temp=max(shared.backward_temp, backward),
            first_backward_temp=max(shared.backward_temp, after + self._backward(stay=True)),
            input_grad_temp=max(shared.input_grad_temp, backward),
            deferred=shared.deferred,
            experts_temp=after + rows - outputs,
            # The gradient of the rows is live, and that of the shared experts' input.
            after_experts=self._router + self._choices - outputs + rows + self.shared.width,
        )
