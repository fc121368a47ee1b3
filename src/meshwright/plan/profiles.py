"""Runtime profiles: what each framework keeps in memory, and which communication it overlaps.

Most settings are facts of each framework's code. Some were chosen by hand on published runs
(docs/validate.md, "Fit"). The fitted rates are in ``calibration.toml``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

SelectiveRecompute = Literal["attention", "half_gemms", "elementwise"]
"""What selective activation checkpointing recomputes: the inside of attention; every second GEMM and all
elementwise kernels; or elementwise kernels alone."""


@dataclass(frozen=True)
class MemoryRules:
    """Memory rules of a framework. The defaults are Meshwright's."""

    master_weights: bool = False
    """16-bit weights with float32 master weights; False: the weights are float32."""
    master_bytes: float = 4.0
    """Bytes of a master weight, where there are any; 0: the optimizer updates 16-bit weights."""
    moment_bytes: float = 4.0
    """Bytes of each of Adam's two moments."""
    gradient_bytes: float = 4.0
    """Bytes of an accumulated gradient element, with any second copy."""
    fp16_gradient_bytes: float | None = None
    """The same under fp16, if it differs."""
    step_gradient_bytes: float = 0.0
    """Bytes of the optimizer's copy of its gradient shard, under fp16."""
    blocks: Literal["eager", "fused", "operators"] = "eager"
    """What blocks save: every operator's inputs and a float32 residual stream; what Megatron's fused kernels
    save; or every operator's inputs in 16 bits."""
    fused_attention: bool = True
    """Attention scores are not saved; otherwise their softmax is, and its dropout."""
    dropout: bool = False
    """Dropout masks are saved."""
    selective_recomputes: SelectiveRecompute = "elementwise"
    """What selective activation checkpointing recomputes."""
    recomputed_modules: tuple[str, ...] = ()
    """What selective activation checkpointing recomputes instead of attention: up-projections of latent
    attention, outputs of norms, outputs of activation functions (Megatron's `recompute_modules`)."""
    gates_in_fp8: bool = False
    """Under fp8 the inputs of a gated activation function are saved in fp8."""
    keeps_gathered: bool = True
    """Inputs all-gathered for sequence parallelism are saved (DTensor); otherwise backward gathers them
    again."""
    zero2_shards_parameters: bool = True
    """ZeRO-2 shards parameters between steps as well (FSDP2 that does not reshard after the forward pass)."""
    pipeline_unsharded: bool = False
    """In a pipeline, ZeRO-3 keeps a stage's parameters gathered, and its gradients unsharded until the last
    micro-batch."""
    logit_bytes: float = 14.0
    """Bytes per logit at the peak of the loss; not used for Meshwright's chunked loss."""
    compiled_logit_bytes: float | None = None
    """The same with a compiled loss, if it differs."""
    split_logit_bytes: float = 14.0
    """The same with the vocabulary sharded over tp."""
    gathers_logits: bool = False
    """The loss all-gathers the logits of all tp ranks; otherwise each rank keeps its part."""
    scratch_gradients: bool = False
    """GEMMs that accumulate into main gradients return a 16-bit tensor of each weight's shape, never
    freed."""
    vocabulary_multiple: int = 1
    """A rank's vocabulary shard is padded to a multiple of this."""
    gathers: Literal["block", "matrix"] = "block"
    """The unit that ZeRO-3 gathers: a block and the prefetched ones, or one weight (DeepSpeed)."""
    bucket_bytes: float = 0.0
    """Bucket buffers of ZeRO collectives, per rank."""
    offloads_activations: bool = False
    """Saved activations are offloaded to the CPU, except those of two blocks. CPU memory is not checked."""
    boundary_tensors_per_micro_batch: int = 0
    """Inputs and outputs of stages, or gradient buffers for them, kept per in-flight micro-batch."""
    imbalance: float = 1.0
    """Tokens of the most loaded rank's experts over an even share, without a capacity."""
    reserve: float = 0.05
    """Memory that the caching allocator reserves beyond live tensors, as a fraction: published 2.8 to 9.3%,
    mean 5%."""
    context_bytes: float = 1.0e9
    """CUDA context and NCCL buffers."""


@dataclass(frozen=True)
class TimeRules:
    """Which communication a framework overlaps, and which kernels it runs."""

    flash_attention: bool = True
    """Fused attention; otherwise batched GEMMs and a softmax in memory."""
    attention_kernel: Literal["native", "flash-2", "flash-1"] = "native"
    """Fused attention of the device's generation (cuDNN, FlashAttention-3; on Ampere FlashAttention-2),
    FlashAttention-2, or the first FlashAttention and Triton's."""
    skips_masked: bool = True
    """Fused attention skips masked blocks; a kernel that reads the mask as a tensor computes them."""
    fused_norms: bool = True
    """A norm is one kernel; otherwise about eight, with a float32 copy."""
    fused_rope: bool = True
    """RoPE is one kernel; otherwise negate, concatenate, two multiplications and an addition."""
    fused_activation: bool = True
    """SwiGLU is one kernel; otherwise two."""
    cpu_launch_ratio: float = 1.0
    """CPU time of launching a block's kernels, over the rate `cpu_launch_s`. Megatron as of 2021 launches 2.6
    times as many kernels as fused ones need; Transformer Engine's modules are slow themselves."""
    quantized_launch_ratio: float = 1.0
    """Factor on CPU launch time under fp8 or fp4: casts and scales."""
    cuda_graphs: bool = False
    """Blocks are replayed from CUDA graphs, without launches by the CPU."""
    blocking_launches: bool = False
    """The CPU waits for each kernel before it launches the next (`CUDA_LAUNCH_BLOCKING=1`)."""
    step_s: float = 0.02
    """Step overhead outside the blocks: data, logging, clipping, launches of the optimizer."""
    selective_recomputes: SelectiveRecompute = "elementwise"
    """What selective activation checkpointing recomputes."""
    dropout: bool = False
    """Dropout masks are drawn and applied."""
    fp8_weight_grads: bool = True
    """Under fp8 the GEMMs of weight gradients run in fp8, too."""
    fused_casts: bool = False
    """Norms and activations write their fp8 output themselves; other casts are one pass each."""
    elementwise_kernels: Literal["typical", "eager", "compiled", "triton"] = "typical"
    """Elementwise kernels of a block: one per norm, addition and activation; those of Meshwright's eager
    blocks; those that torch.compile makes of them; or its Triton kernels, each counted
    (``plan.time.triton_block_bytes``), in layouts that allow them, and compiled ones in others."""
    loss_bytes: float = 24.0
    """Bytes that the loss moves per logit beyond the GEMM itself, forward and backward."""
    reduce_bytes: float = 4.0
    """Bytes of a gradient element on the wire."""
    optimizer_bytes: float = 30.0
    """Bytes that the optimizer moves per parameter; float32 moments and master weights."""
    streams_optimizer_state: bool = False
    """Offloaded state is copied to the device for the update and back; otherwise the CPU updates."""
    cpu_adam_share: float = 0.2
    """Bytes per second of a rank's CPU Adam, over those of its CPU link. Published steps with DeepSpeed imply
    0.06 (8 A800s), 0.2 (4 RTX 4090s) and 0.7 (8 A100s): it depends on the threads per rank, which none
    states. This is their geometric mean; with torch's fused one 0.5 (torchtune, Lambda's 405B)."""
    clip_bytes: float = 0.0
    """Bytes that the gradient norm and clipping move per parameter on a GPU, in passes of their own."""
    overlap_grad_reduce: bool = True
    """Gradient reduction overlaps the last backward pass."""
    overlap_param_gather: bool = True
    """ZeRO all-gathers overlap compute."""
    overlap_tp: bool = False
    """Tensor-parallel collectives are chunked and overlap the GEMMs."""
    hides_tp_backward: bool = False
    """In backward, a tensor-parallel reduction overlaps the weight-gradient GEMM."""
    weight_grad_bytes: float = 6.0
    """Bytes per weight that every micro-batch moves for weight gradients beyond the GEMM: casts and sums."""
    fp16_weight_grad_bytes: float | None = None
    """The same under fp16, if it differs."""
    sums_bias_grads: bool = False
    """Gradients of biases are kernels of their own, not part of the weight-gradient GEMM; in compiled blocks
    adding the biases of queries, keys and values is one, too."""
    accumulate_bytes: float = 0.0
    """Bytes per weight that only micro-batches after the first move, to add their gradients to the earlier
    ones; 0 if the GEMM does it."""
    overlap_p2p: bool = False
    """Pipeline sends and receives overlap compute."""
    one_copy_per_node: bool = True
    """A token is sent to each node once, even if several of its experts are there."""
    max_nodes_per_token: float = float("inf")
    """Nodes that the experts of one token are on, at most: node-limited routing."""
    unfused_routing: bool = False
    """The router is a float32 GEMM, and the outputs of a token's experts are summed by a batched GEMM."""
    overlap_ep: bool = False
    """Expert dispatch and combine overlap the compute of another micro-batch (DualPipe, DeepEP)."""
    fp8_dispatch: bool = False
    """Tokens are dispatched in fp8; they are combined in 16 bits."""
    balances_stages_by_time: bool = False
    """Layers are assigned to pipeline stages by cost; else evenly, with the head on the last stage."""
    head_in_forward: bool = False
    """The loss computes both gradients of the head in forward."""
    embedding_bytes: float = 0.0
    """Bytes that the embedding's gradient moves per element of the table and micro-batch."""
    balances_stages_by_parameters: bool = False
    """Embedding, layers and head are assigned to pipeline stages by parameters, not by time."""
    checkpoints_head: bool = False
    """Full activation checkpointing recomputes the head, too."""
    reduces_embedding_and_head: bool = False
    """Tensor-parallel collectives of embedding and head are counted: sum of the rows, all-gather of logits,
    gradient of the head's input."""
    separate_gate: bool = False
    """Gate and up projections are two column-parallel layers. Without sequence parallelism each all-reduces
    the gradient of its input."""
    splits_sends: bool = True
    """Each rank of a tensor-parallel group sends its shard of an activation to the next stage."""
    exposes_pipeline_reduction: bool = False
    """In a pipeline, the estimate counts no overlap of gradient reduction with the last backward passes."""
    ring_head_chunks: int = 1
    """Groups of key heads that ring attention sends and computes one after another."""
    gather_calls: float = 1.0
    """All-gathers per block of ZeRO-3."""
    gather_share: float = 1.0
    """Bandwidth of ZeRO-3's all-gathers, over that of large ones."""
    prefetches_parameters: bool = True
    """ZeRO-3 gathers the parameters of the next block while a block computes, as FSDP does."""
    copies_shards: bool = False
    """ZeRO-3 copies gathered parameters out of a buffer, and gradients into one, as FSDP2 does on GPUs."""
    bucket_parameters: float = 40e6
    """Parameters per reduction and all-gather of ZeRO-0 to 2, at least; Megatron's default."""
    bucket_parameters_per_rank: float = 0.0
    """The same per data-parallel rank: Megatron grows its buckets, so that latency does not dominate."""
    reduce_scatters_each_micro_batch: bool = False
    """ZeRO-2 reduce-scatters the gradients of every micro-batch."""
    all_reduces_shards: bool = False
    """ZeRO-1 and 2 all-reduce gradients and keep a shard of the sums."""
    counts_every_collective: bool = False
    """Every collective call has its latency: gathers and scatters of sequence parallelism, reductions of
    embedding, head and loss, the gradient of a tied embedding, the control all-reduce of a step."""


@dataclass(frozen=True)
class Profile:
    """One framework."""

    name: str
    memory: MemoryRules = MemoryRules()
    time: TimeRules = TimeRules()


_MEGATRON_2021_TIME = TimeRules(
    flash_attention=False,
    selective_recomputes="attention",
    dropout=True,
    cpu_launch_ratio=2.6,
    step_s=0.005,
    loss_bytes=28.0,
    reduce_bytes=2.0,
    optimizer_bytes=46.0,
    weight_grad_bytes=10.0,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
)
"""Megatron as of 2020 and 2021: no fused attention, an optimizer step in several passes, no overlap. The CPU
launches attention as about ten kernels, and switches the random state for each dropout and checkpoint."""
_MEGATRON_DEEPSPEED_TIME = dataclasses.replace(
    _MEGATRON_2021_TIME, weight_grad_bytes=18.0, fp16_weight_grad_bytes=6.0
)
"""With DeepSpeed as of 2022. Under fp16 autograd sums the gradients of all micro-batches (`stage_1_and_2.py`
without hooks: ZeRO-1, no `overlap_comm`); bf16 ones are cast to float32, then added (`BF16_Optimizer`,
`update_hp_grads`)."""
_MEGATRON_2022_TIME = dataclasses.replace(_MEGATRON_2021_TIME, hides_tp_backward=True, weight_grad_bytes=4.0)
"""As of 2022: gradients are accumulated inside the GEMM (half of that traffic is hidden), and backward
reductions overlap it."""

_MEGATRON_CORE_TIME = TimeRules(
    cpu_launch_ratio=4.5,
    quantized_launch_ratio=1.5,
    bucket_parameters_per_rank=1e6,
    selective_recomputes="attention",
    loss_bytes=28.0,
    hides_tp_backward=True,
    weight_grad_bytes=4.0,
    overlap_p2p=True,
)
"""Megatron from 2023 on, with Transformer Engine. Its layers take 4.2 to 4.7 ms at least, forward and
backward together: 8B on 8 and 16 H100s at tp=4 and at tp=8, Megatron's own tables at tp=1 and 8; in fp8
6.6."""
_MEGATRON_BRIDGE_TIME = dataclasses.replace(_MEGATRON_CORE_TIME, overlap_tp=True, reduce_bytes=2.0)
"""The recipes of NeMo and Megatron Bridge; gradients are reduced in 16 bits (`grad_reduce_in_fp32=False`)."""
_MEGATRON_BRIDGE_2026_TIME = dataclasses.replace(_MEGATRON_BRIDGE_TIME, overlap_ep=True, cuda_graphs=True)
"""As of release 26.06, whose recipes set `overlap_moe_expert_parallel_comm` and `delay_wgrad_compute`, and
use CUDA graphs: of whole iterations, or of attention and router. No launches are counted in either case."""
_HAI_LLM_TIME = dataclasses.replace(
    _MEGATRON_CORE_TIME,
    cpu_launch_ratio=1.0,
    quantized_launch_ratio=1.0,
    overlap_ep=True,
    fp8_dispatch=True,
    max_nodes_per_token=4,
)
"""DeepSeek-V3's framework (arXiv 2412.19437, sections 3.2 and 3.3): DualPipe hides dispatch, which is in fp8
and to at most 4 nodes."""
_MEGATRON_2021_MEMORY = MemoryRules(
    master_weights=True,
    blocks="fused",
    fused_attention=False,
    dropout=True,
    selective_recomputes="attention",
    keeps_gathered=False,
    zero2_shards_parameters=False,
    vocabulary_multiple=128,
)
"""16-bit weights, float32 main gradients, master weights and moments: 18 bytes (Korthikanti et al. 2022)."""
_MEGATRON_CORE_MEMORY = dataclasses.replace(
    _MEGATRON_2021_MEMORY,
    fused_attention=True,
    dropout=False,
    logit_bytes=2.0,
    split_logit_bytes=2.0,
    scratch_gradients=True,
)
"""With Transformer Engine: fused attention and norms, an in-place cross entropy."""
_HAI_LLM_MEMORY = dataclasses.replace(
    _MEGATRON_CORE_MEMORY,
    moment_bytes=2.0,
    recomputed_modules=("mla_up_proj", "layernorm", "act"),
    gates_in_fp8=True,
)
"""bf16 moments; norms, up-projections and SwiGLU are recomputed; SwiGLU's inputs are saved in fp8."""
_MEGATRON_BRIDGE_MEMORY = dataclasses.replace(
    _MEGATRON_CORE_MEMORY, gradient_bytes=2.0, logit_bytes=16.0, split_logit_bytes=16.0
)
"""Recipes of NeMo and Megatron Bridge sum and reduce gradients in 16 bits (`grad_reduce_in_fp32=False`).
Their cross entropy (`cross_entropy_fusion_impl="native"`) holds the logits and their gradient in 16 bits, and
three float32 tensors: a copy, the exponentials, the softmax (`fused_cross_entropy.py`)."""
_DEEPSPEED_MEMORY = dataclasses.replace(
    _MEGATRON_2021_MEMORY,
    gradient_bytes=6.0,
    fp16_gradient_bytes=2.0,
    step_gradient_bytes=4.0,
    gathers="matrix",
    bucket_bytes=2.0e9,
    boundary_tensors_per_micro_batch=1,
    context_bytes=2.0e9,
)
"""bf16 has 16-bit gradients and their float32 sum, both unsharded; fp16 has no sum, but a float32 copy of the
shard that the optimizer updates. Buckets for reducing and gathering of 5e8 elements each, its defaults."""
_TORCHTITAN_MEMORY = MemoryRules(
    blocks="operators",
    selective_recomputes="half_gemms",
    pipeline_unsharded=True,
    boundary_tensors_per_micro_batch=2,
    split_logit_bytes=18.0,
)
"""The loss holds 16-bit logits and three float32 copies; torch's parallel loss four. Its pipeline keeps the
outputs of in-flight micro-batches and a gradient buffer for each."""
_TORCHTITAN_2025_MEMORY = dataclasses.replace(_TORCHTITAN_MEMORY, compiled_logit_bytes=4.0)
"""As of 2025 `compile` covers the loss too: the logits and their gradient in 16 bits, no float32 copies."""
_FSDP_MEMORY = MemoryRules(
    blocks="operators", zero2_shards_parameters=False, logit_bytes=4.0, split_logit_bytes=4.0
)
"""FSDP1 with llm-foundry's fused cross entropy: the logits and their gradient in 16 bits."""
_EAGER_TIME = TimeRules(
    attention_kernel="flash-2",
    fused_norms=False,
    fused_rope=False,
    fused_activation=False,
    cpu_launch_ratio=2.0,
    weight_grad_bytes=0.0,
)
"""Blocks of plain PyTorch modules around `scaled_dot_product_attention` or flash-attn 2."""
_TORCHTITAN_TIME = dataclasses.replace(
    _EAGER_TIME,
    selective_recomputes="half_gemms",
    optimizer_bytes=28.0,
    copies_shards=True,
    cpu_adam_share=0.5,
)
_TORCHTITAN_2025_TIME = dataclasses.replace(_TORCHTITAN_TIME, attention_kernel="native")
"""As of 2025 torch prefers cuDNN's attention on Hopper."""
_HUGGING_FACE_TIME = dataclasses.replace(
    _EAGER_TIME,
    attention_kernel="flash-1",
    skips_masked=False,
    overlap_grad_reduce=False,
    loss_bytes=40.0,
    reduce_bytes=2.0,
    weight_grad_bytes=6.0,
    reduce_scatters_each_micro_batch=True,
    all_reduces_shards=True,
)
"""transformers: LlamaRMSNorm and rotate_half as written, logits cast to float32 (modeling_llama.py); with
an attention mask, torch's SDPA takes its memory-efficient kernel, which computes masked blocks too.
DeepSpeed's `overlap_comm` is off by default in stages 1 and 2, whose gradients it all-reduces (since 0.9,
`use_multi_rank_bucket_allreduce`)."""
_HUGGING_FACE_MEMORY = MemoryRules(
    master_weights=True,
    gradient_bytes=2.0,
    blocks="operators",
    zero2_shards_parameters=False,
    logit_bytes=14.0,
    split_logit_bytes=14.0,
)
"""DeepSpeed or FSDP under the Trainer: 16-bit weights and gradients, float32 optimizer state."""
_MEGATRON_LIKE_TIME = dataclasses.replace(
    _MEGATRON_CORE_TIME,
    attention_kernel="flash-2",
    fused_rope=False,
    fused_activation=False,
    cpu_launch_ratio=1.5,
    quantized_launch_ratio=1.0,
    loss_bytes=28.0,
    hides_tp_backward=False,
    weight_grad_bytes=6.0,
    overlap_p2p=False,
    overlap_param_gather=False,
    reduce_bytes=2.0,
    bucket_parameters=12.5e6,
    bucket_parameters_per_rank=0.0,
)
"""Other frameworks with Megatron's axes: flash-attn 2 and a fused norm, the rest plain PyTorch; blocking
tensor-parallel collectives."""
_MEGATRON_LIKE_MEMORY = dataclasses.replace(
    _MEGATRON_CORE_MEMORY,
    gradient_bytes=2.0,
    scratch_gradients=False,
    blocks="operators",
    logit_bytes=16.0,
    split_logit_bytes=16.0,
    gathers_logits=True,
)
"""16-bit gradients; the loss holds the gathered logits in 16 bits twice and three float32 copies."""

_ALEPH_ALPHA_TIME = dataclasses.replace(
    _MEGATRON_LIKE_TIME,
    cpu_launch_ratio=2.6,
    loss_bytes=40.0,
    reduce_bytes=4.0,
    overlap_grad_reduce=False,
    all_reduces_shards=True,
    bucket_parameters=5e8,
    splits_sends=False,
    balances_stages_by_parameters=True,
    checkpoints_head=True,
    reduces_embedding_and_head=True,
    separate_gate=True,
)
"""Aleph Alpha's `scaling` (GitHub, 0.2.0). DeepSpeed's schedule, whole activations sent by every rank, and
stages balanced by parameters (`pipeline_schedule/train.py`, `communicator.py`, `pipe_partition_method` in
`examples/transformer_example/config.yml`). Every column-parallel layer all-reduces the gradient of its input
(`column_parallel_linear.py`); SwiGLU has two (`mlp.py`). The head gathers the logits (`lm_head.py`), and each
rank computes the whole loss in float32, with its accuracy (`cross_entropy.py`): cast 6 bytes per logit,
log-softmax 8, its gradient 16, argmax 4, cast 6. Activation checkpointing covers the head, too
(`parallel_module.py`). After the last micro-batch gradients are all-reduced in float32, in buckets of 5e8,
although ZeRO-1 needs a shard (`optimizer.py`, `allreduce.py`). A block has about 43 kernels, and switches the
random state as old Megatron does (`layer.py`, `rng_tracker.py`)."""
_ALEPH_ALPHA_MEMORY = dataclasses.replace(_MEGATRON_LIKE_MEMORY, keeps_gathered=True)
"""Norms gather their output for sequence parallelism, which autograd saves (`norm/rms_norm.py`)."""

_MESHWRIGHT_TIME = TimeRules(
    streams_optimizer_state=True,
    cpu_adam_share=0.5,
    copies_shards=True,
    one_copy_per_node=False,
    unfused_routing=True,
    sums_bias_grads=True,
    accumulate_bytes=12.0,
    weight_grad_bytes=12.0,
    elementwise_kernels="eager",
    clip_bytes=12.0,
    cpu_launch_ratio=2.0,
    fp8_weight_grads=False,
    overlap_p2p=True,
    balances_stages_by_time=True,
    head_in_forward=True,
    embedding_bytes=16.0,
    splits_sends=False,
    exposes_pipeline_reduction=True,
    ring_head_chunks=8,
    counts_every_collective=True,
)
"""Meshwright: an eager embedding zeroes its gradient, adds to it and accumulates it."""
_MESHWRIGHT = Profile("meshwright", memory=MemoryRules(imbalance=1.2), time=_MESHWRIGHT_TIME)
MESHWRIGHT_COMPILED = dataclasses.replace(
    _MESHWRIGHT,
    time=dataclasses.replace(
        _MESHWRIGHT_TIME,
        fused_casts=True,
        clip_bytes=0.0,
        elementwise_kernels="compiled",
        step_s=2e-3,
        loss_bytes=6.0,
        weight_grad_bytes=2.0,
        embedding_bytes=4.0,
    ),
)
"""The same with compiled or Triton blocks on GPUs: the loss reads 16-bit logits twice and writes their
gradient once, GEMMs write float32 weight gradients, and attention is cuDNN's."""


def compiled_profile(profile: Profile, triton: bool, experts: bool, fp8_weight_grads: bool) -> Profile:
    """The profile of compiled or Triton blocks on GPUs; only Meshwright has one.

    Args:
        profile: Profile of the framework.
        triton: Whether blocks are Triton kernels.
        experts: Whether blocks have experts. Their kernels are counted as eager: under activation
            checkpointing torch.compile leaves these blocks alone.
        fp8_weight_grads: Whether, under fp8, the GEMMs of weight gradients run in fp8.
    """
    if profile.name != "meshwright":
        return profile
    kernels: Literal["compiled", "triton"] = "triton" if triton else "compiled"
    time = dataclasses.replace(
        MESHWRIGHT_COMPILED.time, elementwise_kernels=kernels, fp8_weight_grads=fp8_weight_grads
    )
    if experts:
        eager = _MESHWRIGHT_TIME
        time = dataclasses.replace(
            time,
            elementwise_kernels=eager.elementwise_kernels,
            weight_grad_bytes=eager.weight_grad_bytes,
            fused_casts=False,
        )
    return dataclasses.replace(MESHWRIGHT_COMPILED, time=time)


PROFILES = {
    profile.name: profile
    for profile in (
        _MESHWRIGHT,
        Profile("megatron-lm", _MEGATRON_2021_MEMORY, _MEGATRON_2021_TIME),
        Profile("megatron-lm-2022", _MEGATRON_2021_MEMORY, _MEGATRON_2022_TIME),
        Profile("megatron-core", _MEGATRON_CORE_MEMORY, _MEGATRON_CORE_TIME),
        Profile("megatron-bridge", _MEGATRON_BRIDGE_MEMORY, _MEGATRON_BRIDGE_TIME),
        Profile("megatron-bridge-2026", _MEGATRON_BRIDGE_MEMORY, _MEGATRON_BRIDGE_2026_TIME),
        Profile("hai-llm", _HAI_LLM_MEMORY, _HAI_LLM_TIME),
        Profile("megatron-like", _MEGATRON_LIKE_MEMORY, _MEGATRON_LIKE_TIME),
        Profile("aleph-alpha-scaling", _ALEPH_ALPHA_MEMORY, _ALEPH_ALPHA_TIME),
        Profile("megatron-deepspeed", _DEEPSPEED_MEMORY, _MEGATRON_DEEPSPEED_TIME),
        Profile("torchtitan", _TORCHTITAN_MEMORY, _TORCHTITAN_TIME),
        Profile("torchtitan-2025", _TORCHTITAN_2025_MEMORY, _TORCHTITAN_2025_TIME),
        Profile("huggingface", _HUGGING_FACE_MEMORY, _HUGGING_FACE_TIME),
        Profile(
            "composer-fsdp",
            _FSDP_MEMORY,
            TimeRules(
                attention_kernel="flash-1", reduce_bytes=2.0, optimizer_bytes=28.0, weight_grad_bytes=0.0
            ),
        ),
        Profile(
            "deepspeed-zero",
            _DEEPSPEED_MEMORY,
            TimeRules(
                flash_attention=False,
                dropout=True,
                reduce_bytes=2.0,
                weight_grad_bytes=0.0,
                gather_calls=4.0,
                gather_share=0.125,
                prefetches_parameters=False,
                reduce_scatters_each_micro_batch=True,
            ),
        ),
    )
}
"""By name. `megatron-lm` is Megatron as of 2020 and 2021, `megatron-core` as of 2023, `megatron-bridge` the
same with the recipes of NeMo and Megatron Bridge, which overlap more (`-2026`: expert dispatch, too);
`hai-llm` is DeepSeek-V3's, `aleph-alpha-scaling` Aleph Alpha's; `megatron-like` is any other framework with
Megatron's axes; `huggingface` is transformers with DeepSpeed or FSDP."""
