"""CPU launch time of blocks: passes that are too short for the device wait for their launches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwright.plan.estimate.workload import Workload
from meshwright.plan.profiles import PROFILES
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.launches import COLLECTIVE_CPU_LAUNCH_S, cpu_launch_s
from meshwright.plan.time.rates import rates_of


def with_rules(given: Workload, **rules: object) -> Workload:
    profile = given.profile
    time = dataclasses.replace(profile.time, **rules)
    return dataclasses.replace(given, profile=dataclasses.replace(profile, time=time))


@pytest.fixture
def launches(make_grid):
    """``launches(workload, tp)``: CPU launch time of a pass with fused softmax."""

    def seconds(given: Workload, tp: int = 1) -> float:
        return float(cpu_launch_s(given, rates_of(given), make_grid(tp=[tp]), np.ones(1))[0])

    return seconds


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_pass_of_a_short_block_takes_the_time_of_its_launches(make_workload, make_grid, launches, tp):
    """Forward and backward, whatever the FLOPs of a rank are."""
    given = make_workload("llama", seq_len=128, global_batch=8)
    block = estimate_step(given, make_grid(tp=[tp], micro_batch=[1])).block
    assert float(block.total[0]) == pytest.approx(2 * launches(given, tp))


def test_the_wait_for_launches_is_the_launch_time_beyond_the_work(make_workload, make_grid):
    """Against the same step with CUDA graphs; a step with long blocks has none."""
    grid = make_grid(tp=[8, 1], micro_batch=[1, 1])
    short = make_workload("llama", seq_len=128, global_batch=8)
    graphs = with_rules(short, cuda_graphs=True)
    waits, none = (estimate_step(one, grid) for one in (short, graphs))
    assert waits.launch_wait_s == pytest.approx(waits.parts["compute"] - none.parts["compute"])
    assert (waits.launch_wait_s > 0.5 * waits.step_s).all()
    assert none.launch_wait_s == pytest.approx(np.zeros(2), abs=1e-12)
    long = estimate_step(make_workload("llama", seq_len=8192), make_grid(micro_batch=[4]))
    assert long.launch_wait_s == pytest.approx(np.zeros(1), abs=1e-12)


def test_transformer_engine_takes_longer_to_launch_than_plain_kernels(make_workload, launches):
    plain, engine = (launches(make_workload(profile=name)) for name in ("torchtitan", "megatron-core"))
    ratios = [PROFILES[name].time.cpu_launch_ratio for name in ("torchtitan", "megatron-core")]
    assert engine / plain == pytest.approx(ratios[1] / ratios[0])
    assert engine > 2 * plain


def test_tensor_parallel_collectives_are_launched_too(make_workload, launches):
    given = make_workload()
    added = launches(given, tp=8) - launches(given)
    assert added == pytest.approx(2 * 3 * COLLECTIVE_CPU_LAUNCH_S)


@pytest.mark.parametrize("precision", ["fp8", "fp4"])
def test_casts_are_launched_too(make_workload, launches, precision):
    rules = PROFILES["megatron-core"].time
    given = make_workload()
    cast = launches(dataclasses.replace(given, precision=precision)) / launches(given)
    assert cast == pytest.approx(rules.quantized_launch_ratio)
    assert rules.quantized_launch_ratio > 1


def test_experts_add_their_launches_whatever_the_framework(make_workload, launches):
    """By the share of layers that have them, in seconds of their own."""
    given = make_workload("experts")
    share = given.model.expert_layers / given.model.num_layers
    assert share > 0
    for profile in ("torchtitan", "megatron-core"):
        one = dataclasses.replace(given, profile=PROFILES[profile])
        rates = rates_of(one)
        added = launches(one) - rates.cpu_launch_s * one.profile.time.cpu_launch_ratio
        assert added == pytest.approx(share * rates.expert_cpu_launch_s)


def test_cuda_graphs_are_not_launched(make_workload, make_grid, launches):
    given = make_workload("experts", seq_len=128, global_batch=8)
    graphs = with_rules(given, cuda_graphs=True)
    assert launches(graphs) == 0
    grid = make_grid(micro_batch=[1])
    assert estimate_step(graphs, grid).step_s < 0.7 * estimate_step(given, grid).step_s
