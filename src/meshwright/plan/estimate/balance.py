"""Pipeline stages of frameworks that balance them by parameters, as DeepSpeed's method `parameters` does.

The unit of size is one block. Embedding and head are items of their own; norms are too small to matter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from meshwright.plan.estimate.grid import Ints
from meshwright.plan.estimate.weights import WeightCounts, count_elements
from meshwright.spec.model import DecoderModel

BISECTIONS = 50
"""Bisection steps for the size of the largest stage."""


def count_balanced(model: DecoderModel, pp: Ints) -> tuple[Ints, Ints, Ints]:
    """Blocks of the first, the largest middle and the last stage of :func:`balance_parameters`."""
    weights = WeightCounts.of(model)
    tables = weights.table * (1 if model.tied_embeddings else 2) + weights.positions + weights.final_norm
    table = weights.table * model.num_layers / (count_elements(model) - tables)
    degrees, back = np.unique(pp, return_inverse=True)
    splits = [balance_parameters(model.num_layers, degree, table) for degree in degrees.tolist()]
    rows = [(split[0], max(split[1:-1], default=split[0]), split[-1]) for split in splits]
    first, middle, last = np.array(rows, dtype=np.int64).reshape(-1, 3)[back.reshape(-1)].T
    return first, middle, last


@functools.lru_cache(maxsize=4096)
def balance_parameters(layers: int, pp: int, table: float) -> tuple[int, ...]:
    """Blocks of each stage, so that the largest stage has as few parameters as possible.

    Among these splits, the one that fills early stages first. With very many stages it may need fewer.

    Args:
        layers: Blocks of the model.
        pp: Stages.
        table: Size of the embedding, and of the head, in blocks.
    """
    sizes = (table, *(1.0,) * layers, table)
    least, most = max(*sizes, sum(sizes) / pp), sum(sizes)
    for _ in range(BISECTIONS):
        middle = (least + most) / 2
        least, most = (least, middle) if len(_fill(sizes, middle)) <= pp else (middle, most)
    counts = _fill(sizes, most)
    counts[0] -= 1
    counts[-1] -= 1
    return (*counts, *(0,) * (pp - len(counts)))


def _fill(sizes: Sequence[float], most: float) -> list[int]:
    """Items of each stage, if one stage after the other is filled up to this size."""
    counts, held = [0], 0.0
    for size in sizes:
        if counts[-1] and held + size > most:
            counts.append(0)
            held = 0.0
        counts[-1] += 1
        held += size
    return counts
