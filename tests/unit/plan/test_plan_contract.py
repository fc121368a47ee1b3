"""The plan file: round trip, version, damaged files, and the golden plan of version 1."""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from pathlib import Path

import pytest
import tomli_w

from meshwright.core.errors import UserError
from meshwright.plan.build import build_plan, plan_from, summarize, summarize_plan
from meshwright.plan.contract import PLAN_VERSION, is_plan, layout_keys, plan_tree, read_plan, write_plan
from meshwright.plan.predict import predict
from meshwright.spec.layout import Layout
from meshwright.spec.load import load_job

GOLDEN = Path(__file__).parents[2] / "golden" / "run-v1" / "plan.toml"


@pytest.fixture
def plan(make_job):
    """The plan of two DDP replicas."""
    return build_plan(make_job(layout={"dp_replicate": 2, "bucket_mb": 0.1}))[0]


@pytest.fixture
def path(tmp_path):
    """A path for a plan."""
    return tmp_path / "plan.toml"


def codes(caught) -> list[str]:
    """The error codes of a caught error."""
    return [problem.code for problem in caught.value.problems]


@pytest.mark.parametrize(
    "layout", [{}, {"dp_replicate": 1}, {"dp_replicate": 3, "micro_batch": 2, "bucket_mb": 0.01}]
)
def test_plan_round_trips(make_job, path, layout):
    plan, _ = build_plan(make_job(layout=layout))
    write_plan(plan, path)
    assert read_plan(path) == plan


def test_plan_has_every_rank_and_the_gradient_buckets(plan):
    assert [rank.rank for rank in plan.ranks] == [0, 1]
    assert plan.parameters == 94_528
    assert len(set(itertools.chain(*plan.buckets))) == 20
    assert plan.job.layout.mode == "given", "the layout is complete"
    assert plan.job.layout.micro_batch is not None


def test_plan_of_one_process_has_no_buckets_and_collectives(make_job):
    plan, _ = build_plan(make_job(layout={"dp_replicate": 1}))
    assert plan.buckets == ()
    assert plan.collectives == ()


def test_plan_file_is_toml_with_version_and_writer(plan, path):
    write_plan(plan, path)
    tree = tomllib.loads(path.read_text())
    assert tree["meshwright_plan"] == PLAN_VERSION == 1
    assert tree["written_by"].startswith("meshwright ")
    assert tree["world_size"] == 2
    assert len(tree["predicted"]["ranks"]) == 2


def test_write_plan_replaces_an_older_plan_atomically(plan, path):
    path.write_text("old")
    write_plan(plan, path)
    assert read_plan(path) == plan
    assert [p.name for p in path.parent.iterdir()] == ["plan.toml"]


def test_unwritable_plan_path_is_a_user_error(plan, tmp_path):
    with pytest.raises(UserError) as caught:
        write_plan(plan, tmp_path / "gone" / "plan.toml")
    assert codes(caught) == ["plan-not-writable"]


def test_plan_files_are_distinguished_from_job_files(plan, path, tmp_path):
    write_plan(plan, path)
    (tmp_path / "job.toml").write_text("[train]\nsteps = 1\n")
    (tmp_path / "noise.toml").write_text("[[[")
    assert is_plan(path)
    assert not is_plan(tmp_path / "job.toml")
    assert not is_plan(tmp_path / "noise.toml")
    assert not is_plan(tmp_path / "gone.toml")


def test_job_of_a_plan_can_be_loaded_and_overridden(plan, path):
    write_plan(plan, path)
    assert load_job(str(path)) == plan.job
    assert load_job(str(path), ["train.steps=9"]).train.steps == 9


def test_plan_is_read_without_the_cluster_file(make_job, path, tmp_path):
    """The plan contains the figures. Ranks may read it in another folder or on another machine."""
    figures = {k: v for k, v in dataclasses.asdict(make_job().cluster).items() if v is not None}
    file = tmp_path / "cluster.toml"
    file.write_text(tomli_w.dumps({k: v for k, v in figures.items() if k not in ("preset", "file")}))
    job = load_job("tiny", ["cluster.file=" + str(file), "data.seq_len=32", "train.global_batch=8"])
    plan, _ = build_plan(job)
    write_plan(plan, path)
    file.unlink()
    assert read_plan(path) == plan


# Damaged files


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_plan_of_another_version_is_refused(plan, path, version):
    tree = plan_tree(plan)
    tree.pop("meshwright_plan")
    path.write_text(tomli_w.dumps(tree if version is None else {"meshwright_plan": version, **tree}))
    with pytest.raises(UserError) as caught:
        read_plan(path)
    assert codes(caught) == ["plan-version"]
    assert f"version {version}; this is version 1" in str(caught.value)
    assert "Plan the job again" in str(caught.value)


def test_missing_plan_is_refused(path):
    with pytest.raises(UserError) as caught:
        read_plan(path)
    assert codes(caught) == ["plan-missing"]


@pytest.mark.parametrize("content", [b"[[[", b"\xff\xfe", b'meshwright_plan = "'])
def test_plan_that_is_not_toml_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_plan(path)
    assert codes(caught) == ["plan-unreadable"]
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        ("predicted",),
        ("predicted", "ranks"),
        ("predicted", "step_s"),
        ("predicted", "collectives"),
        ("predicted", "buckets"),
        ("reasons",),
        ("job",),
    ],
    ids=".".join,
)
@pytest.mark.parametrize("damage", ["missing", "number"])
def test_plan_with_a_missing_or_invalid_table_is_a_user_error(plan, path, keys, damage):
    tree = plan_tree(plan)
    table = tree
    for key in keys[:-1]:
        table = table[key]
    if damage == "missing":
        del table[keys[-1]]
    elif keys[-1] == "step_s":
        table["step_s"] = "soon"
    else:
        table[keys[-1]] = 5
    path.write_text(tomli_w.dumps(tree))
    with pytest.raises(UserError) as caught:
        read_plan(path)
    assert all(code.startswith(("plan-", "job-")) for code in codes(caught))


def test_truncated_plan_is_refused(plan, path):
    write_plan(plan, path)
    whole = path.read_text()
    path.write_text(whole[: whole.index("[[predicted.ranks]]")])
    with pytest.raises(UserError) as caught:
        read_plan(path)
    assert codes(caught) == ["plan-unreadable"]


def test_illegal_job_inside_a_plan_is_refused(plan, path):
    tree = plan_tree(plan)
    tree["job"]["layout"]["offload"] = "all"
    path.write_text(tomli_w.dumps(tree))
    with pytest.raises(UserError) as caught:
        read_plan(path)
    assert "layout-offload-not-built" in codes(caught)


def test_plan_only_layout_can_be_read_for_planning(plan, path):
    """A plan may have a layout that ``train`` refuses. Illegal layouts are refused in any case."""
    tree = plan_tree(plan)
    tree["job"]["layout"]["offload"] = "all"
    path.write_text(tomli_w.dumps(tree))
    assert read_plan(path, to_run=False).job.layout.offload == "all"
    tree["job"]["layout"] |= {"offload": "none", "tp": 3}
    path.write_text(tomli_w.dumps(tree))
    with pytest.raises(UserError) as caught:
        read_plan(path, to_run=False)
    assert codes(caught) == ["layout-tp-heads"]


# Keys of the JSON summary


def test_summary_has_the_documented_keys(plan):
    summary = summarize_plan(plan)
    assert set(summary) >= {
        "layout",
        "step_s",
        "step_s_low",
        "step_s_high",
        "tokens_per_s_per_device",
        "mfu",
        "memory_bytes",
        "breakdown_s",
        "collectives",
        "reasons",
    }
    assert summary["step_s_low"] < summary["step_s"] < summary["step_s_high"]
    assert sum(summary["breakdown_s"].values()) == pytest.approx(summary["step_s"])
    (memory,) = summary["memory_bytes"].values()
    assert sum(line["bytes"] for line in memory["lines"]) == memory["peak"]
    assert summary["tokens_per_s_per_device"] * 2 * summary["step_s"] == pytest.approx(256)
    assert None not in layout_keys(plan.job).values()


# The golden plan


def test_golden_plan_of_version_1_is_read():
    plan = read_plan(GOLDEN)
    assert (plan.job.name, plan.world_size, plan.micro_batches) == ("golden", 2, 2)
    assert plan.parameters == 94_528
    assert plan.flops_per_token == 591_744.0
    assert [rank.first_peak_bytes for rank in plan.ranks] == [2_751_056] * 2
    assert [len(bucket) for bucket in plan.buckets] == [6, 7, 7]
    assert plan.reasons[0] == "2 replicas: given in the job"


def test_planning_the_golden_job_again_gives_the_same_plan():
    """State and traffic matched that run exactly, so they must not change. The peak may by 5%."""
    golden = read_plan(GOLDEN)
    again, _ = build_plan(golden.job)
    planned, before = ([row for row in plan.collectives if row.axis != "control"] for plan in (again, golden))
    assert planned == before, "the control all-reduce has since got a save request of rank 0"
    assert again.buckets == golden.buckets
    assert [r.state_bytes for r in again.ranks] == [r.state_bytes for r in golden.ranks]
    for old, new in zip(golden.ranks, again.ranks, strict=True):
        assert new.peak_bytes == pytest.approx(old.peak_bytes, rel=0.05)


# Estimated layouts and pipelines


@pytest.fixture
def large(make_job):
    """A job of a large model, and a pipeline layout with 16 ranks in 4 stages."""
    tables = {"cluster": {"nodes": 2}, "train": {"global_batch": 32, "precision": "bf16"}}
    job = make_job(model={"preset": "llama3-8b"}, data={"seq_len": 2048}, **tables)
    return job, Layout("given", pp=4, tp=2, dp_shard=2, zero=1, micro_batch=1)


def test_estimated_plan_round_trips_as_not_exact(large, path):
    """The runtime is another framework. The plan has one rank per class and no collectives."""
    job, layout = large
    other = dataclasses.replace(job, train=dataclasses.replace(job.train, runtime="megatron-core"))
    plan = plan_from(predict(other, layout), ["because"])
    write_plan(plan, path)
    assert "exact = false" in path.read_text()
    again = read_plan(path, to_run=False)
    assert again == plan
    assert not again.exact
    assert (again.world_size, len(again.ranks)) == (16, 3)
    assert list(again.classes()) == ["first stage", "middle stages", "last stage"]


def test_plan_has_the_memory_need_of_every_rank(large, path):
    """Each rank has the peaks and the need of its pp rank. The plan has the usable bytes."""
    found = predict(*large)
    plan = plan_from(found)
    write_plan(plan, path)
    plan = read_plan(path)
    assert plan.usable_bytes == int(0.97 * plan.job.cluster.memory_bytes)
    assert len(plan.ranks) == 16
    for rank in plan.ranks:
        need = found.memory.needs[rank.rank // 4]
        assert rank.needed_bytes == need.needed_bytes <= plan.usable_bytes
        assert rank.first_peak_bytes == need.first_step


def test_summary_of_a_prediction_equals_that_of_its_plan(large):
    """The list of layouts is printed without building plans. Only plans have the memory of nodes."""
    found = predict(*large)
    planned = summarize_plan(plan_from(found, ["because"]))
    assert planned.pop("host_memory")
    assert summarize(found, ["because"]) == planned


PLACED = {
    "cluster": {"nodes": 2, "devices_per_node": 2},
    "layout": {"tp": 2, "dp_replicate": 2, "placement": [0, 2, 1, 3]},
}


def test_placement_round_trips_and_rank_order_is_left_out(make_job, path):
    placed = build_plan(make_job(**PLACED))[0]
    write_plan(placed, path)
    assert tomllib.loads(path.read_text())["predicted"]["placement"] == [0, 2, 1, 3]
    assert read_plan(path) == placed
    ordered = build_plan(make_job(**{**PLACED, "layout": {**PLACED["layout"], "placement": "rank-order"}}))[0]
    assert "placement" not in plan_tree(ordered)["predicted"]
    assert ordered.rank_placement.as_pairs() == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("slots", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4]], ids=["short", "twice", "outside"])
def test_plan_with_a_damaged_placement_is_refused(make_job, path, slots):
    tree = plan_tree(build_plan(make_job(**PLACED))[0])
    tree["predicted"]["placement"] = slots
    path.write_text(tomli_w.dumps(tree))
    with pytest.raises(UserError) as caught:
        read_plan(path)
    assert codes(caught) == ["plan-unreadable"]
    assert "predicted.placement" in str(caught.value)
