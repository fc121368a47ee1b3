"""The planner agrees with itself: what it shows, what it writes, what it enforces, and what it says again.

The cases are model presets on cluster presets with 1, 8, 64 and 512 devices (``planner_matrix``).
``planner_checks`` has what must hold of each.
"""

from __future__ import annotations

import pytest

from planner_checks import find_contradictions
from planner_matrix import (
    QUICK,
    SAMPLE,
    SIZES,
    Case,
    choose_sample,
    list_cases,
    list_model_cluster_pairs,
    pairs_of,
    values_of,
)

CHOSEN = choose_sample()
ALL = list(dict.fromkeys([*CHOSEN, *list_model_cluster_pairs()]))


def as_parameters() -> list:
    """A half of the sample in ``make test``, the others in ``make test-all``."""
    slow = [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in ALL[QUICK:]]
    return [*(pytest.param(case, id=str(case)) for case in ALL[:QUICK]), *slow]


@pytest.mark.parametrize("case", as_parameters())
def test_the_layout_shown_is_the_layout_written_and_enforced(case, tmp_path):
    """Proves for one case that ``plan`` and ``plan -o`` agree.

    The first layout is accepted by ``-o``, equals the written plan and is planned alike when it is given.
    Every layout shown fits. Where nothing fits, both commands say so.
    """
    contradictions = find_contradictions(case, tmp_path)
    assert not contradictions, "\n".join(contradictions)


# The cases


def test_every_two_of_model_cluster_and_size_are_planned_together():
    """Proves that ``make test-all`` leaves out no pair, and `make test` no size."""
    assert {pair for case in ALL for pair in pairs_of(case)} == {p for c in list_cases() for p in pairs_of(c)}
    assert {case.size for case in CHOSEN[:QUICK]} == set(SIZES)


def test_the_sample_has_every_value_and_nearly_as_many_pairs_as_it_can():
    """Proves that the sample is a covering one: each row brings new pairs of model, cluster and size."""
    assert len(CHOSEN) == len(set(CHOSEN)) == SAMPLE
    values = {value for case in CHOSEN for value in values_of(case)}
    assert values == {value for case in list_cases() for value in values_of(case)}
    pairs = {pair for case in CHOSEN for pair in pairs_of(case)}
    assert len(pairs) >= 0.95 * 3 * SAMPLE
    large = [case for case in CHOSEN if case.state_share > 1]
    assert 3 <= len(large) <= SAMPLE / 4, "some models do not fit their cluster, most do"


@pytest.mark.parametrize(
    ("cluster", "on"),
    [
        ("h100-sxm", ["1x1x", "1x8x", "8x8x", "64x8x"]),
        ("v100-32g-sxm", ["1x1x", "1x16x", "4x16x", "32x16x"]),
        ("gb200-nvl72", ["1x1x", "1x72x", "1x64x", "8x64x"]),
    ],
)
def test_sizes_follow_the_nodes_of_a_cluster(cluster, on):
    """Proves that 8 stands for one whole node, and 64 and 512 for as few nodes as divide them."""
    assert [Case("tiny", cluster, size).on for size in SIZES] == [f"{words}{cluster}" for words in on]
