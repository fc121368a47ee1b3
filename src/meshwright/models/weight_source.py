"""Where initial weights come from: random numbers, a Hugging Face folder, or zeros that are overwritten."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from meshwright.layout.parameters import list_parameters
from meshwright.spec.model import Model

BLOCK_SIZE = 1 << 20
"""Values of a parameter that one generator draws. A rank draws only the blocks of its shard."""


class WeightSource(ABC):
    """A source of initial weights."""

    is_zero: bool = False
    """Whether all weights are zero: then a device allocates them itself, and nothing is copied to it."""
    makes_rows: bool = False
    """Whether some rows cost less than the whole parameter. Otherwise a shard is cut out of the whole one."""

    @abstractmethod
    def full_tensor(self, name: str) -> Tensor:
        """The full initial values of a parameter, in float32."""

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Some rows of a parameter: what a rank that shards it keeps."""
        return self.full_tensor(name)[first:last]


class RandomWeights(WeightSource):
    """Norms are one, biases zero; other parameters are random, a function of (seed, parameter name).

    Convolutions, which have four dims, are initialised after He et al. (2015) with their fan-out. Random
    numbers are drawn on the CPU for every device, so that a run on GPUs starts from the same weights.
    """

    makes_rows = True

    def __init__(self, model: Model, seed: int, threads: int = 1) -> None:
        self._shapes = {parameter.name: parameter.shape for parameter in list_parameters(model)}
        self._seed, self._std, self._threads = seed, model.init_std, threads

    def full_tensor(self, name: str) -> Tensor:
        """The full initial values of a parameter."""
        return self.rows(name, 0, self._shapes[name][0])

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Some rows of a parameter; only their blocks are drawn."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.full((last - first,), 0.0 if name.endswith(".bias") else 1.0)
        fan_out = shape[0] * math.prod(shape[2:])
        spread = math.sqrt(2 / fan_out) if len(shape) == 4 else self._std
        width = math.prod(shape[1:])
        size, part = math.prod(shape), range(first * width, last * width)
        values = draw(name, size, part, self._seed, spread, self._threads)
        return values.view(last - first, *shape[1:])


class ZeroWeights(WeightSource):
    """Zeros: for a run that loads all parameters from a checkpoint or a snapshot, and for fake tensors."""

    is_zero = True

    def __init__(self, model: Model) -> None:
        self._shapes = {parameter.name: parameter.shape for parameter in list_parameters(model)}

    def full_tensor(self, name: str) -> Tensor:
        """Zeros."""
        return torch.zeros(self._shapes[name])


def parameter_seed(seed: int, name: str) -> int:
    """The seed of a parameter's generator: 63 bits of a hash."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw(name: str, size: int, part: range, seed: int, spread: float, threads: int = 1) -> Tensor:
    """A part of the values of a flattened parameter.

    Each block has a generator of its own, so the values depend neither on the part nor on the threads.

    Args:
        name: The parameter.
        size: Values of the whole parameter.
        part: Which of them.
        seed: The seed of the run.
        spread: Standard deviation.
        threads: How many blocks are drawn at once; drawing releases the GIL.
    """
    first, last = part.start, part.stop
    values = torch.empty(last - first)

    def draw_block(block: int) -> None:
        start, stop = block * BLOCK_SIZE, min((block + 1) * BLOCK_SIZE, size)
        key = parameter_seed(seed, name if block == 0 else f"{name}/{block}")
        generator = torch.Generator().manual_seed(key)
        begin, end = max(first, start), min(last, stop)
        if (begin, end) == (start, stop):
            values[begin - first : end - first].normal_(0.0, spread, generator=generator)
        else:
            whole = torch.empty(stop - start).normal_(0.0, spread, generator=generator)
            values[begin - first : end - first] = whole[begin - start : end - start]

    blocks = range(first // BLOCK_SIZE, -(-last // BLOCK_SIZE))
    threads = min(threads, len(blocks))
    if threads < 2:
        for block in blocks:
            draw_block(block)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(draw_block, blocks))
    return values
