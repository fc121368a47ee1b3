"""Vectorised cross product: repeats each row of a table for every choice that its key allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshwright.plan.estimate.grid import Ints

Columns = dict[str, Ints]
Choices = Sequence[tuple[int, ...]]


def expand(columns: Columns, key: Ints, names: Sequence[str], choices: Callable[[int], Choices]) -> Columns:
    """Cross every row with the choices of its key.

    Args:
        columns: The table.
        key: A number for each row; rows with equal numbers have the same choices.
        names: The columns that a choice fills.
        choices: Called once for each distinct number, a few dozen times at most.
    """
    numbers, group = np.unique(key, return_inverse=True)
    tables = [choices(int(number)) for number in numbers]
    lengths = np.array([len(table) for table in tables], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.int64)
    flat = np.array([choice for table in tables for choice in table], dtype=np.int64).reshape(-1, len(names))
    counts = lengths[group]
    source = np.repeat(np.arange(len(key)), counts)
    first = np.cumsum(counts) - counts
    place = np.arange(len(source)) - first[source] + starts[group][source]
    grown = {name: column[source] for name, column in columns.items()}
    for position, name in enumerate(names):
        grown[name] = flat[place, position]
    return grown


def count_choices(key: Ints, choices: Callable[[int], Choices]) -> Ints:
    """The number of choices of each row."""
    numbers, group = np.unique(key, return_inverse=True)
    lengths = np.array([len(choices(int(number))) for number in numbers], dtype=np.int64)
    return lengths[group]


def keep(columns: Columns, rows: np.ndarray) -> Columns:
    """The table with some of its rows."""
    return {name: column[rows] for name, column in columns.items()}
