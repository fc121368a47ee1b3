"""The space is the legality table's: nothing illegal is in it, nothing legal that it promises is missing."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import get_args

import numpy as np
import pytest

from meshwright.plan.estimate.grid import CONTEXTS, RECOMPUTES
from meshwright.plan.predict import predict
from meshwright.plan.search.find import find_layouts
from meshwright.plan.search.runtimes import RUNTIME_SUPPORT, RuntimeSupport, runtime_support
from meshwright.plan.search.space import (
    LayoutSpace,
    micro_batch_choices,
    pinned_keys,
    virtual_stage_choices,
    world_sizes,
)
from meshwright.spec.job import Runtime
from meshwright.spec.layout import AXES, Layout
from meshwright.spec.legality.table import find_problems, with_layout
from meshwright.spec.numbers import divisors


def layouts_of(space: LayoutSpace, size: int = 1 << 14) -> list[Layout]:
    return [
        grid.layout(n)
        for chunk in space.chunks(size)
        for grid in [chunk.expand_schedules()]
        for n in range(len(grid))
    ]


def legal(job, layout: Layout) -> bool:
    return not find_problems(with_layout(job, layout), to_run=False)


def brute_force(job, world: int):
    """Every legal layout, by asking the table about all combinations; what changes nothing is asked once."""
    layers, batch = job.model.num_layers, job.train.global_batch
    ranks = divisors(world)
    for pp, dp_replicate, dp_shard, cp, tp in itertools.product(ranks, repeat=5):
        if pp * dp_replicate * dp_shard * cp * tp != world:
            continue
        share = -(-batch // (dp_replicate * dp_shard))
        experts = divisors(dp_shard * cp * tp) if job.model.num_experts else [1]
        schedules = [("1f1b", 1)]
        if pp > 1:
            schedules = [(name, v) for name in RuntimeSupport().schedules for v in range(1, layers + 1)]
        for ep, etp, zero, sp, (schedule, stages), context, micro, recompute in itertools.product(
            experts,
            experts,
            range(4),
            (False, True),
            schedules,
            CONTEXTS,
            micro_batch_choices(share),
            RECOMPUTES,
        ):
            fewest = virtual_stage_choices(layers, pp)
            if schedule == "interleaved" and stages > 1 and stages not in fewest:
                continue
            able = tp > 1 and job.data.seq_len % (tp * cp) == 0
            if (able and not sp) or etp not in (1, tp):  # left out: never better, and rarely
                continue
            layout = Layout(
                mode="given", pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep,
                etp=etp, zero=zero, sequence_parallel=sp, schedule=schedule, virtual_stages=stages,
                context=context, micro_batch=micro, recompute=recompute,
            )  # fmt: skip
            if legal(job, layout):
                yield layout


@pytest.mark.parametrize(("kind", "world"), [("dense", 4), ("dense", 6), ("experts", 2), ("latent", 4)])
def test_the_space_is_exactly_what_the_table_allows(make_decoder_job, kind, world):
    job = make_decoder_job(kind, cluster={"devices_per_node": world}, train={"global_batch": 4})
    found = layouts_of(LayoutSpace(job, world))
    assert len(found) == len(set(found)), "no layout twice"
    assert set(found) == set(brute_force(job, world))


@pytest.mark.parametrize("kind", ["dense", "experts", "latent", "llama3-70b", "deepseek-v3", "gpt3-175b"])
def test_samples_of_large_spaces_are_legal(make_decoder_job, kind):
    job = make_decoder_job(kind, cluster={"nodes": 12}, data={"seq_len": 2048}, train={"global_batch": 96})
    dice = random.Random(kind)
    for world in (96, 24, 1):
        chunks = list(itertools.islice(LayoutSpace(job, world).chunks(), 12))
        for chunk in dice.sample(chunks, min(4, len(chunks))):
            grid = chunk.expand_schedules()
            for place in dice.sample(range(len(grid)), min(20, len(grid))):
                layout = grid.layout(place)
                assert layout.world_size == world
                assert find_problems(with_layout(job, layout), to_run=False) == [], layout


def test_counts_are_known_before_anything_is_made(make_decoder_job):
    space = LayoutSpace(make_decoder_job("experts", cluster={"nodes": 2}), 16)
    for size in (64, 1 << 14):
        chunks = list(space.chunks(size))
        assert sum(len(chunk.expand_schedules()) for chunk in chunks) == len(space)
        assert all(chunk.sizes.sum() == len(chunk.expand_schedules()) for chunk in chunks)
        assert all(len(chunk.with_1f1b()) == len(chunk.sizes) for chunk in chunks)
    assert space.illegal > 0


@pytest.mark.parametrize(
    "pins",
    [
        {"micro_batch": 2},
        {"recompute": "full"},
        {"schedule": "gpipe"},
        {"schedule": "interleaved", "virtual_stages": 3},
        {"sequence_parallel": True},
        {"context": "ulysses"},
        {"tp": 2, "pp": 2},
        {"zero": 3},
        {"offload": "optimizer"},
        {"prefetch": 2},
        {"accumulate": "deferred"},
    ],
    ids=str,
)
def test_keys_that_were_given_keep_their_value_and_stay_legal(make_decoder_job, pins):
    job = make_decoder_job("dense")
    found = layouts_of(LayoutSpace(job, 8, pins))
    assert found
    for layout in found:
        assert all(getattr(layout, key) == value for key, value in pins.items())
    assert all(legal(job, layout) for layout in random.Random(0).sample(found, min(60, len(found))))


def test_a_key_is_pinned_where_it_was_written_or_is_not_the_default():
    layout = Layout(recompute="full", micro_batch=None)
    assert pinned_keys(layout) == {"recompute": "full"}
    assert pinned_keys(layout, ["schedule"]) == {"recompute": "full", "schedule": "1f1b"}
    assert pinned_keys(Layout(bucket_mb=1.0)) == {}, "how buckets are cut is no choice of the search"


def test_micro_batches_waste_nothing_or_as_little_as_their_count_allows():
    for share in (1, 7, 12, 48, 97, 512):
        found = micro_batch_choices(share)
        assert set(divisors(share)) <= set(found)
        for micro in found:
            count = -(-share // micro)
            assert micro == -(-share // count), "no smaller one does it in as many micro-batches"


def test_virtual_stages_are_the_fewest_for_their_layers():
    assert virtual_stage_choices(96, 8) == (2, 3, 4, 6), "at most 8"
    assert virtual_stage_choices(6, 8) == ()


def test_even_parts_of_the_cluster_are_tried(make_decoder_job):
    assert world_sizes(make_decoder_job("dense", cluster={"nodes": 6})) == [48, 24, 16, 8, 4, 2, 1]


def test_offloading_is_only_in_a_space_that_asks_for_it(make_decoder_job):
    job = make_decoder_job("dense")
    plain, away = LayoutSpace(job, 8), LayoutSpace(job, 8, offloads=("optimizer", "all"))
    assert {layout.offload for layout in layouts_of(plain)} == {"none"}
    assert {layout.offload for layout in layouts_of(away)} == {"optimizer", "all"}
    assert len(away) == 2 * len(plain)


def test_more_data_ranks_than_samples_are_legal_and_there(make_decoder_job):
    """The rest of the ranks run zero-weight samples; it is slow, and not forbidden."""
    job = make_decoder_job("dense", train={"global_batch": 2})
    assert any(layout.data_degree == 8 for layout in layouts_of(LayoutSpace(job, 8)))


def test_columns_survive_the_way_to_layouts_and_back(make_decoder_job):
    from meshwright.plan.estimate.grid import Grid

    chunk = next(iter(LayoutSpace(make_decoder_job("experts"), 8).chunks()))
    grid = chunk.expand_schedules()
    again = Grid.of([grid.layout(n) for n in range(0, len(grid), 97)])
    for field in dataclasses.fields(grid):
        assert np.array_equal(getattr(grid, field.name)[::97], getattr(again, field.name)), field.name


@pytest.mark.parametrize("runtime", get_args(Runtime))
def test_the_search_for_a_framework_stays_within_what_it_knows(make_decoder_job, runtime):
    job = make_decoder_job("dense", train={"runtime": runtime})
    found = layouts_of(LayoutSpace(job, 8))
    reach = runtime_support(job)
    assert any(runtime.startswith(name) for name in RUNTIME_SUPPORT), "every runtime is listed"
    assert {layout.zero for layout in found} == set(reach.zeros)
    assert {layout.schedule for layout in found if layout.pp > 1} == set(reach.schedules)
    used = {axis for layout in found for axis in AXES if getattr(layout, axis) > 1}
    assert used == set(AXES) & set(reach.axes)
    assert layouts_of(LayoutSpace(job, 8, {"schedule": "gpipe", "zero": 2, "pp": 2})), (
        "what is named is not bound by it"
    )


@pytest.mark.parametrize("runtime", get_args(Runtime))
def test_experts_are_spread_where_the_framework_can(make_decoder_job, runtime):
    job = make_decoder_job("experts", train={"runtime": runtime})
    found = layouts_of(LayoutSpace(job, 4))
    assert {axis for layout in found for axis in ("ep", "etp") if getattr(layout, axis) > 1} == {
        axis for axis in ("ep", "etp") if axis in runtime_support(job).axes
    }


# What the space leaves out


LITTLE = 1.05
"""Two small collectives instead of one cost this much with cp; stages may get other layers."""


@pytest.mark.parametrize(("kind", "precision"), [("dense", "bf16"), ("dense", "fp32"), ("llama3-8b", "bf16")])
def test_sequence_parallel_is_not_slower_nor_more_needy_than_without(make_decoder_job, kind, precision):
    """So the space has it wherever tp takes it. Of 40 random layouts with tp, every one that runs, on GPUs.

    Never slower without cp, never more memory without a pipeline; by 5% at most with them.
    """
    seq_len = 2048 if kind == "llama3-8b" else 64
    job = make_decoder_job(
        kind, train={"precision": precision, "global_batch": 16}, data={"seq_len": seq_len}
    )
    dice, seen = random.Random(f"{kind} {precision}"), 0
    layouts = [layout for layout in layouts_of(LayoutSpace(job, 8)) if layout.sequence_parallel]
    for layout in dice.sample(layouts, 40):
        if find_problems(with_layout(job, layout)):
            continue
        seen += 1
        on, off = predict(job, layout), predict(job, dataclasses.replace(layout, sequence_parallel=False))
        assert on.step_s <= off.step_s * (1 + 1e-9 if layout.cp == 1 else LITTLE), layout
        assert on.needed_bytes <= off.needed_bytes * (1 if layout.pp == 1 else LITTLE), layout
    assert seen >= 30


@pytest.mark.parametrize("seq_len", [256, 2048, 16384])
@pytest.mark.parametrize("kind", ["llama3.2-1b", "llama3-8b", "mixtral-8x7b"])
def test_no_layout_without_sequence_parallel_would_be_recommended(make_decoder_job, kind, seq_len):
    """With tp=2 and tp=4, the best without it is not faster than the best of the space by more than 1%."""
    cluster = {"preset": "h200-sxm", "nodes": 2}
    job = make_decoder_job(kind, cluster=cluster, train={"global_batch": 32}, data={"seq_len": seq_len})
    for tp in (2, 4):
        with_it, without = (
            find_layouts(job, {"tp": tp, "sequence_parallel": flag}, 8).best[:1] for flag in (True, False)
        )
        if without:
            assert with_it, tp
            assert with_it[0].step_s <= without[0].step_s * 1.01, tp


def test_sequence_parallel_off_is_searched_where_it_is_named(make_decoder_job):
    job = make_decoder_job("dense")
    assert all(layout.sequence_parallel for layout in layouts_of(LayoutSpace(job, 8)) if layout.tp > 1)
    named = layouts_of(LayoutSpace(job, 8, {"sequence_parallel": False, "tp": 2}))
    assert named
    assert not any(layout.sequence_parallel for layout in named)


def test_experts_are_split_as_all_matrices_are_or_as_named(make_decoder_job):
    job = make_decoder_job("experts")
    assert {layout.etp for layout in layouts_of(LayoutSpace(job, 4, {"tp": 4}))} == {1, 4}
    assert {layout.etp for layout in layouts_of(LayoutSpace(job, 4, {"tp": 4, "etp": 2}))} == {2}
