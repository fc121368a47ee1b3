"""The nearest legal layout is legal, has as many ranks, and keeps a layout that is already legal."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_legality_table import CASES

from meshwright.spec.layout import AXES, Layout
from meshwright.spec.legality.nearest import SETTINGS, layout_distance, nearest_legal_layout
from meshwright.spec.legality.table import find_problems, with_layout
from meshwright.spec.load import SpecError, build_job
from meshwright.spec.numbers import split_ranks

OF_ONE_PROCESS = {"train-all-reduce-axis"}
"""One process has these problems, too: no layout is nearer to a legal one than the given one."""
ABOUT_LAYOUT = [code for code, tables in CASES.items() if "layout" in tables and code not in OF_ONE_PROCESS]


def build_unchecked(tables, to_run=True):
    """The job, legal or not; None if a section cannot be built."""
    try:
        return build_job(tables, to_run=to_run)
    except SpecError as error:
        return error.job


def codes(job, layout, to_run=True):
    """The error codes of the job with another layout."""
    return {problem.code for problem in find_problems(with_layout(job, layout), to_run)}


@pytest.mark.parametrize("code", ABOUT_LAYOUT)
def test_every_layout_rule_has_a_nearest_legal_layout(tree, code):
    """The remaining problems are those of the model: one process has them too."""
    job = build_unchecked(tree(**CASES[code]))
    nearest = nearest_legal_layout(job)
    assert nearest != job.layout
    assert code not in codes(job, nearest)
    left = codes(job, nearest)
    assert not any(problem.startswith("layout-") for problem in left)
    assert left <= codes(job, Layout(mode="given"))
    if job.model.architecture == "decoder":
        assert nearest.world_size == min(job.layout.world_size, job.cluster.world_size)


degree = st.sampled_from([1, 1, 2, 3, 4])
layouts = st.builds(
    Layout,
    mode=st.just("given"),
    pp=degree,
    dp_replicate=degree,
    dp_shard=degree,
    cp=degree,
    tp=degree,
    zero=st.integers(0, 3),
    micro_batch=st.none() | st.integers(1, 12),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from(["none", "selective", "full"]),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved", "zbv"]),
    virtual_stages=st.integers(1, 2),
    offload=st.sampled_from(["none", "optimizer"]),
    prefetch=st.integers(0, 2),
)
models = st.sampled_from(
    [
        ({"preset": "tiny"}, {}),
        ({"preset": "tiny", "num_layers": 4, "num_kv_heads": 4}, {"block_backend": "compile"}),
        ({"preset": "tiny"}, {"noise_scale_every": 2}),
        ({"preset": "resnet-tiny", "norm": "batch"}, {}),
        ({"preset": "resnet-tiny"}, {"optimizer": "sgd"}),
    ]
)


def build(model, train, batch):
    """A job of 4 CPU ranks with this model, train settings and global batch."""
    data = {"path": "text", "seq_len": 32}
    if "resnet" in model["preset"]:
        data = {"path": "builtin:synthetic-images"}
    cluster = {"preset": "local", "device": "cpu", "devices_per_node": 4}
    tables = {"model": model, "data": data, "train": {"steps": 4, "global_batch": batch, **train}}
    return build_unchecked({**tables, "cluster": cluster})


@pytest.mark.parametrize("to_run", [pytest.param(True, marks=pytest.mark.slow), False])
@settings(max_examples=15)
@given(layout=layouts, chosen=models, batch=st.integers(4, 24))
def test_nearest_layout_is_legal_and_keeps_legal_layouts(to_run, layout, chosen, batch):
    """Any layout gets a legal one. A legal layout is its own nearest layout."""
    job = with_layout(build(*chosen, batch), layout)
    nearest = nearest_legal_layout(job, to_run)
    assert find_problems(with_layout(job, nearest), to_run) == []
    if not find_problems(job, to_run):
        assert nearest == layout
    again = with_layout(job, nearest)
    assert nearest_legal_layout(again, to_run) == nearest, "a legal layout is unchanged"


@settings(max_examples=15)
@given(layout=layouts.filter(lambda layout: layout.world_size <= 8), batch=st.integers(4, 24))
def test_no_legal_layout_of_the_same_world_size_is_nearer(layout, batch):
    """Brute force over all degrees and ZeRO stages finds no nearer layout.

    Other settings are those of the job or the defaults.
    """
    job = with_layout(build({"preset": "tiny"}, {}, batch), layout)
    nearest = nearest_legal_layout(job)
    assert nearest.world_size == layout.world_size
    plain = {name: getattr(Layout, name) for name in SETTINGS}
    found = []
    for degrees, zero in itertools.product(split_ranks(layout.world_size, len(AXES)), range(4)):
        for base in (layout, dataclasses.replace(layout, **plain)):
            tried = dataclasses.replace(base, zero=zero, **dict(zip(AXES, degrees, strict=True)))
            if tried.micro_batch is not None:
                share = -(-batch // tried.data_degree)
                tried = dataclasses.replace(tried, micro_batch=min(tried.micro_batch, share))
            if not find_problems(with_layout(job, tried)):
                found.append(layout_distance(layout, tried))
    assert found
    assert layout_distance(layout, nearest) <= min(found) + 1e-9


def test_nearest_layout_keeps_dp_shard_if_only_a_setting_is_illegal(tree):
    """ZeRO-2 with prefetch becomes ZeRO-3. Deferred accumulation with compression becomes per micro-batch."""
    asked = build_unchecked(tree(layout={"dp_shard": 4, "zero": 2, "micro_batch": 2, "prefetch": 2}))
    nearest = nearest_legal_layout(asked)
    assert (nearest.dp_shard, nearest.zero, nearest.prefetch, nearest.micro_batch) == (4, 3, 2, 2)
    deferred = tree(layout={"dp_shard": 2, "accumulate": "deferred"}, compression={"kind": "bf16"})
    nearest = nearest_legal_layout(build_unchecked(deferred))
    assert (nearest.dp_shard, nearest.zero, nearest.accumulate) == (2, 3, "sharded")


def test_nearest_layout_keeps_tp_if_two_settings_are_illegal(tree):
    """Both zero and prefetch must change. Changing only one of them would lead to dp_shard instead of tp."""
    nearest = nearest_legal_layout(build_unchecked(tree(layout={"tp": 2, "zero": 1, "prefetch": 0})))
    assert (nearest.tp, nearest.dp_shard, nearest.zero, nearest.prefetch) == (2, 1, 0, 1)


def test_nearest_layout_search_scales_to_4096_ranks(tree):
    """The search ends also if nearly all layouts are illegal. For a prime degree it tries fewer ranks."""
    cluster = {"preset": "h100-sxm", "nodes": 512}
    big = {"cluster": cluster, "model": {"preset": "llama3-8b"}, "train": {"global_batch": 4096}}
    started = time.process_time()
    job = build_unchecked(tree(**big, layout={"tp": 8, "pp": 16, "dp_shard": 32, "cp": 1}))
    assert nearest_legal_layout(job).world_size == 4096
    local = {"preset": "local", "device": "cpu", "devices_per_node": 2}
    absurd = build_unchecked(tree(cluster=local, layout={"tp": 10**9 + 7}))
    assert nearest_legal_layout(absurd).world_size == 2
    assert time.process_time() - started < 20, "CPU seconds; the bound has a wide margin"


@pytest.mark.parametrize(
    ("layout", "kept"),
    [
        ({"dp_replicate": 3, "backup_replicas": 3}, {"dp_replicate": 3, "backup_replicas": 1}),
        ({"placement": [1, 0]}, {"dp_replicate": 2, "placement": (1, 0)}),
    ],
)
def test_the_nearest_layout_keeps_what_was_asked_for(tree, layout, kept):
    """Not one process, though that is legal, too."""
    tables = tree(layout=layout)
    tables["layout"] = layout
    nearest = nearest_legal_layout(build_unchecked(tables))
    assert {name: getattr(nearest, name) for name in kept} == kept
