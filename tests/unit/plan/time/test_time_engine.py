"""The estimated step time: parts sum to the step, and known effects are visible."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from meshwright.plan.estimate.grid import Grid
from meshwright.plan.estimate.workload import Workload
from meshwright.plan.profiles import PROFILES
from meshwright.plan.time.block import BlockModel
from meshwright.plan.time.engine import estimate_step
from meshwright.plan.time.gemm import Device
from meshwright.plan.time.launches import COLLECTIVE_CPU_LAUNCH_S
from meshwright.plan.time.overlap import overlap_with
from meshwright.plan.time.rates import rates_of
from meshwright.spec.layout import Layout
from meshwright.spec.model import DecoderModel
from meshwright.validation.devices import known_devices

GPT_175B = DecoderModel(
    num_layers=96, hidden_size=12288, num_heads=96, num_kv_heads=96, ffn_size=49152, vocab_size=51200,
    activation="gelu", norm="layer", positions="learned", max_positions=2048, tied_embeddings=True,
)  # fmt: skip
DEEPSEEK = DecoderModel(
    num_layers=61, hidden_size=7168, num_heads=128, num_kv_heads=128, ffn_size=18432, vocab_size=129280,
    attention="latent", latent_size=512, query_latent_size=1536, rope_head_dim=64, head_dim=128,
    num_experts=256, experts_per_token=8, expert_ffn_size=2048, shared_experts=1, dense_layers=3,
)  # fmt: skip
PTD = Layout(mode="given", tp=8, pp=8, dp_replicate=16, micro_batch=1, schedule="1f1b", recompute="full")


def workload(
    model: DecoderModel = GPT_175B,
    device: str = "A100-80GB-SXM",
    profile: str = "megatron-lm",
    devices: int = 1024,
    **changes: object,
) -> Workload:
    cluster = known_devices()[device]
    cluster = dataclasses.replace(cluster, nodes=-(-devices // cluster.devices_per_node))
    base = Workload(model, cluster, 2048, 1536, "bf16", PROFILES[profile])
    return dataclasses.replace(base, **changes)


def seconds(given: Workload, *layouts: Layout) -> np.ndarray:
    return estimate_step(given, Grid.of(layouts)).step_s


def change(layout: Layout, **changes: object) -> Layout:
    return dataclasses.replace(layout, **changes)


LAYOUTS = (
    PTD,
    change(PTD, recompute="none", sequence_parallel=True),
    change(PTD, recompute="selective", pp=16, dp_replicate=8, schedule="interleaved", virtual_stages=3),
    change(PTD, dp_replicate=4, dp_shard=4, zero=1),
    Layout(mode="given", dp_shard=1024, zero=3, micro_batch=1, recompute="full"),
    change(PTD, cp=2, dp_replicate=8),
    change(PTD, schedule="zb-h1"),
    change(PTD, schedule="zbv", virtual_stages=2),
)


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_parts_add_up_and_a_grid_equals_its_single_layouts(profile):
    """No part is negative. A grid gives the same estimate as each layout alone."""
    given = workload(profile=profile)
    together = estimate_step(given, Grid.of(LAYOUTS))
    assert np.sum(list(together.parts.values()), axis=0) == pytest.approx(together.step_s)
    for name, part in together.parts.items():
        assert (part >= -1e-9 * together.step_s).all(), name
    for place, layout in enumerate(LAYOUTS):
        assert seconds(given, layout)[0] == pytest.approx(together.step_s[place])


def test_step_is_never_faster_than_its_flops_at_peak():
    """The peak is that of the data sheet."""
    given = workload()
    flops = 6 * 174e9 * given.global_batch * given.seq_len / 1024
    assert (seconds(given, *LAYOUTS[:3]) > flops / 312e12).all()


def test_full_checkpointing_costs_a_forward_pass_and_selective_much_less():
    none, selective, full = seconds(
        workload(), *(change(PTD, recompute=kind) for kind in ("none", "selective", "full"))
    )
    assert none < selective < full
    assert full / none == pytest.approx(4 / 3, rel=0.08)


def test_tensor_parallel_across_nodes_is_slower():
    """Sixteen ranks on nodes of eight reduce over the network, so the tensor parallel part grows."""
    given = workload()
    given = dataclasses.replace(given, cluster=dataclasses.replace(given.cluster, nic_bytes_per_s=12.5e9))
    one_node, two_nodes = (estimate_step(given, Grid.of([change(PTD, tp=tp, pp=64 // tp)])) for tp in (8, 16))
    inside, across = (e.parts["tensor parallel"][0] / e.step_s[0] for e in (one_node, two_nodes))
    assert across > 2.5 * inside


def test_oversubscribed_racks_slow_down_groups_that_cross_them():
    given = workload()
    narrow = dataclasses.replace(given.cluster, nodes_per_rack=4, spine_oversubscription=4.0)
    wide, slow = (
        estimate_step(w, Grid.of([change(PTD, pp=1, dp_replicate=128)])).parts["gradient reduction"][0]
        for w in (given, dataclasses.replace(given, cluster=narrow))
    )
    assert slow > 2 * wide


def test_zero_3_throughput_falls_with_devices_as_published():
    """Narayanan et al.

    2021, table 2: 144, 88 and 44 TFLOP/s on 384, 768 and 1,536 devices with a batch of 1,536.
    """
    rates = []
    for devices, micro_batch in ((384, 4), (768, 2), (1536, 1)):
        given = workload(profile="deepspeed-zero", devices=devices, precision="fp16")
        layout = Layout(mode="given", dp_shard=devices, zero=3, micro_batch=micro_batch, recompute="full")
        rates.append(1 / seconds(given, layout)[0] / devices)
    relative = np.array(rates) / rates[0]
    assert relative == pytest.approx([1, 88 / 144, 44 / 144], rel=0.25)


def test_unaligned_head_widths_cost_as_much_as_bloom_reported():
    """14,400 wide with 96 heads (150 each) against 13,824 (144 each), with equal GEMM FLOPs per token."""
    rates = []
    for width in (14400, 13824):
        model = dataclasses.replace(
            GPT_175B, num_layers=80, hidden_size=width, ffn_size=4 * width, vocab_size=250880
        )
        given = workload(
            model, profile="megatron-deepspeed", devices=320, precision="fp16", global_batch=2048
        )
        layout = change(PTD, pp=10, dp_replicate=4)
        rates.append(width**2 / seconds(given, layout)[0])
    assert 1.10 < rates[1] / rates[0] < 1.40


def test_unfused_softmax_costs_time_and_kernel_launches():
    """Megatron's kernel takes heads of a micro-batch in groups of four.

    Fused attention has no such kernel.
    """
    small = dataclasses.replace(
        GPT_175B, num_layers=8, hidden_size=2048, ffn_size=8192, num_heads=16, num_kv_heads=16
    )
    two, four = (Layout(mode="given", tp=8, micro_batch=n, recompute="full") for n in (1, 2))
    for profile, slower in (("megatron-lm", True), ("megatron-core", False)):
        given = workload(small, profile=profile, devices=8, global_batch=16, seq_len=1024)
        rates = dataclasses.replace(rates_of(given), cpu_launch_s=0.1)
        once, twice = estimate_step(given, Grid.of([two, four]), rates).step_s
        assert (once > 2.2 * twice) == slower, "twice the micro-batches with a fifth more kernels each"


def test_blocking_launches_add_cpu_time_to_every_micro_batch():
    """Forward, recomputation and backward of each layer wait for the CPU; large micro-batches wait less."""
    given = workload(profile="megatron-deepspeed", devices=8, global_batch=64)
    rules = dataclasses.replace(given.profile.time, blocking_launches=True)
    blocking = dataclasses.replace(given, profile=dataclasses.replace(given.profile, time=rules))
    one, four = (Layout(mode="given", tp=8, micro_batch=n, recompute="full") for n in (1, 4))
    added = seconds(blocking, one, four) - seconds(given, one, four)
    passes = 3 * GPT_175B.num_layers * np.array([64, 16])
    per_pass = rates_of(given).cpu_launch_s * rules.cpu_launch_ratio + COLLECTIVE_CPU_LAUNCH_S * 2 * np.log2(
        8
    )
    assert added == pytest.approx(passes * per_pass)


@pytest.mark.parametrize(
    ("profile", "difference"), [("megatron-deepspeed", 12.0), ("megatron-lm", 0.0), ("megatron-core", 0.0)]
)
def test_deepspeed_moves_more_to_sum_bf16_gradients_than_fp16_ones(profile, difference):
    """In each micro-batch: 18 and 6 bytes per weight of a linear layer."""
    given = workload(profile=profile, devices=8)
    grid = Grid.of([Layout(mode="given", tp=8, micro_batch=1)])
    bf16, fp16 = (
        BlockModel(one, Device.of(one, rates_of(one)), grid).linear(2048, 1024, 4096).backward_weight[0]
        for one in (given, dataclasses.replace(given, precision="fp16"))
    )
    bytes_per_s = Device.of(given, rates_of(given)).bytes_per_s
    assert (bf16 - fp16) * bytes_per_s / (1024 * 4096) == pytest.approx(difference)


def test_more_virtual_stages_shrink_the_bubble_and_zero_bubble_nearly_removes_it():
    layouts = [
        change(PTD, pp=8, dp_replicate=16),
        change(PTD, pp=8, dp_replicate=16, schedule="interleaved", virtual_stages=4),
        change(PTD, pp=8, dp_replicate=16, schedule="zbv", virtual_stages=2),
    ]
    plain, interleaved, zbv = estimate_step(workload(), Grid.of(layouts)).parts["bubble"]
    assert interleaved == pytest.approx(plain / 4, rel=0.1)
    assert zbv < plain / 3, "a bubble remains, because recomputation makes B longer than W"


def test_deduplicated_dispatch_sends_one_copy_per_node():
    """Dispatch over eight nodes with one copy per node moves less than with one copy per expert."""
    layout = Layout(mode="given", pp=4, dp_shard=64, ep=64, zero=1, micro_batch=1)
    times = []
    for once in (False, True):
        core = PROFILES["megatron-core"]
        profile = dataclasses.replace(core, time=dataclasses.replace(core.time, one_copy_per_node=once))
        given = workload(DEEPSEEK, "H100-80GB-SXM", devices=256, seq_len=4096)
        given = dataclasses.replace(given, profile=profile)
        times.append(estimate_step(given, Grid.of([layout])).parts["expert parallel"][0])
    assert 1.3 < times[0] / times[1] < 2.5


def test_fp8_recipes_cost_their_casts():
    """Delayed scaling reads once, current scaling twice, rows and columns are cast separately."""
    given = workload(device="B200-180GB-SXM", profile="megatron-bridge", precision="fp8")
    delayed, plain, rows = (
        seconds(dataclasses.replace(given, recipe=recipe), change(PTD, micro_batch=4))[0]
        for recipe in ("delayed", "current", "rowwise")
    )
    assert delayed < plain < rows
    assert rows < seconds(dataclasses.replace(given, precision="bf16"), change(PTD, micro_batch=4))[0]


def test_window_reduces_attention_only_if_shorter_than_the_sequence():
    long = workload(DEEPSEEK, "H100-80GB-SXM", "megatron-core", seq_len=65536)
    layout = Layout(mode="given", pp=4, dp_shard=32, zero=1, micro_batch=1)
    windowed = dataclasses.replace(DEEPSEEK, window=512, window_every=2)
    full, half = (seconds(dataclasses.replace(long, model=m), layout)[0] for m in (DEEPSEEK, windowed))
    assert half < 0.8 * full
    wide = dataclasses.replace(DEEPSEEK, window=65536)
    assert seconds(dataclasses.replace(long, model=wide), layout)[0] == pytest.approx(full, rel=1e-6)


def test_etp_ranks_still_exchange_tokens():
    """Experts split in eight instead of spread over eight still need token exchange."""
    given = workload(DEEPSEEK, "H100-80GB-SXM", "megatron-core", devices=64, seq_len=4096)
    layouts = [
        Layout(mode="given", pp=8, dp_shard=8, zero=1, micro_batch=1, ep=ep, etp=etp)
        for ep, etp in ((8, 1), (1, 8), (1, 1))
    ]
    spread, cut, alone = estimate_step(given, Grid.of(layouts)).parts["expert parallel"]
    assert cut > spread > 0
    assert alone == 0


@pytest.mark.parametrize(("profile", "lanes"), [("megatron-core", 1), ("meshwright", 8)])
def test_ring_attention_time_depends_on_chunk_length_and_ulysses_on_the_sequence(profile, lanes):
    """Chunks of seq_len / cp tokens have a lower attention rate, and every call has a launch."""
    given = workload(device="H100-80GB-SXM", profile=profile)
    rates = rates_of(given)
    layouts = [change(PTD, tp=1, pp=1, cp=cp, dp_replicate=1024 // cp) for cp in (1, 8)]
    layouts.append(change(layouts[1], context="ulysses"))
    blocks = BlockModel(given, Device.of(given, rates), Grid.of(layouts))
    whole, ring, exchanged = blocks.times().attention.forward
    assert exchanged - rates.launch_s == pytest.approx((whole - rates.launch_s) / 8)
    ramps = [1 / (1 + rates.attention_ramp / length) for length in (2048, 256)]
    assert ring - 8 * lanes * rates.launch_s == pytest.approx(
        (exchanged - rates.launch_s) * ramps[0] / ramps[1]
    )


def test_ring_attention_over_eight_ranks_is_slow_for_short_sequences():
    """Chunks of 256 tokens take longer than the whole sequences of Ulysses.

    Chunks of 16,384 tokens hardly do.
    """
    ring = change(PTD, tp=1, pp=1, cp=8, dp_replicate=128, recompute="none")
    grid, ratios = Grid.of([ring, change(ring, context="ulysses")]), []
    for length in (2048, 131072):
        given = dataclasses.replace(workload(device="H100-80GB-SXM", profile="megatron-core"), seq_len=length)
        chunked, whole = estimate_step(given, grid).parts["compute"]
        ratios.append(chunked / whole)
    assert ratios[0] > 1.03
    assert 1 < ratios[1] < 1.03


def test_unfused_norms_rope_and_gates_cost_time():
    """Megatron-style blocks of plain PyTorch modules are slower; compiling fuses them."""
    llama = dataclasses.replace(
        GPT_175B, activation="swiglu", norm="rms", positions="rope", max_positions=None, ffn_size=32768
    )
    layout = Layout(mode="given", tp=8, pp=8, dp_replicate=16, micro_batch=1, recompute="none")
    given = workload(llama, profile="torchtitan")
    eager, compiled = (seconds(dataclasses.replace(given, compiled=on), layout)[0] for on in (False, True))
    assert eager > 1.03 * compiled


def test_dualpipe_hides_expert_dispatch():
    given = workload(DEEPSEEK, "H800-80GB-SXM", "megatron-core", devices=128, seq_len=4096)
    layout = Layout(mode="given", pp=8, dp_shard=16, zero=1, micro_batch=1, ep=16, schedule="1f1b")
    dual = change(layout, schedule="dualpipe-v", virtual_stages=2)
    plain, hidden = estimate_step(given, Grid.of([layout, dual])).parts["expert parallel"]
    assert 0 < hidden < 0.7 * plain


def test_reduction_overlaps_the_last_passes_of_interleaved_stages():
    """A chunk is done with its micro-batches while the other chunks still have the last pp of them."""
    given = workload(GPT_175B, profile="megatron-core", devices=256)
    layout = Layout(mode="given", tp=8, pp=8, dp_shard=4, zero=1, micro_batch=1, recompute="none")
    chunks = [change(layout, schedule="interleaved", virtual_stages=n) for n in (2, 6)]
    one, two, six = estimate_step(given, Grid.of([layout, *chunks])).hidden["data parallel"]
    assert one < two <= six


def test_fsdp_hides_collectives_behind_passes_that_are_long_enough():
    """Without prefetch, as in DeepSpeed of 2021, more of the same collectives is exposed."""
    given = workload(GPT_175B, profile="torchtitan")
    rules = dataclasses.replace(given.profile.time, prefetches_parameters=False)
    without = dataclasses.replace(given, profile=dataclasses.replace(given.profile, time=rules))
    layout = Layout(mode="given", dp_shard=1024, zero=3, micro_batch=2)
    hidden, exposed = (
        estimate_step(one, Grid.of([layout])).parts["sharded data parallel"][0] for one in (given, without)
    )
    assert 0 < hidden < 0.8 * exposed


@pytest.mark.parametrize(("compute_s", "exposed"), [(100.0, 0.2), (1.0, 0.5), (0.0, 1.0)])
def test_communication_is_exposed_beyond_the_window_but_for_a_least_share(compute_s, exposed):
    found, hidden = overlap_with(np.array([1.0]), np.array([compute_s]), 0.5, 0.2, contention=0.0)
    assert found == pytest.approx([exposed])
    assert found + hidden == pytest.approx([1.0])


def test_a_mask_as_a_tensor_doubles_attention():
    given = workload(GPT_175B, profile="huggingface")
    skipping = dataclasses.replace(given.profile.time, skips_masked=True)
    other = dataclasses.replace(given, profile=dataclasses.replace(given.profile, time=skipping))
    grid = Grid.of([Layout(mode="given", dp_shard=1024, zero=3, micro_batch=1)])
    passes = [
        BlockModel(one, Device.of(one, rates_of(one)), grid).times().attention.backward_input[0]
        for one in (given, other)
    ]
    assert passes[0] == pytest.approx(2 * passes[1], rel=0.01)


@pytest.mark.parametrize(
    ("profile", "device", "rates"),
    [
        ("composer-fsdp", "A100-80GB-SXM", (1.0, 80 / 128, 96 / 128)),  # Triton: next power of two
        ("torchtitan", "H100-80GB-SXM", (1.0, 80 / 96, 1.0)),  # FlashAttention-2: next multiple of 32
        ("megatron-core", "A100-80GB-SXM", (1.0, 80 / 96, 1.0)),
        ("megatron-core", "H100-80GB-SXM", (0.75, 80 / 124, 96 / 124)),  # cuDNN
    ],
)
def test_attention_rate_at_narrow_heads_depends_on_the_kernel(profile, device, rates):
    """Heads of 64, 80 and 96 against 128, with equal FLOPs."""
    grid = Grid.of([Layout(mode="given", dp_shard=1024, zero=3, micro_batch=1)])
    taken = []
    for width in (64, 80, 96, 128):
        model = dataclasses.replace(
            GPT_175B, hidden_size=15360, num_heads=15360 // width, num_kv_heads=15360 // width
        )
        given = workload(model, device, profile)
        attention = BlockModel(given, Device.of(given, rates_of(given)), grid).times().attention
        taken.append((attention.forward[0], attention.backward_input[0]))
    for (forward, backward), rate in zip(taken, rates, strict=False):
        assert taken[-1][0] / forward == pytest.approx(rate, rel=0.01)
        assert taken[-1][1] / backward == pytest.approx(rate, rel=0.01)


def test_zero_1_over_many_ranks_is_not_free():
    """InternEvo's 7B steps with ZeRO-1 over all ranks: 4.26 s on 16 devices, 7.21 s on 1,024."""
    llama = DecoderModel(
        num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32, ffn_size=11008, vocab_size=103168
    )
    times = []
    for devices in (16, 1024):
        given = workload(llama, profile="megatron-like", devices=devices, global_batch=8 * devices)
        layout = Layout(mode="given", dp_shard=devices, zero=1, micro_batch=2, recompute="none")
        times.append(seconds(given, layout)[0])
    assert times[1] > 1.2 * times[0]


def test_offloaded_optimizers_are_slower():
    """The CPU's Adam has fewer bytes per second than the device's."""
    given = workload(profile="huggingface", devices=8)
    layout = Layout(mode="given", dp_shard=8, zero=2, micro_batch=1, recompute="full")
    here, there = estimate_step(given, Grid.of([layout, change(layout, offload="optimizer")])).parts[
        "optimizer"
    ]
    assert there > 50 * here


LLAMA_13B = DecoderModel(
    num_layers=40, hidden_size=5120, num_heads=40, num_kv_heads=40, ffn_size=13824, vocab_size=128000
)
TP_4 = Layout(mode="given", tp=4, dp_shard=16, zero=1, micro_batch=1, recompute="none")


def with_rules(profile: str, **rules: object) -> Workload:
    given = workload(LLAMA_13B, profile=profile, devices=64)
    time = dataclasses.replace(given.profile.time, **rules)
    return dataclasses.replace(given, profile=dataclasses.replace(given.profile, time=time))


def test_a_separate_gate_projection_reduces_its_input_gradient():
    """Three all-reduces of input gradients instead of two; the forward pass has two anyway."""
    sharded = change(TP_4, sequence_parallel=True)
    plain, gated = (
        estimate_step(with_rules("megatron-like", separate_gate=flag), Grid.of([TP_4, sharded])).block_parts
        for flag in (False, True)
    )
    before, after = plain.exposed["tp"], gated.exposed["tp"]
    np.testing.assert_allclose(after.forward, before.forward)
    assert after.backward_input[0] == pytest.approx(1.5 * before.backward_input[0])
    assert after.backward_input[1] == pytest.approx(before.backward_input[1])


def test_collectives_of_embedding_and_head_are_counted():
    grid = Grid.of([TP_4, change(TP_4, tp=1, dp_shard=64)])
    without, counted = (
        estimate_step(with_rules("megatron-like", reduces_embedding_and_head=flag), grid)
        for flag in (False, True)
    )
    assert without.head_tp.total.max() == without.embedding_tp.total.max() == 0
    assert counted.head_tp.forward[0] > counted.embedding_tp.forward[0] > 0
    assert counted.head_tp.backward_input[0] == pytest.approx(counted.embedding_tp.forward[0])
    assert counted.head_tp.total[1] == counted.embedding_tp.total[1] == 0
    more = counted.parts["tensor parallel"] - without.parts["tensor parallel"]
    assert counted.step_s[0] - without.step_s[0] == pytest.approx(more[0])


def test_activation_checkpointing_may_cover_the_head():
    grid = Grid.of([TP_4, change(TP_4, recompute="full")])
    once, again = (
        estimate_step(with_rules("aleph-alpha-scaling", checkpoints_head=flag), grid)
        for flag in (False, True)
    )
    assert again.head.backward_input[0] == pytest.approx(once.head.backward_input[0])
    assert again.head.backward_input[1] > 1.2 * once.head.backward_input[1]
    assert again.head.forward[1] == pytest.approx(once.head.forward[1])


def test_stages_balanced_by_parameters_leave_room_for_the_head():
    """Stages of 9, 11, 11 and 9 blocks: the slowest has 11, and evenly 10 and the head."""
    given = Grid.of([change(TP_4, pp=4, dp_shard=4)])
    even, balanced = (
        estimate_step(with_rules("aleph-alpha-scaling", balances_stages_by_parameters=flag), given)
        for flag in (False, True)
    )
    count = 1536 / 4
    ideal = count * (10 * balanced.block.total + (balanced.head + balanced.embedding).total / 4)
    slowest = ideal + balanced.parts["uneven stages"]
    last = 9 * balanced.block.total + balanced.head.total
    assert slowest[0] == pytest.approx(count * max(11 * balanced.block.total[0], last[0]))
    assert balanced.step_s[0] < even.step_s[0]
