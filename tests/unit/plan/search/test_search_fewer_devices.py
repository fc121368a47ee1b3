"""Numbers of devices that a layout is planned for after a loss."""

from __future__ import annotations

import pytest

from meshwright.plan.search.fewer_devices import list_fewer


def count_twos(number: int) -> int:
    return (number & -number).bit_length()


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (0, ()),
        (1, (1,)),
        (3, (3, 2)),
        (7, (7, 6, 4)),
        (8, (8,)),
        (2047, (2047, 2046, 2044, 2040, 2032, 2016)),
    ],
)
def test_numbers_with_more_factors_of_two(most, expected):
    assert list_fewer(most)[:6] == expected


@pytest.mark.parametrize("most", range(1, 70))
def test_each_number_has_more_factors_of_two_than_all_larger_ones(most):
    expected = [
        number
        for number in range(most, 0, -1)
        if all(count_twos(number) > count_twos(larger) for larger in range(number + 1, most + 1))
    ]
    assert list(list_fewer(most)) == expected
