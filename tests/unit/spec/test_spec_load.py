"""From TOML and overrides to a job: what wins, what defaults mean, and every mistake with its fix."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import tomli_w

from meshwright.core.errors import UserError
from meshwright.spec import cluster as cluster_module
from meshwright.spec import load as load_module
from meshwright.spec.load import (
    PLAN_KEY,
    SpecError,
    apply_override,
    build_job,
    job_tree,
    load_job,
    read_tree,
)
from meshwright.spec.presets import preset_names

GOOD = """
[model]
preset = "tiny"
[cluster]
preset = "h100-sxm"
[data]
path = "text"
seq_len = 32
[train]
steps = 4
global_batch = 8
"""


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    return str(path)


def codes(caught) -> list[str]:
    return [problem.code for problem in caught.value.problems]


# What a good job becomes


def test_a_job_is_named_after_its_file_unless_it_says_otherwise(job_file):
    assert load_job(job_file).name == "mine"
    assert load_job(job_file, ["name=other"]).name == "other"


def test_preset_fields_lie_under_the_file_and_the_file_under_overrides(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(GOOD.replace('preset = "tiny"', 'preset = "tiny"\nnum_layers = 3\nffn_size = 96'))
    job = load_job(str(path), ["model.ffn_size=160", "model.ffn_size=192"])
    assert job.model.hidden_size == 64, "from the preset"
    assert job.model.num_layers == 3, "the file wins over the preset"
    assert job.model.ffn_size == 192, "the last override wins over all"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.steps=7", "train.steps", 7),
        ("train.lr=1e-3", "train.lr", 1e-3),
        ("train.deterministic=true", "train.deterministic", True),
        ("train.precision=bf16", "train.precision", "bf16"),
        ('train.precision="bf16"', "train.precision", "bf16"),
        ("data.path=/a/b c=d", "data.path", "/a/b c=d"),
        ("data.path=builtin:python-stdlib", "data.path", "builtin:python-stdlib"),
        ("train.wandb=007", "train.wandb", "007"),
    ],
)
def test_an_override_is_a_toml_value_where_it_is_one_and_else_a_text(job_file, override, path, value):
    found = load_job(job_file, [override])
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_a_bare_preset_name_is_a_job_to_plan():
    job = load_job("llama3-8b", on="2x8xh100-sxm")
    assert (job.name, job.model.preset, job.cluster.world_size) == ("llama3-8b", "llama3-8b", 16)
    assert (job.data.seq_len, job.train.global_batch, job.train.precision) == (4096, 512, "bf16")


def test_loading_a_preset_twice_shares_nothing():
    load_job("tiny", ["train.global_batch=2"], on="h100-sxm")
    assert load_job("tiny", on="h100-sxm").train.global_batch == 512


def test_building_a_job_leaves_the_tables_as_they_were(tree):
    tables = tree(layout={"dp_replicate": 2})
    before = repr(tables)
    build_job(tables)
    assert repr(tables) == before


def test_a_job_written_out_and_read_back_is_the_same_job(tree):
    job = build_job(tree(layout={"dp_replicate": 2, "micro_batch": 2}, train={"warmup": 2, "clip": 0.0}))
    assert build_job(job_tree(job)) == job


@pytest.mark.parametrize("name", preset_names("models"))
def test_every_model_preset_loads_and_breaks_no_rule(name):
    assert load_job(name, on="h100-sxm", to_run=False).model.preset == name


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_every_cluster_preset_loads_and_says_where_its_figures_come_from(name):
    cluster = load_job("tiny", [f"cluster.preset={name}"]).cluster
    assert cluster.preset == name
    assert cluster.basis
    assert cluster.device_name
    if name != "local":
        assert cluster.device == "cuda"
        assert cluster.bf16_flops_per_s < cluster.peak_bf16_flops_per_s, "reached is below the data sheet"


# The layout's defaults


@pytest.mark.parametrize("degree", ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"])
def test_naming_a_degree_makes_the_layout_given(tree, degree):
    job = build_job(tree(layout={degree: 1}))
    assert job.layout.mode == "given"
    assert job.layout.world_size == 1, "degrees that are not named are one"


def test_a_layout_without_degrees_is_the_planners(tree):
    assert build_job(tree()).layout.mode == "auto"
    assert build_job(tree(layout={"micro_batch": 2})).layout.mode == "auto"


def test_auto_beside_a_degree_is_a_contradiction(refused):
    problem = refused(layout={"mode": "auto", "dp_replicate": 2})[0]
    assert problem.code == "layout-auto-with-degrees"
    assert "layout.dp_replicate" in str(problem)


def test_dp_shard_without_zero_means_zero_3(tree):
    assert build_job(tree(layout={"dp_shard": 2})).layout.zero == 3


def test_zero_0_with_dp_shard_says_to_use_dp_replicate(refused):
    problem = next(p for p in refused(layout={"dp_shard": 4, "zero": 0}) if p.path == "layout.zero")
    assert problem.code == "layout-zero-dp-shard"
    assert "layout.dp_replicate=4" in problem.fix


# The cluster


@pytest.mark.parametrize(
    ("on", "nodes", "devices", "preset"),
    [
        ("8x8xh100-sxm", 8, 8, "h100-sxm"),
        ("4xh100-sxm", 1, 4, "h100-sxm"),
        ("h100-sxm", 1, 8, "h100-sxm"),
        ("2x72xgb200-nvl72", 2, 72, "gb200-nvl72"),
        ("128x16xv100-32g-sxm", 128, 16, "v100-32g-sxm"),
        ("1024xh100-sxm", 128, 8, "h100-sxm"),
        ("144xgb200-nvl72", 2, 72, "gb200-nvl72"),
        ("1x16xh100-sxm", 1, 16, "h100-sxm"),
        ("12xh100-sxm", 1, 12, "h100-sxm"),
    ],
)
def test_on_reads_nodes_devices_preset(on, nodes, devices, preset):
    cluster = load_job("tiny", on=on).cluster
    assert (cluster.nodes, cluster.devices_per_node, cluster.preset) == (nodes, devices, preset)


@pytest.mark.parametrize(
    "on", ["", "8x", "x8xh100-sxm", "0xh100-sxm", "8x0xh100-sxm", "8*8*h100", "2x2x2xh100"]
)
def test_on_that_is_no_cluster_is_refused_with_its_form(on):
    with pytest.raises(UserError) as caught:
        load_job("tiny", on=on)
    problem = caught.value.problems[0]
    assert problem.code in ("cluster-bad-on", "cluster-unknown-preset")
    assert problem.fix


def test_on_takes_the_place_of_the_jobs_cluster(job_file):
    job = load_job(job_file, on="2x4xa100-80g-sxm")
    assert (job.cluster.preset, job.cluster.world_size) == ("a100-80g-sxm", 8)


def test_an_override_of_the_cluster_holds_beside_on():
    """A setting is never silently ignored: what is said last and most exactly wins."""
    job = load_job("tiny", ["cluster.memory_bytes=1000000000"], on="h100-sxm")
    assert job.cluster.memory_bytes == 1_000_000_000


def test_local_is_this_machines_cores_when_there_is_no_gpu(tree, monkeypatch):
    monkeypatch.setattr(load_module, "find_gpus", list)
    monkeypatch.setattr(load_module, "count_cores", lambda: 6)
    monkeypatch.setattr(load_module, "machine_memory_bytes", lambda: 12_000_000_000)
    cluster = build_job(tree(cluster={"preset": "local"})).cluster
    assert (cluster.device, cluster.devices_per_node, cluster.memory_bytes) == ("cpu", 6, 2_000_000_000)


def test_local_is_this_machines_gpus_when_there_are_some(tree, monkeypatch):
    monkeypatch.setattr(load_module, "find_gpus", lambda: [("NVIDIA H200", 150_000_000_000)] * 2)
    cluster = build_job(tree(cluster={"preset": "local"})).cluster
    assert (cluster.device, cluster.devices_per_node, cluster.memory_bytes) == ("cuda", 2, 150_000_000_000)
    assert cluster.memory_bytes_per_s == pytest.approx(4.8e12), "figures of the known device"


def test_asking_for_the_cpu_looks_for_no_gpu(tree, monkeypatch):
    monkeypatch.setattr(load_module, "find_gpus", lambda: [("NVIDIA H200", 150_000_000_000)])
    assert build_job(tree(cluster={"preset": "local", "device": "cpu"})).cluster.device == "cpu"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_hidden_by_the_environment_are_not_found(monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert cluster_module.find_gpus() == []


def test_a_cluster_file_gives_the_figures_and_the_job_may_change_them(tree, tmp_path):
    path = tmp_path / "cluster.toml"
    fields = dataclasses.asdict(build_job(tree()).cluster)
    path.write_text("\n".join(f"{k} = {v!r}" for k, v in fields.items() if v is not None and k != "preset"))
    tables = tree(cluster=None)
    tables["cluster"] = {"file": str(path), "nodes": 3}
    cluster = build_job(tables).cluster
    assert (cluster.nodes, cluster.memory_bytes, cluster.preset) == (3, 80_000_000_000, None)


# Every bad input, with its code, its path and its fix


@pytest.mark.parametrize(
    ("tables", "code", "path", "says"),
    [
        ({"train": {"step": 4}}, "job-unknown-key", "train.step", "Did you mean train.steps?"),
        ({"lyout": {"tp": 2}}, "job-unknown-key", "lyout", "Did you mean layout?"),
        ({"train": {"zzz": 4}}, "job-unknown-key", "train.zzz", "Keys of [train]: steps, global_batch"),
        ({"train": {"steps": "4"}}, "job-wrong-type", "train.steps", "whole number. Write it without quotes"),
        ({"train": {"steps": 1.5}}, "job-wrong-type", "train.steps", "must be a whole number"),
        ({"train": {"steps": True}}, "job-wrong-type", "train.steps", "must be a whole number"),
        ({"train": {"lr": "fast"}}, "job-wrong-type", "train.lr", "must be a number"),
        ({"train": {"lr": [1]}}, "job-wrong-type", "train.lr", "must be a number"),
        ({"train": {"deterministic": 1}}, "job-wrong-type", "train.deterministic", "must be true or false"),
        ({"data": {"path": 7}}, "job-wrong-type", "data.path", "must be a string"),
        ({"name": 5}, "job-wrong-type", "name", "must be a string"),
        ({"model": 5}, "job-wrong-type", "model", "must be a table. Write [model] and its keys below"),
        ({"layout": 5}, "job-wrong-type", "layout", "must be a table. Write [layout]"),
        ({"cluster": 5}, "job-wrong-type", "cluster", "must be a table. Write [cluster]"),
        ({"train": {"steps": 0}}, "job-out-of-range", "train.steps", "must be at least 1"),
        ({"train": {"lr": 0.0}}, "job-out-of-range", "train.lr", "must be more than 0"),
        ({"train": {"lr": float("nan")}}, "job-out-of-range", "train.lr", "must be finite"),
        ({"train": {"beta1": 1.0}}, "job-out-of-range", "train.beta1", "must be less than 1"),
        ({"data": {"eval_fraction": 0.9}}, "job-out-of-range", "data.eval_fraction", "at most 0.5"),
        ({"train": {"wandb": ""}}, "job-out-of-range", "train.wandb", "must not be empty"),
        ({"name": "x" * 101}, "job-out-of-range", "name", "must have at most 100 characters"),
        ({"layout": {"zero": 4}}, "job-out-of-range", "layout.zero", "must be at most 3"),
        ({"train": {"precision": "bf61"}}, "job-not-a-choice", "train.precision", "Did you mean 'bf16'?"),
        ({"layout": {"mode": "atuo"}}, "job-not-a-choice", "layout.mode", "is not one of 'auto' or 'given'"),
        ({"data": {"mask": 3}}, "job-not-a-choice", "data.mask", "'causal' or 'document'"),
        ({"train": None}, "job-missing-key", "train", "Add the table [train]"),
        ({"data": None}, "job-missing-key", "data", "Add the table [data]"),
        ({"model": None}, "job-missing-key", "model", "Add the table [model]"),
        ({"cluster": {"preset": "h100"}}, "cluster-unknown-preset", "cluster.preset", "'h100-sxm'"),
        ({"cluster": {"file": "/no/file"}}, "cluster-file-unreadable", "cluster.file", "No such file"),
    ],
)
def test_a_mistake_gets_exactly_one_line_with_path_code_and_fix(refused, tables, code, path, says):
    (problem,) = refused(**tables)
    assert (problem.code, problem.path) == (code, path)
    assert says in str(problem)
    assert str(problem).endswith(f"[{code}]")


@pytest.mark.parametrize(
    ("section", "key"), [("train", "steps"), ("train", "global_batch"), ("data", "path")]
)
def test_a_missing_key_says_which_table_it_belongs_to(tree, section, key):
    tables = tree()
    del tables[section][key]
    with pytest.raises(UserError) as caught:
        build_job(tables)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("job-missing-key", f"{section}.{key}")
    assert f"[{section}]" in problem.fix


def test_a_model_without_fields_may_name_a_preset_instead(refused):
    problems = refused(model={"preset": None})
    missing = [p for p in problems if p.code == "job-missing-key"]
    assert {p.path for p in missing} >= {"model.num_layers", "model.hidden_size", "model.vocab_size"}
    assert all("model.preset" in p.fix for p in missing)


def test_an_unknown_model_preset_is_named_with_the_nearest(refused):
    problem = refused(model={"preset": "llama-8b"})[0]
    assert (problem.code, problem.path) == ("model-unknown-preset", "model.preset")
    assert "'llama3-8b'" in problem.fix


def test_an_unknown_model_preset_is_the_only_thing_reported(refused):
    """The fields that the preset would have given are not the user's omission."""
    assert [p.code for p in refused(model={"preset": "tiney"})] == ["model-unknown-preset"]


@pytest.mark.parametrize("value", [True, "3e-4"])
def test_a_number_is_not_a_flag_and_not_a_text(refused, value):
    """TOML has types: ``lr = true`` is a mistake, not 1.0."""
    (problem,) = refused(train={"lr": value})
    assert (problem.code, problem.path) == ("job-wrong-type", "train.lr")


@pytest.mark.parametrize(("section", "key"), [("train", "lr"), ("layout", "bucket_mb")])
def test_infinity_is_out_of_range(refused, section, key):
    (problem,) = refused(**{section: {key: float("inf")}})
    assert problem.path == f"{section}.{key}"
    assert problem.code in ("job-out-of-range", "job-wrong-type")


@pytest.mark.parametrize(
    "text", ["steps", "=4", "train.=4", ".steps=4", "train..steps=4", "a b=4", "--steps=4 "]
)
def test_an_override_of_another_form_is_refused_with_an_example(job_file, text):
    with pytest.raises(UserError) as caught:
        load_job(job_file, [text])
    problem = caught.value.problems[0]
    assert problem.code in ("job-bad-override", "job-unknown-key")
    assert problem.fix


def test_an_override_below_a_value_is_refused():
    problem = apply_override({"train": {"steps": 4}}, "train.steps.now=4")
    assert problem.code == "job-bad-override"
    assert "steps is not a table" in str(problem)


def test_an_override_makes_the_table_it_needs():
    tables: dict = {}
    assert apply_override(tables, "layout.tp=2") is None
    assert tables == {"layout": {"tp": 2}}


def test_an_unknown_key_in_an_override_is_an_unknown_key(job_file):
    with pytest.raises(UserError) as caught:
        load_job(job_file, ["train.stepps=4"])
    assert codes(caught) == ["job-unknown-key"]


@pytest.mark.parametrize("source", ["gone.toml", "folder/gone", "gone.yaml"])
def test_a_path_that_is_not_there_does_not_list_the_presets(source):
    with pytest.raises(UserError) as caught:
        load_job(source)
    assert codes(caught) == ["job-missing-file"]
    assert not any(name in str(caught.value) for name in preset_names("models"))


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("llama3-8", ["llama3-8b"]),
        ("mixtral", ["mixtral-8x7b", "mixtral-8x22b"]),
        ("xyzzy", preset_names("models")),
    ],
)
def test_a_name_that_is_no_preset_is_answered_with_presets(source, named):
    """Those that begin like it, or similar ones; else all."""
    with pytest.raises(UserError) as caught:
        load_job(source)
    assert codes(caught) == ["job-missing-file"]
    assert all(name in str(caught.value) for name in named)


@pytest.mark.parametrize(("name", "text"), [("job.yaml", "train:\n  lr: 3e-4\n"), ("job.json", "{}")])
def test_other_formats_are_refused_as_such(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        load_job(str(tmp_path / name))
    assert codes(caught) == ["job-not-toml"]


def test_a_cluster_may_be_written_in_capitals(job_file):
    assert load_job(job_file, on="2x8xH100-SXM").cluster == load_job(job_file, on="2x8xh100-sxm").cluster


def test_a_folder_is_not_a_job(tmp_path):
    with pytest.raises(UserError) as caught:
        load_job(str(tmp_path))
    assert codes(caught) == ["job-unreadable"]


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"[train\n", "job-bad-toml"), (b"a = 1\na = 2\n", "job-bad-toml"), (b"\xff", "job-unreadable")],
)
def test_a_file_that_is_not_toml_is_refused(tmp_path, content, code):
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_job(str(path))
    assert codes(caught) == [code]
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["meshwright_plan = 1\n", "meshwright_plan = 1\njob = 5\n"])
def test_a_plan_without_a_job_is_refused_and_not_a_traceback(tmp_path, content):
    path = tmp_path / "plan.toml"
    path.write_text(content)
    with pytest.raises(UserError):
        read_tree(str(path))


# All at once


def test_all_mistakes_are_reported_in_one_error(job_file):
    """Types, ranges, choices, unknown keys, overrides, presets, --on and legality in one go."""
    overrides = [
        "nonsense",
        "train.steps=0",
        "train.lr=[1]",
        "train.precision=bf61",
        "data.maks=causal",
        "layout.tp=3",
        "layout.sequence_parallel=1",
        "model.num_kv_heads=3",
        "train.warmup=-1",
    ]
    with pytest.raises(UserError) as caught:
        load_job(job_file, overrides, on="0xh100-sxm")
    found = {(p.code, p.path) for p in caught.value.problems}
    assert found == {
        ("job-bad-override", "nonsense"),
        ("cluster-bad-on", "on"),
        ("job-out-of-range", "train.steps"),
        ("job-wrong-type", "train.lr"),
        ("job-not-a-choice", "train.precision"),
        ("job-unknown-key", "data.maks"),
        ("job-wrong-type", "layout.sequence_parallel"),
        ("job-out-of-range", "train.warmup"),
        ("layout-tp-heads", "layout.tp"),
        ("model-kv-heads", "model.num_kv_heads"),
    }


@pytest.mark.parametrize(
    ("tables", "hidden"),
    [
        ({"train": {"steps": "x"}, "layout": {"tp": 3}}, "layout-tp-heads"),
        ({"train": None, "layout": {"tp": 3}}, "layout-tp-heads"),
        ({"data": {"seq_len": 0}, "train": {"precision": "fp8"}}, "train-fp8-not-built"),
        ({"train": {"lr": "x", "precision": "fp8"}}, "train-fp8-not-built"),
        # the path of the first mistake is part of a word in the second one's sentence
        ({"data": None, "layout": {"tp": 3}}, "layout-tp-heads"),
        ({"train": {"lr": "x", "lr_scaling": "linear"}}, "train-lr-base-batch"),
        ({"name": 5, "consistency": {"mode": "gossip"}}, "consistency-mode-not-built"),
        ({"cluster": {"devices_per_node": "two"}, "layout": {"tp": 3}}, "layout-tp-heads"),
        ({"cluster": 5, "layout": {"tp": 3}}, "layout-tp-heads"),
        ({"cluster": {"preset": "h100"}, "layout": {"tp": 3}}, "layout-tp-heads"),
    ],
)
def test_a_mistake_of_type_hides_no_illegal_setting(refused, tables, hidden):
    problems = refused(**tables)
    assert len(problems) == 2, [str(p) for p in problems]
    assert hidden in [p.code for p in problems]


@pytest.mark.parametrize(
    "tables",
    [
        {"model": {"preset": None}},
        {"model": {"num_heads": "four"}},
        {"model": {"hidden_size": "wide", "num_heads": 6}},
        {"train": {"global_batch": "x"}, "layout": {"micro_batch": 999}},
        {"data": {"seq_len": "x"}},
    ],
)
def test_no_problem_is_reported_about_a_value_that_the_user_never_wrote(refused, tables):
    """Stand-ins let the other rules be checked; they must not break rules themselves."""
    problems = refused(**tables)
    assert {p.code for p in problems} <= {"job-missing-key", "job-wrong-type"}, [str(p) for p in problems]


@pytest.mark.parametrize("more", [{}, {"precision": "fp8"}], ids=["one problem", "two problems"])
def test_a_spec_error_pickles_with_its_job_and_problems(tree, more):
    """Run-time errors travel between processes; this one must not lose a problem on the way."""
    with pytest.raises(SpecError) as caught:
        build_job(tree(layout={"tp": 3}, train=more))
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.problems == caught.value.problems
    assert again.job == caught.value.job


def test_layers_that_a_plan_dealt_do_not_outlive_its_stages(tmp_path):
    """Another pipeline on the command line deals them again; what a job file says stays, and is refused."""
    job = read_tree("examples/quickstart.toml") | {"layout": {"pp": 2, "stage_layers": [3, 5]}}
    plan, written = tmp_path / "plan.toml", tmp_path / "job.toml"
    plan.write_text(tomli_w.dumps({PLAN_KEY: 1, "predicted": {"layers_assigned": True}, "job": job}))
    written.write_text(tomli_w.dumps(job))
    assert load_job(str(plan)).layout.stage_layers is None
    assert load_job(str(plan), ["layout.pp=4"]).layout.stage_layers is None
    with pytest.raises(SpecError, match="layout-stage-layers"):
        load_job(str(written), ["layout.pp=4"])
