"""Initial weights as a function of (seed, parameter name), never of rank, order, device or layout."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from meshwright.run.models.llama import Llama
from meshwright.spec.job import Job


def parameter_seed(seed: int, name: str) -> int:
    """The seed of one parameter's generator: 63 bits of a hash."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def initialise(module: nn.Module, seed: int, std: float) -> None:
    """Fill every parameter in place: norms with one, the rest from its own generator.

    Numbers are drawn on the CPU whatever the device, so that a run on GPUs starts from the same weights.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            continue
        generator = torch.Generator().manual_seed(parameter_seed(seed, name))
        drawn = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
        parameter.copy_(drawn)


def build_model(job: Job, device: torch.device) -> Llama:
    """The job's model with its initial weights, on its device."""
    with torch.device(device):
        model = Llama(job.model, job.data.seq_len)
    initialise(model, job.train.seed, job.model.init_std)
    return model
