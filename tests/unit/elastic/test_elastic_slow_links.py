"""Which host has a slow network link, from how long the links of a step were busy."""

from __future__ import annotations

import pytest

from meshwright.elastic.slow_links import find_late_link
from meshwright.elastic.stragglers import Straggler, StragglerWatch

RATE = 10e6
"""Bytes per second of a usual link."""


def ring(hosts, factors=None, sent=1e6):
    """Reports of one rank per host that sends to the next one; factors by (source, target)."""
    return {
        host: {
            f"h{host}>h{(host + 1) % hosts}": [
                sent / RATE * (factors or {}).get((host, (host + 1) % hosts), 1.0),
                sent,
            ]
        }
        for host in range(hosts)
    }


@pytest.mark.parametrize("hosts", [3, 4, 8])
def test_the_host_of_two_slow_links_is_named(hosts):
    found = find_late_link(ring(hosts, {(0, 1): 2.0, (1, 2): 2.0}), waited_s=1.0)
    assert found is not None
    assert found.rank == 1
    assert found.late_s == pytest.approx(0.1, rel=1e-6)
    assert found.slowdown == pytest.approx(2.0)


def test_of_one_slow_link_the_sender_is_named():
    found = find_late_link(ring(4, {(2, 3): 3.0}), waited_s=1.0)
    assert found is not None
    assert found.rank == 2


def test_links_that_are_alike_name_nobody():
    assert find_late_link(ring(4), waited_s=1.0) is None


def test_two_hosts_name_nobody():
    assert find_late_link(ring(2, {(0, 1): 5.0}), waited_s=1.0) is None


def test_a_link_that_sends_more_is_not_slow():
    """Pipeline stages and tensor parallel groups send different amounts."""
    reports = ring(4)
    reports[1] = {"h1>h2": [0.3, 3e6]}
    found = find_late_link(reports, waited_s=1.0)
    assert found is None or found.late_s < 1e-6


def test_a_link_that_is_hidden_delays_nobody():
    found = find_late_link(ring(4, {(0, 1): 2.0, (1, 2): 2.0}), waited_s=0.01)
    assert found is not None
    assert found.late_s == 0.01


def test_other_peers_than_ranks_do_not_count():
    """An object store is no rank; its slow connection is the storage of a rank."""
    reports = ring(3)
    reports[1]["h1>10.9.9.9"] = [5.0, 1e6]
    assert find_late_link(reports, waited_s=1.0) is None


def test_small_messages_are_not_compared_with_large_ones():
    reports = {rank: {**one, f"h{rank}>h{(rank + 2) % 4}": [0.05, 100.0]} for rank, one in ring(4).items()}
    assert find_late_link(reports, waited_s=1.0) is None


def watch_steps(watch, steps, first, factors=None):
    found = []
    for step in range(first, first + steps):
        late_s = max((factors or {(0, 0): 1.0}).values()) * 0.1 - 0.1
        for rank, links in ring(4, factors).items():
            spent = {"compute": 0.1, "waiting": 0.1 + late_s}
            found += watch.feed(rank, 0, step, spent, links)
    return found


def test_a_slow_link_is_named_within_20_steps_and_recovers():
    watch = StragglerWatch([(0, 1, 2, 3)])
    assert watch_steps(watch, 60, 1) == []
    (named,) = watch_steps(watch, 20, 61, {(0, 1): 1.5, (1, 2): 1.5})
    assert isinstance(named, Straggler)
    assert (named.rank, named.phase, named.since_step, named.preempted) == (1, "communication", 61, False)
    assert named.slowdown == pytest.approx(1.5)
    assert named.lateness_s == pytest.approx(0.05, rel=1e-6)
    (recovered,) = watch_steps(watch, 20, 81)
    assert recovered.rank == 1
