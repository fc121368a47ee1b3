"""A mixture of sources: the same samples in every layout, and after a resume in another one."""

from __future__ import annotations

import json
import shutil

import pytest

from meshwright.api import load_job
from meshwright.core.errors import UserError

JOB = """
[model]
preset = "tiny"
[data]
seq_len = 32
tokenizer = "bpe:300"
[[data.sources]]
name = "lines"
path = "lines.jsonl"
weight = 2
[[data.sources]]
name = "table"
path = "table.csv"
text_field = "body"
[train]
steps = 6
global_batch = 5
[checkpoint]
every_steps = 2
keep_last = 9
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"line {n} " + "of words " * 9}) for n in range(200)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    rows = [f"row {n} " + "with other text " * 5 for n in range(90)]
    (tmp_path / "table.csv").write_text("\n".join(["body", *rows]))
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def test_resume_of_a_mixture_in_another_layout(folder):
    straight = load_job("job.toml", "layout.dp_replicate=1", "run_dir=one").train()
    manifest = json.loads((folder / "one/checkpoints/step-00000004/manifest.json").read_text())
    assert manifest["position"] == 20
    assert manifest["sources"] == {"lines": 2.0, "table": 1.0}
    assert sum(manifest["source_positions"].values()) == 20
    assert manifest["source_positions"]["table"] in (6, 7)
    shutil.copytree(folder / "one/checkpoints/step-00000004", folder / "saved/step-00000004")
    job = load_job("job.toml", "layout.dp_replicate=2", "run_dir=two", "checkpoint.dir=saved")
    assert job.train(resume=True).losses == pytest.approx(straight.losses[4:], rel=1e-5)


def test_resume_with_other_weights_is_refused(folder):
    load_job("job.toml", "layout.dp_replicate=1", "train.steps=2", "run_dir=one").train()
    (folder / "job.toml").write_text(JOB.replace("weight = 2", "weight = 3"))
    with pytest.raises(UserError) as error:
        load_job("job.toml", "layout.dp_replicate=1", "run_dir=one").train(resume=True)
    assert error.value.problems[0].code == "resume-mismatch"
