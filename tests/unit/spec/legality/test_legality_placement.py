"""Rules of ``layout.placement``: a permutation of the right length, on slots that exist."""

from __future__ import annotations

import pytest

from meshwright.core.errors import UserError

NODES = {"nodes": 2, "devices_per_node": 2}


def problems(make_job, placement, **degrees):
    with pytest.raises(UserError) as caught:
        make_job(cluster=NODES, layout={"placement": placement, **degrees})
    return [(problem.code, problem.path, str(problem)) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("placement", "code", "text"),
    [
        ([0, 1, 2], "layout-placement-length", "has 3 slots; the layout has 4 ranks"),
        ([0, 1, 2, 2], "layout-placement-slots", "names slot 2 for 2 ranks"),
        ([0, 1, 2, 4], "layout-placement-slots", "names slot 4; there are 4 (2 nodes x 2)"),
    ],
)
def test_slots_are_a_permutation(make_job, placement, code, text):
    ((found, path, message),) = problems(make_job, placement, dp_replicate=4)
    assert (found, path) == (code, "layout.placement")
    assert text in message


def test_fewer_ranks_than_slots_leave_some_out(make_job):
    job = make_job(cluster=NODES, layout={"dp_replicate": 2, "placement": [1, 3]})
    assert job.layout.placement == (1, 3)


def test_a_list_needs_a_given_layout(make_job):
    ((code, _, _),) = problems(make_job, [0, 1, 2, 3])
    assert code == "layout-placement-auto"


@pytest.mark.parametrize(
    ("placement", "code", "path"),
    [
        ("rank_order", "job-not-a-choice", "layout.placement"),
        ([0, -1, 2, 3], "job-out-of-range", "layout.placement.1"),
        ([0, "a"], "job-wrong-type", "layout.placement.1"),
    ],
)
def test_other_values_are_refused_with_their_place(make_job, placement, code, path):
    ((found, where, _),) = problems(make_job, placement, dp_replicate=4)
    assert (found, where) == (code, path)
