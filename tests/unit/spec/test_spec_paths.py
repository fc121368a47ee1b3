"""Paths of a job: relative to the job file, in overrides to the working folder, absolute once loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.errors import UserError
from meshwright.plan.build import build_plan
from meshwright.plan.contract import read_plan, write_plan
from meshwright.spec.job import Job
from meshwright.spec.load import build_job, load_job, read_tree
from meshwright.spec.paths import PATH_KEYS, resolve_paths

JOB = """
run_dir = "out/run"
[model]
preset = "tiny"
[data]
path = "text/*.txt"
cache = "cache"
tokenizer = "./tok"
template = "chat.jinja"
seq_len = 64
[train]
steps = 1
global_batch = 2
[checkpoint]
dir = "kept"
[cluster]
file = "cluster.toml"
"""


@pytest.fixture
def job_file(tmp_path, monkeypatch):
    """A job file in a folder that is not the working folder."""
    folder, elsewhere = tmp_path / "jobs", tmp_path / "work"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "job.toml").write_text(JOB)
    (folder / "cluster.toml").write_text('preset = "local"\n')
    monkeypatch.chdir(elsewhere)
    return folder / "job.toml"


def paths_of(job: Job) -> dict[str, str | None]:
    """Every path of a job, by key."""
    return {
        "run_dir": job.run_dir,
        "path": job.data.path,
        "cache": job.data.cache,
        "tokenizer": job.data.tokenizer,
        "template": job.data.template,
        "dir": job.checkpoint.dir,
        "file": job.cluster.file,
    }


def test_paths_in_the_file_are_relative_to_its_folder(job_file):
    relative = Path("../jobs/job.toml")
    for source in (job_file, relative):
        found = paths_of(load_job(str(source)))
        names = ("out/run", "text/*.txt", "cache", "tok", "chat.jinja", "kept", "cluster.toml")
        assert found == dict(zip(found, (str(job_file.parent / name) for name in names), strict=True))


def test_paths_in_overrides_are_relative_to_the_working_folder(job_file, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    job = load_job(str(job_file), ["data.path=a.txt", "run_dir=/abs/run", "checkpoint.dir=~/kept"])
    assert job.data.path == str(tmp_path / "work/a.txt")
    assert (job.run_dir, job.checkpoint.dir) == ("/abs/run", str(tmp_path / "home/kept"))
    assert job.data.tokenizer == str(job_file.parent / "tok"), "keys of the file stay relative to it"


def test_builtin_names_are_not_resolved_as_paths(job_file):
    names = ["data.path=builtin:python-stdlib", "data.tokenizer=bpe:512", "data.template=chatml"]
    job = load_job(str(job_file), names)
    found = [f"data.{key}={getattr(job.data, key)}" for key in ("path", "tokenizer", "template")]
    assert found == names


def test_plan_in_another_folder_has_the_same_paths(job_file, tmp_path, monkeypatch):
    plan = build_plan(load_job(str(job_file)), [])[0]
    (tmp_path / "plans").mkdir()
    write_plan(plan, tmp_path / "plans/plan.toml")
    monkeypatch.chdir(tmp_path)
    assert read_plan(Path("plans/plan.toml")).job == plan.job
    again = load_job("plans/plan.toml", ["train.steps=2"])
    assert paths_of(again) == paths_of(plan.job)


def test_plan_omits_paths_that_the_job_omits(job_file, tmp_path):
    """Default folders depend on the working folder of each run, so a plan does not contain them."""
    job_file.write_text(JOB.replace('cache = "cache"', "").replace('run_dir = "out/run"', ""))
    plan = build_plan(load_job(str(job_file)), [])[0]
    write_plan(plan, tmp_path / "plan.toml")
    again = read_plan(tmp_path / "plan.toml").job
    assert (again.data.cache, again.run_dir) == (None, None)


def test_paths_of_sources_start_from_the_job_file(job_file):
    text = JOB.replace('path = "text/*.txt"', "").replace('template = "chat.jinja"', "")
    job_file.write_text(text + '[[data.sources]]\nname = "a"\npath = "a.txt"\ntemplate = "t.jinja"\n')
    (source,) = load_job(str(job_file)).data.sources
    assert (source.path, source.template) == (
        str(job_file.parent / "a.txt"),
        str(job_file.parent / "t.jinja"),
    )


@pytest.mark.parametrize(
    ("sources", "code"),
    [
        ([{"name": "a", "path": "x", "weight": -1.0}], "job-out-of-range"),
        ([{"name": "a", "path": "x", "weight": 0.0}], "data-weights-zero"),
        ([{"name": "a", "path": "x"}, {"name": "a", "path": "y"}], "data-source-names"),
        ([{"name": "a", "path": "x", "part": 1}], "job-unknown-key"),
        ([{"path": "x"}], "job-missing-key"),
        ([], "job-missing-key"),
    ],
)
def test_bad_sources_are_refused(sources, code):
    tree = read_tree("tiny") | {"data": {"seq_len": 64, "sources": sources}}
    with pytest.raises(UserError) as error:
        build_job(tree)
    assert [problem.code for problem in error.value.problems] == [code]


def test_a_path_and_sources_exclude_each_other():
    tree = read_tree("tiny")
    tree["data"]["sources"] = [{"name": "a", "path": "x"}]
    with pytest.raises(UserError) as error:
        build_job(tree)
    assert [problem.code for problem in error.value.problems] == ["data-path-or-sources"]


def test_non_string_paths_are_left_to_validation(tmp_path):
    tree = {"data": {"path": 5, "cache": ""}, "model": "tiny", "checkpoint": [{"dir": "a"}, 7]}
    resolve_paths(tree, tmp_path)
    assert tree["data"] == {"path": 5, "cache": ""}
    assert tree["checkpoint"] == [{"dir": str(tmp_path / "a")}, 7], "lists of tables are resolved too"


def test_path_keys_are_keys_of_the_job():
    from meshwright.spec.validation_errors import section_type

    for key in PATH_KEYS:
        *parents, leaf = key.split(".")
        assert leaf in section_type(parents).__dataclass_fields__
