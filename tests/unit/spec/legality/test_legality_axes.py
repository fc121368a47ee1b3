"""Legality of every layout axis: the largest legal and the smallest illegal settings."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.plan.estimate.workload import Workload
from meshwright.plan.profiles import PROFILES
from meshwright.spec.job import Job, Runtime
from meshwright.spec.legality.table import find_problems
from meshwright.spec.load import SpecError, build_job

EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 48}


@pytest.fixture
def codes(tree):
    """``codes(tp=4)``: the error codes of a layout on 64 GPUs, with changes to model, data and train."""

    def find(model=None, data=None, train=None, **layout) -> list[str]:
        tables = {"cluster": {"nodes": 8}, "train": {"global_batch": 64, **(train or {})}, "layout": layout}
        base = {"num_layers": 16, "num_heads": 16, "num_kv_heads": 4, "head_dim": 8, "ffn_size": 96}
        try:
            build_job(tree(model={**base, **(model or {})}, data=data or {}, **tables), to_run=False)
        except SpecError as error:
            return [p.code for p in error.problems]
        return []

    return find


@pytest.mark.parametrize(("tp", "legal"), [(1, True), (2, True), (4, True), (8, True), (16, True)])
def test_tp_above_num_kv_heads_is_legal(codes, tp, legal):
    """With 4 key-value heads, tp=8 holds each head twice and tp=16 four times."""
    assert (codes(tp=tp) == []) is legal


def test_tp_that_neither_divides_nor_repeats_kv_heads_is_refused(codes):
    """tp=6 and 4 key-value heads are refused. One key-value head and latent attention are legal."""
    assert codes(tp=6, model={"num_heads": 12, "num_kv_heads": 4}) == ["layout-tp-kv-heads"]
    assert codes(tp=6, model={"num_heads": 12, "num_kv_heads": 1}) == []
    latent = {
        "attention": "latent",
        "latent_size": 32,
        "rope_head_dim": 8,
        "num_heads": 12,
        "num_kv_heads": 12,
    }
    assert codes(tp=6, model=latent) == []


def test_tp_must_divide_dense_and_shared_expert_ffn_only(codes):
    """Only dense layers and shared experts are split by tp. Routed experts are split by etp."""
    assert codes(tp=16, model={"ffn_size": 88}) == ["layout-tp-ffn"]
    routed = {**EXPERTS, "ffn_size": 88, "expert_ffn_size": 7}
    assert codes(tp=16, model=routed) == [], "no dense layers, and tp does not split routed experts"
    assert codes(tp=16, model={**routed, "dense_layers": 1}) == ["layout-tp-ffn"]
    assert codes(tp=16, model={**routed, "shared_experts": 1}) == ["layout-tp-ffn"]
    assert codes(tp=16, model={**routed, "shared_experts": 16}) == []
    assert codes(tp=16, etp=2, model=routed) == ["layout-etp-ffn"]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"pp": 16}, []),
        ({"pp": 17}, ["layout-pp-layers"]),
        ({"pp": 4, "virtual_stages": 4, "schedule": "interleaved", "micro_batch": 4}, []),
        ({"pp": 4, "virtual_stages": 5, "schedule": "interleaved"}, ["layout-pp-layers"]),
        ({"pp": 4, "virtual_stages": 2, "schedule": "interleaved", "micro_batch": 6}, ["layout-interleaved"]),
        ({"pp": 4, "virtual_stages": 2, "schedule": "interleaved"}, []),
        ({"pp": 4, "schedule": "interleaved"}, ["layout-interleaved"]),
        ({"pp": 4, "virtual_stages": 2}, ["layout-virtual-stages"]),
        ({"pp": 4, "virtual_stages": 2, "schedule": "zb-h1"}, ["layout-virtual-stages"]),
        ({"pp": 4, "schedule": "zb-h1"}, []),
        ({"pp": 4, "schedule": "gpipe"}, []),
        ({"pp": 8, "schedule": "zbv"}, []),
        ({"pp": 9, "schedule": "zbv"}, ["layout-pp-layers"]),
        ({"pp": 4, "schedule": "zbv", "virtual_stages": 3}, ["layout-virtual-stages"]),
        ({"pp": 4, "schedule": "dualpipe-v", "micro_batch": 8}, []),
        ({"pp": 4, "schedule": "dualpipe-v", "micro_batch": 9}, []),
        ({"pp": 4, "schedule": "dualpipe-v", "micro_batch": 10}, ["layout-dualpipe"]),
        ({"pp": 2, "dp_replicate": 32, "virtual_stages": 2, "schedule": "interleaved"}, []),
        ({"pp": 4, "dp_replicate": 16, "virtual_stages": 2, "schedule": "interleaved", "micro_batch": 2},
         ["layout-interleaved"]),
    ],
    ids=str,
)  # fmt: skip
def test_pipeline_stages_and_schedules(codes, layout, expected):
    """The stages need a layer each. Interleaved and DualPipe-V restrict the number of micro-batches."""
    assert codes(**layout) == expected


def test_v_schedule_implies_two_virtual_stages(tree):
    """``schedule = "zbv"`` sets virtual_stages to 2, as dp_shard sets zero to 3."""
    made = tree(model={"num_layers": 8}, layout={"pp": 4, "schedule": "zbv"})
    assert build_job(made, to_run=False).layout.virtual_stages == 2
    alone = tree(layout={"dp_replicate": 2, "schedule": "zbv"})
    with pytest.raises(SpecError) as caught:
        build_job(alone)
    assert [p.code for p in caught.value.problems] == ["layout-schedule-pp"]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"ep": 8, "dp_shard": 8}, []),
        ({"ep": 8, "dp_shard": 2, "tp": 4}, []),
        ({"ep": 8, "cp": 2, "tp": 4}, []),
        ({"ep": 4, "dp_shard": 8, "dp_replicate": 2}, []),
        ({"ep": 8, "dp_replicate": 8}, ["layout-ep-ranks"]),
        ({"ep": 8, "pp": 8}, ["layout-ep-ranks"]),
        ({"ep": 3, "dp_shard": 6}, ["layout-ep-experts"]),
        ({"ep": 16, "dp_shard": 16}, ["layout-ep-experts"]),
        ({"ep": 4, "etp": 2, "dp_shard": 8}, []),
        ({"ep": 4, "etp": 4, "dp_shard": 8}, ["layout-ep-ranks"]),
        ({"etp": 2}, ["layout-ep-ranks"]),
        ({"etp": 32, "dp_shard": 32}, ["layout-etp-ffn"]),
    ],
    ids=str,
)
def test_ep_and_etp_must_divide_experts_and_data_ranks(codes, layout, expected):
    """The experts are divided by ep. The ranks of dp_shard, cp and tp are divided by ep times etp."""
    assert codes(model=EXPERTS, **layout) == expected


def test_ep_of_a_dense_model_is_refused(codes):
    assert codes(ep=2, dp_shard=2) == ["layout-ep-dense"]


@pytest.mark.parametrize(
    ("layout", "seq_len", "expected"),
    [
        ({"cp": 4}, 32, []),
        ({"cp": 4}, 36, ["layout-cp-seq-len"]),
        ({"cp": 4, "context": "ulysses"}, 32, []),
        ({"cp": 4, "tp": 4, "context": "ulysses"}, 32, []),
        ({"cp": 8, "tp": 4, "context": "ulysses"}, 32, ["layout-ulysses-heads"]),
        ({"tp": 4, "cp": 2, "sequence_parallel": True}, 32, []),
        ({"tp": 4, "cp": 2, "sequence_parallel": True}, 20, ["layout-sequence-parallel-len"]),
        ({"tp": 4, "sequence_parallel": True}, 20, []),
        ({"cp": 2, "sequence_parallel": True}, 32, ["layout-sequence-parallel-tp"]),
    ],
    ids=str,
)
def test_cp_and_sequence_parallel_must_divide_the_sequence(codes, layout, seq_len, expected):
    """Ring attention needs chunks of equal length. Ulysses needs enough heads."""
    assert codes(data={"seq_len": seq_len}, **layout) == expected


def test_ulysses_degree_must_divide_or_repeat_kv_heads(codes):
    twelve = {"num_heads": 12, "ffn_size": 96}
    assert codes(cp=4, context="ulysses", model={**twelve, "num_kv_heads": 6}) == ["layout-ulysses-heads"]
    assert codes(cp=4, context="ulysses", model={**twelve, "num_kv_heads": 2}) == []


def test_zero_needs_dp_shard_or_cp(codes):
    """ZeRO shards over dp_shard and cp. Without either, zero above 0 is refused."""
    assert codes(zero=1, tp=1) == ["layout-zero-unsharded"]
    assert codes(zero=3, cp=2) == []
    assert codes(zero=2, dp_replicate=2) == ["layout-zero-unsharded"]
    assert codes(dp_shard=2, zero=0) == ["layout-zero-dp-shard"]


def test_settings_without_degrees_are_checked_after_planning(codes):
    """Without degrees the planner chooses the layout.

    A setting that needs a degree is refused only beside degrees.
    """
    for layout in ({"zero": 1}, {"schedule": "zbv"}, {"context": "ulysses"}, {"sequence_parallel": True}):
        assert codes(**layout) == []
        assert codes(**layout, dp_replicate=2) != []


def test_layout_must_fit_the_devices_and_the_batch(codes):
    """More ranks than GPUs and micro-batches above a rank's share of the batch are refused."""
    assert codes(dp_replicate=65) == ["layout-world-size"]
    assert codes(tp=16, pp=4) == []
    assert codes(dp_replicate=64, micro_batch=2) == ["layout-micro-batch"]


degree = st.sampled_from([1, 2, 3, 4, 8, 16])


@settings(max_examples=60, deadline=None)
@given(
    degrees=st.fixed_dictionaries(
        dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"), degree)
    ),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v"]),
    virtual_stages=st.integers(1, 3),
    micro_batch=st.none() | st.integers(1, 12),
    experts=st.sampled_from([None, 8]),
    sequence_parallel=st.booleans(),
)
def test_any_layout_is_legal_or_refused_with_fixes(degrees, experts, **rest):
    """No combination of degrees and settings raises anything but a SpecError.

    Every problem names a layout key and has a fix, and the legality table gives the same problems as loading.
    """
    layout = {k: v for k, v in {**degrees, **rest}.items() if v is not None}
    model = {"preset": "tiny", **({"num_experts": experts, "experts_per_token": 2} if experts else {})}
    tables = {
        "model": model,
        "cluster": {"preset": "h100-sxm", "nodes": 2},
        "data": {"path": "text", "seq_len": 32},
        "train": {"steps": 4, "global_batch": 24},
        "layout": layout,
    }
    problems = []
    try:
        job = build_job(tables, to_run=False)
    except SpecError as error:
        problems, job = error.problems, error.job
    assert all(p.path.startswith("layout") and p.fix for p in problems)
    assert problems or job.layout.world_size <= 16
    assert find_problems(job, to_run=False) == list(problems)


def test_every_runtime_has_a_profile_and_every_profile_is_a_runtime(tree):
    """The values of train.runtime are the names of the profiles. An unknown runtime lists them."""
    assert set(typing.get_args(Runtime)) == set(PROFILES)
    for name in PROFILES:
        job: Job = build_job(tree(train={"runtime": name}), to_run=False)
        assert Workload.of(job).profile.name == name
    with pytest.raises(SpecError) as caught:
        build_job(tree(train={"runtime": "megatron"}), to_run=False)
    assert all(name in str(caught.value) for name in PROFILES)
