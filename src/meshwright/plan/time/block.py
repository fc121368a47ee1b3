"""Time of one block, of the head and of the embedding on a GPU, for one micro-batch on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import CONTEXTS, Flags, Floats, Grid, Ints
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.profiles import TimeRules
from meshwright.plan.time.gemm import Device, Sizes, gemm_s
from meshwright.spec.model import DecoderModel

ATTENTION_BACKWARD_FLOPS = 2.5
ATTENTION_BACKWARD_RATE = 0.85
FULL_RATE_HEAD_DIM = 128
"""Head width from which fused attention reaches its full rate; half the width reaches 75%."""
EXPERT_ROW_MULTIPLE = 16
"""An expert's tokens are padded to a multiple of this."""
SCORE_BYTES, SCORE_BACKWARD_BYTES = 9.0, 11.0
"""Bytes per attention score that softmax, mask and dropout move where attention is not fused."""
SOFTMAX_BATCH = 4
"""Megatron's fused softmax needs a multiple of 4 heads x sequences (`attn_batches % 4`, fused_softmax.py)."""
UNFUSED_SOFTMAX_BYTES, UNFUSED_SOFTMAX_BACKWARD_BYTES = 32.0, 34.0
"""Extra bytes per score without the fused softmax: cast to float32, scale, mask, softmax, cast back."""
EMBEDDING_OUTPUT_BYTES = 4.0
"""Bytes per element of the embedding's output."""
RING = CONTEXTS.index("ring")
UNFUSED_SOFTMAX_KERNELS = 1.2
"""Kernels of a block without the fused softmax, over those with it: nine more on about fifty."""


@dataclass(frozen=True)
class Passes:
    """Seconds of a forward pass and of the two halves of a backward pass."""

    forward: Floats
    backward_input: Floats
    backward_weight: Floats

    def __add__(self, other: Passes) -> Passes:
        return Passes(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def times(self, factor: Floats | float) -> Passes:
        """Scaled by a factor."""
        return Passes(self.forward * factor, self.backward_input * factor, self.backward_weight * factor)

    def where(self, wanted: Flags, other: Passes) -> Passes:
        """These where ``wanted``, else those of ``other``."""
        return Passes(
            np.where(wanted, self.forward, other.forward),
            np.where(wanted, self.backward_input, other.backward_input),
            np.where(wanted, self.backward_weight, other.backward_weight),
        )

    def take(self, indices: Ints) -> Passes:
        """The passes of some layouts."""
        return Passes(self.forward[indices], self.backward_input[indices], self.backward_weight[indices])

    @property
    def total(self) -> Floats:
        """Forward and backward."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class BlockTimes:
    """Times of a block, averaged over the model's layers."""

    gemms: Passes
    attention: Passes
    elementwise: Passes
    expert_gemms: Passes
    """GEMMs of routed experts, averaged over all layers."""
    selective: Floats
    """Recompute time of selective activation checkpointing."""

    def take(self, indices: Ints) -> BlockTimes:
        """The times of some layouts."""
        return BlockTimes(
            gemms=self.gemms.take(indices),
            attention=self.attention.take(indices),
            elementwise=self.elementwise.take(indices),
            expert_gemms=self.expert_gemms.take(indices),
            selective=self.selective[indices],
        )

    @property
    def work(self) -> Passes:
        """The sum of all parts, without activation checkpointing."""
        return self.gemms + self.attention + self.elementwise + self.expert_gemms


class BlockModel:
    """Estimates a block of a workload on a GPU, for a grid of layouts."""

    def __init__(self, workload: Workload, device: Device, grid: Grid) -> None:
        self.model: DecoderModel = workload.model
        self.rules: TimeRules = workload.profile.time
        self.workload, self.device, self.grid = workload, device, grid
        self.seq_len, self.compiled = workload.seq_len, workload.compiled
        self.rows = grid.micro_batch * workload.seq_len / grid.cp
        """Tokens of a micro-batch on a rank, before any split over tp."""
        self.tp = grid.tp.astype(float)
        self.token_split = np.where(grid.sequence_parallel, self.tp, 1.0)
        self.head_chunks = np.clip(self.model.num_kv_heads // self.tp, 1, self.rules.ring_head_chunks)
        """Kernels and messages per chunk of ring attention."""
        batches = grid.micro_batch * self.model.num_heads / self.tp
        self.unfused_softmax: Flags = np.asarray(
            (batches % SOFTMAX_BATCH != 0) & (not self.rules.flash_attention)
        )
        """Layouts whose attention runs without the fused softmax."""

    def times(self) -> BlockTimes:
        """The parts of an average block."""
        model = self.model
        dense_share = 1 - model.expert_layers / model.num_layers
        gemms = self._attention_projections()
        if dense_share:
            gemms = gemms + self._feed_forward(model.ffn_size, self.tp).times(dense_share)
        experts = Passes(*(np.zeros(len(self.grid)),) * 3)
        if model.expert_layers:
            if model.shared_experts:
                shared = self._feed_forward(model.shared_experts * model.expert_width, self.tp)
                gemms = gemms + shared.times(1 - dense_share)
            experts = self._experts().times(1 - dense_share)
        attention, elementwise = self._attention(), self._elementwise(dense_share)
        again = self._selective_s(gemms, attention, elementwise)
        return BlockTimes(gemms, attention, elementwise, experts, again)

    def _selective_s(self, gemms: Passes, attention: Passes, elementwise: Passes) -> Floats:
        """Recompute time of selective activation checkpointing."""
        if self.rules.selective == "attention":
            return attention.forward
        if self.rules.selective == "half":
            return elementwise.forward + 0.5 * gemms.forward
        return elementwise.forward

    def linear(
        self, rows: Sizes, columns: Sizes, depth: Sizes, count: Sizes = 1, plain: bool = False
    ) -> Passes:
        """The three GEMMs of a linear layer: forward, input gradient, weight gradient."""
        device = self.device
        stored = (
            self.rules.gradient_sum_bytes * np.asarray(columns, float) * depth * count / device.bytes_per_s
        )
        return Passes(
            gemm_s(device, rows, columns, depth, count, plain),
            gemm_s(device, rows, depth, columns, count, plain),
            gemm_s(device, columns, depth, rows, count, plain or not self.rules.fp8_weight_grads) + stored,
        )

    def _attention_projections(self) -> Passes:
        """The projections around attention."""
        model, rows, tp = self.model, self.rows, self.tp
        width = model.hidden_size
        out = self.linear(rows, width, model.value_size / tp)
        if model.attention == "latent":
            rope, latent = model.rope_head_dim or 0, model.latent_size or 0
            head = model.head_size
            queries = model.num_heads * (head + rope) / tp
            made = self.linear(rows, latent + rope, width) + self.linear(
                rows, (model.num_heads * head + model.value_size) / tp, latent
            )
            if model.query_latent_size:
                qk_dim = self.linear(rows, model.query_latent_size, width)
                return out + made + qk_dim + self.linear(rows, queries, model.query_latent_size)
            return out + made + self.linear(rows, queries, width)
        keys = np.maximum(model.kv_size / tp, model.head_size)
        return out + self.linear(rows, model.query_size / tp + 2 * keys, width)

    def _feed_forward(self, inner: int, split: Floats) -> Passes:
        model = self.model
        entries = 2 if model.activation == "swiglu" else 1
        into = self.linear(self.rows, entries * inner / split, model.hidden_size)
        return into + self.linear(self.rows, model.hidden_size, inner / split)

    def _experts(self) -> Passes:
        """Grouped GEMMs of a rank's experts; routing is balanced."""
        model, grid = self.model, self.grid
        local_experts = np.maximum((model.num_experts or 1) / grid.ep, 1.0)
        rows = self.rows / self.tp * (model.experts_per_token or 1) * grid.etp / local_experts
        rows = np.ceil(rows / EXPERT_ROW_MULTIPLE) * EXPERT_ROW_MULTIPLE
        entries = 2 if model.activation == "swiglu" else 1
        inner = model.expert_width / grid.etp
        into = self.linear(rows, entries * inner, model.hidden_size, local_experts)
        both = into + self.linear(rows, model.hidden_size, inner, local_experts)
        return both.times(1 / self.device.rates.expert_matmul)

    def _attention(self) -> Passes:
        """Attention, averaged over full and sliding-window layers."""
        model = self.model
        windowed = model.windowed_layers / model.num_layers
        full = self._scores(self.seq_len)
        if not windowed:
            return full
        return full.times(1 - windowed) + self._scores(min(model.window or self.seq_len, self.seq_len)).times(
            windowed
        )

    def _scores(self, span: int) -> Passes:
        model = self.model
        qk_dim = model.head_size + (model.rope_head_dim or 0 if model.attention == "latent" else 0)
        v_dim = model.value_head_dim or model.head_size
        heads = model.num_heads / self.tp
        if not self.rules.flash_attention:
            return self._unfused(heads, qk_dim, v_dim)
        # On average a token attends to half of the sequence, or to its window.
        context = span * (1 - span / (2 * self.seq_len)) if span < self.seq_len else span / 2
        flops = 2.0 * self.rows * heads * context * (qk_dim + v_dim)
        return self._fused(flops, span, v_dim)

    def _fused(self, flops: Floats, span: int, v_dim: int) -> Passes:
        """Fused attention, by the sequence length per kernel.

        Ring attention computes cp chunks of seq_len / cp keys, each in its own launch. Ulysses computes full
        sequences with fewer heads.
        """
        rates = self.device.rates
        chunks = np.where(self.grid.context == RING, self.grid.cp, 1)
        length = np.minimum(span, self.seq_len / chunks)
        launches = np.where(chunks > 1, chunks * self.head_chunks, 1)
        narrow = min(1.0, 0.5 + 0.5 * v_dim / FULL_RATE_HEAD_DIM)
        ramp = length / (length + rates.attention_ramp)
        peak = self.device.plain_flops_per_s / rates.matmul
        forward = flops / (peak * rates.attention * narrow * ramp) + launches * rates.launch_s
        backward = forward * (ATTENTION_BACKWARD_FLOPS / ATTENTION_BACKWARD_RATE)
        return Passes(forward, backward, np.zeros_like(forward))

    def _unfused(self, heads: Floats, qk_dim: int, v_dim: int) -> Passes:
        """Unfused attention: two batched GEMMs, and passes over the scores."""
        device, length = self.device, self.seq_len
        count = self.rows / length * heads
        forward = gemm_s(device, length, length, qk_dim, count, plain=True)
        forward = forward + gemm_s(device, length, v_dim, length, count, plain=True)
        scores = count * float(length) ** 2 / device.bytes_per_s
        return Passes(
            forward + (SCORE_BYTES + UNFUSED_SOFTMAX_BYTES * self.unfused_softmax) * scores,
            2 * forward
            + (SCORE_BACKWARD_BYTES + UNFUSED_SOFTMAX_BACKWARD_BYTES * self.unfused_softmax) * scores,
            np.zeros_like(forward),
        )

    def _elementwise(self, dense_share: float) -> Passes:
        """Norms, residual additions, RoPE and activation functions: memory traffic."""
        model, grid = self.model, self.grid
        width = model.hidden_size
        added = 7.0 if self.rules.dropout else 6.0
        forward = (2 * 4.0 + 2 * added) * width / self.token_split
        backward = (2 * 6.0 + 2 * added) * width / self.token_split
        rotated = 4.0 * (model.query_size + model.kv_size) / self.tp
        gated = model.activation == "swiglu"
        inner = dense_share * model.ffn_size / self.tp
        if model.expert_layers:
            routed = (model.experts_per_token or 1) / self.tp
            share = 1 - dense_share
            inner = inner + share * routed * model.expert_width  # etp: more tokens, as many fewer columns
            inner = inner + share * model.shared_experts * model.expert_width / self.tp
            sent = share * routed * width
            forward, backward = forward + 10.0 * sent, backward + 14.0 * sent
        forward = forward + rotated + (6.0 if gated else 4.0) * inner
        backward = backward + rotated + (10.0 if gated else 6.0) * inner
        rates = self.device.rates
        moved = rates.elementwise * (rates.compiled if self.compiled else 1.0)
        scale = self.rows * moved / self.device.bytes_per_s
        return Passes(forward * scale, backward * scale, np.zeros(len(grid)))

    def head(self) -> Passes:
        """The head's GEMM and the loss."""
        model = self.model
        columns = np.ceil(model.vocab_size / self.tp / 128) * 128
        gemm = self.linear(self.rows, columns, model.hidden_size, plain=True)
        loss = self.rules.loss_bytes * self.rows * columns / self.device.bytes_per_s
        return self._order_head(gemm + Passes(loss / 2, loss / 2, np.zeros_like(loss)))

    def _order_head(self, head: Passes) -> Passes:
        """The head's passes; all in the forward pass if the loss computes its gradients there."""
        if not self.rules.head_in_forward:
            return head
        return Passes(head.total, np.zeros_like(head.forward), np.zeros_like(head.forward))

    def embedding(self) -> Passes:
        """Lookup of the rows, and the dense gradient of the table."""
        model = self.model
        none = np.zeros(len(self.grid))
        if not self.rules.embedding_bytes:
            return Passes(none, none, none)
        rows = EMBEDDING_OUTPUT_BYTES * self.rows / self.token_split * model.hidden_size
        table = self.rules.embedding_bytes * model.vocab_size / self.tp * model.hidden_size
        return Passes(rows / self.device.bytes_per_s, table / self.device.bytes_per_s, none)
