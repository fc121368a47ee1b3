"""What a rank of tensor, sequence and expert parallelism holds, written down without torch.

A rank of ``tp`` holds a **narrower model**: its heads, its part of the feed-forward, its rows of the
vocabulary (filled up to the same number on every rank); norms, positions and the biases behind a sum are
whole on all. Where key heads are fewer than ranks, each lies on several of them.

Routed experts are not split over ``tp``: a rank holds some of them (``ep``), of each some columns (``etp``).
The router is whole on all ranks, the shared experts are split over ``tp`` as a dense feed-forward is.

``plan.tensor_traffic`` and ``plan.expert_traffic`` count what that moves.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from meshwright.layout.axes import is_expert
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel, Model

KV_REPLICA_AXIS = "tp_kv"
"""The ranks that hold copies of the same key heads."""
ROUTER = "router"
_WHOLE = ("attention_norm", "ffn_norm", "norm", "positions", ROUTER)
"""Modules that no rank cuts."""


@dataclass(frozen=True)
class LocalDecoder(DecoderModel):
    """A rank's part of a decoder whose routed experts have axes of their own (``axes.has_expert_axes``)."""

    sharded_experts: int = 0
    """Routed experts of a layer."""
    sharded_expert_width: int = 0
    """Of each of them."""
    sharded_shared_width: int = 0
    """Of the shared experts together."""

    @property
    def local_experts(self) -> int:
        """Routed experts of a layer that are held here."""
        return self.sharded_experts

    @property
    def local_expert_width(self) -> int:
        """Inner width of a routed expert as it is held here."""
        return self.sharded_expert_width

    @property
    def shared_width(self) -> int:
        """Inner width of the shared experts together, as it is held here."""
        return self.sharded_shared_width


def local_model(job: Job) -> Model:
    """The model as the matrices of one rank make it."""
    layout = job.layout
    if not isinstance(job.model, DecoderModel):
        return job.model
    return shard_decoder(job.model, layout.tp, layout.ep, layout.etp)


@functools.lru_cache(maxsize=64)
def shard_decoder(model: DecoderModel, tp: int, ep: int = 1, etp: int = 1) -> DecoderModel:
    """What a rank holds of a decoder whose matrices ``tp`` share, and whose experts ``ep`` x ``etp``."""
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
    """Tokens of a micro-batch that a rank works on: of each sample its part, where ``cp`` share one."""
    return (job.layout.micro_batch or 1) * job.data.seq_len // job.layout.cp


def count_kv_replicas(model: DecoderModel, tp: int) -> int:
    """Ranks that hold the same key heads."""
    return max(1, tp // model.num_kv_heads)


def is_tp_replicated(name: str) -> bool:
    """Whether ``tp`` leaves a parameter whole; routed experts, which other axes cut, are so."""
    owner, _, leaf = name.rpartition(".")
    module = owner.rpartition(".")[2]
    return module in _WHOLE or is_expert(name) or (leaf == "bias" and module in ("wo", "down"))


def needs_tp_grad_sync(name: str, sequence_parallel: bool) -> bool:
    """Whether each rank of ``tp`` has a part of a parameter's gradient, that of its own tokens.

    A router sees a rank's own tokens alone in any case, what is whole beside it with sequence parallelism.
    """
    if is_expert(name):
        return False
    return is_tp_replicated(name) and (sequence_parallel or name.split(".")[-2] == ROUTER)


def is_ep_sharded(name: str, ep: int, etp: int) -> bool:
    """Whether ranks of ``ep`` hold different parts of a parameter of routed experts.

    The bias behind an expert's sum is whole on all ranks that share the expert.
    """
    return is_expert(name) and (ep > 1 or (etp > 1 and not name.endswith("down.bias")))


def is_kv_projection(name: str) -> bool:
    """Whether a parameter makes keys or values."""
    return name.split(".")[-2] in ("wk", "wv")
