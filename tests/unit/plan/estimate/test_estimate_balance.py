"""Pipeline stages that are balanced by parameters."""

from __future__ import annotations

import pytest

from meshwright.plan.estimate.balance import balance_parameters


@pytest.mark.parametrize(
    ("layers", "pp", "table", "expected"),
    [
        (40, 1, 2.08, (40,)),
        (40, 2, 2.08, (20, 20)),
        (40, 4, 2.08, (9, 11, 11, 9)),
        (80, 4, 1.3, (19, 21, 21, 19)),
        (80, 8, 1.3, (9, 11, 11, 11, 11, 11, 11, 5)),
        (8, 4, 0.0, (2, 2, 2, 2)),
        (3, 8, 2.0, (0, 2, 1, 0, 0, 0, 0, 0)),
    ],
)
def test_early_stages_are_filled_up_to_the_smallest_largest_stage(layers, pp, table, expected):
    assert balance_parameters(layers, pp, table) == expected


@pytest.mark.parametrize("pp", [2, 3, 5, 8])
def test_no_other_split_has_a_smaller_largest_stage(pp):
    layers, table = 32, 2.4
    counts = balance_parameters(layers, pp, table)
    sizes = [count + table * (stage in (0, pp - 1)) for stage, count in enumerate(counts)]
    assert sum(counts) == layers
    # A smaller bound has no room for all layers.
    least = max(sizes) - 1e-6
    room = 2 * int(least - table) + (pp - 2) * int(least)
    assert room < layers
