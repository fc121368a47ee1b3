"""Simulated collectives: closed forms where they are exact, contention where links are shared."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest

import meshwright as mw
from meshwright.core.errors import UserError
from meshwright.schedule.collective.build import build_collective, list_algorithms
from meshwright.schedule.collective.ops import Op
from meshwright.simulate.collective import simulate_collective
from meshwright.simulate.collective_choice import compare_algorithms
from meshwright.simulate.collective_links import build_links, build_uniform_links
from meshwright.spec.load import load_job

ALPHA, BETA, GAMMA, LAUNCH = 2e-6, 1e9, 1e-10, 5e-6


def cluster_of(on, **fields):
    return replace(load_job("demo-2m", on=on, to_run=False).cluster, **fields)


def time_of(op, algorithm, ranks, size, links=None, **options):
    schedule = build_collective(op, algorithm, ranks, **options)
    return simulate_collective(schedule, size, links or build_uniform_links(ranks, ALPHA, BETA)).time_s


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16])
def test_ring_all_reduce_equals_its_closed_form(ranks):
    links = build_uniform_links(ranks, ALPHA, BETA, GAMMA, LAUNCH)
    share = 10_000
    steps = ranks - 1
    expected = LAUNCH + 2 * steps * (ALPHA + share / BETA) + steps * share * GAMMA
    assert time_of("all_reduce", "ring", ranks, ranks * share, links) == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_recursive_algorithms_equal_their_closed_forms(ranks):
    size = 16_000 * ranks
    doubling = log2(ranks) * (ALPHA + size / BETA)
    assert time_of("all_reduce", "recursive_doubling", ranks, size) == pytest.approx(doubling)
    halving = 2 * log2(ranks) * ALPHA + 2 * (ranks - 1) / ranks * size / BETA
    assert time_of("all_reduce", "halving_doubling", ranks, size) == pytest.approx(halving)


def test_messages_share_the_port_that_they_pass():
    """The inner rank 2 of a tree of 4 sends to ranks 1 and 3 at once: each gets half of its port."""
    size = 1_000_000
    shared = time_of("broadcast", "tree", 4, size)
    assert shared == pytest.approx(2 * ALPHA + size / BETA + 2 * size / BETA)


def test_messages_that_share_nothing_do_not_slow_each_other():
    links = build_uniform_links(6, ALPHA, BETA)
    one = time_of("all_to_all", "naive", 2, 100_000)
    pairs = build_collective("all_reduce", "hierarchical", 6, ranks_per_node=2)
    first = simulate_collective(pairs, 300_000, links).step_end_s
    assert [row[0] for row in first] == pytest.approx([ALPHA + 150_000 / BETA] * 6)
    assert one == pytest.approx(ALPHA + 50_000 / BETA)


def test_a_port_is_busy_while_it_has_messages():
    schedule = build_collective("broadcast", "naive", 3)
    found = simulate_collective(schedule, 1_000_000, build_uniform_links(3, 0.0, BETA))
    assert found.port_busy_s == pytest.approx((2e-3, 0, 0, 1e-3, 0, 1e-3))


@pytest.mark.parametrize("op", list(Op))
def test_every_algorithm_ends_at_every_size(op):
    for algorithm in list_algorithms(op):
        nodes = {"ranks_per_node": 2} if algorithm == "hierarchical" else {}
        times = [time_of(op, algorithm, 5, size, **nodes) for size in (0, 1, 999, 10**6)]
        assert 0 < times[0] <= times[1] <= times[2] < times[3]


def test_one_rank_takes_no_time():
    assert time_of("all_reduce", "ring", 1, 10**6, build_uniform_links(1, ALPHA, BETA, launch_s=LAUNCH)) == 0


def test_shared_nic_gives_the_bounds_of_hierarchy_and_placement():
    """Two nodes of two ranks with one slow NIC each: hierarchical 1.5 x a ring, 3 x an interleaved ring."""
    cluster = cluster_of("2x2xh100-sxm", nic_bytes_per_s=6.25e6)
    links = build_links(cluster, 4, nic_per_node=True)
    size = 100_000_000
    hierarchical = time_of("all_reduce", "hierarchical", 4, size, links, ranks_per_node=2)
    ring = time_of("all_reduce", "ring", 4, size, links)
    interleaved = time_of("all_reduce", "ring", 4, size, links, order=[0, 2, 1, 3])
    assert ring / hierarchical == pytest.approx(1.5, rel=0.01)
    assert interleaved / hierarchical == pytest.approx(3, rel=0.01)
    assert interleaved / ring == pytest.approx(2, rel=0.01)


def test_placement_moves_ranks_to_other_nodes():
    cluster = cluster_of("2x2xh100-sxm", nic_bytes_per_s=6.25e6)
    apart = build_links(cluster, 4, devices=[0, 2, 1, 3], nic_per_node=True)
    together = build_links(cluster, 4, nic_per_node=True)
    size = 10_000_000
    slow, fast = (time_of("all_reduce", "ring", 4, size, links) for links in (apart, together))
    assert slow / fast == pytest.approx(2, rel=0.01)


def test_oversubscribed_uplink_slows_messages_between_racks():
    even = cluster_of("4x8xh100-sxm", nodes_per_rack=2)
    narrow = replace(even, spine_oversubscription=4.0)
    size = 256_000_000
    wide_s, narrow_s = (
        time_of("all_to_all", "naive", 32, size, build_links(cluster, 32)) for cluster in (even, narrow)
    )
    # In round k, min(k, 32 - k) of the 16 ranks of a rack send through an uplink as wide as 4 NICs.
    slowdown = sum(max(1, min(k, 32 - k) / 4) for k in range(1, 32)) / 31
    assert narrow_s / wide_s == pytest.approx(slowdown, rel=0.1)


def test_schedule_that_never_ends_is_refused():
    good = build_collective("all_gather", "ring", 3)
    broken = replace(good, rows=(good.rows[0][:1], *good.rows[1:]))
    with pytest.raises(ValueError, match="prove the schedule first"):
        simulate_collective(broken, 3000, build_uniform_links(3, ALPHA, BETA))


def test_small_tensors_want_few_steps_and_large_ones_few_bytes():
    found = compare_algorithms("all_reduce", cluster_of("2x8xh100-sxm"), [8, 16], [1024, 2**28])
    assert found.fastest(8, 1024).algorithm == "recursive_doubling"
    assert found.fastest(16, 2**28).algorithm == "hierarchical"
    times = {(row.ranks, row.size_bytes, row.algorithm): row.time_s for row in found.rows}
    assert times[8, 2**28, "ring"] < 0.6 * times[8, 2**28, "recursive_doubling"]
    assert times[8, 1024, "ring"] > times[8, 1024, "tree"]
    assert (8, 1024, "hierarchical") not in times


@pytest.mark.parametrize(
    "bad", [{"ranks": [1]}, {"ranks": [17]}, {"sizes": [0]}, {"algorithms": ["star"]}, {"op": "sum"}]
)
def test_bad_comparison_is_refused(bad):
    given = {"op": "all_reduce", "cluster": cluster_of("2x8xh100-sxm"), **bad}
    with pytest.raises(UserError):
        compare_algorithms(**given)


@pytest.mark.parametrize(
    ("on", "algorithms", "argument"),
    [("1x1xh100-sxm", [], "on"), ("1x8xh100-sxm", ["hierarchical"], "algorithms")],
)
def test_a_comparison_without_a_row_is_refused(on, algorithms, argument):
    with pytest.raises(UserError) as raised:
        mw.compare_collectives("all_reduce", on, algorithms=algorithms)
    assert raised.value.problems[0].path.endswith(argument)
