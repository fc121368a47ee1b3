"""Bytes per token that a block saves for backward, by framework and activation checkpointing.

With D the hidden size, Q and K the widths of all query and key heads, F the feed-forward size, H heads, s the
sequence length, e bytes per element (2, or 4 in float32), q bytes per element of a saved GEMM input (1 in fp8
if it is saved in fp8):

=================  ==================================  ====================  ============================
blocks             over tp with sequence parallelism   inputs of GEMMs       over tp
=================  ==================================  ====================  ============================
fused (Megatron)   2 x D e, 2 x D with dropout         2 x D q               (2 Q + 2 K) e + F (2 e + q)
operators (torch)  2 x D e                             2 x D e               (2 Q + 2 K) e + 4 F e
eager (autocast)   2 x (D + 1) 4                       2 x D e               (2 Q + 2 K) e + 4 F e
=================  ==================================  ====================  ============================

and 4 H for the log-sum-exp of fused attention, or s H (2 + 3 with dropout) for saved scores. With Q = K = D,
F = 4 D, GELU, dropout and no fused attention the first line is s b h (34 + 5 a s / h), equation 1 of
Korthikanti et al. 2022. GELU saves F (e + q), a gated feed-forward F (2 e + q).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Floats, Grid
from meshwright.plan.estimate.state import ACTIVATION_BYTES, FLOAT32
from meshwright.plan.estimate.terms import Sum, Term
from meshwright.plan.estimate.workload import Workload

GEMM_INPUT_BYTES = {"fp8": 1.0, "fp4": 0.5625}
"""Bytes per element of a GEMM input in low precision, fp4 with its scales."""
ROUTER_BYTES = 13.0
"""Probabilities, scores and their softmax in float32 and the map, per expert and token."""
CHOICE_BYTES = 28.0
"""Weight in float32, index of the expert, and index in two orders, per expert that a token chooses."""


@dataclass(frozen=True)
class SavedBytes:
    """Bytes per token of one part of a block."""

    shared: float = 0.0
    """Sharded by tp under sequence parallelism."""
    gathered: float = 0.0
    """Inputs of tensor-parallel GEMMs: sharded like `shared` if a framework all-gathers them again."""
    split: float = 0.0
    """Sharded by tp."""
    scores: float = 0.0
    """Per position of the sequence; sharded by tp."""
    routed: float = 0.0
    """Per copy of a token that is sent to an expert; every rank of etp has all copies."""
    routed_inner: float = 0.0
    """The same inside the expert: sharded by etp."""
    dispatched: float = 0.0
    """Per copy of a token, if experts are on other ranks; every rank of etp has all copies."""
    second_output: float = 0.0
    """The attention output once more, under Ulysses; sharded by tp."""

    def __add__(self, other: SavedBytes) -> SavedBytes:
        return SavedBytes(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def attention_saved_bytes(workload: Workload) -> SavedBytes:
    """Attention with its norm, without activation checkpointing."""
    model, rules, low = workload.model, workload.profile.memory, ACTIVATION_BYTES[workload.precision]
    width, heads, gemm_input = model.hidden_size, model.num_heads, _gemm_input_bytes(workload)
    inputs = SavedBytes(
        shared=norm_input_bytes(workload) + (width if rules.dropout else 0), gathered=width * gemm_input
    )
    rotated = model.num_heads * (model.head_size + (model.rope_head_dim or 0))
    results = model.value_size * low + (model.value_size * gemm_input if gemm_input < low else 0.0)
    if model.attention == "latent":
        query_latent_size, latent, rope = (
            model.query_latent_size or 0,
            model.latent_size or 0,
            model.rope_head_dim or 0,
        )
        below = (2 * query_latent_size + 2 * latent + rope) * low
        inner = SavedBytes(shared=below, split=(2 * rotated + model.value_size) * low + results)
    else:
        inner = SavedBytes(split=(model.query_size + 2 * _key_width(workload)) * low + results)
    if rules.fused_attention:
        inner += SavedBytes(split=FLOAT32 * heads)
    else:
        inner += SavedBytes(scores=heads * (low + (low + 1 if rules.dropout else 0)))
    return inputs + inner + SavedBytes(second_output=model.value_size * low)


def _key_width(workload: Workload) -> int:
    """Width of saved keys: torch repeats them for every query head in float32 and with a mask."""
    model, eager = workload.model, workload.profile.memory.blocks == "eager"
    repeats = workload.precision == "fp32" or workload.document_mask
    return model.query_size if eager and repeats and workload.cluster.device == "cuda" else model.kv_size


def ffn_saved_bytes(workload: Workload, expert: bool) -> SavedBytes:
    """A feed-forward with its norm, dense or MoE, without activation checkpointing."""
    model, rules, low = workload.model, workload.profile.memory, ACTIVATION_BYTES[workload.precision]
    width, gemm_input = model.hidden_size, _gemm_input_bytes(workload)
    gated = model.activation == "swiglu"
    gate = 1.0 if rules.gates_in_fp8 and workload.precision == "fp8" else low
    inner = (2 * gate if gated else low) + gemm_input
    if rules.blocks != "fused":
        inner = (4 if gated else 2) * low
    norm = norm_input_bytes(workload) + (width if rules.dropout else 0)
    if not expert:
        return SavedBytes(shared=norm, gathered=width * gemm_input, split=model.ffn_size * inner)
    wide = model.expert_width
    found = SavedBytes(
        shared=norm + width * low + (model.num_experts or 0) * ROUTER_BYTES,
        split=model.shared_experts * wide * inner,
        routed=width * gemm_input,
        routed_inner=wide * inner,
    )
    if rules.blocks != "eager":
        return found
    # The router reads float32, shared experts another copy. The weighted sum of the outputs saves them all.
    shared_input = width * low if model.shared_experts and low < FLOAT32 else 0.0
    return found + SavedBytes(
        shared=width * (FLOAT32 - low) + shared_input, routed_inner=width * low + CHOICE_BYTES
    )


def _gemm_input_bytes(workload: Workload) -> float:
    """Bytes per element of a saved GEMM input: Transformer Engine saves low precision, torchao does not."""
    low = ACTIVATION_BYTES[workload.precision]
    return GEMM_INPUT_BYTES.get(workload.precision, low) if workload.profile.memory.scratch_gradients else low


def norm_input_bytes(workload: Workload) -> float:
    """A norm's input; with statistics if it is not fused into a GEMM; on CPU also RMSNorm's output."""
    model = workload.model
    if workload.profile.memory.blocks != "eager":
        low, time = ACTIVATION_BYTES[workload.precision], workload.profile.time
        unfused = not (time.fused_norms or workload.compiled or model.norm == "layer")
        # Unfused: the float32 copy for the square and the scale, and the output before the weight.
        return model.hidden_size * (FLOAT32 + low if unfused else low)
    if model.norm == "layer":
        return (model.hidden_size + 2) * FLOAT32
    return ((1 if workload.cluster.device == "cuda" else 2) * model.hidden_size + 1) * FLOAT32


def block_saved_bytes(workload: Workload, expert: bool) -> tuple[SavedBytes, SavedBytes, SavedBytes]:
    """A block without activation checkpointing, with selective, and with full."""
    model, rules = workload.model, workload.profile.memory
    attention, ffn = attention_saved_bytes(workload), ffn_saved_bytes(workload, expert)
    residual = FLOAT32 if rules.blocks == "eager" else ACTIVATION_BYTES[workload.precision]
    whole, full = attention + ffn, SavedBytes(shared=model.hidden_size * residual)
    if rules.recomputed_modules and rules.fused_attention:
        return whole, whole + _recomputed_modules(workload, expert), full
    if rules.selective_recomputes == "attention":
        lse = FLOAT32 * model.num_heads if rules.fused_attention else 0.0
        return whole, whole + SavedBytes(split=-lse, scores=-attention.scores), full
    outputs = (
        _saved_half(workload, expert)
        if rules.selective_recomputes == "half_gemms"
        else _saved_gemm_outputs(workload, expert)
    )
    return whole, full + outputs, full


def _recomputed_modules(workload: Workload, expert: bool) -> SavedBytes:
    """Memory saved by recomputing the profile's modules, as negative bytes."""
    model, modules, low = (
        workload.model,
        workload.profile.memory.recomputed_modules,
        ACTIVATION_BYTES[workload.precision],
    )
    gemm_input, found = _gemm_input_bytes(workload), SavedBytes()
    if "mla_up_proj" in modules and model.attention == "latent":
        rotated = model.num_heads * (model.head_size + (model.rope_head_dim or 0))
        found += SavedBytes(split=-(2 * rotated + model.value_size) * low)
    if "layernorm" in modules:
        found += SavedBytes(gathered=-(1 if expert else 2) * model.hidden_size * gemm_input)
    if "act" in modules and expert:
        shared = model.shared_experts * model.expert_width
        found += SavedBytes(split=-shared * gemm_input, routed_inner=-model.expert_width * gemm_input)
    elif "act" in modules:
        found += SavedBytes(split=-model.ffn_size * gemm_input)
    return found


def _saved_gemm_outputs(workload: Workload, expert: bool) -> SavedBytes:
    """The output of every GEMM and of attention: Meshwright's selective activation checkpointing."""
    model, low = workload.model, ACTIVATION_BYTES[workload.precision]
    first = 2 if model.activation == "swiglu" else 1
    heads = SavedBytes(split=(2 * model.query_size + 2 * model.kv_size) * low + FLOAT32 * model.num_heads)
    if model.attention == "latent":
        rope = model.rope_head_dim or 0
        rotated = model.num_heads * (2 * model.head_size + 2 * rope) + 2 * model.value_size
        heads = SavedBytes(split=rotated * low + FLOAT32 * model.num_heads)
    ffn = SavedBytes(split=first * model.ffn_size * low)
    if expert:
        wide = first * model.expert_width * low
        ffn = SavedBytes(split=model.shared_experts * wide, routed=model.hidden_size * low, routed_inner=wide)
    return heads + SavedBytes(shared=model.hidden_size * low) + ffn


def _saved_half(workload: Workload, expert: bool) -> SavedBytes:
    """Outputs of every second GEMM and of attention: torchtitan's selective activation checkpointing.

    GEMMs in order: queries, keys, values, attention output, gate, up, down; the odd ones are saved.
    torchao's fp8 GEMMs are the same operator on a tensor subclass, so fp8 saves as much, in 16 bits.
    Grouped GEMMs of experts are not on its list; the results of expert dispatch and combine are.
    """
    model, low = workload.model, ACTIVATION_BYTES[workload.precision]
    attention = SavedBytes(split=model.value_size * low + FLOAT32 * model.num_heads)
    odd = SavedBytes(split=(model.query_size + model.kv_size) * low)
    if expert:
        return attention + odd + SavedBytes(dispatched=2 * model.hidden_size * low)
    return attention + odd + SavedBytes(split=model.ffn_size * low, shared=model.hidden_size * low)


@dataclass(frozen=True)
class Tokens:
    """Tokens of a rank in one micro-batch."""

    count: Floats
    """micro_batch x seq_len / cp."""
    residual: Floats
    """Activations of the residual stream: sharded by tp under sequence parallelism."""
    gathered: Floats
    """Inputs that are saved all-gathered."""
    split: Floats
    """count / tp."""
    scores: Floats
    """Pairs of token and position, over tp."""
    routed: Floats
    """Copies that reach the rank's experts, on the rank with most of them."""
    routed_inner: Floats
    """The same over etp, which shards the inside of an expert."""
    dispatched: Floats
    """``routed`` if experts are on other ranks, else 0."""
    exchanged: Floats
    """count / tp under Ulysses, else 0."""

    @classmethod
    def of(cls, workload: Workload, grid: Grid) -> Tokens:
        """The tokens of each layout."""
        rules, model = workload.profile.memory, workload.model
        count = grid.micro_batch * (workload.seq_len / grid.cp)
        split = count / grid.tp
        residual = np.where(grid.sequence_parallel, split, count)
        # A rank that holds all experts reads every copy, however uneven the experts' loads are.
        free = np.where(grid.ep > 1, rules.imbalance, 1.0) if model.num_experts else 1.0
        uneven = model.capacity_factor or free
        exchanged = (grid.cp > 1) & (grid.context == 1)
        copies = split * ((model.experts_per_token or 0) * uneven)
        return cls(
            count=count,
            residual=residual,
            gathered=count if rules.keeps_gathered else residual,
            split=split,
            scores=split * workload.seq_len,
            routed=copies * grid.etp,
            routed_inner=copies,
            dispatched=np.where(grid.ep > 1, copies * grid.etp, 0.0),
            exchanged=np.where(exchanged, split, 0.0),
        )


def sum_saved_bytes(kinds: tuple[SavedBytes, ...], grid: Grid, tokens: Tokens, recompute: bool = True) -> Sum:
    """Saved by one block of one micro-batch; ``recompute=False``: without activation checkpointing."""
    parts = (
        ("shared", "residual stream and norms", tokens.residual),
        ("gathered", "inputs of GEMMs", tokens.gathered),
        ("split", "inside attention and feed-forward", tokens.split),
        ("scores", "scores", tokens.scores),
        ("routed", "inputs of routed experts", tokens.routed),
        ("routed_inner", "inside routed experts", tokens.routed_inner),
        ("dispatched", "results of dispatch and combine", tokens.dispatched),
        ("second_output", "attention output before the all-to-all", tokens.exchanged),
    )
    terms = []
    for name, label, count in parts:
        values = [float(getattr(kind, name)) for kind in kinds]
        if not any(values):
            continue
        coefficient = np.array(values)[grid.recompute] if recompute else values[0]
        terms.append(Term(label, (count, coefficient)))
    return Sum.of(*terms)
