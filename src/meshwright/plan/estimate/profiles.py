"""Runtime profiles: what frameworks keep in memory and what they do at the same time.

Facts of each framework, not fitted to anything. Rates that are fitted are in ``calibration.toml``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MemoryRules:
    """What a framework keeps. The defaults are Meshwright's own."""

    master_weights: bool = False
    """16-bit weights with float32 master weights beside them; False: the weights are float32 themselves."""
    gradient_bytes: float = 4.0
    """Bytes of a gradient element that is accumulated, with any second copy of it."""
    fp16_gradient_bytes: float | None = None
    """The same under fp16, where it differs."""
    step_gradient_bytes: float = 0.0
    """Bytes of the optimizer's own copy of its part of the gradients, under fp16."""
    blocks: Literal["eager", "fused", "operators"] = "eager"
    """What blocks keep: every operator's inputs beside a float32 residual stream; what Megatron's fused
    kernels keep; or every operator's inputs in 16 bits."""
    fused_attention: bool = True
    """Scores are never kept; else their softmax is, and its dropout."""
    dropout: bool = False
    """Dropout's masks are kept."""
    selective: Literal["attention", "half", "products"] = "products"
    """What selective recomputation keeps: all but the inside of attention; every second product and
    attention's result; or every product."""
    keeps_gathered: bool = True
    """Inputs gathered for sequence parallelism are kept (DTensor); else they are gathered again."""
    shards_with_gradients: bool = True
    """ZeRO-2 keeps parameters sharded between steps as well (FSDP2 that does not reshard after forward)."""
    pipeline_unsharded: bool = False
    """In a pipeline, ZeRO-3 keeps a stage's parameters gathered, and its gradients whole to the last of the
    micro-batches."""
    logit_bytes: float = 14.0
    """Bytes for each logit when the loss is at its largest; Meshwright's, by chunks, does not read it."""
    compiled_logit_bytes: float | None = None
    """The same where the loss is compiled, if that differs."""
    split_logit_bytes: float = 14.0
    """The same where the vocabulary is split over tp."""
    scratch_gradients: bool = False
    """Products that add to main gradients hand back a 16-bit tensor of each weight's shape, kept for good."""
    vocabulary_multiple: int = 1
    """A rank's part of the vocabulary is padded to a multiple of this."""
    gathers: Literal["block", "matrix"] = "block"
    """What ZeRO-3 gathers at once: a block and those ahead of it, or one matrix (DeepSpeed)."""
    bucket_bytes: float = 0.0
    """Buffers that collectives of ZeRO are copied through, on a rank."""
    stale_boundaries: int = 0
    """Tensors of a stage's boundary that are kept beside each micro-batch in flight."""
    imbalance: float = 1.0
    """Tokens on the fullest rank's experts over an even share, without a capacity."""
    reserve: float = 0.05
    """What the allocator holds beside what is allocated, as a part of it: published 2.8 to 9.3%, mean 5%."""
    context_bytes: float = 1.0e9
    """CUDA's context and NCCL's buffers."""


@dataclass(frozen=True)
class TimeRules:
    """What a framework does at the same time, and how."""

    flash_attention: bool = True
    """Scores never reach memory; else batched products and a softmax over them."""
    selective: Literal["attention", "half", "elementwise"] = "elementwise"
    """What selective recomputation runs again: attention, every second product, or no product at all."""
    dropout: bool = False
    """Masks are drawn and applied."""
    narrow_weight_gradients: bool = True
    """Under fp8 the products that make the gradients of weights are in 8 bits, too."""
    loss_bytes: float = 24.0
    """Bytes that the loss moves for each logit beyond the product itself, forward and backward."""
    reduce_bytes: float = 4.0
    """Bytes of a gradient element on the wire."""
    optimizer_bytes: float = 30.0
    """Bytes that the update moves for each parameter; float32 moments and master weights."""
    overlap_grad_reduce: bool = True
    """Gradients are reduced while the last backward pass goes on."""
    overlap_param_gather: bool = True
    """ZeRO gathers parameters while layers compute."""
    overlap_tp: bool = False
    """Tensor-parallel collectives are cut up and hidden behind the products."""
    hides_tp_backward: bool = False
    """In the backward pass, a tensor-parallel reduction runs beside the product for the weight's gradient."""
    gradient_sum_bytes: float = 6.0
    """Bytes that adding a weight's gradient to its sum moves for each element, beyond the product's own."""
    overlap_p2p: bool = False
    """Stages send and receive while they compute."""
    one_copy_a_node: bool = False
    """A token goes to another node once, however many experts it visits there."""
    balanced_stages: bool = False
    """Layers are assigned to pipeline stages by cost; else evenly, with the head on the last stage."""
    head_in_forward: bool = False
    """The loss computes both gradients of the head in the forward pass."""
    embedding_bytes: float = 0.0
    """Bytes that the embedding's gradient moves for each element of the table, per micro-batch."""
    splits_sends: bool = True
    """Each rank of a tensor-parallel group sends its part of an activation to the next stage."""
    reduces_after_pipeline: bool = False
    """In a pipeline, gradients are reduced when the schedule has ended: nothing hides them."""
    ring_lanes: int = 1
    """Groups of key heads that ring attention sends and computes one after the other."""
    counts_calls: bool = False
    """Every collective call has its latency: gathers and scatters of sequence parallelism, reductions of
    embedding, head and loss, the gradient of a tied embedding, the control all-reduce of a step."""


@dataclass(frozen=True)
class Profile:
    """One framework."""

    name: str
    stacks: tuple[str, ...] = ()
    """Sections of the calibration, the later over the earlier; the name if left out."""
    memory: MemoryRules = MemoryRules()
    time: TimeRules = TimeRules()

    @property
    def calibrations(self) -> tuple[str, ...]:
        """Stacks whose rates it has, the later over the earlier."""
        return self.stacks or (self.name,)


_OLD = TimeRules(
    flash_attention=False,
    selective="attention",
    dropout=True,
    loss_bytes=28.0,
    reduce_bytes=2.0,
    optimizer_bytes=46.0,
    gradient_sum_bytes=10.0,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
)
"""Megatron as of 2020 and 2021: no fused attention, the update in several passes, nothing overlaps."""
_OLD_2022 = dataclasses.replace(_OLD, hides_tp_backward=True, gradient_sum_bytes=4.0)
"""As of 2022: gradients are summed inside the product (half of that traffic is hidden), and reductions of the
backward pass run beside it."""

_CORE = TimeRules(
    selective="attention", loss_bytes=12.0, hides_tp_backward=True, gradient_sum_bytes=4.0, overlap_p2p=True
)
"""Megatron as of 2023 on, with Transformer Engine."""
_BRIDGE = dataclasses.replace(_CORE, overlap_tp=True, one_copy_a_node=True)
"""The recipes of NeMo and Megatron Bridge."""
_MEGATRON_2021 = MemoryRules(
    master_weights=True,
    blocks="fused",
    fused_attention=False,
    dropout=True,
    selective="attention",
    keeps_gathered=False,
    shards_with_gradients=False,
    vocabulary_multiple=128,
)
"""16-bit weights, float32 main gradients, master weights and moments: 18 bytes (Korthikanti et al. 2022)."""
_MEGATRON_CORE = dataclasses.replace(
    _MEGATRON_2021,
    fused_attention=True,
    dropout=False,
    logit_bytes=2.0,
    split_logit_bytes=2.0,
    scratch_gradients=True,
)
"""With Transformer Engine: fused attention and norms, a cross entropy that works in the logits' place."""
_MEGATRON_BRIDGE = dataclasses.replace(_MEGATRON_CORE, gradient_bytes=2.0)
"""Recipes of NeMo and Megatron Bridge sum and reduce gradients in 16 bits (`grad_reduce_in_fp32=False`)."""
_DEEPSPEED = dataclasses.replace(
    _MEGATRON_2021,
    gradient_bytes=6.0,
    fp16_gradient_bytes=2.0,
    step_gradient_bytes=4.0,
    gathers="matrix",
    bucket_bytes=2.0e9,
    stale_boundaries=1,
    context_bytes=2.0e9,
)
"""bf16 has 16-bit gradients and their float32 sum, both whole; fp16 has no sum, but a float32 copy of the
part that is stepped. Buckets for reducing and gathering of 5e8 elements each, its defaults."""
_TORCHTITAN = MemoryRules(
    blocks="operators",
    selective="half",
    pipeline_unsharded=True,
    stale_boundaries=2,
    split_logit_bytes=18.0,
)
"""The loss holds 16-bit logits and three float32 copies of them; torch's parallel loss four. Its pipeline
keeps the results of micro-batches in flight and has a buffer for the gradient of each."""
_TORCHTITAN_2025 = dataclasses.replace(_TORCHTITAN, compiled_logit_bytes=4.0)
"""As of 2025 `compile` covers the loss too: the logits and their gradient in 16 bits, no float32 copies."""
_FSDP = MemoryRules(blocks="operators", shards_with_gradients=False, logit_bytes=4.0, split_logit_bytes=4.0)
"""FSDP1 with llm-foundry's fused cross entropy: the logits and their gradient in 16 bits."""
_TITAN = TimeRules(selective="half", optimizer_bytes=28.0, gradient_sum_bytes=0.0)

_OWN = TimeRules(
    narrow_weight_gradients=False,
    overlap_p2p=True,
    balanced_stages=True,
    head_in_forward=True,
    embedding_bytes=16.0,
    splits_sends=False,
    reduces_after_pipeline=True,
    ring_lanes=8,
    counts_calls=True,
)
"""Meshwright's own: an eager embedding clears its gradient, adds to it and accumulates it."""
_MESHWRIGHT = Profile("meshwright", memory=MemoryRules(imbalance=1.2), time=_OWN)
MESHWRIGHT_COMPILED = dataclasses.replace(
    _MESHWRIGHT,
    stacks=("meshwright", "meshwright-compiled"),
    time=dataclasses.replace(_OWN, loss_bytes=6.0, gradient_sum_bytes=2.0, embedding_bytes=4.0),
)
"""The same where blocks are compiled on GPUs, or are our own kernels: the loss reads 16-bit logits twice and
writes their gradient once, products write gradients of weights in float32, and attention is cuDNN's."""


def compiled_profile(profile: Profile, narrow_weight_gradients: bool) -> Profile:
    """The profile of compiled blocks on GPUs, where ours has one of its own.

    Args:
        profile: Of the framework.
        narrow_weight_gradients: Whether, under fp8, gradients of weights are products of 8 bits as well.
    """
    if profile.name != "meshwright":
        return profile
    time = dataclasses.replace(MESHWRIGHT_COMPILED.time, narrow_weight_gradients=narrow_weight_gradients)
    return dataclasses.replace(MESHWRIGHT_COMPILED, time=time)


PROFILES = {
    profile.name: profile
    for profile in (
        _MESHWRIGHT,
        Profile("megatron-lm", memory=_MEGATRON_2021, time=_OLD),
        Profile(
            "megatron-lm-2022", ("megatron-lm", "megatron-lm-2022"), memory=_MEGATRON_2021, time=_OLD_2022
        ),
        Profile("megatron-core", memory=_MEGATRON_CORE, time=_CORE),
        Profile("megatron-bridge", memory=_MEGATRON_BRIDGE, time=_BRIDGE),
        Profile(
            "megatron-bridge-26.06",
            ("megatron-bridge", "megatron-bridge-26.06"),
            memory=_MEGATRON_BRIDGE,
            time=_BRIDGE,
        ),
        Profile("megatron-deepspeed", memory=_DEEPSPEED, time=_OLD),
        Profile("torchtitan", memory=_TORCHTITAN, time=_TITAN),
        Profile("torchtitan-2025", ("torchtitan", "torchtitan-2025"), memory=_TORCHTITAN_2025, time=_TITAN),
        Profile(
            "composer-fsdp",
            memory=_FSDP,
            time=TimeRules(reduce_bytes=2.0, optimizer_bytes=28.0, gradient_sum_bytes=0.0),
        ),
        Profile(
            "deepspeed-zero",
            memory=_DEEPSPEED,
            time=TimeRules(flash_attention=False, dropout=True, reduce_bytes=2.0, gradient_sum_bytes=0.0),
        ),
    )
}
"""By name. `megatron-lm` is Megatron as of 2020 and 2021, `megatron-core` as of 2023, `megatron-bridge` the
same with the recipes of NeMo and Megatron Bridge, which overlap more; their release 26.06 made layers of
experts faster."""
