"""How a job's step executes: the block backend and what follows from it.

The block backend is resolved here once. Other code asks this module and does not read the ``[train]`` keys.
"""

from __future__ import annotations

from typing import Literal

from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

BlockBackend = Literal["eager", "compile", "triton"]
Transport = Literal["none", "gloo", "shared_memory", "nccl"]

LOW_PRECISIONS = ("bf16", "fp16", "fp8")
"""Precisions whose GEMMs read 16 bits or less."""
MIN_ROPE_HEAD_SIZE = 16
"""Smallest head size of the Triton RoPE kernel, which also needs a power of two."""


def resolve_block_backend(job: Job) -> BlockBackend:
    """The backend that computes the transformer blocks.

    ``triton`` falls back to ``eager`` on a CPU, and to ``compile`` where the model or the layout rules Triton
    blocks out (``layout.no_effect`` reports both).

    Args:
        job: With its layout settled.
    """
    backend = wanted_block_backend(job)
    if backend != "triton" or find_triton_obstacle(job) is None:
        return backend
    return "compile" if job.cluster.device == "cuda" else "eager"


def wanted_block_backend(job: Job) -> BlockBackend:
    """``train.block_backend``, or its default, which does not depend on the layout.

    The default is ``triton`` for a dense decoder in 16 bits or fp8 on GPUs, ``eager`` elsewhere. On CPUs
    compiling takes longer than a short run. The shapes of experts' inputs change with every batch.
    """
    train, model = job.train, job.model
    if train.block_backend is not None:
        return train.block_backend
    dense = isinstance(model, DecoderModel) and model.num_experts is None
    ours = train.runtime == "meshwright" and job.cluster.device == "cuda"
    return "triton" if ours and dense and train.precision in LOW_PRECISIONS else "eager"


def explain_block_backend(job: Job) -> list[str]:
    """Explain the default backend, or name the blocks that a chosen backend does not compile.

    Empty if there is nothing to explain, and for jobs that cannot choose a backend.

    Args:
        job: With its layout settled.
    """
    train, missing = job.train, find_triton_obstacle(job)
    if not isinstance(job.model, DecoderModel) or train.runtime != "meshwright":
        return []
    if train.block_backend is not None:
        checkpointed = job.model.num_experts is not None and job.layout.recompute != "none"
        if resolve_block_backend(job) != "compile" or not checkpointed:
            return []
        eager = f"blocks with experts run eagerly under layout.recompute={job.layout.recompute}"
        return [f"train.block_backend=compile: {eager}; final norm, loss and optimizer are compiled"]
    reason = "the fastest backend" if missing is None else f"triton needs {missing}"
    return [f"train.block_backend={resolve_block_backend(job)} by default: {reason}"]


def resolve_transport(job: Job) -> Transport:
    """What runs the collectives of ranks on one node; ``none`` for one rank.

    Args:
        job: With its layout settled.
    """
    return "none" if job.layout.world_size == 1 else resolve_node_transport(job)


def resolve_node_transport(job: Job) -> Transport:
    """What would run the collectives of several ranks on one node, in any layout."""
    if job.cluster.device == "cuda":
        return "nccl"
    alone = job.cluster.nodes > 1 and job.cluster.devices_per_node == 1
    return "gloo" if job.train.transport == "gloo" or alone else "shared_memory"


def explain_transport(job: Job) -> list[str]:
    """What runs the collectives and why, as a sentence; empty where there is no choice.

    Args:
        job: With its layout settled.
    """
    transport, train = resolve_transport(job), job.train
    if transport in ("none", "nccl") or train.runtime != "meshwright" or train.transport != "auto":
        return []
    if transport == "gloo":
        return ["train.transport=gloo: every node has one rank"]
    return ["train.transport=shared_memory by default: ranks of one node share memory; gloo between nodes"]


def find_triton_obstacle(job: Job) -> str | None:
    """The first requirement of the Triton blocks that the job does not meet."""
    model, layout, train = job.model, job.layout, job.train
    if job.cluster.device != "cuda":
        return "a GPU"
    if train.compile_backend != "inductor":
        return "train.compile_backend=inductor"
    if train.precision not in LOW_PRECISIONS:
        return "train.precision=bf16, fp16 or fp8"
    if not isinstance(model, DecoderModel) or model.num_experts is not None:
        return "a dense decoder"
    if (model.norm, model.positions, model.activation) != ("rms", "rope", "swiglu"):
        return "a decoder with RMS norms, RoPE and SwiGLU"
    if model.attention_bias or model.ffn_bias or model.attention != "heads" or model.window is not None:
        return "plain attention heads without biases or a window"
    if model.head_size < MIN_ROPE_HEAD_SIZE or model.head_size & (model.head_size - 1):
        return f"a head size that is a power of two, at least {MIN_ROPE_HEAD_SIZE}"
    if layout.pp * layout.tp * layout.cp > 1 or layout.zero >= 2:
        return "unsharded weights and sequences (pp, tp and cp of 1, zero below 2)"
    return None


def uses_bf16_weight_copies(job: Job) -> bool:
    """Whether the GEMMs of compiled or Triton blocks read 16-bit weight copies that persist across steps.

    ZeRO-2 and 3 gather weights in 16 bits for each pass instead. Pipeline stages and experts do not have
    copies yet.
    """
    layout, model = job.layout, job.model
    unsharded = layout.zero < 2 and layout.pp == 1
    dense = isinstance(model, DecoderModel) and model.num_experts is None
    return not uses_eager_blocks(job) and job.train.precision in LOW_PRECISIONS and unsharded and dense


def uses_eager_blocks(job: Job) -> bool:
    """Whether the blocks run as plain PyTorch modules."""
    return resolve_block_backend(job) == "eager"


def uses_triton_blocks(job: Job) -> bool:
    """Whether the blocks are Triton blocks."""
    return resolve_block_backend(job) == "triton"


def uses_torch_compile(job: Job) -> bool:
    """Whether torch.compile compiles the blocks."""
    return resolve_block_backend(job) == "compile"


def uses_fused_kernels(job: Job) -> bool:
    """Whether loss and optimizer may run as fused GPU kernels: with compiled or Triton blocks."""
    fused = not uses_eager_blocks(job) and job.train.compile_backend == "inductor"
    return fused and job.cluster.device == "cuda"


def autotunes_gemms(job: Job) -> bool:
    """Whether the 16-bit GEMMs of the Triton blocks are autotuned before training starts."""
    return job.train.gemm_autotune and uses_triton_blocks(job)


def uses_fused_adamw(job: Job) -> bool:
    """Whether AdamW runs as one Triton kernel: with compiled or Triton blocks on a GPU.

    Not with a loss scale (a step may be skipped), with gradient noise (added after clipping) or with an
    offloaded optimizer.
    """
    train = job.train
    plain = train.precision != "fp16" and not train.grad_noise and job.layout.offload == "none"
    return uses_fused_kernels(job) and plain and train.optimizer == "adamw"


def keeps_bf16_grads(job: Job) -> bool:
    """Whether the gradients of the blocks' linears stay in bf16 from the GEMM to the optimizer step.

    Not where other ranks or micro-batches are added to them: each sum would round again.
    """
    layout, batch = job.layout, job.train.global_batch
    alone = layout.world_size == 1 and layout.micro_batch is not None and layout.micro_batch >= batch
    return job.train.grad_dtype == "bf16" and alone and uses_triton_blocks(job) and uses_fused_adamw(job)
