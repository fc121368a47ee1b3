"""Which jobs' compiled blocks read copies, are computed by our own kernels, and what follows from that."""

from __future__ import annotations

from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

LOW_PRECISIONS = ("bf16", "fp16", "fp8")
"""Those whose products read 16 bits or less."""
LEAST_TURNED = 16
"""Head size that the kernel of rotations takes; it is a power of two."""


def keeps_copies(job: Job) -> bool:
    """Whether compiled products read copies in 16 bits that live from step to step.

    Not where weights are gathered in 16 bits for each pass (ZeRO-2 and 3), and not yet in stages of a
    pipeline and beside experts.
    """
    layout, model = job.layout, job.model
    whole = layout.zero < 2 and layout.pp == 1
    dense = isinstance(model, DecoderModel) and model.num_experts is None
    return job.train.compile and job.train.precision in LOW_PRECISIONS and whole and dense


def _compiles_for_gpu(job: Job) -> bool:
    """Whether what is asked for is fast code for a GPU, whoever writes it."""
    return job.train.compile and job.train.compile_backend == "inductor" and job.cluster.device == "cuda"


def runs_own_kernels(job: Job) -> bool:
    """Whether our own kernels compute the blocks of a compiled decoder: on a GPU, if it looks like Llama."""
    model, layout = job.model, job.layout
    if not (keeps_copies(job) and isinstance(model, DecoderModel)):
        return False
    named = (model.norm, model.positions, model.activation) == ("rms", "rope", "swiglu")
    plain = not model.attention_bias and not model.ffn_bias
    plain = plain and model.attention == "heads" and model.window is None
    paired = model.head_size >= LEAST_TURNED and model.head_size & (model.head_size - 1) == 0
    whole = layout.tp * layout.cp == 1
    wanted = job.train.kernels == "own" and _compiles_for_gpu(job)
    return named and plain and paired and whole and wanted


def hands_to_compiler(job: Job) -> bool:
    """Whether torch's compiler makes a part of its step."""
    return job.train.compile and not runs_own_kernels(job)


def races_products(job: Job) -> bool:
    """Whether algorithms of its 16-bit products race before it begins: those between our own kernels."""
    return job.train.products == "raced" and runs_own_kernels(job)


def fuses_update(job: Job) -> bool:
    """Whether the update is one pass of our own: AdamW's beside compiled blocks on a GPU.

    Not where somebody comes between: a loss scale may skip a step, noise is added to clipped gradients, and
    offloaded state lies in slots.
    """
    train = job.train
    alone = train.precision != "fp16" and not train.grad_noise and job.layout.offload == "none"
    return _compiles_for_gpu(job) and alone and train.optimizer == "adamw"


def explain_gradients(job: Job) -> list[str]:
    """Why gradients that should be of 16 bits are not, in a sentence; nothing where they are.

    Args:
        job: With its layout settled.
    """
    if job.train.gradients == "fp32" or narrows_gradients(job):
        return []
    where = "one GPU's own kernels make them in one micro-batch, without layout.offload"
    return [f"train.gradients={job.train.gradients} has no effect here: it is for gradients where {where}"]


def narrows_gradients(job: Job) -> bool:
    """Whether gradients of the blocks' matrices are kept in 16 bits from the product to the update.

    Not where something is added to them, by other ranks or micro-batches: each sum would round again.
    """
    layout, batch = job.layout, job.train.global_batch
    alone = layout.world_size == 1 and layout.micro_batch is not None and layout.micro_batch >= batch
    return job.train.gradients == "bf16" and alone and runs_own_kernels(job) and fuses_update(job)
