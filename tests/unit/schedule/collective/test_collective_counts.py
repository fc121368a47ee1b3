"""Steps and bytes of collective algorithms, as the literature gives them."""

from __future__ import annotations

from math import ceil, log2

import pytest

from meshwright.schedule.collective.build import build_collective
from meshwright.schedule.collective.proof import prove_collective
from meshwright.schedule.collective.traffic import count_traffic


def steps_of(op, algorithm, ranks, **options):
    return prove_collective(build_collective(op, algorithm, ranks, **options)).steps


@pytest.mark.parametrize("ranks", range(2, 18))
def test_ring_all_reduce_takes_2_n_minus_1_steps_and_moves_2_n_minus_1_over_n_of_the_data(ranks):
    schedule = build_collective("all_reduce", "ring", ranks)
    size = 1000 * ranks
    traffic = count_traffic(schedule, size)
    assert prove_collective(schedule).steps == 2 * (ranks - 1)
    assert set(traffic.sent) == set(traffic.received) == {2 * (ranks - 1) * size // ranks}
    assert set(traffic.reduced) == {(ranks - 1) * size // ranks}


@pytest.mark.parametrize("ranks", range(2, 18))
def test_naive_all_reduce_moves_n_minus_1_times_the_data_through_one_rank(ranks):
    traffic = count_traffic(build_collective("all_reduce", "naive", ranks), 1000)
    assert traffic.received == ((ranks - 1) * 1000, *[1000] * (ranks - 1))
    assert traffic.sent == traffic.received
    assert steps_of("all_reduce", "naive", ranks) == 2 * (ranks - 1)


@pytest.mark.parametrize("ranks", range(2, 18))
@pytest.mark.parametrize("algorithm", ["tree", "double_tree"])
def test_tree_all_reduce_takes_2_log2_n_steps(algorithm, ranks):
    assert steps_of("all_reduce", algorithm, ranks) == 2 * ceil(log2(ranks))


def test_ring_latency_grows_linearly_not_logarithmically():
    """The claim "ring all-reduce has O(log N) latency" is wrong: doubling the ranks doubles the steps."""
    rings = {ranks: steps_of("all_reduce", "ring", ranks) for ranks in (8, 16, 32, 64)}
    assert rings == {8: 14, 16: 30, 32: 62, 64: 126}
    trees = {ranks: steps_of("all_reduce", "tree", ranks) for ranks in (8, 16, 32, 64)}
    assert trees == {8: 6, 16: 8, 32: 10, 64: 12}


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_recursive_algorithms_on_powers_of_two(ranks):
    size = 1000 * ranks
    doubling = build_collective("all_reduce", "recursive_doubling", ranks)
    assert prove_collective(doubling).steps == log2(ranks)
    assert set(count_traffic(doubling, size).sent) == {log2(ranks) * size}
    halving = build_collective("all_reduce", "halving_doubling", ranks)
    assert prove_collective(halving).steps == 2 * log2(ranks)
    assert set(count_traffic(halving, size).sent) == {2 * (ranks - 1) * size // ranks}


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 9, 13])
def test_other_numbers_of_ranks_add_a_step_before_and_after(ranks):
    power = int(log2(ranks))
    assert steps_of("all_reduce", "recursive_doubling", ranks) == power + 2
    assert steps_of("all_reduce", "halving_doubling", ranks) == 2 * power + 2


def test_double_tree_balances_what_a_tree_does_not():
    """In a binary tree inner ranks send and receive 3 tensors, leaves 1; in two trees everyone about 2."""
    size = 1200
    single = count_traffic(build_collective("all_reduce", "tree", 16), size)
    double = count_traffic(build_collective("all_reduce", "double_tree", 16), size)
    assert single.most == 3 * size
    assert double.most == 2 * size
    assert sum(single.sent) == sum(double.sent) == 2 * 15 * size


def test_segments_are_pipelined():
    assert steps_of("broadcast", "ring", 6, segments=4) == 5 + 3
    assert steps_of("reduce", "ring", 6, segments=4) == 5 + 3
    assert steps_of("broadcast", "tree", 8, segments=4) == 3 + 3
    assert steps_of("all_reduce", "tree", 8, segments=4) == 6 + 3


def test_hierarchical_sends_only_a_share_between_nodes():
    """Two nodes of four: a rank sends 2 x 1/2 of its quarter of the data to the other node."""
    schedule = build_collective("all_reduce", "hierarchical", 8, ranks_per_node=4)
    assert prove_collective(schedule).steps == 3 + 2 + 3
    spans = schedule.spans(8000)
    crossing = [
        sum(
            spans[s.stop - 1][1] - spans[s.start][0]
            for step in row
            for s in step.sends
            if s.peer // 4 != rank // 4
        )
        for rank, row in enumerate(schedule.rows)
    ]
    assert crossing == [2000] * 8
    assert set(count_traffic(schedule, 8000).sent) == {2 * 7 * 8000 // 8}


def test_2d_uses_both_dimensions_in_fewer_steps_than_a_ring():
    schedule = build_collective("all_reduce", "2d", 16)
    assert prove_collective(schedule).steps == 2 * (3 + 3)
    assert set(count_traffic(schedule, 32000).sent) == {2 * 15 * 2000}
    first = schedule.rows[0][0]
    assert {send.peer for send in first.sends} == {1, 4}


def test_all_to_all_counts():
    assert set(count_traffic(build_collective("all_to_all", "naive", 8), 800).sent) == {700}
    assert set(count_traffic(build_collective("all_to_all", "ring", 8), 800).sent) == {100 * 28}
    bruck = build_collective("all_to_all", "recursive_doubling", 8)
    assert prove_collective(bruck).steps == 3
    assert set(count_traffic(bruck, 800).sent) == {3 * 400}


def test_uneven_sizes_are_counted_to_the_element():
    traffic = count_traffic(build_collective("all_gather", "ring", 3), 10)
    assert traffic.received == (6, 7, 7)
    assert traffic.reduced == (0, 0, 0)
