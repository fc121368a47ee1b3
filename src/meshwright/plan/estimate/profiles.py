"""Runtime profiles: what frameworks keep in memory and what they do at the same time.

Facts of each framework, not fitted to anything. Rates that are fitted are in ``calibration.toml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MemoryRules:
    """What a framework keeps."""

    master_weights: bool = True
    """16-bit training keeps float32 master weights beside 16-bit ones; False: the weights are float32 themselves."""
    gradient_bytes: int = 4
    """Bytes of a gradient element that is accumulated."""


@dataclass(frozen=True)
class TimeRules:
    """What a framework does at the same time, and how."""

    flash_attention: bool = True
    """Scores never reach memory; else batched products and a softmax over them."""
    selective: Literal["attention", "half", "elementwise"] = "elementwise"
    """What selective recomputation runs again: attention, every second product, or no product at all."""
    dropout: bool = False
    """Masks are drawn and applied."""
    loss_bytes: float = 24.0
    """Bytes that the loss moves for each logit beyond the product itself, forward and backward."""
    reduce_bytes: float = 4.0
    """Bytes of a gradient element on the wire."""
    optimizer_bytes: float = 30.0
    """Bytes that the update moves for each parameter: 16-bit training with float32 moments and master weights."""
    overlap_grad_reduce: bool = True
    """Gradients are reduced while the last backward pass goes on."""
    overlap_param_gather: bool = True
    """ZeRO gathers parameters while layers compute."""
    overlap_tp: bool = False
    """Tensor-parallel collectives are cut up and hidden behind the products."""
    overlap_p2p: bool = False
    """Stages send and receive while they compute."""


@dataclass(frozen=True)
class Profile:
    """One framework."""

    name: str
    memory: MemoryRules = MemoryRules()
    time: TimeRules = TimeRules()


_OLD = TimeRules(
    flash_attention=False,
    selective="attention",
    dropout=True,
    loss_bytes=28.0,
    reduce_bytes=2.0,
    optimizer_bytes=46.0,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
)
"""Megatron as of 2020 to 2022: no fused attention, the update in several passes, nothing overlaps."""

PROFILES = {
    profile.name: profile
    for profile in (
        Profile("meshwright"),
        Profile("megatron-lm", time=_OLD),
        Profile(
            "megatron-core",
            time=TimeRules(selective="attention", loss_bytes=12.0, overlap_tp=True, overlap_p2p=True),
        ),
        Profile("megatron-deepspeed", time=_OLD),
        Profile("torchtitan", time=TimeRules(selective="half", optimizer_bytes=28.0)),
        Profile("composer-fsdp", time=TimeRules(reduce_bytes=2.0, optimizer_bytes=28.0)),
        Profile("deepspeed-zero", time=TimeRules(flash_attention=False, dropout=True, reduce_bytes=2.0)),
    )
}
"""By name. `megatron-lm` is Megatron as of 2020 to 2022, `megatron-core` as of 2023 on."""
