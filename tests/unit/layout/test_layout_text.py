"""A layout as text: one line, and overrides that restore it."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.layout.text import describe_layout, layout_overrides, overrides_from
from meshwright.plan.search.planner import search_job
from meshwright.spec.layout import Layout
from meshwright.spec.load import apply_override, build_job, job_tree


def with_overrides(job, words):
    """The job with these overrides instead of its layout."""
    tree = job_tree(dataclasses.replace(job, layout=Layout()))
    tree.pop("layout")
    for text in words.split():
        assert apply_override(tree, text) is None
    return build_job(tree).layout


def test_printed_overrides_restore_the_layout(make_job):
    job = make_job(model={"preset": "llama3.2-1b"}, train={"global_batch": 32})
    for prediction in search_job(job, top=8).best:
        layout = dataclasses.replace(prediction.layout, stage_layers=None)
        assert with_overrides(job, layout_overrides(prediction.layout)) == layout


def test_layout_of_one_process_has_a_text():
    layout = Layout("given", micro_batch=4)
    assert describe_layout(layout) == "one device micro_batch=4"
    assert layout_overrides(layout) == "layout.dp_replicate=1 layout.micro_batch=4"


def test_non_default_settings_are_in_the_line():
    layout = Layout(
        "given", pp=4, cp=2, tp=8, dp_shard=2, zero=3, schedule="interleaved", virtual_stages=2,
        context="ulysses", sequence_parallel=True, recompute="full", offload="all", micro_batch=1,
    )  # fmt: skip
    expected = "pp=4 dp_shard=2 cp=2 tp=8 zero=3 interleaved x2 ulysses sequence_parallel recompute=full"
    assert describe_layout(layout) == f"{expected} offload=all micro_batch=1"


@pytest.mark.parametrize(
    "layout",
    [
        Layout("given", dp_replicate=8, micro_batch=1),
        Layout("given", dp_shard=8, zero=2, micro_batch=1),
        Layout("given", tp=2, dp_replicate=4, micro_batch=1),
    ],
    ids=describe_layout,
)
def test_overrides_reset_keys_of_another_layout(make_job, layout):
    """They work behind a job file that sets more keys than the new layout."""
    before = Layout(
        "given", dp_shard=2, tp=2, pp=2, zero=3, prefetch=2, sequence_parallel=True, recompute="full",
        schedule="zb-h1", micro_batch=2,
    )  # fmt: skip
    tree = job_tree(dataclasses.replace(make_job(), layout=before))
    for text in overrides_from(before, layout).split():
        assert apply_override(tree, text) is None
    assert build_job(tree).layout == layout
