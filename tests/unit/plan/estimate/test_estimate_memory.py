"""The memory estimate: lines sum to the peak, columns are independent, every layout key has its effect."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwright.layout.parameters import count_parameters
from meshwright.plan.estimate.balance import balance_parameters
from meshwright.plan.estimate.memory import EXCLUDED_LINES, LINES, estimate_memory
from meshwright.plan.estimate.state import STATE_LINES
from meshwright.plan.profiles import PROFILES

PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "fp4")


@pytest.mark.parametrize("profile", sorted(PROFILES))
@pytest.mark.parametrize("model", ["gpt", "llama", "experts", "latent"])
def test_lines_sum_to_the_peak_of_the_largest_class(make_workload, random_grid, profile, model):
    for precision in PRECISIONS:
        estimate = estimate_memory(make_workload(model, profile, precision=precision), random_grid)
        assert set(estimate.lines) == set(LINES)
        assert all((column >= 0).all() for column in estimate.lines.values())
        np.testing.assert_allclose(sum(estimate.lines.values()), estimate.peak_bytes, rtol=1e-12)
        np.testing.assert_allclose(np.maximum.reduce(list(estimate.classes.values())), estimate.peak_bytes)


@pytest.mark.parametrize("profile", ["meshwright", "megatron-core", "torchtitan"])
def test_estimate_of_a_layout_is_independent_of_others(make_workload, random_grid, profile):
    """The columns of a grid are independent, so search and prediction of one layout agree."""
    workload = make_workload("experts", profile)
    together = estimate_memory(workload, random_grid)
    for place in range(0, len(random_grid), 7):
        alone = estimate_memory(workload, random_grid.take(np.array([place])))
        assert alone.peak_bytes[0] == pytest.approx(together.peak_bytes[place], rel=1e-12)
        for name in LINES:
            assert alone.lines[name][0] == pytest.approx(together.lines[name][place], rel=1e-9, abs=1.0)


def test_state_between_steps_by_definition(make_workload, make_grid):
    """Replicated P + G + O; zero=1 P + G + O/N; FSDP2's zero=2 and 3 (P + G + O)/N; N = dp_shard x cp."""
    workload = make_workload("llama", "meshwright")
    count = count_parameters(workload.model)
    grid = make_grid(zero=[0, 1, 2, 3], dp_shard=[1, 4, 4, 4], cp=[1, 2, 2, 2], dp_replicate=[8, 1, 1, 1])
    between = estimate_memory(workload, grid).state_before_optimizer_bytes / count
    np.testing.assert_allclose(between, [16, 8 + 8 / 8, 16 / 8, 16 / 8], rtol=1e-6)


def test_megatron_state_is_18_or_6_plus_12_over_n_bytes_per_parameter(make_workload, make_grid):
    workload = make_workload("llama", "megatron-core")
    count = count_parameters(workload.model)
    grid = make_grid(zero=[0, 1, 2, 3], dp_shard=[1, 4, 4, 4])
    between = estimate_memory(workload, grid).state_before_optimizer_bytes / count
    np.testing.assert_allclose(between, [18, 9, 2 + 16 / 4, 18 / 4], rtol=1e-6)


def test_expert_state_is_sharded_over_ep_shard(make_workload, make_grid):
    """With ep = dp_shard every rank has its own experts, and their optimizer state is not sharded."""
    workload = make_workload("experts", "megatron-core")
    grid = make_grid(zero=[1, 1, 1], dp_shard=[8, 8, 16], ep=[1, 8, 8])
    optimizer = estimate_memory(workload, grid).lines["optimizer"] / 8
    model = workload.model
    routed = 15 * 64 * 3 * model.hidden_size * 1024
    dense = optimizer[0] * 8 - routed
    np.testing.assert_allclose(optimizer[1], dense / 8 + routed / 8, rtol=1e-9)
    np.testing.assert_allclose(optimizer[2], dense / 16 + routed / 8 / 2, rtol=1e-9)


def test_activations_of_a_gpt_block_are_those_of_korthikanti(make_workload, make_grid):
    """Table 2: s b h (34 + 5 a s / h); with tp 10 + 24/t + 5 a s / h t; with sequence parallel all over t."""
    workload = make_workload("gpt", "megatron-lm", precision="fp16")
    grid = make_grid(
        tp=[1, 8, 8, 8, 8], sequence_parallel=[False, False, True, True, True], recompute=[0, 0, 0, 1, 2]
    )
    kept = estimate_memory(workload, grid).lines["activations"] / (48 * 2048 * 6144)
    scores = 5 * 64 * 2048 / 6144
    expected = [34 + scores, 10 + 24 / 8 + scores / 8, (34 + scores) / 8, 34 / 8, 2 / 8]
    np.testing.assert_allclose(kept, expected, rtol=1e-9)


def test_the_first_stage_holds_as_many_micro_batches_as_its_schedule_says(make_workload, make_grid):
    """1F1B min(p, m); GPipe m; interleaved p (1 + (p - 1) / (p v)) (Korthikanti et al., section 4.2.3)."""
    workload = make_workload("gpt", "megatron-lm", precision="fp16", global_batch=16)
    one = estimate_memory(workload, make_grid()).lines["activations"][0]
    grid = make_grid(
        pp=[4] * 4, schedule=[1, 0, 2, 1], virtual_stages=[1, 1, 2, 1], dp_replicate=[1, 1, 1, 8]
    )
    held = estimate_memory(workload, grid).lines["activations"] / (one / 4)
    np.testing.assert_allclose(held, [4, 16, 4 * (1 + 3 / 8), 2], rtol=1e-9)


def test_a_v_schedule_has_both_ends_of_the_model_on_its_first_rank(make_workload, make_grid):
    workload = make_workload("llama", "megatron-core")
    estimate = estimate_memory(workload, make_grid(pp=[4, 4], schedule=[1, 4], virtual_stages=[1, 2]))
    table = 128256 * 4096
    per_stage = (count_parameters(workload.model) - 2 * table - 4096) / 4
    np.testing.assert_allclose(estimate.lines["parameters"][1] / 2, per_stage + 2 * table + 4096, rtol=1e-9)


def test_a_tied_embedding_is_on_the_first_and_on_the_last_stage(make_workload, make_grid):
    workload = make_workload("gpt", "megatron-lm", precision="fp16")
    estimate = estimate_memory(workload, make_grid(pp=[4], zero=[0]))
    assert estimate.classes["first"][0] > estimate.classes["middle"][0]
    assert estimate.state_before_optimizer_bytes[0] > 18 * (12 * 12 * 6144**2 + 51200 * 6144)
    alone = estimate_memory(workload, make_grid()).lines["parameters"][0] / 2
    assert alone == pytest.approx(count_parameters(workload.model), rel=1e-3)


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_more_activation_checkpointing_never_saves_more(make_workload, make_grid, profile):
    grid = make_grid(recompute=[0, 1, 2], pp=[2, 2, 2])
    none, selective, full = estimate_memory(make_workload("llama", profile), grid).lines["activations"]
    assert none >= selective > full


@pytest.mark.parametrize("profile", sorted(PROFILES))
@pytest.mark.parametrize("model", ["llama", "experts"])
def test_a_higher_zero_stage_never_keeps_more_between_steps(make_workload, make_grid, profile, model):
    grid = make_grid(zero=[1, 2, 3], dp_shard=[8, 8, 8], ep=[4, 4, 4])
    between = estimate_memory(make_workload(model, profile), grid).state_before_optimizer_bytes
    assert between[0] > between[1] >= between[2]


def test_offload_moves_the_optimizer_or_all_state_to_the_cpu(make_workload, make_grid):
    estimate = estimate_memory(make_workload("llama"), make_grid(offload=[0, 1, 2]))
    state = np.array([estimate.lines[name] for name in STATE_LINES])
    assert (state[:, 0] > 0).all()
    assert (state[:2, 1] > 0).all()
    assert (state[2:, 1] == 0).all()
    assert (state[:, 2] == 0).all()
    assert estimate.lines["gathered"][2] > 0, "offloaded parameters still come to the device, block by block"


def test_each_prefetched_block_costs_its_16_bit_parameters(make_workload, make_grid):
    grid = make_grid(
        prefetch=[0, 1, 2], zero=[3] * 3, dp_shard=[64] * 3, recompute=[2] * 3, micro_batch=[1] * 3
    )
    workload = make_workload("llama", "torchtitan", seq_len=128)
    gathered = estimate_memory(workload, grid).lines["gathered"]
    block = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096
    np.testing.assert_allclose(np.diff(gathered), 2 * block, rtol=1e-9)


def test_deferred_accumulation_keeps_gradients_unsharded(make_workload, make_grid):
    grid = make_grid(accumulate=[0, 1, 1], zero=[3] * 3, dp_shard=[8] * 3, micro_batch=[1, 1, 64])
    gradients = estimate_memory(make_workload("llama", "meshwright"), grid).lines["gradients"]
    assert gradients[1] == pytest.approx(8 * gradients[0])
    assert gradients[2] == pytest.approx(gradients[0]), "a single micro-batch has nothing to defer"


def test_context_parallelism_halves_activations_and_ulysses_saves_a_second_output(make_workload, make_grid):
    workload = make_workload("llama")
    plain, ring, ulysses = estimate_memory(workload, make_grid(cp=[1, 2, 2], context=[0, 0, 1])).lines[
        "activations"
    ]
    assert ring == pytest.approx(plain / 2)
    assert ulysses - ring == pytest.approx(32 * 1024 * 4096 * 2)


def test_only_dtensor_saves_gathered_inputs(make_workload, make_grid):
    """Megatron gathers sequence-parallel inputs again; DTensor saves 2 D e per token and block for them."""
    grid = make_grid(tp=[4], sequence_parallel=[True])
    kept = {
        name: estimate_memory(make_workload("llama", name), grid).lines["activations"][0]
        for name in ("megatron-core", "torchtitan")
    }
    inner = 32 * 512 * 14336 * 2  # operators keep one inner vector more
    norms = 32 * 2 * 512 * 4096 * 4  # unfused norms keep a float32 copy
    assert kept["torchtitan"] - kept["megatron-core"] == pytest.approx(
        inner + norms + 32 * 2 * 4096 * 2 * (2048 - 512)
    )


def test_etp_does_not_multiply_the_inside_of_experts(make_workload, make_grid):
    """Ranks of etp keep all tokens of an expert, each with its columns: only the inputs of experts grow."""
    workload = make_workload("experts", "megatron-core")
    one, four = (
        float(estimate_memory(workload, make_grid(tp=[4], ep=[1], etp=[etp])).lines["activations"][0])
        for etp in (1, 4)
    )
    assert one < four < 2.5 * one


def test_types_of_state_are_settings_of_the_profile(make_workload, make_grid):
    """Adam with bf16 moments and no master weights."""
    workload = make_workload("llama", "huggingface")
    memory = dataclasses.replace(workload.profile.memory, moment_bytes=2.0, master_bytes=0.0)
    small = dataclasses.replace(workload, profile=dataclasses.replace(workload.profile, memory=memory))
    usual, less = (estimate_memory(w, make_grid()).lines for w in (workload, small))
    assert less["optimizer"][0] == pytest.approx(usual["optimizer"][0] / 2)
    assert less["master weights"][0] == 0


def test_fp8_saves_smaller_activations_in_transformer_engine_only(make_workload, make_grid):
    kept = {}
    for profile in ("megatron-core", "torchtitan"):
        for precision in ("bf16", "fp8", "fp4"):
            workload = make_workload("llama", profile, precision=precision)
            kept[profile, precision] = estimate_memory(workload, make_grid()).lines["activations"][0]
    assert kept["megatron-core", "fp4"] < kept["megatron-core", "fp8"] < kept["megatron-core", "bf16"]
    assert kept["torchtitan", "fp8"] == kept["torchtitan", "bf16"]


@pytest.mark.parametrize("ep", [1, 4])
def test_expert_imbalance_needs_more_memory_up_to_the_capacity(make_workload, make_grid, ep):
    """Between ranks only: one that holds all experts reads the copies of all tokens."""
    workload = make_workload("experts", "meshwright")
    bounded = dataclasses.replace(workload, model=dataclasses.replace(workload.model, capacity_factor=1.0))
    grid = make_grid(ep=[ep], dp_replicate=[ep])
    free, fixed = (estimate_memory(w, grid).lines["activations"][0] for w in (workload, bounded))
    each = 2048 * 2 + 4 * 1024 * 2 + 2048 * 2 + 28  # input, inside, output, weight and indices
    uneven = workload.profile.memory.imbalance - 1 if ep > 1 else 0
    assert free - fixed == pytest.approx(15 * 2048 * 6 * uneven * each)


def test_memory_counted_by_publications_leaves_out_some_lines(make_workload, random_grid):
    estimate = estimate_memory(make_workload(), random_grid)
    counted = {kind: estimate.counted_as(kind) for kind in EXCLUDED_LINES}
    assert (counted["formula"] < counted["allocated"]).all()
    assert (counted["allocated"] < counted["reserved"]).all()
    assert (counted["reserved"] < counted["device"]).all()
    np.testing.assert_allclose(counted["device"], estimate.peak_bytes)


def test_uneven_layers_count_embedding_and_head_as_layers(make_workload, make_grid):
    """30 layers on 8 stages are 4 each including embedding and head, so 3 on the first and last stage."""
    workload = make_workload("llama")
    workload = dataclasses.replace(workload, model=dataclasses.replace(workload.model, num_layers=30))
    estimate = estimate_memory(workload, make_grid(pp=[8]))
    block = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096
    table = 128256 * 4096
    assert estimate.state_before_optimizer_bytes[0] == pytest.approx(
        18 * (3 * block + table + 4096), rel=1e-6
    )


def test_stages_that_are_balanced_by_parameters(make_workload, make_grid):
    """Embedding and 6 blocks, 8 blocks each on the middle stages, 2 blocks and the head."""
    workload = make_workload("llama", "aleph-alpha-scaling")
    block = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096
    estimate = estimate_memory(workload, make_grid(pp=[5]))
    found = balance_parameters(32, 5, 128256 * 4096 / block)
    assert found == (5, 8, 8, 8, 3)
    assert estimate.state_before_optimizer_bytes[0] == pytest.approx(16 * 8 * block, rel=1e-6)


@pytest.mark.parametrize("profile", ["meshwright", "megatron-core", "aleph-alpha-scaling"])
def test_an_empty_grid_is_estimated(make_workload, random_grid, profile):
    """A search may filter out every layout."""
    empty = random_grid.take(np.zeros(len(random_grid), dtype=np.bool_))
    estimate = estimate_memory(make_workload("experts", profile), empty)
    assert len(estimate.peak_bytes) == 0
    assert all(len(column) == 0 for column in estimate.lines.values())
