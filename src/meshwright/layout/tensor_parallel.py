"""The local shapes of tensor parallel, sequence parallel and expert parallel.

A tp rank has a **local model** with fewer heads, a narrower feed-forward and a part of the vocabulary (padded
to the same size on every rank). Norms, positions and the biases of row-parallel linears are replicated. With
fewer key heads than ranks, each key head is replicated on several ranks.

Routed experts are not split over ``tp``: a rank has some of them (``ep``), and of each a part of the columns
(``etp``). The router is replicated. Shared experts are split over ``tp`` like a dense feed-forward.

``plan.traffic.tensor`` and ``plan.traffic.expert`` count the communication.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from meshwright.layout.axes import is_expert
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel, Model

KV_REPLICA_AXIS = "tp_kv"
"""The tp ranks with copies of the same key heads."""
ROUTER = "router"
_REPLICATED = ("attention_norm", "ffn_norm", "norm", "positions", ROUTER)
"""Modules that are replicated over tp."""
_ROW_PARALLEL = ("wo", "down")
"""Linears of which tp shards the columns of the weight."""


@dataclass(frozen=True)
class LocalDecoder(DecoderModel):
    """The local model of a rank where routed experts have separate axes (``axes.has_expert_axes``)."""

    sharded_experts: int = 0
    """Routed experts per layer."""
    sharded_expert_width: int = 0
    """Intermediate size of each."""
    sharded_shared_width: int = 0
    """Intermediate size of all shared experts."""

    @property
    def local_experts(self) -> int:
        """Routed experts per layer on this rank."""
        return self.sharded_experts

    @property
    def local_expert_width(self) -> int:
        """Intermediate size of a routed expert on this rank."""
        return self.sharded_expert_width

    @property
    def shared_width(self) -> int:
        """Intermediate size of all shared experts on this rank."""
        return self.sharded_shared_width


def local_model(job: Job) -> Model:
    """The model with the shapes of one rank."""
    layout = job.layout
    if not isinstance(job.model, DecoderModel):
        return job.model
    return shard_decoder(job.model, layout.tp, layout.ep, layout.etp)


@functools.lru_cache(maxsize=64)
def shard_decoder(model: DecoderModel, tp: int, ep: int = 1, etp: int = 1) -> DecoderModel:
    """A decoder with the shapes of one rank of tp, ep and etp."""
    if tp * ep * etp == 1:
        return model
    held = dataclasses.replace(
        model,
        num_heads=model.num_heads // tp,
        num_kv_heads=max(1, model.num_kv_heads // tp),
        head_dim=model.head_size,
        ffn_size=model.ffn_size // tp,
        vocab_size=-(-model.vocab_size // tp),
    )
    if not model.expert_layers:
        return held
    return LocalDecoder(
        **{**vars(held), "expert_ffn_size": model.expert_width},
        sharded_experts=model.local_experts // ep,
        sharded_expert_width=model.expert_width // etp,
        sharded_shared_width=model.shared_width // tp,
    )


def count_tokens(job: Job) -> int:
    """Tokens of a micro-batch on one rank; cp splits each sequence."""
    return (job.layout.micro_batch or 1) * job.data.seq_len // job.layout.cp


def count_kv_replicas(model: DecoderModel, tp: int) -> int:
    """Ranks with a copy of the same key heads."""
    return max(1, tp // model.num_kv_heads)


def is_tp_replicated(name: str) -> bool:
    """Whether tp does not shard a parameter. Routed experts are sharded by other axes."""
    owner, _, leaf = name.rpartition(".")
    module = owner.rpartition(".")[2]
    return module in _REPLICATED or is_expert(name) or (leaf == "bias" and module in _ROW_PARALLEL)


def tp_dim(name: str) -> int | None:
    """The dim of a parameter that tp shards; None if it is replicated over tp."""
    if is_tp_replicated(name):
        return None
    return 1 if name.split(".")[-2] in _ROW_PARALLEL else 0


def needs_tp_grad_sync(name: str, sequence_parallel: bool) -> bool:
    """Whether the gradient of a replicated parameter is all-reduced over tp.

    Each rank has the gradient of its own tokens only: always for the router, with sequence parallelism for
    all replicated parameters.
    """
    if is_expert(name):
        return False
    return is_tp_replicated(name) and (sequence_parallel or name.split(".")[-2] == ROUTER)


def is_kv_projection(name: str) -> bool:
    """Whether a parameter is a key or value projection."""
    return name.split(".")[-2] in ("wk", "wv")
