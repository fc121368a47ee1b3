"""Properties of every estimate: sums, monotonicity, and no effect of axes of degree 1."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.memory import estimate_memory
from meshwright.plan.estimate.weights import count_elements
from meshwright.plan.time.block import BlockModel
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.gemm import Device
from meshwright.plan.time.rates import rates_of
from meshwright.spec.layout import SCHEDULES
from meshwright.validation.devices import known_devices

PROFILES_OF_EACH_KIND = ("meshwright", "megatron-lm", "megatron-bridge", "torchtitan", "deepspeed-zero")
ZERO_BUBBLE = [SCHEDULES.index(name) for name in ("zb-h1", "zbv", "dualpipe-v")]
SLACK = 1 + 1e-9


@pytest.fixture
def legal_grid(random_grid: Grid) -> Grid:
    """Random layouts, changed if settings contradict each other."""
    grid = random_grid
    pipeline = grid.pp > 1
    several = np.isin(grid.schedule, [2, *ZERO_BUBBLE[1:]])
    zero = np.where(grid.dp_shard * grid.cp > 1, grid.zero, 0)
    ranks = np.where(zero > 0, grid.dp_shard, 1) * grid.cp * grid.tp
    ep = np.where(ranks % grid.ep == 0, grid.ep, 1)
    return dataclasses.replace(
        grid,
        schedule=np.where(pipeline, grid.schedule, 1),
        virtual_stages=np.where(pipeline & several, 2, 1),
        zero=zero,
        dp_shard=np.where(zero > 0, grid.dp_shard, 1),
        ep=ep,
        etp=np.where((ranks // ep) % grid.etp == 0, grid.etp, 1),
        sequence_parallel=grid.sequence_parallel & (grid.tp > 1),
    )


def replace(grid: Grid, **columns: Any) -> Grid:
    """The layouts with changed columns. A number applies to all layouts."""
    return dataclasses.replace(
        grid, **{name: np.broadcast_to(np.asarray(value), (len(grid),)) for name, value in columns.items()}
    )


def peak_flops_per_s(given: Any) -> float:
    """The data sheet's rate in the workload's precision."""
    cluster = given.cluster
    if given.precision == "fp8":
        return float(cluster.peak_fp8_flops_per_s)
    return float(cluster.peak_bf16_flops_per_s or cluster.bf16_flops_per_s)


@pytest.mark.parametrize("model", ["llama", "experts", "latent"])
@pytest.mark.parametrize("device", sorted(known_devices()))
def test_no_device_exceeds_its_peak_or_is_faster_with_more_work(make_workload, legal_grid, device, model):
    """FLOPs of the weights that a token passes: 6 per weight; attention and recomputation are left out."""
    cluster = known_devices()[device]
    cluster = dataclasses.replace(
        cluster, nodes=-(-int(legal_grid.world_size.max()) // cluster.devices_per_node)
    )
    for precision in ("bf16", "fp8") if cluster.peak_fp8_flops_per_s else ("bf16",):
        given = dataclasses.replace(
            make_workload(model, "megatron-core"), cluster=cluster, precision=precision
        )
        made, batch = given.model, given.global_batch
        idle = (made.num_experts or 0) - (made.experts_per_token or 0)
        idle *= 3 * made.expert_layers * made.hidden_size * made.expert_width
        weights = count_elements(made) - idle - made.vocab_size * made.hidden_size
        least = 6 * weights * batch * given.seq_len / legal_grid.world_size / peak_flops_per_s(given)
        step, memory = estimate_step(given, legal_grid).step_s, estimate_memory(given, legal_grid).peak_bytes
        assert np.isfinite(step).all()
        assert (step >= least).all()
        longer = dataclasses.replace(given, seq_len=2 * given.seq_len)
        # Waits for launches count as input gradients. Where the backward pass is split, longer weight
        # gradients can fill a bubble instead.
        split = np.isin(
            legal_grid.schedule, [SCHEDULES.index(name) for name in ("zb-h1", "zbv", "dualpipe-v")]
        )
        assert (estimate_step(longer, legal_grid).step_s >= np.where(split, 0.995, 1) * step).all()
        assert (estimate_memory(longer, legal_grid).peak_bytes >= memory).all()
        more = dataclasses.replace(given, global_batch=2 * batch)
        assert (estimate_step(more, legal_grid).step_s >= step).all()


@pytest.mark.parametrize("model", ["gpt", "experts", "latent"])
@pytest.mark.parametrize("profile", PROFILES_OF_EACH_KIND)
def test_parts_are_not_negative_and_add_up(make_workload, legal_grid, profile, model):
    """This covers the parts of the step and the lines of memory."""
    given = make_workload(model, profile)
    step, memory = estimate_step(given, legal_grid), estimate_memory(given, legal_grid)
    assert sum(step.parts.values()) == pytest.approx(step.step_s)
    assert sum(memory.lines.values()) == pytest.approx(memory.peak_bytes)
    for parts, total in ((step.parts, step.step_s), (memory.lines, memory.peak_bytes)):
        for name, part in parts.items():
            assert (part >= -1e-9 * total).all(), name


@pytest.mark.parametrize(
    "rate",
    ["link_bytes_per_s", "nic_bytes_per_s", "memory_bytes_per_s", "bf16_flops_per_s", "host_bytes_per_s"],
)
@pytest.mark.parametrize("model", ["gpt", "experts"])
@pytest.mark.parametrize("profile", PROFILES_OF_EACH_KIND)
def test_faster_hardware_is_never_slower(make_workload, legal_grid, profile, model, rate):
    """One rate is doubled. Zero-bubble schedules are excluded: a shorter W fills less of their bubble."""
    grid = legal_grid.take(~np.isin(legal_grid.schedule, ZERO_BUBBLE))
    slow = make_workload(model, profile)
    cluster = dataclasses.replace(slow.cluster, nodes=64)
    slow = dataclasses.replace(slow, cluster=cluster)
    faster = dataclasses.replace(cluster, **{rate: 2 * getattr(cluster, rate)})
    fast = dataclasses.replace(slow, cluster=faster)
    assert (estimate_step(fast, grid).step_s <= SLACK * estimate_step(slow, grid).step_s).all()


@pytest.mark.parametrize("profile", PROFILES_OF_EACH_KIND)
def test_axis_of_one_rank_has_no_effect(make_workload, legal_grid, profile):
    """Without cp the context method has no effect.

    The ZeRO stage needs shards, and sequence parallel needs tp.
    """
    given, grid = make_workload("gpt", profile), legal_grid
    same = (
        replace(grid, context=np.where(grid.cp == 1, 1 - grid.context, grid.context)),
        replace(grid, zero=np.where(grid.dp_shard * grid.cp == 1, 1, grid.zero)),
        replace(grid, sequence_parallel=grid.sequence_parallel | (grid.tp == 1)),
        replace(grid, ep=1, etp=1),
    )
    step, memory = estimate_step(given, grid).step_s, estimate_memory(given, grid).peak_bytes
    for other in same:
        assert estimate_step(given, other).step_s == pytest.approx(step, rel=1e-12)
        assert estimate_memory(given, other).peak_bytes == pytest.approx(memory, rel=1e-12)


@pytest.mark.parametrize("profile", PROFILES_OF_EACH_KIND)
def test_more_activation_checkpointing_is_never_faster(make_workload, legal_grid, profile):
    """Offloading and collectives are included."""
    given = make_workload("llama", profile)
    grid = legal_grid.take(~np.isin(legal_grid.schedule, ZERO_BUBBLE))
    none, selective, full = (estimate_step(given, replace(grid, recompute=n)).step_s for n in range(3))
    assert (none <= SLACK * selective).all()
    assert (selective <= SLACK * full).all()


@pytest.mark.parametrize("profile", PROFILES_OF_EACH_KIND)
def test_doubling_the_layers_less_than_doubles_compute(make_workload, legal_grid, profile):
    """The head does not grow with the layers."""
    once = make_workload("llama", profile)
    model = dataclasses.replace(once.model, num_layers=2 * once.model.num_layers)
    twice = dataclasses.replace(once, model=model)
    ratio = (
        estimate_step(twice, legal_grid).parts["compute"] / estimate_step(once, legal_grid).parts["compute"]
    )
    assert (ratio <= 2 * SLACK).all()
    assert (ratio >= 1.6).all()


@pytest.mark.parametrize("profile", PROFILES_OF_EACH_KIND)
def test_larger_micro_batches_are_not_slower(make_workload, legal_grid, profile):
    """The same samples need fewer and larger GEMMs. A partial last wave may cost a percent."""
    given = make_workload("llama", profile)
    small, large = (estimate_step(given, replace(legal_grid, micro_batch=n)).parts["compute"] for n in (1, 4))
    even = given.global_batch % (4 * legal_grid.data_degree) == 0
    assert even.any()
    assert (large[even] <= 1.01 * small[even]).all()


def test_one_expert_model_costs_about_as_much_as_a_dense_model(make_workload, make_grid):
    """It has as many parameters and FLOPs, plus sorting of tokens and grouped GEMMs."""
    dense = make_workload("llama", "megatron-core", global_batch=64)
    model = dataclasses.replace(dense.model, num_experts=1, experts_per_token=1, expert_ffn_size=14336)
    routed = dataclasses.replace(dense, model=model)
    grid = make_grid(dp_shard=[8, 8], zero=[1, 3], micro_batch=[2, 2])
    time = estimate_step(routed, grid).step_s / estimate_step(dense, grid).step_s
    memory = estimate_memory(routed, grid).peak_bytes / estimate_memory(dense, grid).peak_bytes
    assert ((time > 1) & (time < 1.3)).all()
    assert ((memory > 0.95) & (memory < 1.25)).all()


def test_splitting_experts_over_etp_moves_as_many_bytes(make_workload, make_grid):
    """A rank then has the tokens of its etp group and a part of the columns."""
    given = make_workload("experts", "megatron-core")
    grid = make_grid(tp=[4, 4], etp=[1, 4], dp_shard=[2, 2], zero=[1, 1])
    times = BlockModel(given, Device.of(given, rates_of(given)), grid).times()
    assert times.elementwise.forward[0] == pytest.approx(times.elementwise.forward[1])


def test_dense_gradients_are_reduced_over_ep_ranks(make_workload, make_grid):
    """In a published run without ZeRO the experts are on 8 ranks, all with the same dense parameters."""
    given = make_workload("experts", "megatron-lm")
    alone, spread = estimate_step(given, make_grid(dp_shard=[1, 8], ep=[1, 8], tp=[1, 1])).parts[
        "gradient reduction"
    ]
    assert alone == 0
    assert spread > 0


def test_offload_transfers_overlap_with_all_gathers(make_workload, make_grid):
    """They use two links: the time is at least that of each and at most their sum."""
    given = make_workload("gpt", "deepspeed-zero", global_batch=64)
    columns = {"dp_shard": [8, 8], "zero": [3, 3], "micro_batch": [1, 1]}
    gathered, both = estimate_step(given, make_grid(**columns, offload=[1, 2])).parts["sharded data parallel"]
    streamed = estimate_step(given, make_grid(dp_shard=[1], offload=[2])).parts["sharded data parallel"][0]
    assert gathered <= both <= gathered + 64 * streamed


@pytest.mark.parametrize("profile", ["megatron-core", "torchtitan"])
def test_zbv_memory_is_between_1f1b_and_gpipe(make_workload, make_grid, profile):
    """ZBV has p micro-batches in flight on every rank, 1F1B on its first rank, and GPipe has all of them."""
    given = make_workload("llama", profile, global_batch=64)
    names = ("gpipe", "1f1b", "zbv")
    grid = make_grid(
        pp=[4] * 3, schedule=[SCHEDULES.index(n) for n in names], virtual_stages=[1, 1, 2], recompute=[0] * 3
    )
    held = dict(zip(names, estimate_memory(given, grid).lines["activations"], strict=True))
    assert held["zbv"] < held["gpipe"]
    assert held["zbv"] == pytest.approx(held["1f1b"], rel=0.01)
