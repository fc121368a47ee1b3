"""Where nothing fits: the error names the need, what is nearest to fitting, and changes that do fit."""

from __future__ import annotations

import dataclasses
import re

import pytest

from meshwright.core.errors import UserError
from meshwright.plan.build import build_plan
from meshwright.plan.predict import predict
from meshwright.plan.search.failure import nothing_fits_error, search_error, suggest_changes
from meshwright.plan.search.find import find_layouts
from meshwright.plan.search.planner import search_job
from meshwright.spec.layout import Layout
from meshwright.spec.load import apply_override, build_job, job_tree

GB = 10**9


def refuse(job, *named):
    with pytest.raises(UserError) as caught:
        search_job(job, named)
    (problem,) = caught.value.problems
    return problem


def with_overrides(job, words):
    tree = job_tree(job)
    if job.layout.mode == "auto":
        del tree["layout"]
    for text in words.split():
        assert apply_override(tree, text) is None
    return build_job(tree, to_run=False)


def test_nothing_fits_names_the_need_the_room_and_the_largest_line(make_decoder_job):
    """Of the layout that needs least of all."""
    job = make_decoder_job("llama3-70b", cluster={"devices_per_node": 1, "host_memory_bytes": GB})
    with pytest.raises(UserError) as caught:
        build_plan(job)
    (problem,) = caught.value.problems
    assert problem.code == "plan-nothing-fits"
    size = r"[\d.]+ [GT]B"
    assert re.search(rf"step needs {size}, {size} more than usable \(97% of 80 GB, 77.6 GB\)", str(problem))
    assert re.search(r"largest part: \w+, \d+ GB", str(problem))
    assert re.search(r"Use cluster\.nodes=\d+, \d+ devices \(.*: [\d.]+ GB per rank\)", problem.fix)
    assert "LoRA" in problem.fix


def test_a_given_layout_that_does_not_fit_is_told_changes_that_do(make_decoder_job):
    """Every change that is named fits when it is pasted, and needs what is said."""
    layout = {"tp": 8, "micro_batch": 16}
    job = make_decoder_job("llama3-8b", data={"seq_len": 8192}, train={"global_batch": 64}, layout=layout)
    assert not predict(job, job.layout).fits
    problem = refuse(job)
    named = re.findall(r"[Uu]se ((?:(?:layout|data)\.\S+ ?)+)\([^()]*, ([\d.]+ GB) per rank", problem.fix)
    assert 1 <= len(named) <= 3
    for words, needed in named:
        again = with_overrides(job, words)
        found = predict(again, again.layout)
        assert found.fits, words
        assert f"{found.needed_bytes / GB:.3g} GB" == needed


def test_keys_that_are_let_go_and_more_nodes_are_tried(make_decoder_job):
    """A pinned micro-batch is the reason; without it, or with more nodes, something fits."""
    job = make_decoder_job("llama3-8b", cluster={"memory_bytes": 12 * GB})
    pins = {"micro_batch": 8, "offload": "none"}
    assert find_layouts(job, pins, 1).best == []
    remedies = suggest_changes(job, pins)
    assert remedies
    assert any("Leave layout." in remedy or "cluster.nodes=" in remedy for remedy in remedies)
    assert all(re.search(r": [\d.]+ GB per rank\)$", remedy) for remedy in remedies)


def test_a_remedy_of_a_search_is_one(make_decoder_job):
    """More nodes, or a shorter sequence: the job with it has a layout that fits."""
    job = make_decoder_job(
        "llama3-70b", cluster={"devices_per_node": 8, "host_memory_bytes": GB}, data={"seq_len": 4096}
    )
    remedies = suggest_changes(job, {"offload": "none"})
    assert remedies
    for remedy in remedies:
        words = re.match(r"Use (\S+?=\d+)", remedy)
        if words:
            changed = with_overrides(job, words[1])
            assert find_layouts(changed, {"offload": "none"}, 1).best, remedy


def test_keys_that_leave_no_legal_layout_are_named(make_decoder_job):
    job = make_decoder_job("dense")
    pins = {"tp": 3, "dp_shard": 2}
    error = search_error(job, pins, find_layouts(job, pins, 1))
    (problem,) = error.problems
    assert problem.code == "plan-no-layout"
    assert str(problem).startswith("layout.tp=3 layout.dp_shard=2 leave no legal layout on 8 devices")
    assert "Leave one of them out" in problem.fix


def test_a_search_that_ended_at_its_time_limit_says_so(make_decoder_job):
    """What fits may not have been seen."""
    job = make_decoder_job("llama3-8b", cluster={"memory_bytes": GB})
    closest = predict(job, Layout("given", dp_shard=8, zero=3, micro_batch=1))
    early, whole = (str(nothing_fits_error(closest, [], stopped)) for stopped in (True, False))
    assert "the search reached its time limit" in early
    assert "time limit" not in whole


def test_host_memory_that_is_missing_is_said_to_be(make_decoder_job):
    job = make_decoder_job("llama3-8b", cluster={"memory_bytes": 200 * GB, "host_memory_bytes": 10 * GB})
    layout = Layout("given", dp_replicate=2, micro_batch=1, offload="optimizer")
    found = predict(dataclasses.replace(job, layout=layout), layout)
    (problem,) = nothing_fits_error(found, []).problems
    assert "offloaded state needs" in str(problem)
    assert "more than cluster.host_memory_bytes" in str(problem)
    assert "more than usable" not in str(problem)


def test_this_machine_is_told_that_a_cluster_can_be_named(make_decoder_job):
    job = make_decoder_job("llama3-70b", cluster={"preset": "local", "device": "cpu", "memory_bytes": 8 * GB})
    assert "--on 8x8xh100-sxm" in refuse(job).fix
