"""How many tokens the loss computes logits for at once."""

from __future__ import annotations

from meshwright.spec.execution import uses_fused_kernels
from meshwright.spec.job import Job
from meshwright.spec.model import DecoderModel

LOSS_CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**29}
"""Logits held at once: 4 MB on a core, near its cache; 2 GiB on a GPU, which likes large products."""


LOSS_CHUNK_TOKENS = (256, 4096)
"""Tokens of a chunk: not few, as each passes over the head's gradient; not many, as fp16 sums over them."""


def writes_grad_in_logits(job: Job) -> bool:
    """Whether the loss of a compiled model writes the gradient in the logits' place, with a GPU's kernel."""
    return uses_fused_kernels(job) and job.layout.tp == 1


def loss_chunk(job: Job, model: DecoderModel) -> int:
    """Tokens whose logits the loss holds at once."""
    return eager_chunk(job.cluster.device, model) * (2 if writes_grad_in_logits(job) else 1)


def eager_chunk(device: str, model: DecoderModel) -> int:
    """The same where nothing is compiled."""
    least, most = LOSS_CHUNK_TOKENS
    return min(most, max(least, LOSS_CHUNK_ELEMENTS[device] // model.vocab_size))
