"""Runtime profiles: what frameworks keep in memory and what they do at the same time.

Facts of each framework, not fitted to anything. Rates that are fitted are in ``calibration.toml``.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    overlap_grad_reduce: bool = True
    """Gradients are reduced while the backward pass goes on."""
    overlap_param_gather: bool = True
    """ZeRO gathers parameters while layers compute."""
    overlap_tp: bool = False
    """Tensor-parallel collectives are cut up and hidden behind the products."""


@dataclass(frozen=True)
class Profile:
    """One framework."""

    name: str
    memory: MemoryRules = MemoryRules()
    time: TimeRules = TimeRules()


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("meshwright"),
        Profile("megatron-lm", time=TimeRules(flash_attention=False, overlap_grad_reduce=False)),
        Profile("megatron-core", time=TimeRules(overlap_tp=True)),
        Profile("megatron-deepspeed", time=TimeRules(flash_attention=False, overlap_grad_reduce=False)),
        Profile("torchtitan"),
        Profile("composer-fsdp"),
        Profile("deepspeed-zero"),
    )
}
"""By name. `megatron-lm` is Megatron as of 2020 to 2022, `megatron-core` as of 2023 on."""
