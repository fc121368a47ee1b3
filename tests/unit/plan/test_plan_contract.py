"""The plan as a file: round trip, version, damage, and the oldest one that must still be read."""

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
    return build_plan(make_job(layout={"dp_replicate": 2, "bucket_mb": 0.1}))[0]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.toml"


def codes(caught) -> list[str]:
    return [problem.code for problem in caught.value.problems]


@pytest.mark.parametrize(
    "layout", [{}, {"dp_replicate": 1}, {"dp_replicate": 3, "micro_batch": 2, "bucket_mb": 0.01}]
)
def test_a_plan_written_and_read_back_is_the_same_plan(make_job, path, layout):
    plan, _ = build_plan(make_job(layout=layout))
    write_plan(plan, path)
    assert read_plan(path) == plan


def test_a_plan_holds_one_prediction_a_rank_and_the_buckets_of_the_run(plan):
    assert [rank.rank for rank in plan.ranks] == [0, 1]
    assert plan.parameters == 94_528
    assert len(set(itertools.chain(*plan.buckets))) == 20
    assert plan.job.layout.mode == "given", "the choice is settled"
    assert plan.job.layout.micro_batch is not None


def test_one_process_has_no_buckets_and_no_collectives(make_job):
    plan, _ = build_plan(make_job(layout={"dp_replicate": 1}))
    assert plan.buckets == ()
    assert plan.collectives == ()


def test_the_file_says_version_and_writer_and_is_complete_toml(plan, path):
    write_plan(plan, path)
    tree = tomllib.loads(path.read_text())
    assert tree["meshwright_plan"] == PLAN_VERSION == 1
    assert tree["written_by"].startswith("meshwright ")
    assert tree["world_size"] == 2
    assert len(tree["predicted"]["ranks"]) == 2


def test_writing_leaves_no_draft_and_replaces_an_older_plan(plan, path):
    path.write_text("old")
    write_plan(plan, path)
    assert read_plan(path) == plan
    assert [p.name for p in path.parent.iterdir()] == ["plan.toml"]


def test_a_place_that_cannot_be_written_is_the_users_mistake(plan, tmp_path):
    with pytest.raises(UserError) as caught:
        write_plan(plan, tmp_path / "gone" / "plan.toml")
    assert codes(caught) == ["plan-not-writable"]


def test_a_plan_is_told_from_a_job(plan, path, tmp_path):
    write_plan(plan, path)
    (tmp_path / "job.toml").write_text("[train]\nsteps = 1\n")
    (tmp_path / "noise.toml").write_text("[[[")
    assert is_plan(path)
    assert not is_plan(tmp_path / "job.toml")
    assert not is_plan(tmp_path / "noise.toml")
    assert not is_plan(tmp_path / "gone.toml")


def test_the_job_inside_a_plan_can_be_loaded_and_overridden(plan, path):
    write_plan(plan, path)
    assert load_job(str(path)) == plan.job
    assert load_job(str(path), ["train.steps=9"]).train.steps == 9


def test_a_plan_needs_no_cluster_file_to_be_read(make_job, path, tmp_path):
    """Its figures are in the plan; ranks may read it in another folder or on another machine."""
    figures = {k: v for k, v in dataclasses.asdict(make_job().cluster).items() if v is not None}
    file = tmp_path / "cluster.toml"
    file.write_text(tomli_w.dumps({k: v for k, v in figures.items() if k not in ("preset", "file")}))
    job = load_job("tiny", ["cluster.file=" + str(file), "data.seq_len=32", "train.global_batch=8"])
    plan, _ = build_plan(job)
    write_plan(plan, path)
    file.unlink()
    assert read_plan(path) == plan


# Damage


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused_with_both_numbers(plan, path, version):
    tree = plan_tree(plan)
    tree.pop("meshwright_plan")
    path.write_text(tomli_w.dumps(tree if version is None else {"meshwright_plan": version, **tree}))
    with pytest.raises(UserError) as caught:
        read_plan(path)
    assert codes(caught) == ["plan-version"]
    assert f"version {version}; this is version 1" in str(caught.value)
    assert "Plan the job again" in str(caught.value)


def test_a_plan_that_is_not_there_is_missing(path):
    with pytest.raises(UserError) as caught:
        read_plan(path)
    assert codes(caught) == ["plan-missing"]


@pytest.mark.parametrize("content", [b"[[[", b"\xff\xfe", b'meshwright_plan = "'])
def test_a_plan_that_is_not_toml_is_unreadable(path, content):
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
def test_a_plan_with_a_part_missing_or_of_another_type_is_refused_without_a_traceback(
    plan, path, keys, damage
):
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


def test_a_plan_cut_short_is_refused(plan, path):
    write_plan(plan, path)
    whole = path.read_text()
    path.write_text(whole[: whole.index("[[predicted.ranks]]")])
    with pytest.raises(UserError) as caught:
        read_plan(path)
    assert codes(caught) == ["plan-unreadable"]


def test_an_illegal_job_inside_a_plan_is_refused_by_its_rule(plan, path):
    tree = plan_tree(plan)
    tree["job"]["layout"]["offload"] = "all"
    path.write_text(tomli_w.dumps(tree))
    with pytest.raises(UserError) as caught:
        read_plan(path)
    assert "layout-offload-not-built" in codes(caught)


def test_a_plan_whose_layout_does_not_run_yet_can_be_looked_at(plan, path):
    """A plan is wider than a run: `train` refuses what `plan` may have written."""
    tree = plan_tree(plan)
    tree["job"]["layout"]["offload"] = "all"
    path.write_text(tomli_w.dumps(tree))
    assert read_plan(path, to_run=False).job.layout.offload == "all"
    tree["job"]["layout"] |= {"offload": "none", "tp": 3}
    path.write_text(tomli_w.dumps(tree))
    with pytest.raises(UserError) as caught:
        read_plan(path, to_run=False)
    assert codes(caught) == ["layout-tp-heads"]


# What programs read


def test_the_summary_has_the_keys_of_interfaces(plan):
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


def test_the_plan_of_version_1_is_still_read():
    plan = read_plan(GOLDEN)
    assert (plan.job.name, plan.world_size, plan.micro_batches) == ("golden", 2, 2)
    assert plan.parameters == 94_528
    assert plan.flops_per_token == 591_744.0
    assert [rank.first_peak_bytes for rank in plan.ranks] == [2_751_056] * 2
    assert [len(bucket) for bucket in plan.buckets] == [6, 7, 7]
    assert plan.reasons[0] == "2 replicas: given in the job"


def test_planning_the_golden_job_again_promises_the_same_state_traffic_and_buckets():
    """State and bytes were found equal in that run: a planner that says otherwise is wrong."""
    golden = read_plan(GOLDEN)
    again, _ = build_plan(golden.job)
    assert again.collectives == golden.collectives
    assert again.buckets == golden.buckets
    assert [r.state_bytes for r in again.ranks] == [r.state_bytes for r in golden.ranks]
    for old, new in zip(golden.ranks, again.ranks, strict=True):
        assert new.peak_bytes == pytest.approx(old.peak_bytes, rel=0.05)


# Layouts that this version does not run, and layouts of pipelines


@pytest.fixture
def large(make_job):
    """A pipeline of a large model: 16 ranks in 4 stages."""
    tables = {"cluster": {"nodes": 2}, "train": {"global_batch": 32, "precision": "bf16"}}
    job = make_job(model={"preset": "llama3-8b"}, data={"seq_len": 2048}, **tables)
    return job, Layout("given", pp=4, tp=2, dp_shard=2, zero=1, micro_batch=1)


def test_an_estimated_plan_survives_its_file_and_says_that_it_is_not_exact(large, path):
    """Another framework's runtime: one rank of each class, and no collectives."""
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


def test_a_plan_promises_every_rank_what_its_pp_rank_needs(large, path):
    """What fits is written: each peak, the need, and what is usable."""
    found = predict(*large)
    plan = plan_from(found)
    write_plan(plan, path)
    plan = read_plan(path)
    assert plan.usable_bytes == int(0.97 * plan.job.cluster.memory_bytes)
    assert len(plan.ranks) == 16
    for rank in plan.ranks:
        need = found.memory.needs[rank.rank // 4]
        assert rank.needed_bytes == need.needed_bytes <= plan.usable_bytes
        assert rank.checkpoint_bytes == need.checkpoint
        assert rank.first_peak_bytes == need.first_step


def test_a_summary_without_ranks_is_that_of_the_plan(large):
    """The list of layouts is made without a plan for each."""
    found = predict(*large)
    assert summarize(found, ["because"]) == summarize_plan(plan_from(found, ["because"]))
