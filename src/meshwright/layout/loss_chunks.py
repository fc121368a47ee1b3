"""The chunked loss: tokens whose logits are computed at once."""

from __future__ import annotations

from meshwright.spec.execution import uses_fused_kernels
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

LOSS_CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**29}
"""Logits per chunk: 4 MB on a CPU core, close to its cache size; 2 GiB on a GPU, for large GEMMs."""


LOSS_CHUNK_TOKENS = (256, 4096)
"""Limits of tokens per chunk: each chunk makes a pass over the head's gradient; fp16 sums over a chunk."""


def writes_grad_in_logits(job: Job) -> bool:
    """Whether the fused loss kernel writes the gradient into the buffer of the logits."""
    return uses_fused_kernels(job) and job.layout.tp == 1


def loss_chunk(job: Job, model: DecoderModel) -> int:
    """Tokens per chunk."""
    return eager_chunk(job.cluster.device, model) * (2 if writes_grad_in_logits(job) else 1)


def eager_chunk(device: str, model: DecoderModel) -> int:
    """Tokens per chunk of the eager loss."""
    least, most = LOSS_CHUNK_TOKENS
    return min(most, max(least, LOSS_CHUNK_ELEMENTS[device] // model.vocab_size))
