"""The public API: names, planning without torch, and objects instead of output."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from job_texts import TINY_ON_H100
from meshwright import results
from meshwright.api import load_job


@pytest.fixture
def job_path(tmp_path):
    """A small job file."""
    path = tmp_path / "job.toml"
    path.write_text(f'name = "small"\n{TINY_ON_H100}')
    return path


def test_a_job_shows_its_file_and_overrides(job_path):
    assert repr(load_job(job_path, "train.steps=2")) == f"Job({str(job_path)!r}, 'train.steps=2')"


def test_public_names_resolve_and_others_do_not():
    for name in mw.__all__:
        assert getattr(mw, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mw.no_such_name
    assert set(mw.__all__) <= set(dir(mw))


def test_a_plan_has_layout_memory_and_collectives(job_path, capfd):
    plan = mw.load_job(job_path, "layout.dp_replicate=2").plan()
    assert (plan.layout.dp_replicate, plan.world_size) == (2, 2)
    (memory,) = plan.memory.values()
    assert 0 < memory.state_bytes["parameters"] < memory.needed_bytes
    assert {row.axis for row in plan.collectives} == {"dp_replicate", "control"}
    assert plan.step_s > 0
    assert plan.reasons
    assert capfd.readouterr() == ("", ""), "the API prints nothing"


def test_written_plan_can_be_used_as_a_job(job_path, tmp_path):
    plan = mw.load_job(job_path, "layout.dp_replicate=2").plan()
    plan.write(tmp_path / "plan.toml")
    assert mw.load_job(tmp_path / "plan.toml").plan().layout == plan.layout


def test_invalid_job_raises_one_error_with_every_problem(job_path):
    with pytest.raises(mw.UserError) as caught:
        mw.load_job(job_path, "train.stepz=3", "train.steps=soon")
    assert {p.code for p in caught.value.problems} >= {"job-unknown-key", "job-wrong-type"}


def test_preset_can_be_planned_on_a_cluster():
    plan = mw.load_job("llama3-8b", on="8xh100-sxm").plan(top=4)
    assert plan.world_size == 8
    assert len(plan.search.best) >= 4
    assert plan.as_dict(2)["layouts"][0]["step_s"] == plan.step_s


def test_explain_gives_reasons_for_a_layout(job_path):
    found = load_job(job_path).explain("layout.tp=3")
    assert not found.legal
    assert found.problems[0].code == "layout-tp-heads"
    assert found.nearest
    legal = load_job(job_path).explain("layout.tp=2")
    assert legal.legal
    assert legal.plan is not None


def test_types_of_results_are_the_same_for_a_type_checker_and_at_run_time():
    """The module names each type twice: in an import and in its table."""
    tree = ast.parse(Path(results.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    typed = {
        alias.name: node.module for node in imports if "meshwright" in node.module for alias in node.names
    }
    assert typed == results.MODULES
    for name, module in results.MODULES.items():
        assert getattr(results, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="NoSuchType"):
        _ = results.NoSuchType


def test_a_step_range_contains_the_predicted_step(job_path):
    plan = mw.load_job(job_path, "layout.dp_replicate=2").plan()
    low, high = plan.step_range_s
    assert low < plan.step_s < high


def test_reporter_receives_lines_of_text(job_path):
    lines: list[str] = []
    reporter = mw.Reporter(log=lines.append)
    reporter.warning("look")
    assert lines == ["warning: look"]
    mw.load_job(job_path).plan(reporter=reporter)


def test_planning_does_not_import_torch_and_loading_a_job_no_planner(job_path):
    code = (
        "import json, sys, meshwright as mw\n"
        "job = mw.load_job(sys.argv[1])\n"
        "early = sorted(n for n in sys.modules if n.startswith('meshwright.plan'))\n"
        "job.plan()\n"
        "print(json.dumps([early, 'torch' in sys.modules, 'matplotlib' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(job_path)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [[], False, False]


def test_runs_of_an_empty_folder_and_of_a_folder_that_is_not_a_run(tmp_path):
    assert mw.list_runs(tmp_path) == []
    with pytest.raises(mw.UserError) as caught:
        mw.load_run(tmp_path)
    assert caught.value.problems[0].code == "run-missing"


def test_the_package_exports_the_whole_api():
    from meshwright import api

    assert set(api.__all__) <= set(mw.__all__)


@pytest.mark.parametrize(
    "call",
    [
        lambda job: job.plan(by="speed"),
        lambda job: job.plan(top=0),
        lambda job: job.plan(top="5"),
        lambda job: job.explain(["layout.tp=2"]),
        lambda job: job.size_cluster(-1.0, 10.0),
        lambda job: job.size_cluster(1e9, float("nan")),
        lambda job: mw.generate("nowhere", tokens=0),
        lambda job: mw.generate("nowhere", temperature=-1.0),
        lambda job: mw.load_job("job.toml", {"train.steps": 3}),
    ],
)
def test_invalid_argument_is_refused_by_name(job_path, call):
    with pytest.raises(mw.UserError) as caught:
        call(mw.load_job(job_path))
    assert caught.value.problems[0].code == "api-argument"


def test_results_have_a_short_repr(job_path):
    """They are shown in notebooks; some hold every predicted layout."""
    job = mw.load_job(job_path)
    big = mw.load_job("llama3-8b", on="8xh100-sxm")
    plan = job.plan()
    collective, schedule = mw.build_collective("all_reduce", "ring", 8), mw.build_schedule("zbv", 4, 8)
    results = [
        *(job, plan, plan.contract, plan.search, plan.simulate_step(), job.explain("layout.tp=3")),
        *(big.simulate_failures(3, runs=20), big.size_cluster(1e10, 3e6), collective, schedule),
        *(mw.prove_collective(collective), mw.simulate_schedule(schedule)),
        *(mw.validate(), mw.validate_collectives()),
    ]
    assert {type(found).__name__: len(repr(found)) for found in results if len(repr(found)) > 500} == {}


def test_one_text_path_or_number_stands_for_a_list_of_one(tmp_path, monkeypatch):
    (tmp_path / "words.txt").write_text("one two two")
    monkeypatch.chdir(tmp_path)
    assert mw.count_words("words.txt").total == 3
    one = mw.compare_collectives("all_gather", ranks=16, sizes=2**20, algorithms="ring")
    assert one == mw.compare_collectives("all_gather", ranks=[16], sizes=[2**20], algorithms=["ring"])
    with pytest.raises(mw.UserError) as caught:
        mw.validate("nowhere.csv")
    assert "nowhere.csv" in str(caught.value)
