"""``plan`` and ``plan -o`` agree for model presets on cluster presets with 1, 8, 64 and 512 devices.

The cases are model presets on cluster presets with 1, 8, 64 and 512 devices (``planner_matrix``).
``planner_checks`` has the checks.
"""

from __future__ import annotations

import pytest

from planner_checks import find_contradictions
from planner_matrix import (
    QUICK,
    SAMPLE,
    SIZES,
    Case,
    add_size_pairs,
    choose_sample,
    list_cases,
    pairs_of,
    size_pairs_of,
    values_of,
)

CHOSEN = choose_sample()
ALL = add_size_pairs(CHOSEN)
FAST = [next(case for case in reversed(CHOSEN[:QUICK]) if case.size == size) for size in SIZES]


def as_parameters() -> list:
    """One case of each size runs in ``make test``, the rest in ``make test-all``."""
    slow = [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in ALL if case not in FAST]
    return [*(pytest.param(case, id=str(case)) for case in FAST), *slow]


@pytest.mark.parametrize("case", as_parameters())
def test_plan_shows_writes_and_accepts_the_same_layout(case, tmp_path):
    """``plan`` and ``plan -o`` agree for one case.

    ``-o`` accepts the first layout and writes it. When it is given, it gets the same prediction.
    Every layout shown fits. If nothing fits, both commands report it.
    """
    contradictions = find_contradictions(case, tmp_path)
    assert not contradictions, "\n".join(contradictions)


# The cases


def test_cases_cover_every_cluster_and_architecture_at_every_size():
    """``make test-all`` covers all of them and every model, ``make test`` every size."""
    covered, possible = ({p for c in cases for p in size_pairs_of(c)} for cases in (ALL, list_cases()))
    assert covered == possible
    assert {case.model for case in ALL} == {case.model for case in list_cases()}
    assert len(ALL) == len(set(ALL)) < len(list_cases()) / 20
    assert {case.size for case in FAST} == set(SIZES)


def test_sample_covers_every_value_and_nearly_all_pairs():
    """The sample is a covering array: each case adds new pairs of model, cluster and size."""
    assert len(CHOSEN) == len(set(CHOSEN)) == SAMPLE
    values = {value for case in CHOSEN for value in values_of(case)}
    assert values == {value for case in list_cases() for value in values_of(case)}
    pairs = {pair for case in CHOSEN for pair in pairs_of(case)}
    assert len(pairs) >= 0.95 * 3 * SAMPLE
    large = [case for case in CHOSEN if case.state_share > 1]
    assert 3 <= len(large) <= SAMPLE / 4, "a few models do not fit their cluster"


@pytest.mark.parametrize(
    ("cluster", "on"),
    [
        ("h100-sxm", ["1x1x", "1x8x", "8x8x", "64x8x"]),
        ("v100-32g-sxm", ["1x1x", "1x16x", "4x16x", "32x16x"]),
        ("gb200-nvl72", ["1x1x", "1x72x", "1x64x", "8x64x"]),
    ],
)
def test_case_sizes_use_whole_nodes(cluster, on):
    """Size 8 is one whole node. Sizes 64 and 512 use as few nodes as possible."""
    assert [Case("tiny", cluster, size).on for size in SIZES] == [f"{words}{cluster}" for words in on]
