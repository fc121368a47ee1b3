"""Parameters of a block and of a rank, split as a layout splits them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.plan.estimate.grid import Floats, Grid
from meshwright.spec.model import DecoderModel


@dataclass(frozen=True)
class Shares:
    """Elements that one rank has before ZeRO shards them."""

    block: Floats
    """An average block without its routed experts."""
    expert_block: Floats
    """The routed experts of an average block."""
    rank: Floats
    """Blocks, embedding and head of the fullest rank, without routed experts."""
    expert_rank: Floats
    """Routed experts of a rank."""


def attention_parameters(model: DecoderModel) -> float:
    """Matrices of attention in one block."""
    width = model.hidden_size
    out = model.value_size * width
    if model.attention == "latent":
        rope, latent, head = model.rope_head_dim or 0, model.latent_size or 0, model.head_size
        made = width * (latent + rope) + latent * (model.num_heads * head + model.value_size)
        queries = model.num_heads * (head + rope)
        lead = model.query_latent_size
        return out + made + (width * lead + lead * queries if lead else width * queries)
    return out + width * (model.query_size + 2 * model.kv_size)


def share_parameters(model: DecoderModel, grid: Grid) -> Shares:
    """What each rank of each layout has; biases and norms are too small to matter here."""
    width = model.hidden_size
    entries = 3 if model.activation == "swiglu" else 2
    expert_share = model.expert_layers / model.num_layers
    dense = (1 - expert_share) * entries * width * model.ffn_size
    shared = expert_share * entries * width * model.expert_width * model.shared_experts
    router = expert_share * width * (model.num_experts or 0)
    block = (attention_parameters(model) + dense + shared) / grid.tp + router + 2.0 * width
    experts = expert_share * entries * width * model.expert_width * (model.num_experts or 0)
    expert_block = experts / (grid.ep * grid.etp)
    layers = model.num_layers / grid.pp
    table = model.vocab_size * width / grid.tp
    both = (grid.pp == 1) & (not model.tied_embeddings)
    ends = table * np.where(both, 2.0, 1.0)
    return Shares(block, expert_block, block * layers + ends, expert_block * layers)
