"""Time of one block, of the head and of the embedding on a GPU, for one micro-batch on one rank."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.plan.estimate.grid import CONTEXTS, Flags, Floats, Grid, Ints
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.profiles import TimeRules
from meshwright.plan.time.gemm import Device, Sizes, gemm_s
from meshwright.plan.time.triton_block_bytes import KernelBytes, kernel_bytes
from meshwright.spec.model import DecoderModel

ATTENTION_BACKWARD_FLOPS = 2.5
"""FLOPs of attention's backward pass over those of its forward pass."""
ATTENTION_BACKWARD_RATE = 0.92
"""Rate of attention's backward pass over its forward pass, for long sequences (cuDNN on an H200)."""
BACKWARD_RAMP = 3.6
"""Sequence length at which attention's backward pass reaches half of its rate, over that of the forward pass
(`attention_ramp`)."""
FULL_RATE_HEAD_DIM = 124
"""Head size from which cuDNN's attention reaches its full rate; below, the rate is in proportion: 65% at 80
and 77% at 96, where 67% and 78% were measured on an H200."""
HALF_HEAD_DIM, HALF_HEAD_RATE = 64, 0.75
"""Head width for which cuDNN has a tile of its own, and the rate of attention there."""
WIDE_HEAD_DIM, FLASH_2_HEAD_MULTIPLE = 128, 32
"""FlashAttention-2 pads heads up to this width to a multiple (`round_multiple`, flash_api.cpp). It is as fast
at 64 as at 128: 302 and 309 TFLOP/s forward and backward on Hopper, 8,192 tokens without a mask (pull
requests 2688 and 1791 of flash-attention). The first FlashAttention and Triton's pad to a power of two."""
EXPERT_ROW_MULTIPLE = 16
"""An expert's tokens are padded to a multiple of this."""
COMBINE_DEPTH = 8
"""Least depth (K) of the batched GEMM that sums the outputs of a token's experts; fewer are padded."""
OUTER_PRODUCT_TILE, OUTER_PRODUCT_RATE = 32.0, 0.54
"""Tile of the kernel that computes the gradients of these outputs, a batched GEMM of depth 1, and its rate
over that of a GEMM of this tile: 2.5 ms for 16,384 tokens of width 2,048 on an H200, with 2 or 6 experts."""
ROUTING_KERNELS, ROUTING_BACKWARD_KERNELS = 45, 25
"""Small kernels of routing: sorting, counting, losses; each takes ``launch_s``."""
EXPERT_SYNC_S = 1.2e-3
"""Time that a GPU waits for launches after the CPU has read the experts' loads, per forward pass of an expert
layer and per recomputation. Four steps on an H200: 0.7 to 1.7 ms beyond kernels and step overhead."""
SCORE_BYTES, SCORE_BACKWARD_BYTES = 9.0, 11.0
"""Bytes per attention score that softmax, mask and dropout move where attention is not fused."""
SOFTMAX_BATCH = 4
"""Megatron's fused softmax needs a multiple of 4 heads x sequences (`attn_batches % 4`, fused_softmax.py)."""
UNFUSED_SOFTMAX_BYTES, UNFUSED_SOFTMAX_BACKWARD_BYTES = 32.0, 34.0
"""Extra bytes per score without the fused softmax: cast to float32, scale, mask, softmax, cast back."""
EMBEDDING_OUTPUT_BYTES = 4.0
"""Bytes per element of the embedding's output."""
TRITON_ACTIVATION_BYTES = 2.0
"""Bytes of an activation of Triton blocks."""
RING = CONTEXTS.index("ring")
UNFUSED_SOFTMAX_KERNEL_RATIO = 1.2
"""Kernels of a block without the fused softmax, over those with it: nine more on about fifty."""


class TrafficPerElement(NamedTuple):
    """Bytes per element that kernels read and write."""

    forward: float
    backward: float


NORM_BYTES, UNFUSED_NORM_BYTES = TrafficPerElement(4.0, 6.0), TrafficPerElement(36.0, 76.0)
"""Unfused: cast to float32, square, mean, scale, cast back, weight (transformers' LlamaRMSNorm)."""
ROPE_BYTES, UNFUSED_ROPE_BYTES = TrafficPerElement(4.0, 4.0), TrafficPerElement(24.0, 28.0)
"""Unfused: negate, concatenate, two multiplications, an addition (or through float32 complex numbers), and
copies of values and outputs to another order of heads."""
GATE_BYTES, UNFUSED_GATE_BYTES = TrafficPerElement(6.0, 10.0), TrafficPerElement(10.0, 18.0)
"""SwiGLU, per element of one half. Unfused: silu, then the multiplication."""
GELU_BYTES = TrafficPerElement(4.0, 6.0)
DISPATCH_BYTES = TrafficPerElement(10.0, 14.0)
"""Per element of the rows that experts read: gathering and scattering them."""
ADDITION_BYTES = 6.0
"""Adding two gradients of an input."""
COUNTED_KERNEL_TIME_FACTOR = 1.08
"""Time of kernels whose bytes are counted one by one, over a copy of these bytes. Triton kernels alone on an
H200: 1.11. Real steps of an H200 with compiled blocks take 1.33 times as long for them as with Triton blocks,
which is the ratio of the counted bytes."""
COMPILED_RESIDUAL_BYTES = ((4.0, 10.0), (12.0, 22.0))
"""Bytes per element of the residual stream that norms and additions move, forward and backward: a multiple of
the residual stream's own bytes, plus those of 16-bit tensors. Counted in the kernels that torch.compile
(torch 2.13) makes of a block; parameter gradients of norms are reductions of their own."""
EAGER_KERNEL_TIME_FACTOR = 1.6
"""Time of torch's elementwise kernels in eager blocks, over a copy of the bytes that they read and write.
From profiles of two steps on an H200: 327 GB (GPT-2 XL) and 378 GB (16 experts), both at 2.55 TB/s."""
EAGER_RESIDUAL_BYTES = TrafficPerElement(48.0, 100.0)
"""Bytes per element of the float32 residual stream that the kernels of an eager block move. Each norm moves 8
forward and 20 backward, each cast 6, each addition to the stream 10, each addition of gradients 12 in float32
and 6 in 16 bits."""
EAGER_ROPE = TrafficPerElement(36.0, 46.0)
"""Negate, concatenate, two multiplications and an addition in float32, a cast; the same backward."""
EAGER_DISPATCH = TrafficPerElement(5.0, 17.0)
"""The same for the rows that experts read: two gathers of 4 bytes, which are as fast as a copy (2.5 here);
backward also an addition, and a sum at half the rate of other kernels."""
BIAS_BYTES = 4.0
"""Adding a bias to the output of a GEMM, as a kernel of its own."""
BIAS_GRAD_BYTES = 2.0
"""The gradient of a bias, where it is not part of a GEMM: a sum over the gradient of the layer's output."""
CAST_ONCE_BYTES, CAST_FUSED_BYTES = 3.0, 1.0
"""Bytes that a cast moves per element: reads 2 and writes 1; fused with the kernel before it, writes 1."""
CAST_BYTES = {"delayed": 4.0, "current": 6.0, "rowwise": 10.0, "mxfp8": 4.5, "subchannel": 6.0, "nvfp4": 6.0}
"""Bytes that a cast moves per element, by recipe: reads 2, writes one copy and its transpose; `current` reads
twice (the maximum first), `rowwise` does so for rows and for columns."""


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

    def where(self, condition: Flags, other: Passes) -> Passes:
        """These where ``condition`` holds, else those of ``other``."""
        return Passes(
            np.where(condition, self.forward, other.forward),
            np.where(condition, self.backward_input, other.backward_input),
            np.where(condition, self.backward_weight, other.backward_weight),
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
    selective_recompute_s: Floats
    """Recompute time of selective activation checkpointing."""

    def take(self, indices: Ints) -> BlockTimes:
        """The times of some layouts."""
        return BlockTimes(
            gemms=self.gemms.take(indices),
            attention=self.attention.take(indices),
            elementwise=self.elementwise.take(indices),
            expert_gemms=self.expert_gemms.take(indices),
            selective_recompute_s=self.selective_recompute_s[indices],
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
        fp16 = self.rules.fp16_weight_grad_bytes if workload.precision == "fp16" else None
        self.weight_grad_bytes = self.rules.weight_grad_bytes if fp16 is None else fp16
        """Bytes per weight that casting and summing a weight gradient move."""
        self.head_chunks = np.clip(self.model.num_kv_heads // self.tp, 1, self.rules.ring_head_chunks)
        """Kernels and messages per chunk of ring attention."""
        batches = grid.micro_batch * self.model.num_heads / self.tp
        self.unfused_softmax: Flags = np.asarray(
            (batches % SOFTMAX_BATCH != 0) & (not self.rules.flash_attention)
        )
        """Layouts whose attention runs without the fused softmax."""
        self.triton: Flags = grid.has_unsharded_layers & (self.rules.elementwise_kernels == "triton")
        """Layouts whose blocks are Triton kernels."""

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
        recomputed = self._selective_s(gemms, attention, elementwise, experts)
        return BlockTimes(gemms, attention, elementwise, experts, recomputed)

    def _selective_s(self, gemms: Passes, attention: Passes, elementwise: Passes, experts: Passes) -> Floats:
        """Recompute time of selective activation checkpointing."""
        # In fp8 the kernels of Triton blocks write the 16-bit inputs of weight-gradient GEMMs anyway.
        recompute_s = np.zeros(len(self.grid))
        if self.workload.precision != "fp8":
            counted = COUNTED_KERNEL_TIME_FACTOR * self._kernel_bytes().recomputed
            recompute_s = counted * self.rows / self.device.bytes_per_s
        return np.where(self.triton, recompute_s, self._recomputed_s(gemms, attention, elementwise, experts))

    def _recomputed_s(self, gemms: Passes, attention: Passes, elementwise: Passes, experts: Passes) -> Floats:
        """Recompute time of selective activation checkpointing, in blocks that are not Triton blocks."""
        memory = self.workload.profile.memory
        if memory.recomputed_modules and memory.fused_attention:
            found = np.zeros(len(self.grid))
            if "mla_up_proj" in memory.recomputed_modules and self.model.attention == "latent":
                found = found + self._up_projections().forward
            if {"layernorm", "act"} & set(memory.recomputed_modules):
                found = found + elementwise.forward
            return found
        if self.rules.selective_recomputes == "attention":
            return attention.forward
        if self.rules.selective_recomputes == "half_gemms":
            # Grouped GEMMs are not saved. Measured compiled steps leave no time for running them again.
            again = 0.0 if self.compiled else experts.forward
            return elementwise.forward + 0.5 * gemms.forward + again
        routed = self.model.expert_layers / self.model.num_layers * self.rules.unfused_routing
        return elementwise.forward + EXPERT_SYNC_S * routed

    def linear(
        self, rows: Sizes, columns: Sizes, depth: Sizes, count: Sizes = 1, unquantized: bool = False
    ) -> Passes:
        """The three GEMMs of a linear layer: forward, input gradient, weight gradient."""
        device = self.device
        stored = self.weight_grad_bytes * np.asarray(columns, float) * depth * count / device.bytes_per_s
        cast = (
            Passes(*(np.zeros(len(self.grid)),) * 3)
            if unquantized
            else self._casts(rows, columns, depth, count)
        )
        return cast + Passes(
            gemm_s(device, rows, columns, depth, count, unquantized),
            gemm_s(device, rows, depth, columns, count, unquantized),
            gemm_s(device, columns, depth, rows, count, unquantized or not self.rules.fp8_weight_grads)
            + stored,
        )

    def _casts(self, rows: Sizes, columns: Sizes, depth: Sizes, count: Sizes) -> Passes:
        """Casts to fp8 or fp4: input and weight forward, the gradient of the output backward."""
        none = np.zeros(len(self.grid))
        if self.workload.precision not in ("fp8", "fp4"):
            return Passes(none, none, none)
        rows, columns, depth = (np.asarray(size, float) for size in (rows, columns, depth))
        if self.rules.fused_casts:
            return self._fused_casts(rows, columns, depth, count)
        moved = CAST_BYTES.get(self.workload.recipe, CAST_BYTES["current"]) / self.device.bytes_per_s
        forward = (rows * depth + columns * depth) * count * moved
        return Passes(none + forward, none + rows * columns * count * moved, none)

    def _fused_casts(self, rows: Floats, columns: Floats, depth: Floats, count: Sizes) -> Passes:
        """Casts of Meshwright's compiled and Triton blocks (models/triton_block.py).

        Weights in both passes, gradients, and both operands of an fp8 weight-gradient GEMM.
        """
        weights = columns * depth * CAST_ONCE_BYTES
        forward = rows * depth * CAST_FUSED_BYTES + weights
        backward = rows * columns * CAST_ONCE_BYTES + weights
        weight_grad = rows * (columns + depth) * CAST_ONCE_BYTES * self.rules.fp8_weight_grads
        scale = np.asarray(count, float) / self.device.bytes_per_s + np.zeros(len(self.grid))
        return Passes(forward * scale, backward * scale, weight_grad * scale)

    def _attention_projections(self) -> Passes:
        """The projections around attention."""
        model, rows, tp = self.model, self.rows, self.tp
        width = model.hidden_size
        out = self.linear(rows, width, model.value_size / tp)
        if model.attention == "latent":
            rope, latent = model.rope_head_dim or 0, model.latent_size or 0
            down = self.linear(rows, latent + rope, width)
            if model.query_latent_size:
                down = down + self.linear(rows, model.query_latent_size, width)
            return out + down + self._up_projections()
        keys = np.maximum(model.kv_size / tp, model.head_size)
        return out + self.linear(rows, model.query_size / tp + 2 * keys, width)

    def _up_projections(self) -> Passes:
        """Of latent attention: queries, and keys and values, from their latent vectors."""
        model, rows, tp = self.model, self.rows, self.tp
        queries = model.num_heads * (model.head_size + (model.rope_head_dim or 0)) / tp
        keys = (model.num_heads * model.head_size + model.value_size) / tp
        depth = model.query_latent_size or model.hidden_size
        return self.linear(rows, keys, model.latent_size or 0) + self.linear(rows, queries, depth)

    def _feed_forward(self, inner: int, split: Floats) -> Passes:
        model = self.model
        entries = 2 if model.activation == "swiglu" else 1
        fused = 1 if self.rules.separate_gate else entries
        into = self.linear(self.rows, fused * inner / split, model.hidden_size, entries // fused)
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
        grouped = both.times(1 / self.device.rates.expert_matmul)
        return grouped + self._routing() if self.rules.unfused_routing else grouped

    def _routing(self) -> Passes:
        """The router's float32 GEMMs, and the weighted sum of each token's outputs as a batched GEMM."""
        model, device = self.model, self.device
        tokens, width = self.rows / self.tp, float(model.hidden_size)
        float32_device = dataclasses.replace(
            device, flops_per_s=device.float32_flops_per_s, operand_width=4.0
        )
        experts = float(model.num_experts or 1)
        chosen = float(max(model.experts_per_token or 1, COMBINE_DEPTH))

        def combine(rows: float, columns: float, depth: float) -> Floats:
            return gemm_s(device, rows, columns, depth, tokens, unquantized=True)

        forward = gemm_s(float32_device, tokens, experts, width) + combine(1, width, chosen)
        tile = OUTER_PRODUCT_TILE
        backward = (
            gemm_s(float32_device, tokens, width, experts) + combine(tile, width, tile) / OUTER_PRODUCT_RATE
        )
        return Passes(
            forward + ROUTING_KERNELS * device.rates.launch_s + EXPERT_SYNC_S,
            backward + ROUTING_BACKWARD_KERNELS * device.rates.launch_s,
            gemm_s(float32_device, experts, width, tokens) + combine(1, chosen, width),
        )

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
        if not self.rules.skips_masked:
            context = float(self.seq_len)
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
        rate = (
            self.device.unquantized_flops_per_s
            / rates.matmul
            * self._attention_rate()
            * self._head_rate(v_dim)
        )
        started = launches * rates.launch_s
        forward = flops * (1 + rates.attention_ramp / length) / rate
        backward = flops * (1 + BACKWARD_RAMP * rates.attention_ramp / length) / rate
        backward = backward * (ATTENTION_BACKWARD_FLOPS / ATTENTION_BACKWARD_RATE)
        return Passes(forward + started, backward + 2 * started, np.zeros_like(forward))

    def _unfused(self, heads: Floats, qk_dim: int, v_dim: int) -> Passes:
        """Unfused attention: two batched GEMMs, and passes over the scores."""
        device, length = self.device, self.seq_len
        count = self.rows / length * heads
        forward = gemm_s(device, length, length, qk_dim, count, unquantized=True)
        forward = forward + gemm_s(device, length, v_dim, length, count, unquantized=True)
        scores = count * float(length) ** 2 / device.bytes_per_s
        return Passes(
            forward + (SCORE_BYTES + UNFUSED_SOFTMAX_BYTES * self.unfused_softmax) * scores,
            2 * forward
            + (SCORE_BACKWARD_BYTES + UNFUSED_SOFTMAX_BACKWARD_BYTES * self.unfused_softmax) * scores,
            np.zeros_like(forward),
        )

    def _head_rate(self, width: int) -> Floats:
        """Rate of the framework's attention kernel at a head width, over that at 128."""
        kernel = self.rules.attention_kernel
        multiple = 2 ** math.ceil(math.log2(width)) if kernel == "flash-1" else FLASH_2_HEAD_MULTIPLE
        padded = width / (math.ceil(width / multiple) * multiple) if width < WIDE_HEAD_DIM else 1.0
        cudnn = HALF_HEAD_RATE * width / HALF_HEAD_DIM
        if width > HALF_HEAD_DIM:
            cudnn = min(1.0, width / FULL_RATE_HEAD_DIM)
        # Where FlashAttention-2 is as fast as the kernel of the device's generation, it is that kernel.
        has_cudnn = (kernel == "native") & (np.asarray(self.device.rates.flash_2) < 1)
        return np.where(has_cudnn, cudnn, padded)

    def _attention_rate(self) -> float:
        """Rate of the framework's attention kernel, over one large 16-bit GEMM."""
        rates, kernel = self.device.rates, self.rules.attention_kernel
        slower = {"native": 1.0, "flash-2": rates.flash_2, "flash-1": rates.flash_2 * rates.flash_1}
        return rates.attention * slower[kernel]

    def _elementwise(self, dense_share: float) -> Passes:
        """Norms, residual additions, RoPE and activation functions: memory traffic."""
        model, grid, rules = self.model, self.grid, self.rules
        width, gated = model.hidden_size, model.activation == "swiglu"
        eager = rules.elementwise_kernels == "eager"
        compiled = rules.elementwise_kernels in ("compiled", "triton")
        residual, rope, gate = self._moved_bytes()
        dispatch = EAGER_DISPATCH if eager else DISPATCH_BYTES
        forward = residual.forward * width / self.token_split
        backward = residual.backward * width / self.token_split
        rotated = (model.query_size + model.kv_size) / self.tp * (model.positions == "rope")
        inner = dense_share * model.ffn_size / self.tp
        if model.expert_layers:
            routed = (model.experts_per_token or 1) / self.tp
            share = 1 - dense_share
            inner = inner + share * routed * model.expert_width  # etp multiplies tokens, divides columns
            inner = inner + share * model.shared_experts * model.expert_width / self.tp
            sent = share * routed * width
            forward, backward = forward + dispatch.forward * sent, backward + dispatch.backward * sent
        if rules.sums_bias_grads:
            heads = (model.query_size + 2 * model.kv_size) / self.tp * model.attention_bias
            forward = forward + BIAS_BYTES * heads * compiled
            backward = backward + BIAS_GRAD_BYTES * (heads + width * model.attention_bias)
            backward = backward + BIAS_GRAD_BYTES * (width + (1 + gated) * inner) * model.ffn_bias
        if (rules.separate_gate or eager) and gated:  # the rows are gathered here
            backward = backward + ADDITION_BYTES * dense_share * width
        act = gate if gated else GELU_BYTES
        forward = forward + rope.forward * rotated + act.forward * inner
        backward = backward + rope.backward * rotated + act.backward * inner
        over_counted = {"typical": self.device.rates.elementwise, "eager": EAGER_KERNEL_TIME_FACTOR}.get(
            rules.elementwise_kernels, COUNTED_KERNEL_TIME_FACTOR
        )
        scale = self.rows * over_counted / self.device.bytes_per_s
        return self._counted_kernels().where(
            self.triton, Passes(forward * scale, backward * scale, np.zeros(len(grid)))
        )

    def _moved_bytes(self) -> tuple[TrafficPerElement, TrafficPerElement, TrafficPerElement]:
        """Bytes per element of the residual stream, of RoPE and of a gated activation."""
        rules, residual_bytes = self.rules, self.workload.residual_bytes
        if rules.elementwise_kernels == "eager":
            return EAGER_RESIDUAL_BYTES, EAGER_ROPE, UNFUSED_GATE_BYTES
        norm, rope, gate = (
            fused if self.compiled or flag else apart
            for flag, fused, apart in (
                # PyTorch's layer norm and GELU are single kernels.
                (rules.fused_norms or self.model.norm == "layer", NORM_BYTES, UNFUSED_NORM_BYTES),
                (rules.fused_rope, ROPE_BYTES, UNFUSED_ROPE_BYTES),
                (rules.fused_activation, GATE_BYTES, UNFUSED_GATE_BYTES),
            )
        )
        added = 7.0 if rules.dropout else 6.0
        residual = TrafficPerElement(2 * (norm.forward + added), 2 * (norm.backward + added))
        if rules.elementwise_kernels in ("compiled", "triton"):
            residual = TrafficPerElement(*(r * residual_bytes + low for r, low in COMPILED_RESIDUAL_BYTES))
        return residual, rope, gate

    def _kernel_bytes(self) -> KernelBytes[Floats]:
        """Bytes per token of the kernels of Triton blocks."""
        model = self.model
        shares = (size / self.tp for size in (model.query_size, model.kv_size, model.ffn_size))
        residual = self.workload.residual_bytes
        return kernel_bytes(TRITON_ACTIVATION_BYTES, residual, model.hidden_size / self.token_split, *shares)

    def _counted_kernels(self) -> Passes:
        """The kernels of Triton blocks; under fp8 they write one byte in place of two, counted as casts."""
        forward, backward, recomputed = self._kernel_bytes()
        if self.workload.precision == "fp8":
            forward, backward = forward - recomputed, backward + recomputed
        scale = self.rows * COUNTED_KERNEL_TIME_FACTOR / self.device.bytes_per_s
        return Passes(forward * scale, backward * scale, np.zeros(len(self.grid)))

    def head(self) -> Passes:
        """The head's GEMM and the loss."""
        model = self.model
        columns = np.ceil(model.vocab_size / self.tp / 128) * 128
        gemm = self.linear(self.rows, columns, model.hidden_size, unquantized=True)
        gathers = self.workload.profile.memory.gathers_logits
        logits = self.rows * (model.vocab_size if gathers else columns)
        loss = self.rules.loss_bytes * logits / self.device.bytes_per_s
        return self._order_head(gemm + Passes(loss / 2, loss / 2, np.zeros_like(loss)))

    def logits(self) -> Floats:
        """Seconds of the head's GEMM in the forward pass."""
        columns = np.ceil(self.model.vocab_size / self.tp / 128) * 128
        return self.linear(self.rows, columns, self.model.hidden_size, unquantized=True).forward

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
