"""Formatted numbers have a unit and three significant digits."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshwright.core.units import MIB, format_bytes, format_count, format_plural, format_rate, format_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (378112, "378 kB"),
        (1_240_000_000, "1.24 GB"),
        (80e9, "80 GB"),
        (2.5e12, "2.5 TB"),
        (3e18, "3000 PB"),
        (-1500, "-1.5 kB"),
        (0.25, "0.25 B"),
    ],
)
def test_bytes_are_decimal(count, text):
    assert format_bytes(count) == text


def test_counts_have_no_unit_and_no_trailing_space():
    assert format_count(8_030_261_248) == "8.03 G"
    assert format_count(12) == "12"


def test_rates_join_prefix_and_unit():
    assert format_rate(412e9, "FLOP") == "412 GFLOP/s"
    assert format_rate(950, "B") == "950 B/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (820e-6, "820 us"),
        (0.0413, "41.3 ms"),
        (2.5, "2.50 s"),
        (59.99, "59.99 s"),
        (59.996, "1 min 0 s"),
        (100.2, "1 min 40 s"),
        (200, "3 min 20 s"),
        (7199.6, "2 h 0 min"),
        (18720, "5 h 12 min"),
    ],
)
def test_seconds_are_formatted_with_a_suitable_unit(seconds, text):
    assert format_seconds(seconds) == text


PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


@given(st.integers(0, 10**17))
@example(999_600)
@example(999_999_999)
def test_formatted_counts_are_within_half_a_percent(count):
    """The mantissa has no exponent."""
    text = format_count(count)
    number, _, prefix = text.partition(" ")
    assert "e" not in number, text
    assert abs(float(number) * PREFIXES[prefix] - count) <= 0.005 * count + 0.5, text


def test_a_mebibyte_is_a_power_of_two():
    assert MIB == 1048576


@pytest.mark.parametrize(("number", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks")])
def test_one_is_singular(number, text):
    assert format_plural(number, "rank") == text
    assert format_plural(2, "batch", "es") == "2 batches"
