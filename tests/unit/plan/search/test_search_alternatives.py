"""What is near a layout: changes that run, each with its price; changes that fit; the nearest legal one."""

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

TABLES = {
    "model": {"preset": "demo-2m"},
    "cluster": {"preset": "local", "device": "cpu", "devices_per_node": 4},
    "data": {"path": "text", "seq_len": 256},
    "train": {"steps": 4, "global_batch": 64},
}
LARGE = {
    "model": {"preset": "llama3-8b"},
    "cluster": {"nodes": 2},
    "train": {"global_batch": 32, "precision": "bf16"},
    "data": {"seq_len": 2048},
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
    job = build_job({**TABLES, "layout": layout})
    return dataclasses.replace(job, layout=predict(job, job.layout).layout)


def needed_by(job):
    return predict(job, job.layout).needed_bytes


def pasted(job, overrides, tmp_path):
    """The job that a user gets who pastes the overrides behind the file that ran out."""
    path = tmp_path / "job.toml"
    path.write_text(tomli_w.dumps(job_tree(job)))
    assert "layout" in read_tree(str(path))
    return load_job(str(path), overrides.split())


# The table of changes


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_neighbours_of_a_layout_that_runs_all_run(make_job, model, layout):
    """Each differs, keeps the number of ranks, and no rule of this version refuses it once it is settled."""
    job = make_job(**{**LARGE, "model": {"preset": model}})
    start = predict(job, layout)
    assert start.exact
    near = list_neighbours(job, start.layout)
    assert len(near) >= 8
    assert len({changed for _, changed in near}) == len(near), "none is there twice"
    for words, changed in near:
        assert changed != dataclasses.replace(start.layout, stage_layers=None), words
        assert changed.world_size == layout.world_size, words
        assert find_problems(with_layout(job, changed)) == [], words
        assert predict(job, changed).exact, words


def test_a_layout_that_can_only_be_planned_has_neighbours_that_can(make_job):
    """Another framework's runtime runs none here; its neighbours need only be legal."""
    job = make_job(**LARGE)
    job = dataclasses.replace(job, train=dataclasses.replace(job.train, runtime="megatron-core"))
    assert not is_exact(with_layout(job, PIPELINE))
    near = list_neighbours(job, PIPELINE)
    assert len(near) >= 8
    assert all(find_problems(with_layout(job, changed), to_run=False) == [] for _, changed in near)


def test_a_change_says_what_it_changes(make_job):
    changes = dict(list_neighbours(make_job(**LARGE), PIPELINE))
    assert changes["tp=4 (instead of 2)"].dp_shard == 1
    assert changes["pp=2 (instead of 4)"].dp_shard == 4
    assert changes["schedule=zb-h1 (instead of 1f1b)"].schedule == "zb-h1"
    assert changes["sequence_parallel=true"].sequence_parallel
    assert changes["recompute=full (instead of none)"].recompute == "full"
    assert "offload=optimizer (instead of none)" in changes


def test_on_cpus_nothing_is_offloaded():
    job = settled(dp_replicate=4, micro_batch=1)
    assert not any("offload" in words for words, _ in list_neighbours(job, job.layout))


# Neighbours of a recommended layout


def test_every_neighbour_loses_for_a_reason_with_a_number(make_job):
    job = make_job(**LARGE)
    found = find_layouts(job, {}, 8)
    unfit, *others = explain_neighbours(found)
    assert re.match(r"because (they do|it does) not fit: ", unfit), "one sentence for all of them"
    assert len(others) + unfit.count(" GB)") == len(list_neighbours(job, found.best[0].layout))
    for sentence in others:
        assert re.search(r": .*\d.*(slower|memory|faster)", sentence), sentence


def test_a_faster_neighbour_that_breaks_a_fixed_key_says_so(make_job):
    """With zero=3 fixed, zero=1 is faster and not "more complex": the job rules it out."""
    found = find_layouts(make_job(**LARGE), {"zero": 3}, 8)
    for sentence in explain_neighbours(found):
        broken = re.match(r"zero=[12] ", sentence)
        assert not (broken and "more complex" in sentence), sentence
    fast = predict(found.job, dataclasses.replace(found.best[0].layout, zero=1))
    fast = dataclasses.replace(fast, time=StepTime({"compute": found.best[0].step_s / 2}))
    if fast.fits:
        assert compare(found.best[0], fast, pins=found.pins).endswith("but the job fixes layout.zero=3")


def test_a_changed_degree_may_take_the_micro_batch_that_suits_it(make_job):
    """Then the sentence names it."""
    best = predict(job := make_job(**LARGE), Layout("given", dp_shard=8, tp=2, zero=3, micro_batch=4))
    sentences = explain_neighbours(SearchResult(job, best=[best]))
    for sentence in sentences:
        found = re.match(r"(\w+=[^,:\s]+).*, micro_batch=(\d+): ", sentence)
        if found:
            assert not found[1].startswith("micro_batch")
            assert int(found[2]) != best.layout.micro_batch
    named = [s for s in sentences if re.search(r", micro_batch=\d+: ", s)]
    assert named
    assert all(s.startswith(("tp", "pp", "cp", "dp_", "ep")) for s in named), job.name


def test_memory_that_is_missing_is_said_in_bytes(make_job):
    job = make_job(**LARGE)
    fits, large = (predict(job, layout) for layout in (PIPELINE, LAYOUTS[0]))
    assert not large.fits
    over = large.needed_bytes - int(job.cluster.memory_bytes * 0.97)
    assert compare(fits, large).endswith(f"{over / 1e9:.3g} GB more than usable")


def test_the_part_that_grew_is_named(make_job):
    job = make_job(**LARGE)
    many, waits = (predict(job, dataclasses.replace(PIPELINE, micro_batch=n)) for n in (1, 8))
    assert re.search(r"% slower: bubble \+", compare(many, waits))
    differences = part_differences(many, waits)
    assert sum(differences.values()) == pytest.approx(waits.step_s - many.step_s)
    assert max(differences, key=lambda name: differences[name]) == "bubble"


def test_what_is_compared_is_what_was_ranked_by(make_job):
    """By memory bytes count, by cost device time; a faster layout says that it is faster."""
    job = make_job(**LARGE)
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
def test_each_change_fits_when_it_is_pasted_and_costs_what_is_said(layout, share, tmp_path):
    job = settled(**layout)
    room = int(needed_by(job) * share)
    found = find_alternatives(job, room)
    assert [r.step_s for r in found[:2]] == sorted(r.step_s for r in found[:2])
    assert len({r.overrides for r in found}) == len(found) <= 3
    for remedy in found:
        again = pasted(job, remedy.overrides, tmp_path)
        prediction = predict(again, again.layout)
        assert prediction.needed_bytes == remedy.needed_bytes <= room
        assert prediction.step_s == pytest.approx(remedy.step_s)


def test_recomputation_and_a_smaller_micro_batch_are_both_offered():
    found = find_alternatives(job := settled(dp_replicate=4, micro_batch=16), int(needed_by(job) * 0.7), 20)
    named = [remedy.overrides for remedy in found]
    assert any("micro_batch=8" in text and "recompute" not in text for text in named), named
    assert any("recompute=" in text for text in named), named


def test_state_that_is_too_large_is_sharded_or_split():
    """A micro-batch of one cannot be smaller; the state of four replicas can be cut."""
    job = settled(dp_replicate=4, micro_batch=1, recompute="full")
    found = find_alternatives(job, int(needed_by(job) * 0.8))
    assert found
    for remedy in found:
        assert re.search(r"layout\.(dp_shard|tp|pp)=", remedy.overrides), remedy
        assert "layout.dp_replicate=4" not in remedy.overrides


def test_a_shorter_sequence_is_offered_where_the_layout_has_fewer_than_three_changes():
    """One device and the smallest micro-batch: only recomputation is left."""
    job = settled(dp_replicate=1, micro_batch=1, recompute="full")
    job = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, devices_per_node=1))
    found = find_alternatives(job, needed_by(job) - 1)
    assert found
    assert "data.seq_len=128" in found[-1].overrides


def test_nothing_is_offered_where_nothing_fits():
    assert find_alternatives(settled(dp_replicate=1, micro_batch=1), 1000) == []


def test_a_price_is_in_words():
    job = settled(dp_replicate=4, micro_batch=16)
    remedy = find_alternatives(job, int(needed_by(job) * 0.7))[0]
    assert re.fullmatch(r"[\d.]+ m?s/step, [\d.]+ MB per rank", remedy.price)


def test_the_room_is_what_was_there_or_what_was_reached():
    assert memory_budget_after_oom(1000, 500, 10, None) == 500
    assert memory_budget_after_oom(1000, 500, 10, 390) == 400
    assert memory_budget_after_oom(1000, 5000, None, None) == 900, "more was taken than predicted"
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
def test_the_nearest_layout_runs_is_close_and_priced(make_job, asked, nearest):
    """With the price that predicting it has."""
    job = with_layout(make_job(**LARGE), asked)
    problems = find_problems(job)
    assert problems
    (found,) = find_nearest_legal(job, problems)
    assert found.runs
    assert find_problems(found.prediction.job) == []
    assert {key: getattr(found.prediction.layout, key) for key in nearest} == nearest
    again = predict(make_job(**LARGE), found.prediction.layout)
    assert (again.step_s, again.needed_bytes) == (found.prediction.step_s, found.prediction.needed_bytes)
    assert found.line.startswith(f"nearest layout that runs: {found.overrides} (predicted ")
    assert found.as_dict()["fits"] is again.fits


def test_stages_that_were_not_asked_for_do_not_count_against_interleaving(make_job):
    """`schedule = interleaved` without stages is illegal; the nearest legal layout interleaves."""
    asked = Layout("given", pp=4, tp=2, schedule="interleaved", micro_batch=1)
    job = with_layout(make_job(**LARGE), asked)
    (found,) = find_nearest_legal(job, find_problems(job))
    assert (found.prediction.layout.schedule, found.prediction.layout.virtual_stages) == ("interleaved", 2)


def test_a_nearest_layout_that_does_not_fit_says_by_how_much(make_job):
    asked = Layout("given", dp_replicate=17, micro_batch=1)
    job = with_layout(make_job(**LARGE), asked)
    (found,) = find_nearest_legal(job, find_problems(job))
    assert not found.prediction.fits
    assert f"; {found.prediction.shortage})" in found.line


def test_a_legal_layout_has_no_nearest(make_job):
    job = with_layout(make_job(**LARGE), PIPELINE)
    assert find_nearest_legal(job, []) == []
