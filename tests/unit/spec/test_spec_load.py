"""Loading a job from TOML and overrides: precedence, defaults, and one problem with a fix per mistake."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import tomli_w

from job_texts import TINY_ON_H100
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


@pytest.fixture
def job_file(tmp_path):
    """The valid job, written to mine.toml."""
    path = tmp_path / "mine.toml"
    path.write_text(TINY_ON_H100)
    return str(path)


def codes(caught) -> list[str]:
    """The error codes of a caught error."""
    return [problem.code for problem in caught.value.problems]


# Valid jobs


def test_job_name_defaults_to_the_file_name(job_file):
    assert load_job(job_file).name == "mine"
    assert load_job(job_file, ["name=other"]).name == "other"


def test_overrides_replace_file_keys_and_file_keys_replace_the_preset(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(TINY_ON_H100.replace('preset = "tiny"', 'preset = "tiny"\nnum_layers = 3\nffn_size = 96'))
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
def test_override_is_parsed_as_toml_or_else_a_string(job_file, override, path, value):
    found = load_job(job_file, [override])
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_preset_name_is_a_job_with_default_data_and_batch():
    job = load_job("llama3-8b", on="2x8xh100-sxm")
    assert (job.name, job.model.preset, job.cluster.world_size) == ("llama3-8b", "llama3-8b", 16)
    assert (job.data.seq_len, job.train.global_batch, job.train.precision) == (4096, 512, "bf16")


def test_overrides_do_not_change_the_loaded_preset():
    load_job("tiny", ["train.global_batch=2"], on="h100-sxm")
    assert load_job("tiny", on="h100-sxm").train.global_batch == 512


def test_build_job_does_not_change_its_tables(tree):
    tables = tree(layout={"dp_replicate": 2})
    before = repr(tables)
    build_job(tables)
    assert repr(tables) == before


def test_job_tree_round_trips(tree):
    job = build_job(tree(layout={"dp_replicate": 2, "micro_batch": 2}, train={"warmup": 2, "clip": 0.0}))
    assert build_job(job_tree(job)) == job


# Defaults of the layout


@pytest.mark.parametrize("degree", ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"])
def test_a_degree_makes_the_layout_given(tree, degree):
    job = build_job(tree(layout={degree: 1}))
    assert job.layout.mode == "given"
    assert job.layout.world_size == 1, "other degrees default to 1"


def test_layout_without_degrees_is_auto(tree):
    assert build_job(tree()).layout.mode == "auto"
    assert build_job(tree(layout={"micro_batch": 2})).layout.mode == "auto"


def test_mode_auto_with_a_degree_is_refused(refused):
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
def test_on_option_gives_nodes_devices_and_preset(on, nodes, devices, preset):
    cluster = load_job("tiny", on=on).cluster
    assert (cluster.nodes, cluster.devices_per_node, cluster.preset) == (nodes, devices, preset)


@pytest.mark.parametrize(
    "on", ["", "8x", "x8xh100-sxm", "0xh100-sxm", "8x0xh100-sxm", "8*8*h100", "2x2x2xh100"]
)
def test_malformed_on_option_is_refused_with_a_fix(on):
    with pytest.raises(UserError) as caught:
        load_job("tiny", on=on)
    problem = caught.value.problems[0]
    assert problem.code in ("cluster-bad-on", "cluster-unknown-preset")
    assert problem.fix


def test_on_option_replaces_the_cluster_of_the_job(job_file):
    job = load_job(job_file, on="2x4xa100-80g-sxm")
    assert (job.cluster.preset, job.cluster.world_size) == ("a100-80g-sxm", 8)


def test_cluster_override_applies_on_top_of_on_option():
    """An override wins over --on, so that no setting is ignored."""
    job = load_job("tiny", ["cluster.memory_bytes=1000000000"], on="h100-sxm")
    assert job.cluster.memory_bytes == 1_000_000_000


def test_local_cluster_without_gpus_has_the_cpu_cores(tree, monkeypatch):
    monkeypatch.setattr(load_module, "find_gpus", list)
    monkeypatch.setattr(load_module, "count_cores", lambda: 6)
    monkeypatch.setattr(load_module, "machine_memory_bytes", lambda: 12_000_000_000)
    cluster = build_job(tree(cluster={"preset": "local"})).cluster
    assert (cluster.device, cluster.devices_per_node, cluster.memory_bytes) == ("cpu", 6, 2_000_000_000)


def test_local_cluster_has_the_gpus_of_the_machine(tree, monkeypatch):
    monkeypatch.setattr(load_module, "find_gpus", lambda: [("NVIDIA H200", 150_000_000_000)] * 2)
    cluster = build_job(tree(cluster={"preset": "local"})).cluster
    assert (cluster.device, cluster.devices_per_node, cluster.memory_bytes) == ("cuda", 2, 150_000_000_000)
    assert cluster.memory_bytes_per_s == pytest.approx(4.8e12), "figures of the known device"


def test_local_cluster_with_device_cpu_ignores_gpus(tree, monkeypatch):
    monkeypatch.setattr(load_module, "find_gpus", lambda: [("NVIDIA H200", 150_000_000_000)])
    assert build_job(tree(cluster={"preset": "local", "device": "cpu"})).cluster.device == "cpu"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_hidden_by_cuda_visible_devices_are_not_found(monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert cluster_module.find_gpus() == []


def test_job_keys_replace_keys_of_the_cluster_file(tree, tmp_path):
    path = tmp_path / "cluster.toml"
    fields = dataclasses.asdict(build_job(tree()).cluster)
    path.write_text("\n".join(f"{k} = {v!r}" for k, v in fields.items() if v is not None and k != "preset"))
    tables = tree(cluster=None)
    tables["cluster"] = {"file": str(path), "nodes": 3}
    cluster = build_job(tables).cluster
    assert (cluster.nodes, cluster.memory_bytes, cluster.preset) == (3, 80_000_000_000, None)


# Invalid input: code, path and fix


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
        ({"train": {"precision": "float16"}}, "job-not-a-choice", "train.precision", "Did you mean 'fp16'?"),
        ({"layout": {"schedule": "1F1B"}}, "job-not-a-choice", "layout.schedule", "Did you mean '1f1b'?"),
        ({"layout": {"recompute": True}}, "job-not-a-choice", "layout.recompute", "Did you mean 'full'?"),
        ({"layout": {"mode": "atuo"}}, "job-not-a-choice", "layout.mode", "is not one of 'auto' or 'given'"),
        ({"data": {"mask": 3}}, "job-not-a-choice", "data.mask", "'causal' or 'document'"),
        ({"train": None}, "job-missing-key", "train", "Add the table [train]"),
        ({"data": None}, "job-missing-key", "data", "Add the table [data]"),
        ({"model": None}, "job-missing-key", "model", "Add the table [model]"),
        ({"cluster": {"preset": "h100"}}, "cluster-unknown-preset", "cluster.preset", "'h100-sxm'"),
        ({"cluster": {"file": "/no/file"}}, "cluster-file-unreadable", "cluster.file", "No such file"),
    ],
)
def test_each_mistake_is_one_problem_with_path_code_and_fix(refused, tables, code, path, says):
    (problem,) = refused(**tables)
    assert (problem.code, problem.path) == (code, path)
    assert says in str(problem)
    assert str(problem).endswith(f"[{code}]")


@pytest.mark.parametrize(
    ("section", "key"), [("train", "steps"), ("train", "global_batch"), ("data", "path")]
)
def test_missing_key_names_its_table(tree, section, key):
    tables = tree()
    del tables[section][key]
    with pytest.raises(UserError) as caught:
        build_job(tables)
    (problem,) = caught.value.problems
    assert (problem.code, problem.path) == ("job-missing-key", f"{section}.{key}")
    assert f"[{section}]" in problem.fix


def test_model_without_keys_suggests_a_preset(refused):
    problems = refused(model={"preset": None})
    missing = [p for p in problems if p.code == "job-missing-key"]
    assert {p.path for p in missing} >= {"model.num_layers", "model.hidden_size", "model.vocab_size"}
    assert all("model.preset" in p.fix for p in missing)


def test_unknown_model_preset_suggests_the_nearest(refused):
    problem = refused(model={"preset": "llama-8b"})[0]
    assert (problem.code, problem.path) == ("model-unknown-preset", "model.preset")
    assert "'llama3-8b'" in problem.fix


def test_unknown_model_preset_adds_no_missing_key_problems(refused):
    """The preset would have given these keys."""
    assert [p.code for p in refused(model={"preset": "tiney"})] == ["model-unknown-preset"]


@pytest.mark.parametrize("value", [True, "3e-4"])
def test_booleans_and_strings_are_not_numbers(refused, value):
    """TOML has types: ``lr = true`` is an error, not 1.0."""
    (problem,) = refused(train={"lr": value})
    assert (problem.code, problem.path) == ("job-wrong-type", "train.lr")


@pytest.mark.parametrize(("section", "key"), [("train", "lr"), ("layout", "bucket_mb")])
def test_infinity_is_refused(refused, section, key):
    (problem,) = refused(**{section: {key: float("inf")}})
    assert problem.path == f"{section}.{key}"
    assert problem.code in ("job-out-of-range", "job-wrong-type")


@pytest.mark.parametrize(
    "text", ["steps", "=4", "train.=4", ".steps=4", "train..steps=4", "a b=4", "--steps=4 "]
)
def test_malformed_override_is_refused_with_a_fix(job_file, text):
    with pytest.raises(UserError) as caught:
        load_job(job_file, [text])
    problem = caught.value.problems[0]
    assert problem.code in ("job-bad-override", "job-unknown-key")
    assert problem.fix


def test_override_below_a_scalar_key_is_refused():
    problem = apply_override({"train": {"steps": 4}}, "train.steps.now=4")
    assert problem.code == "job-bad-override"
    assert "steps is not a table" in str(problem)


def test_override_sets_a_key_of_one_table_of_a_list(tmp_path):
    path = tmp_path / "job.toml"
    sources = '[[data.sources]]\nname = "a"\npath = "a.txt"\n[[data.sources]]\nname = "b"\npath = "b.txt"\n'
    path.write_text(TINY_ON_H100 + sources)
    job = load_job(str(path), ["data.path=", "data.sources.1.weight=0.3", "data.sources.0.name=7"])
    assert [(one.name, one.weight) for one in job.data.sources] == [("7", 1.0), ("b", 0.3)]


@pytest.mark.parametrize("key", ["data.sources.2.weight", "data.sources.weight", "data.sources.x.weight"])
def test_override_of_a_table_that_a_list_does_not_have_is_refused(key):
    problem = apply_override({"data": {"sources": [{}, {}]}}, f"{key}=1")
    assert problem.code == "job-bad-override"
    assert "data.sources is a list of 2 tables" in str(problem)
    assert "data.sources.0." in problem.fix
    assert "[[data.sources]]" in apply_override({"data": {}}, "data.sources.0.weight=1").fix


@pytest.mark.parametrize(("name", "first"), [("8x8xH100", "h100-sxm"), ("a100", "a100-40g-sxm")])
def test_a_cluster_without_its_form_suggests_sxm_first(name, first):
    with pytest.raises(UserError) as caught:
        load_job("tiny", on=name, to_run=False)
    assert caught.value.problems[0].fix.startswith(f"Did you mean {first!r} or ")


def test_override_creates_missing_tables():
    tables: dict = {}
    assert apply_override(tables, "layout.tp=2") is None
    assert tables == {"layout": {"tp": 2}}


def test_unknown_key_in_an_override_is_refused(job_file):
    with pytest.raises(UserError) as caught:
        load_job(job_file, ["train.stepps=4"])
    assert codes(caught) == ["job-unknown-key"]


@pytest.mark.parametrize("source", ["gone.toml", "folder/gone", "gone.yaml"])
def test_missing_file_does_not_list_presets(source):
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
def test_unknown_job_name_lists_similar_presets(source, named):
    """Presets with this prefix or with similar names are listed, otherwise all."""
    with pytest.raises(UserError) as caught:
        load_job(source)
    assert codes(caught) == ["job-missing-file"]
    assert all(name in str(caught.value) for name in named)


@pytest.mark.parametrize(
    ("name", "text"),
    [("job.yaml", "train:\n  lr: 3e-4\n"), ("job.yml", "# valid TOML too\n"), ("job.json", "{}")],
)
def test_yaml_and_json_files_are_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as caught:
        load_job(str(tmp_path / name))
    assert codes(caught) == ["job-not-toml"]


def test_a_folder_is_refused_with_the_files_in_it(tmp_path):
    (tmp_path / "plan.toml").write_text("")
    with pytest.raises(UserError) as caught:
        load_job(str(tmp_path))
    assert codes(caught) == ["job-unreadable"]
    assert str(tmp_path / "plan.toml") in str(caught.value)


def test_on_option_ignores_case(job_file):
    assert load_job(job_file, on="2x8xH100-SXM").cluster == load_job(job_file, on="2x8xh100-sxm").cluster


def test_folder_as_a_job_is_refused(tmp_path):
    with pytest.raises(UserError) as caught:
        load_job(str(tmp_path))
    assert codes(caught) == ["job-unreadable"]


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"[train\n", "job-bad-toml"), (b"a = 1\na = 2\n", "job-bad-toml"), (b"\xff", "job-unreadable")],
)
def test_invalid_toml_is_refused(tmp_path, content, code):
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_job(str(path))
    assert codes(caught) == [code]
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["meshwright_plan = 1\n", "meshwright_plan = 1\njob = 5\n"])
def test_plan_without_a_job_is_a_user_error(tmp_path, content):
    path = tmp_path / "plan.toml"
    path.write_text(content)
    with pytest.raises(UserError):
        read_tree(str(path))


# Several problems in one error


def test_all_mistakes_are_reported_in_one_error(job_file):
    """The error covers types, ranges, choices, unknown keys, overrides, presets, --on and legality."""
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
        (
            {"data": {"seq_len": 0}, "train": {"precision": "fp8", "block_backend": "eager"}},
            "train-fp8-not-built",
        ),
        ({"train": {"lr": "x", "precision": "fp8", "block_backend": "eager"}}, "train-fp8-not-built"),
        # the path of the first problem is a substring of the second one's message
        ({"data": None, "layout": {"tp": 3}}, "layout-tp-heads"),
        ({"train": {"lr": "x", "lr_scaling": "linear"}}, "train-lr-base-batch"),
        ({"name": 5, "consistency": {"mode": "gossip"}}, "consistency-mode-not-built"),
        ({"cluster": {"devices_per_node": "two"}, "layout": {"tp": 3}}, "layout-tp-heads"),
        ({"cluster": 5, "layout": {"tp": 3}}, "layout-tp-heads"),
        ({"cluster": {"preset": "h100"}, "layout": {"tp": 3}}, "layout-tp-heads"),
    ],
)
def test_type_error_hides_no_illegal_setting(refused, tables, hidden):
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
def test_placeholders_for_invalid_keys_add_no_problems(refused, tables):
    """Placeholders stand in for missing and invalid values while the other rules are checked.

    They break no rule.
    """
    problems = refused(**tables)
    assert {p.code for p in problems} <= {"job-missing-key", "job-wrong-type"}, [str(p) for p in problems]


@pytest.mark.parametrize("more", [{}, {"precision": "fp8"}], ids=["one problem", "two problems"])
def test_spec_error_pickles_with_its_job_and_problems(tree, more):
    """Errors are sent between processes. Unpickling keeps the job and every problem."""
    with pytest.raises(SpecError) as caught:
        build_job(tree(layout={"tp": 3}, train=more))
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.problems == caught.value.problems
    assert again.job == caught.value.job


def test_stage_layers_chosen_by_the_planner_are_dropped_on_load(tmp_path):
    """The planner's stage_layers are chosen again for another pp.

    Those of a job file are kept, and refused if they do not fit.
    """
    job = read_tree("examples/quickstart.toml") | {"layout": {"pp": 2, "stage_layers": [3, 5]}}
    plan, written = tmp_path / "plan.toml", tmp_path / "job.toml"
    plan.write_text(tomli_w.dumps({PLAN_KEY: 1, "predicted": {"layers_assigned": True}, "job": job}))
    written.write_text(tomli_w.dumps(job))
    assert load_job(str(plan)).layout.stage_layers is None
    assert load_job(str(plan), ["layout.pp=4"]).layout.stage_layers is None
    with pytest.raises(SpecError) as caught:
        load_job(str(written), ["layout.pp=4"])
    assert codes(caught) == ["layout-stage-layers"]
