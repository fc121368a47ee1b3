"""Errors of a search in which nothing fits: the need, the closest layout and changes that fit."""

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


@pytest.fixture(autouse=True)
def unhurried_suggestions(monkeypatch):
    """Suggestions do not depend on how busy the machine is."""
    monkeypatch.setattr("meshwright.plan.search.failure.SUGGEST_S", 60.0)
    monkeypatch.setattr("meshwright.plan.search.failure.TRY_S", 20.0)


def refuse(job, *named):
    """The problem that the search reports."""
    with pytest.raises(UserError) as caught:
        search_job(job, named)
    (problem,) = caught.value.problems
    return problem


def with_overrides(job, words):
    """The job with these overrides."""
    tree = job_tree(job)
    if job.layout.mode == "auto":
        del tree["layout"]
    for text in words.split():
        assert apply_override(tree, text) is None
    return build_job(tree, to_run=False)


def test_nothing_fits_names_need_usable_memory_and_largest_part(make_decoder_job):
    """The figures are those of the layout with the smallest need."""
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


def test_given_layout_that_does_not_fit_gets_changes_that_fit(make_decoder_job):
    """Each suggested change fits and needs the memory that the message names."""
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


def test_suggestions_drop_pinned_keys_or_add_nodes(make_decoder_job):
    """The pinned micro_batch prevents a fit. Without it, or with more nodes, a layout fits."""
    job = make_decoder_job("llama3-8b", cluster={"memory_bytes": 12 * GB})
    pins = {"micro_batch": 8, "offload": "none"}
    assert find_layouts(job, pins, 1).best == []
    remedies = suggest_changes(job, pins)
    assert remedies
    assert any("Leave layout." in remedy or "cluster.nodes=" in remedy for remedy in remedies)
    assert all(re.search(r": [\d.]+ GB per rank\)$", remedy) for remedy in remedies)


@pytest.mark.slow
def test_suggested_nodes_and_sequence_lengths_fit(make_decoder_job):
    """The search of the changed job finds a layout that fits."""
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


def test_pinned_keys_without_a_legal_layout_are_named(make_decoder_job):
    job = make_decoder_job("dense")
    pins = {"tp": 3, "dp_shard": 2}
    error = search_error(job, pins, find_layouts(job, pins, 1))
    (problem,) = error.problems
    assert problem.code == "plan-no-layout"
    assert str(problem).startswith("layout.tp=3 layout.dp_shard=2 leave no legal layout on 8 devices")
    assert "Leave one of them out" in problem.fix


def test_nothing_fits_mentions_the_time_limit(make_decoder_job):
    """A layout that fits may be among those not searched."""
    job = make_decoder_job("llama3-8b", cluster={"memory_bytes": GB})
    closest = predict(job, Layout("given", dp_shard=8, zero=3, micro_batch=1))
    early, whole = (str(nothing_fits_error(closest, [], stopped)) for stopped in (True, False))
    assert "the search reached its time limit" in early
    assert "time limit" not in whole


def test_missing_host_memory_is_named(make_decoder_job):
    job = make_decoder_job("llama3-8b", cluster={"memory_bytes": 200 * GB, "host_memory_bytes": 10 * GB})
    layout = Layout("given", dp_replicate=2, micro_batch=1, offload="optimizer")
    found = predict(dataclasses.replace(job, layout=layout), layout)
    (problem,) = nothing_fits_error(found, []).problems
    assert "offloaded state needs" in str(problem)
    assert "more than cluster.host_memory_bytes" in str(problem)
    assert "more than usable" not in str(problem)


def test_local_cluster_suggests_a_cluster_preset(make_decoder_job):
    job = make_decoder_job("llama3-70b", cluster={"preset": "local", "device": "cpu", "memory_bytes": 8 * GB})
    problem = refuse(job)
    assert problem.code == "plan-nothing-fits"
    assert "8x8xh100-sxm" in problem.fix
