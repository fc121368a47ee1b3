"""Parameters by part of the model, and those of a pipeline rank before ZeRO."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Floats, Grid
from meshwright.plan.estimate.stages import Stage
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class WeightCounts:
    """Number of elements of each part of the model."""

    attention: float
    """Weights of a block's attention that tensor parallelism shards."""
    latents: float
    """The parameters that it does not shard: the down projections of latent attention."""
    norms: float
    """Norms of a block, and biases that are not sharded."""
    ffn: float
    """A dense feed-forward."""
    shared: float
    """The shared experts of a layer together."""
    router: float
    expert: float
    """One routed expert."""
    table: float
    """Embedding, or head, with the vocabulary padded."""
    positions: float
    final_norm: float

    @classmethod
    def of(cls, model: DecoderModel) -> WeightCounts:
        """The parts of a model."""
        width, queries, keys = model.hidden_size, model.query_size, model.kv_size
        norm = float(width * (1 if model.norm == "rms" else 2))
        final, entries = norm, 3 if model.activation == "swiglu" else 2
        attention, latents = float(width * (queries + 2 * keys) + model.value_size * width), 0.0
        if model.attention == "latent":
            rope, latent, head = model.rope_head_dim or 0, model.latent_size or 0, model.head_size
            query_latent_size, rotated = model.query_latent_size or 0, model.num_heads * (head + rope)
            latents = float(width * (latent + rope + query_latent_size) + latent + query_latent_size)
            attention = float(latent * (model.num_heads * head + model.value_size) + model.value_size * width)
            attention += (query_latent_size or width) * rotated
        elif model.attention_bias:
            attention += queries + 2 * keys
            norm += width / 2
        ffn = float(entries * width * model.ffn_size)
        if model.ffn_bias:
            ffn += (entries - 1) * model.ffn_size
            norm += width / 2
        expert = float(entries * width * model.expert_width)
        return cls(
            attention=attention,
            latents=latents,
            norms=2.0 * norm,
            ffn=ffn,
            shared=expert * model.shared_experts,
            router=float(width * (model.num_experts or 0)),
            expert=expert,
            table=float(model.vocab_size * width),
            positions=float((model.max_positions or 0) * width) if model.positions == "learned" else 0.0,
            final_norm=final,
        )


def count_elements(model: DecoderModel) -> float:
    """Parameters of a model as the sum of its parts: as fast for any number of layers."""
    weights, routed = WeightCounts.of(model), model.expert_layers
    blocks = model.num_layers * (weights.attention + weights.latents + weights.norms)
    blocks += (model.num_layers - routed) * weights.ffn
    blocks += routed * (weights.shared + weights.router + (model.num_experts or 0) * weights.expert)
    tables = weights.table * (1 if model.tied_embeddings else 2) + weights.positions
    return blocks + tables + weights.final_norm


@dataclass(frozen=True)
class LocalWeightCounts:
    """Elements of one rank, before ZeRO."""

    dense: Floats
    """All but routed experts."""
    experts: Floats
    block: Floats
    """The largest block, routed experts left out."""
    expert_block: Floats
    """Routed experts of one block."""
    matrices: Floats
    """Matrices of all blocks, routers and routed experts left out."""
    table: Floats
    """The rank's shard of an embedding or a head."""
    routed: bool
    """Whether there are routed experts at all."""


def count_local_weights(
    model: DecoderModel, weights: WeightCounts, grid: Grid, stage: Stage, multiple: int
) -> LocalWeightCounts:
    """Parameters of a class of ranks; tied tables are on the first and on the last stage.

    Args:
        model: For its vocabulary and experts.
        weights: Elements of the model's parts.
        grid: The layouts.
        stage: The class.
        multiple: Rows of each rank's vocabulary shard are padded to a multiple of this; 1: not padded.
    """
    attention = weights.attention / grid.tp + weights.latents
    always = attention + weights.norms
    shared, dense_ffn = weights.shared / grid.tp, weights.ffn / grid.tp
    routed = shared + weights.router
    rows = model.vocab_size / grid.tp
    if multiple > 1:
        rows = (-(-model.vocab_size // (grid.tp * multiple)) * multiple).astype(np.float64)
    table = rows * float(model.hidden_size)
    tables = stage.embeds * 1.0 + stage.heads * (0.0 if model.tied_embeddings else 1.0)
    if model.tied_embeddings:
        tables = np.maximum(tables, stage.heads * 1.0)
    ends = tables * table + stage.embeds * weights.positions + stage.heads * weights.final_norm
    dense = stage.layers * always + stage.dense_layers * dense_ffn + stage.expert_layers * routed + ends
    expert_block = weights.expert * (model.num_experts or 0) / (grid.ep * grid.etp)
    block = always + np.where(stage.dense_layers > 0, dense_ffn, routed)
    return LocalWeightCounts(
        dense=dense,
        experts=stage.expert_layers * expert_block,
        block=block,
        expert_block=expert_block * (stage.expert_layers > 0),
        matrices=stage.layers * attention + stage.dense_layers * dense_ffn + stage.expert_layers * shared,
        table=table,
        routed=bool(model.num_experts),
    )
