"""Neighbours of a layout, changes that make it fit, and the nearest legal layout, with predictions."""

from __future__ import annotations

import dataclasses
import re

import pytest
import tomli_w

from meshwright.plan.predict import is_exact, predict
from meshwright.plan.search.alternatives import (
    compare,
    explain_neighbours,
    find_alternatives,
    find_nearest_legal,
    list_neighbours,
    memory_budget_after_oom,
    part_differences,
)
from meshwright.plan.search.find import SearchResult, find_layouts
from meshwright.plan.time.step import StepTime
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import find_problems, with_layout
from meshwright.spec.load import build_job, job_tree, load_job, read_tree
from model_shapes import LLAMA_ON_16_GPUS

TABLES = {
    "model": {"preset": "demo-2m"},
    "cluster": {"preset": "local", "device": "cpu", "devices_per_node": 4},
    "data": {"path": "text", "seq_len": 256},
    "train": {"steps": 4, "global_batch": 64},
}
PIPELINE = Layout("given", pp=4, tp=2, dp_shard=2, zero=1, micro_batch=1)
LAYOUTS = [
    Layout("given", dp_replicate=16, micro_batch=1),
    Layout("given", dp_replicate=2, dp_shard=8, zero=3, prefetch=2, micro_batch=1),
    Layout("given", dp_shard=8, tp=2, zero=2, accumulate="deferred", micro_batch=1),
    Layout("given", dp_shard=2, tp=8, zero=1, sequence_parallel=True, recompute="full", micro_batch=4),
    Layout("given", cp=2, dp_shard=8, zero=3, context="ulysses", micro_batch=1),
    Layout("given", pp=2, dp_shard=8, zero=1, schedule="interleaved", virtual_stages=4, micro_batch=1),
    Layout("given", pp=4, dp_shard=4, zero=1, schedule="zbv", virtual_stages=2, micro_batch=1),
    PIPELINE,
]


def settled(**layout):
    """A small CPU job with a complete layout."""
    job = build_job({**TABLES, "layout": layout})
    return dataclasses.replace(job, layout=predict(job, job.layout).layout)


def needed_by(job):
    """The bytes that the job needs per rank."""
    return predict(job, job.layout).needed_bytes


def with_pasted_overrides(job, overrides, tmp_path):
    """The job of a user who adds the overrides to the file that ran out of memory."""
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(job_tree(job)))
    assert "layout" in read_tree(str(path))
    return load_job(str(path), overrides.split())


# Neighbours


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_neighbours_of_a_runnable_layout_are_runnable(make_job, model, layout):
    """Each neighbour is different, has as many ranks, and breaks no legality rule."""
    job = make_job(**{**LLAMA_ON_16_GPUS, "model": {"preset": model}})
    start = predict(job, layout)
    assert start.exact
    near = list_neighbours(job, start.layout)
    assert len(near) >= 8
    assert len({changed for _, changed in near}) == len(near), "no neighbour twice"
    for words, changed in near:
        assert changed != dataclasses.replace(start.layout, stage_layers=None), words
        assert changed.world_size == layout.world_size, words
        assert find_problems(with_layout(job, changed)) == [], words
        assert predict(job, changed).exact, words


def test_neighbours_of_a_plan_only_layout_are_legal(make_job):
    """Layouts of another framework's runtime cannot run here, so their neighbours need only be legal."""
    job = make_job(**LLAMA_ON_16_GPUS)
    job = dataclasses.replace(job, train=dataclasses.replace(job.train, runtime="megatron-core"))
    assert not is_exact(with_layout(job, PIPELINE))
    near = list_neighbours(job, PIPELINE)
    assert len(near) >= 8
    assert all(find_problems(with_layout(job, changed), to_run=False) == [] for _, changed in near)


def test_neighbour_names_the_changed_key(make_job):
    changes = dict(list_neighbours(make_job(**LLAMA_ON_16_GPUS), PIPELINE))
    assert changes["tp=4 (instead of 2)"].dp_shard == 1
    assert changes["pp=2 (instead of 4)"].dp_shard == 4
    assert changes["schedule=zb-h1 (instead of 1f1b)"].schedule == "zb-h1"
    assert changes["sequence_parallel=true"].sequence_parallel
    assert changes["recompute=full (instead of none)"].recompute == "full"
    assert "offload=optimizer (instead of none)" in changes


def test_neighbours_on_cpus_have_no_offloading():
    job = settled(dp_replicate=4, micro_batch=1)
    assert not any("offload" in words for words, _ in list_neighbours(job, job.layout))


# Comparison of neighbours with the recommended layout


def test_every_neighbour_is_rejected_with_a_number(make_job):
    job = make_job(**LLAMA_ON_16_GPUS)
    found = find_layouts(job, {}, 8)
    unfit, *others = explain_neighbours(found)
    assert re.match(r"because (they do|it does) not fit: ", unfit), "one sentence for all of them"
    assert len(others) + unfit.count(" GB)") == len(list_neighbours(job, found.best[0].layout))
    for sentence in others:
        assert re.search(r": .*\d.*(slower|memory|faster)", sentence), sentence


def test_faster_neighbour_that_breaks_a_fixed_key_names_the_key(make_job):
    """With zero=3 fixed, zero=1 is faster and fits, but is not allowed by the job."""
    job = make_job(**LLAMA_ON_16_GPUS)
    best = predict(job, Layout("given", dp_shard=2, tp=8, zero=3, recompute="full", micro_batch=1))
    neighbour = predict(job, dataclasses.replace(best.layout, zero=1))
    assert neighbour.fits
    fast = dataclasses.replace(neighbour, time=StepTime({"compute": best.step_s / 2}))
    assert compare(best, fast, pins={"zero": 3}).endswith("but the job fixes layout.zero=3")
    assert not compare(best, fast, pins={}).endswith("but the job fixes layout.zero=3")


def test_neighbour_with_another_degree_may_change_the_micro_batch(make_job):
    """The sentence then names the micro-batch."""
    best = predict(
        job := make_job(**LLAMA_ON_16_GPUS), Layout("given", dp_shard=8, tp=2, zero=3, micro_batch=4)
    )
    sentences = explain_neighbours(SearchResult(job, best=[best]))
    for sentence in sentences:
        found = re.match(r"(\w+=[^,:\s]+).*, micro_batch=(\d+): ", sentence)
        if found:
            assert not found[1].startswith("micro_batch")
            assert int(found[2]) != best.layout.micro_batch
    named = [s for s in sentences if re.search(r", micro_batch=\d+: ", s)]
    assert named
    assert all(s.startswith(("tp", "pp", "cp", "dp_", "ep")) for s in named), job.name


def test_layout_that_does_not_fit_names_the_missing_bytes(make_job):
    job = make_job(**LLAMA_ON_16_GPUS)
    fits, large = (predict(job, layout) for layout in (PIPELINE, LAYOUTS[0]))
    assert not large.fits
    over = large.needed_bytes - int(job.cluster.memory_bytes * 0.97)
    assert compare(fits, large).endswith(f"{over / 1e9:.3g} GB more than usable")


def test_slower_layout_names_the_part_that_grew(make_job):
    job = make_job(**LLAMA_ON_16_GPUS)
    few_bubbles, many_bubbles = (predict(job, dataclasses.replace(PIPELINE, micro_batch=n)) for n in (1, 8))
    assert re.search(r"% slower: bubble \+", compare(few_bubbles, many_bubbles))
    differences = part_differences(few_bubbles, many_bubbles)
    assert sum(differences.values()) == pytest.approx(many_bubbles.step_s - few_bubbles.step_s)
    assert max(differences, key=lambda name: differences[name]) == "bubble"


def test_comparison_uses_the_objective_of_the_search(make_job):
    """Objective memory compares bytes, cost compares device time, time compares step times."""
    job = make_job(**LLAMA_ON_16_GPUS)
    lean, fast = (predict(job, dataclasses.replace(PIPELINE, recompute=r)) for r in ("full", "none"))
    more = fast.needed_bytes - lean.needed_bytes
    assert compare(lean, fast, "memory") == f"{more / 1e9:.3g} GB more memory"
    assert re.match(r"[\d.]+% faster, [\d.]+ GB per rank", compare(lean, fast))
    assert re.match(r"[\d.]+% slower: ", compare(fast, lean))
    assert compare(fast, fast) == "same time and memory"
    few = predict(job, Layout("given", dp_shard=8, zero=3, micro_batch=1))
    twice = predict(job, Layout("given", dp_shard=16, zero=3, micro_batch=1))
    assert twice.step_s < few.step_s
    assert "% more device time" in compare(few, twice, "cost")


# Changes that fit


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_replicate": 4, "micro_batch": 16},
        {"dp_replicate": 4, "micro_batch": 1},
        {"dp_shard": 4, "zero": 1, "micro_batch": 16},
        {"dp_replicate": 2, "dp_shard": 2, "micro_batch": 8},
        {"dp_replicate": 1, "micro_batch": 64},
        {"dp_replicate": 1, "micro_batch": 64, "recompute": "full"},
        {"pp": 2, "dp_replicate": 2, "micro_batch": 8},
        {"tp": 2, "micro_batch": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("share", [0.9, 0.6])
def test_suggested_changes_fit_and_match_their_prediction(layout, share, tmp_path):
    job = settled(**layout)
    room = int(needed_by(job) * share)
    found = find_alternatives(job, room)
    assert [r.step_s for r in found[:2]] == sorted(r.step_s for r in found[:2])
    assert len({r.overrides for r in found}) == len(found) <= 3
    for remedy in found:
        again = with_pasted_overrides(job, remedy.overrides, tmp_path)
        prediction = predict(again, again.layout)
        assert prediction.needed_bytes == remedy.needed_bytes <= room
        assert prediction.step_s == pytest.approx(remedy.step_s)


def test_suggestions_include_recompute_and_a_smaller_micro_batch():
    found = find_alternatives(job := settled(dp_replicate=4, micro_batch=16), int(needed_by(job) * 0.7), 20)
    named = [remedy.overrides for remedy in found]
    assert any("micro_batch=8" in text and "recompute" not in text for text in named), named
    assert any("recompute=" in text for text in named), named


def test_suggestions_shard_state_that_is_too_large():
    """A micro-batch of one cannot be smaller. The state of four replicas can be sharded."""
    job = settled(dp_replicate=4, micro_batch=1, recompute="full")
    found = find_alternatives(job, int(needed_by(job) * 0.8))
    assert found
    for remedy in found:
        assert re.search(r"layout\.(dp_shard|tp|pp)=", remedy.overrides), remedy
        assert "layout.dp_replicate=4" not in remedy.overrides


def test_suggestions_include_a_shorter_sequence_if_few_changes_fit():
    """One device with micro_batch=1 and full recompute has no other change of the layout."""
    job = settled(dp_replicate=1, micro_batch=1, recompute="full")
    job = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, devices_per_node=1))
    found = find_alternatives(job, needed_by(job) - 1)
    assert found
    assert "data.seq_len=128" in found[-1].overrides


def test_no_suggestion_if_nothing_fits():
    assert find_alternatives(settled(dp_replicate=1, micro_batch=1), 1000) == []


def test_suggestion_has_step_time_and_memory():
    job = settled(dp_replicate=4, micro_batch=16)
    remedy = find_alternatives(job, int(needed_by(job) * 0.7))[0]
    assert re.fullmatch(r"[\d.]+ m?s/step, [\d.]+ MB per rank", remedy.step_and_memory)


def test_memory_budget_after_oom_uses_the_smallest_evidence():
    assert memory_budget_after_oom(1000, 500, 10, None) == 500
    assert memory_budget_after_oom(1000, 500, 10, 390) == 400
    assert memory_budget_after_oom(1000, 5000, None, None) == 900, "the run took more than predicted"
    assert memory_budget_after_oom(1000, 5000, 300, None) == 700


# The nearest legal layout


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        (Layout("given", tp=3, micro_batch=1), {"world_size": 3}),
        (Layout("given", dp_replicate=2, tp=6, micro_batch=1), {"world_size": 12, "tp": 4}),
        (Layout("given", dp_shard=4, zero=0, micro_batch=1), {"dp_shard": 4}),
        (Layout("given", pp=4, tp=2, virtual_stages=2, micro_batch=1), {"pp": 4, "tp": 2}),
    ],
    ids=["tp=3", "tp=6", "zero=0", "virtual_stages"],
)
def test_nearest_layout_is_legal_and_has_its_prediction(make_job, asked, nearest):
    """Its step time and memory equal those of predicting it directly."""
    job = with_layout(make_job(**LLAMA_ON_16_GPUS), asked)
    problems = find_problems(job)
    assert problems
    (found,) = find_nearest_legal(job, problems)
    assert found.runs
    assert find_problems(found.prediction.job) == []
    assert {key: getattr(found.prediction.layout, key) for key in nearest} == nearest
    again = predict(make_job(**LLAMA_ON_16_GPUS), found.prediction.layout)
    assert (again.step_s, again.needed_bytes) == (found.prediction.step_s, found.prediction.needed_bytes)
    assert found.line.startswith(f"nearest layout that runs: {found.overrides} (predicted ")
    assert found.as_dict()["fits"] is again.fits


def test_interleaved_without_virtual_stages_stays_interleaved(make_job):
    """`schedule = "interleaved"` without virtual_stages is illegal.

    The nearest legal layout is interleaved.
    """
    asked = Layout("given", pp=4, tp=2, schedule="interleaved", micro_batch=1)
    job = with_layout(make_job(**LLAMA_ON_16_GPUS), asked)
    (found,) = find_nearest_legal(job, find_problems(job))
    assert (found.prediction.layout.schedule, found.prediction.layout.virtual_stages) == ("interleaved", 2)


def test_nearest_layout_that_does_not_fit_names_the_shortage(make_job):
    asked = Layout("given", dp_replicate=17, micro_batch=1)
    job = with_layout(make_job(**LLAMA_ON_16_GPUS), asked)
    (found,) = find_nearest_legal(job, find_problems(job))
    assert not found.prediction.fits
    assert f"; {found.prediction.shortage})" in found.line


def test_legal_layout_has_no_nearest_suggestion(make_job):
    job = with_layout(make_job(**LLAMA_ON_16_GPUS), PIPELINE)
    assert find_nearest_legal(job, []) == []
