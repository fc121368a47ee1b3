"""Closed forms against the simulation: times within 0.5% and equal peaks over many sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.schedule.pipeline.build import build_schedule
from meshwright.schedule.pipeline.closed_forms import (
    CODES,
    encode,
    peak_in_flight,
    pipeline_time,
)
from meshwright.schedule.pipeline.proof import prove_schedule
from meshwright.schedule.pipeline.walk import StageTimes, walk_schedule
from meshwright.spec.layout import SCHEDULES

TIMES = [(1, 1, 1), (1, 2, 1), (1, 1, 0.6), (0.8, 1, 1.2), (1.5, 1, 1), (1, 1.3, 1.1)]
WIDE = [(1, 4), (2, 2), (2, 16), (3, 9), (4, 8), (4, 32), (5, 20), (8, 16), (8, 64), (16, 64)]
FEW = [(4, 1), (4, 2), (6, 6), (8, 4), (8, 12)]


def simulated_s(name, pp, m, v, times, transfer=0.0, overlap=True) -> float:
    """The makespan of the simulated schedule."""
    return walk_schedule(build_schedule(name, pp, m, v), StageTimes(*times), transfer, overlap).makespan_s


def stages_of(name: str) -> list[int]:
    """The virtual stages that the schedule is tested with."""
    return {"interleaved": [2, 3], "zbv": [2], "dualpipe-v": [2]}.get(name, [1])


def valid_micro_batches(name: str, pp: int, m: int) -> int:
    """The smallest number of micro-batches that is at least ``m`` and valid for the schedule."""
    return {"interleaved": -(-m // pp) * pp, "dualpipe-v": max(m, 2 * pp)}.get(name, m)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "m"), WIDE)
def test_time_without_transfers_equals_the_simulation(name, pp, m):
    m = valid_micro_batches(name, pp, m)
    for v in stages_of(name):
        for times in TIMES:
            expected = simulated_s(name, pp, m, v, times)
            assert float(pipeline_time(name, pp, v, m, *times)) == pytest.approx(expected, rel=0.005), times


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize(("pp", "m"), FEW)
def test_time_with_few_micro_batches_equals_the_simulation(name, pp, m):
    for times in TIMES:
        assert float(pipeline_time(name, pp, 1, m, *times)) == pytest.approx(
            simulated_s(name, pp, m, 1, times), rel=0.005
        )


@pytest.mark.parametrize(("pp", "m"), FEW)
def test_time_of_zbv_with_few_micro_batches_is_within_3_percent(pp, m):
    """ZBV does not reach its steady state with fewer than 2 pp micro-batches."""
    for times in TIMES:
        assert float(pipeline_time("zbv", pp, 2, m, *times)) == pytest.approx(
            simulated_s("zbv", pp, m, 2, times), rel=0.03
        )


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("pp", "m"), [*WIDE, (6, 13), (7, 30), (3, 2)])
def test_time_with_transfers_equals_the_simulation(name, pp, m, overlap):
    m = m if name != "interleaved" else -(-m // pp) * pp
    for v in stages_of(name):
        for times in TIMES:
            for transfer in (0.01, 0.1, 0.5):
                expected = simulated_s(name, pp, m, v, times, transfer, overlap)
                form = float(pipeline_time(name, pp, v, m, *times, transfer, overlap))
                assert form == pytest.approx(expected, rel=0.005), (v, times, transfer)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["zb-h1", "zbv", "dualpipe-v"])
@pytest.mark.parametrize(("pp", "m"), [(2, 8), (4, 16), (8, 16), (8, 64)])
def test_time_of_split_backward_with_transfers_is_within_2_percent(name, pp, m, overlap):
    """This holds from two micro-batches per rank and for transfers up to a quarter of W."""
    for times in TIMES:
        for transfer in (0.01, 0.05, 0.15):
            expected = simulated_s(name, pp, m, None, times, transfer, overlap)
            form = float(pipeline_time(name, pp, 2, m, *times, transfer, overlap))
            assert form == pytest.approx(expected, rel=0.02), (times, transfer)


@pytest.mark.parametrize("name", ["interleaved", "zb-h1", "zbv", "dualpipe-v"])
@pytest.mark.parametrize(("pp", "m"), [(2, 8), (4, 16), (8, 32)])
def test_time_with_very_long_transfers_is_within_5_percent(name, pp, m):
    """Such a layout must not look good to the search."""
    for times in TIMES:
        for transfer in (1.0, 2.0, 4.0):
            expected = simulated_s(name, pp, m, None, times, transfer)
            form = float(pipeline_time(name, pp, 2, m, *times, transfer))
            assert form == pytest.approx(expected, rel=0.05), (times, transfer)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe-v"]),
    pp=st.integers(1, 9),
    groups=st.integers(1, 5),
    rest=st.integers(0, 8),
    times=st.tuples(*[st.floats(0.2, 3.0)] * 3),
)
def test_time_of_random_sizes_equals_the_simulation(name, pp, groups, rest, times):
    m = valid_micro_batches(name, pp, groups * pp + rest)
    v = stages_of(name)[0]
    assert float(pipeline_time(name, pp, v, m, *times)) == pytest.approx(
        simulated_s(name, pp, m, v, times), rel=0.005
    )


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(SCHEDULES), pp=st.integers(1, 9), groups=st.integers(1, 4), v=st.integers(2, 4))
def test_in_flight_peak_equals_the_proof(name, pp, groups, v):
    m = valid_micro_batches(name, pp, groups * 3)
    stages = v if name == "interleaved" else stages_of(name)[0]
    proof = prove_schedule(build_schedule(name, pp, m, stages))
    assert tuple(peak_in_flight(name, np.arange(pp), pp, stages, m)) == proof.peak_in_flight


def test_arrays_of_schedules_and_sizes_broadcast():
    names = np.array(SCHEDULES)[:, None]
    m = np.array([8, 16, 64])
    seconds = pipeline_time(names, 4, 2, m, 1.0, 1.0, 1.0)
    assert seconds.shape == (6, 3)
    codes = np.array([CODES[name] for name in SCHEDULES])[:, None]
    assert np.array_equal(seconds, pipeline_time(codes, 4, 2, m, 1.0, 1.0, 1.0))
    for row, name in enumerate(SCHEDULES):
        assert np.array_equal(seconds[row], pipeline_time(name, 4, 2, m, 1.0, 1.0, 1.0))
    assert peak_in_flight(names[..., None], np.arange(4), 4, 2, m[:, None]).shape == (6, 3, 4)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zbv", "dualpipe-v"])
def test_only_interleaved_depends_on_virtual_stages(name):
    """One array of layouts can therefore have a value for all schedules."""
    one, three = (pipeline_time(name, 4, v, 8, 1, 1, 1, slowest_s=7.0) for v in (1, 3))
    assert one == three


def test_scalar_arguments_give_a_scalar():
    assert pipeline_time("1f1b", 4, 1, 8, 1, 1, 1).shape == ()
    assert float(pipeline_time("1f1b", 4, 1, 8, 1, 1, 1)) == 33


def test_unknown_schedule_raises():
    with pytest.raises(ValueError, match="no closed form for dapple"):
        encode("dapple")
    with pytest.raises(ValueError, match="not in 0 to 5"):
        pipeline_time(np.array([0, 6]), 4, 1, 8, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "v", "m", "bubble"),
    [("gpipe", 1, 1, 3 / 4), ("1f1b", 1, 8, 3 / 11), ("interleaved", 2, 8, 3 / 19), ("zbv", 2, 64, 0.005)],
)
def test_bubbles_equal_the_published_formulas(name, v, m, bubble):
    """The idle fraction of four ranks, with equal forward, input-gradient and weight-gradient times."""
    busy = 3.0 * m * v
    assert 1 - busy / float(pipeline_time(name, 4, v, m, 1, 1, 1)) == pytest.approx(bubble, abs=0.005)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v"])
@pytest.mark.parametrize("slow", [0, -1])
def test_slow_first_or_last_stage_determines_the_time(name, slow):
    """One stage has twice the work and each rank 8 micro-batches.

    The error is at most 5%; a slow last stage of 1F1B is exact.
    """
    schedule = build_schedule(name, 4, 32)
    each = np.ones(schedule.stages)
    each[slow] = 2
    expected = walk_schedule(schedule, StageTimes(each, each, each)).makespan_s
    mean = float(each.mean())
    v = schedule.virtual_stages
    slowest = 3.0 * (v + 1)
    form = float(pipeline_time(name, 4, v, 32, mean, mean, mean, slowest_s=slowest))
    exact = name == "gpipe" or (name == "1f1b" and slow == -1)
    assert form == pytest.approx(expected, rel=1e-9 if exact else 0.05)
