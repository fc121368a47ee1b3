"""Collective schedules: every operation and algorithm gives the right numbers; bad requests are refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective_reference import make_inputs, run_ahead, run_schedule, wrong_chunks
from meshwright.core.errors import UserError
from meshwright.schedule.collective.build import (
    ALGORITHMS,
    MAX_RANKS,
    PAIRS,
    SEGMENTED,
    build_collective,
    list_algorithms,
)
from meshwright.schedule.collective.hierarchical import grid_columns, grid_rows, split_groups
from meshwright.schedule.collective.ops import ROOTED, Op
from meshwright.schedule.collective.proof import prove_collective
from meshwright.schedule.collective.steps import split_evenly
from meshwright.schedule.collective.tree import binary_tree, find_depths, second_tree

EVERY = [(op, algorithm) for op in Op for algorithm in list_algorithms(op)]


def build(op, algorithm, ranks, per_node=2, **given_options):
    nodes = {"ranks_per_node": min(per_node, ranks)} if algorithm == "hierarchical" else {}
    return build_collective(op, algorithm, ranks, **(nodes | given_options))


@pytest.mark.parametrize(("op", "algorithm"), EVERY)
def test_result_is_right_on_1_to_17_ranks(op, algorithm):
    for ranks in range(1, 18):
        for root in sorted({0, ranks - 1}) if op in ROOTED else [0]:
            schedule = build(op, algorithm, ranks, per_node=3, root=root)
            assert prove_collective(schedule).violations == ()
            for elements in (0, 3 * ranks + 1) if ranks % 2 else (1, ranks - 1):
                inputs = make_inputs(schedule, elements)
                outputs = [buffer.copy() for buffer in inputs]
                run_schedule(schedule, elements, outputs)
                assert wrong_chunks(schedule, elements, inputs, outputs) == [], (ranks, root, elements)


@settings(max_examples=80, deadline=None)
@given(pair=st.sampled_from(EVERY), ranks=st.integers(1, 17), elements=st.integers(0, 400), data=st.data())
def test_result_is_right_for_any_size_order_and_groups(pair, ranks, elements, data):
    op, algorithm = pair
    order = data.draw(st.permutations(range(ranks)))
    options = {"root": data.draw(st.integers(0, ranks - 1))} if op in ROOTED else {}
    if algorithm in ("hierarchical", "2d"):
        bounds = sorted({0, ranks, *data.draw(st.lists(st.integers(0, ranks), max_size=4))})
        options["groups"] = [order[low:high] for low, high in pairwise(bounds)]
    else:
        options["order"] = order
    if pair in SEGMENTED:
        options["segments"] = data.draw(st.integers(1, 5))
    schedule = build_collective(op, algorithm, ranks, **options)
    assert prove_collective(schedule).violations == ()
    inputs = make_inputs(schedule, elements)
    outputs = [buffer.copy() for buffer in inputs]
    run_schedule(schedule, elements, outputs)
    assert wrong_chunks(schedule, elements, inputs, outputs) == []


@settings(max_examples=40, deadline=None)
@given(pair=st.sampled_from(EVERY), ranks=st.integers(2, 7), seed=st.integers(0, 10**6))
def test_result_is_right_if_ranks_run_ahead_of_their_steps(pair, ranks, seed):
    """As interpreters do that pipeline: only the orders that ``steps.py`` names are kept."""
    op, algorithm = pair
    schedule = build(op, algorithm, ranks, segments=2 if pair in SEGMENTED else 1)
    elements = 2 * ranks + 1
    inputs = make_inputs(schedule, elements)
    outputs = [buffer.copy() for buffer in inputs]
    run_ahead(schedule, elements, outputs, seed)
    assert wrong_chunks(schedule, elements, inputs, outputs) == []


@pytest.mark.parametrize(("op", "algorithm"), EVERY)
def test_one_rank_is_an_empty_schedule(op, algorithm):
    schedule = build(op, algorithm, 1)
    assert schedule.rows == ((),)
    assert prove_collective(schedule).proved
    assert schedule.spans(7) == ((0, 7),)


def test_every_algorithm_is_in_the_table():
    assert {name for found in PAIRS.values() for name in found} == set(ALGORITHMS)
    assert set(PAIRS) == set(Op)


def test_ring_follows_the_given_order():
    schedule = build_collective("all_reduce", "ring", 4, order=[0, 2, 1, 3])
    assert [{send.peer for step in row for send in step.sends} for row in schedule.rows] == [
        {2},
        {3},
        {1},
        {0},
    ]


def test_hierarchical_messages_between_nodes_stay_on_a_lane():
    schedule = build_collective("all_reduce", "hierarchical", 8, ranks_per_node=4)
    for rank, row in enumerate(schedule.rows):
        peers = {send.peer for step in row for send in step.sends if send.peer // 4 != rank // 4}
        assert peers == {(rank + 4) % 8}


@pytest.mark.parametrize(("op", "algorithm"), EVERY)
def test_chunks_cover_the_tensor_once(op, algorithm):
    schedule = build(op, algorithm, 7)
    for elements in (0, 1, 6, 7, 8, 1000):
        spans = schedule.spans(elements)
        whole = schedule.buffer_elements(elements)
        assert len(spans) == schedule.chunks
        assert [low for low, _ in spans] + [whole] == [0, *(high for _, high in spans)]


def test_blocks_differ_by_one_element():
    assert list(split_evenly(0, 7, 3)) == [(0, 3), (3, 5), (5, 7)]
    assert list(split_evenly(5, 7, 4)) == [(5, 6), (6, 7), (7, 7), (7, 7)]


@pytest.mark.parametrize("members", range(1, 40))
def test_member_with_two_children_is_a_leaf_of_the_other_tree(members):
    trees = binary_tree(members), second_tree(members)
    for parents in trees:
        assert parents.count(None) == 1
        assert max(find_depths(parents)) == (members - 1).bit_length()
        assert all(parents.count(member) <= 2 for member in range(members))
    for one, other in (trees, trees[::-1]):
        assert not [member for member in range(members) if one.count(member) == 2 and member in other]


def test_grid_is_as_square_as_possible():
    assert [len(grid_rows(ranks)) for ranks in (1, 4, 6, 7, 12, 16)] == [1, 2, 2, 3, 3, 4]
    assert grid_columns(split_groups(5, 2)) == ((0, 2, 4), (1, 3))


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (("sum", "ring", 4), "collective-op", ["all_reduce", "'sum'"]),
        (("all_reduce", "star", 4), "collective-algorithm", ["recursive_doubling", "'star'"]),
        (("scatter", "double_tree", 4), "collective-pair", ["Use naive, ring, tree"]),
        (("all_reduce", "ring", 0), "collective-ranks", ["at least one"]),
        (("all_reduce", "ring", -3), "collective-ranks", ["at least one"]),
        (("all_reduce", "ring", MAX_RANKS + 1), "collective-ranks", [f"more than {MAX_RANKS}"]),
        (("all_to_all", "ring", 129), "collective-ranks", ["more than 128"]),
    ],
)
def test_bad_request_is_refused(request_, code, words):
    with pytest.raises(UserError) as caught:
        build_collective(*request_)
    assert caught.value.problems[0].code == code
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("op", "algorithm", "options", "code"),
    [
        ("broadcast", "ring", {"root": 4}, "collective-root"),
        ("broadcast", "ring", {"root": -1}, "collective-root"),
        ("all_reduce", "ring", {"root": 1}, "collective-root"),
        ("all_reduce", "ring", {"segments": 2}, "collective-segments"),
        ("broadcast", "ring", {"segments": 0}, "collective-segments"),
        ("all_reduce", "ring", {"ranks_per_node": 2}, "collective-groups"),
        ("all_reduce", "hierarchical", {}, "collective-groups"),
        ("all_reduce", "hierarchical", {"ranks_per_node": 5}, "collective-groups"),
        ("all_reduce", "hierarchical", {"ranks_per_node": 0}, "collective-groups"),
        ("all_reduce", "hierarchical", {"groups": [[0, 1], [2]]}, "collective-groups"),
        ("all_reduce", "hierarchical", {"ranks_per_node": 2, "order": [0, 1, 2, 3]}, "collective-order"),
        ("all_reduce", "ring", {"order": [0, 1, 1, 3]}, "collective-order"),
    ],
)
def test_bad_option_is_refused(op, algorithm, options, code):
    with pytest.raises(UserError) as caught:
        build_collective(op, algorithm, 4, **options)
    assert caught.value.problems[0].code == code
