"""The planner: layouts for a job that are legal and fit, the best first."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshwright.core.errors import Problem, UserError
from meshwright.plan.build import build_plan
from meshwright.plan.contract import read_plan, write_plan
from meshwright.plan.memory.fit import USABLE_MEMORY
from meshwright.plan.search import planner
from meshwright.plan.search.find import SIMPLICITY_MARGIN
from meshwright.plan.search.planner import search_job
from meshwright.spec.legality.table import find_problems
from meshwright.spec.load import build_job


def changed(job, **tables):
    """The job with replaced keys. It is not loaded again, because tests do this often."""
    sections = {name: dataclasses.replace(getattr(job, name), **keys) for name, keys in tables.items()}
    return dataclasses.replace(job, **sections)


@pytest.mark.parametrize(
    ("preset", "cluster", "batch"),
    [
        ("tiny", "h100-sxm", 8),
        ("llama3.2-1b", "h100-sxm", 512),
        ("llama3.2-1b", "a100-80g-sxm", 6),
        ("demo-2m", "b200", 3),
    ],
)
def test_auto_layout_is_at_least_as_fast_as_ddp(make_job, preset, cluster, batch):
    """It may be slower by the simplicity margin."""
    tables = {"model": {"preset": preset}, "cluster": {"preset": cluster}, "train": {"global_batch": batch}}
    best = search_job(make_job(**tables), top=16).best[0]
    given_steps = []
    for ranks in range(1, min(8, batch) + 1):
        found = search_job(make_job(**tables, layout={"dp_replicate": ranks}))
        assert len(found.best) == found.checked == 1, "a given layout is not searched"
        given_steps.append(found.best[0].step_s)
    assert best.step_s <= min(given_steps) * (1 + SIMPLICITY_MARGIN["cuda"])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_found_layouts_are_legal_fit_and_sorted(make_job, device):
    """All axes are searched, also on CPUs."""
    cluster = {"preset": "local", "device": "cpu", "devices_per_node": 4} if device == "cpu" else {}
    job = make_job(model={"preset": "demo-2m"}, cluster=cluster, train={"global_batch": 32})
    found = search_job(job)
    assert 16 <= len(found.best) <= 64
    assert all(prediction.fits and prediction.exact for prediction in found.best)
    assert not any(find_problems(prediction.job) for prediction in found.best)
    first, *rest = [prediction.step_s for prediction in found.best]
    assert rest == sorted(rest)
    assert first <= min(rest) * (1 + SIMPLICITY_MARGIN[device])
    assert len({prediction.layout for prediction in found.best}) == len(found.best), "no layout twice"
    assert len({(p.layout.tp, p.layout.pp, p.layout.cp, p.layout.zero) for p in found.best}) > 4


def test_named_keys_keep_their_value(make_job):
    """A named key with its default value is kept too."""
    job = make_job(model={"preset": "demo-2m"}, layout={"recompute": "full", "micro_batch": 2})
    found = search_job(job, ("recompute", "micro_batch"), 8)
    assert {(p.layout.recompute, p.layout.micro_batch) for p in found.best} == {("full", 2)}
    plain = make_job(model={"preset": "demo-2m"})
    assert {p.layout.dp_replicate for p in search_job(plain, ("dp_replicate",), 8).best} == {1}
    assert {p.layout.dp_replicate for p in search_job(plain, (), 8).best} != {1}


def test_layouts_that_do_not_fit_are_not_found(make_job):
    """The device has 20% more memory than the smallest need."""
    job = make_job(model={"preset": "demo-2m"}, cluster={"device": "cpu"}, train={"global_batch": 64})
    least = search_job(job, ("offload",), objective="memory").best[0].needed_bytes
    small = changed(job, cluster={"memory_bytes": int(least * 1.2 / USABLE_MEMORY)})
    whole, found = search_job(job, top=16).best, search_job(small, top=16).best
    assert max(p.needed_bytes for p in found) <= least * 1.2
    assert max(p.needed_bytes for p in whole) > least * 1.2
    assert found[0].step_s > whole[0].step_s


def test_pinned_ep_and_context_methods_are_found(make_job):
    """With experts ep occurs, and both context methods where they are named."""
    experts = {"preset": "demo-2m", "num_experts": 4, "experts_per_token": 2, "num_layers": 2}
    cluster = {"preset": "local", "device": "cpu", "devices_per_node": 4}
    for layout in ({"ep": 2}, {"cp": 2, "context": "ulysses"}, {"cp": 2, "context": "ring"}):
        job = make_job(model=experts, cluster=cluster, data={"seq_len": 128})
        pinned = changed(job, layout=layout)
        found = search_job(pinned, tuple(layout), 4).best
        assert found
        assert all(getattr(p.layout, key) == value for p in found for key, value in layout.items())


@settings(max_examples=15, deadline=None)
@given(batch=st.integers(1, 24), micro=st.none() | st.integers(1, 24), devices=st.integers(1, 8))
@example(batch=9, micro=4, devices=3)
def test_planned_layout_is_legal_and_round_trips(make_job, tmp_path_factory, batch, micro, devices):
    """The run must accept every plan."""
    layout = {} if micro is None or micro > batch else {"micro_batch": micro}
    fast = {"devices_per_node": devices, "link_bytes_per_s": 1e15, "link_latency_s": 1e-12}
    job = changed(make_job(), cluster=fast, train={"global_batch": batch}, layout=layout)
    assert find_problems(job) == []
    plan, found = build_plan(job)
    assert find_problems(plan.job) == []
    assert plan.job == found.best[0].job
    path = tmp_path_factory.mktemp("plans") / "plan.toml"
    write_plan(plan, path)
    assert read_plan(path) == plan


# ResNets: data parallel only


def build_images(batch=24, **layout):
    """A ResNet job with this batch and layout."""
    return build_job(
        {
            "name": "images",
            "model": {"preset": "resnet-tiny"},
            "cluster": {"preset": "h100-sxm"},
            "data": {"path": "images"},
            "train": {"steps": 4, "global_batch": batch},
            "layout": layout,
        }
    )


def test_resnet_replicas_are_at_most_the_samples():
    assert search_job(build_images(batch=3)).evaluated == 3
    assert {p.layout.dp_replicate for p in search_job(build_images(batch=3)).best} == {1, 2, 3}


def test_layouts_illegal_after_completion_are_dropped(monkeypatch):
    """The best remaining layout is chosen. With none left, the broken rule is the error."""
    job = build_images()
    before = search_job(job)
    problem = Problem("layout-micro-batch", "is forbidden here", path="layout.micro_batch")
    worst = before.best[-1].layout
    monkeypatch.setattr(planner, "find_problems", lambda placed: [problem] if placed.layout == worst else [])
    after = search_job(job)
    assert (after.evaluated, after.illegal) == (before.evaluated - 1, before.illegal + 1)
    assert [p.layout for p in after.best] == [p.layout for p in before.best[:-1]]
    monkeypatch.setattr(planner, "find_problems", lambda placed: [problem])
    with pytest.raises(UserError) as caught:
        search_job(job)
    assert caught.value.problems == (problem,)
