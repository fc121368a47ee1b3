"""Nodes that are cut off, delayed, or lose their connection to the supervisor: fault tests 21 and 22."""

from __future__ import annotations

import pytest

from meshwright.runs.faults.checks import delays, partitions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def require_figures(check):
    assert check.figures
    assert [str(figure) for figure in check.figures if not figure.ok] == []


def test_21_a_black_holed_node_commits_nothing_and_the_others_go_on(check):
    """A spare node that joined in the middle of the run takes over; the lost one comes back as a spare."""
    partitions.check_black_hole(check)
    require_figures(check)


@pytest.mark.parametrize("sends", [True, False])
def test_21_a_node_with_one_way_loss_is_replaced(check, sends):
    partitions.check_one_way(check, sends)
    require_figures(check)


def test_21_a_supervisor_with_a_minority_waits_and_nobody_commits(check):
    partitions.check_minority(check)
    require_figures(check)


def test_22_delays_and_stalls_are_no_deaths_and_the_plan_predicts_the_step(check):
    delays.check_delay_and_stalls(check)
    require_figures(check)


def test_22_connections_that_are_reset_cost_no_rank(check):
    delays.check_resets(check)
    require_figures(check)
