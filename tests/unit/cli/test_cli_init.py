"""``meshwright init``: the file loads and plans as it is; bad arguments are refused and leave no file."""

from __future__ import annotations

import glob
import json
import os
import pty
import subprocess
import sys

import pytest

from meshwright.spec.load import load_job
from meshwright.spec.presets import preset_names

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def test_init_without_arguments_writes_a_job_that_plans(cli):
    assert cli("init", "--json").json["path"] == "job.toml"
    assert cli("plan", "job.toml", "--json").json["layouts"]


@pytest.mark.parametrize("model", preset_names("models"))
def test_init_writes_a_job_that_loads_for_every_preset(cli, model):
    assert cli("init", "--model", model, "--gpus", "2x8xH100-SXM").status == 0
    cluster = load_job("job.toml", to_run=False).cluster
    assert (cluster.nodes, cluster.devices_per_node, cluster.preset) == (2, 8, "h100-sxm")


def test_init_with_a_hugging_face_folder_writes_paths_relative_to_the_file(cli, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "jobs").mkdir()
    assert cli("init", "--model", "hf", "--data", "text.txt", "--gpus", 3, "-o", "jobs/a.toml").status == 0
    text = (tmp_path / "jobs" / "a.toml").read_text()
    assert '"../hf"' in text
    assert '"../text.txt"' in text
    job = load_job("jobs/a.toml", to_run=False)
    assert (job.cluster.devices_per_node, job.data.seq_len) == (3, 512)


@pytest.mark.parametrize("own", [True, False])
def test_init_chooses_a_chat_template_for_instruction_data(cli, tmp_path, own):
    """The model's own, or one without special tokens; a folder of text gets none."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(LLAMA))
    if own:
        (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "data.jsonl").write_text('{"instruction": "Add 1 and 2.", "input": "", "output": "3"}\n')
    assert cli("init", "--model", "hf", "--data", "data.jsonl").status == 0
    data = load_job("job.toml", to_run=False).data
    assert (data.template, data.mask, data.prompt_masking) == (
        "tokenizer" if own else "alpaca",
        "document",
        True,
    )
    (tmp_path / "text.jsonl").write_text('{"text": "some text"}\n')
    assert cli("init", "--model", "hf", "--data", "text.jsonl", "--force").status == 0
    assert load_job("job.toml", to_run=False).data.template is None


FIELDS = {
    "rows.csv": ("id,Body\n1,some text\n2,more text\n", "Body"),
    "rows.tsv": ("id\treview\tstars\n1\tIt was a long and windy road to it.\t5\n", "review"),
    "rows.jsonl": ('{"title": "a", "content": "b", "n": 1}\n', "content"),
    "rows.json": ('[{"lang": "en", "note": "a text of some length, longer than its language"}]', "note"),
    "usual.jsonl": ('{"title": "a", "text": "b"}\n', None),
    "plain.txt": ("some text", None),
}


@pytest.mark.parametrize("name", FIELDS)
def test_init_finds_the_field_with_the_text(cli, tmp_path, name):
    content, field = FIELDS[name]
    (tmp_path / name).write_text(content)
    assert cli("init", "--model", "tiny", "--data", name).status == 0
    assert load_job("job.toml").data.text_field == field


def test_init_finds_the_text_column_of_a_parquet_file(cli, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"id": [1, 2], "article": ["some text", "more text"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert cli("init", "--data", "rows.parquet").status == 0
    assert load_job("job.toml").data.text_field == "article"


def test_init_reports_data_that_training_would_refuse(cli, tmp_path):
    (tmp_path / "rows.csv").write_text("id;text\n1;a, b\n")
    ran = cli("init", "--data", "rows.csv")
    assert (ran.status, ran.codes) == (2, ["data-bad-csv"])
    assert "semicolons" in ran.err
    assert not (tmp_path / "job.toml").exists()


def test_init_lists_the_fields_if_none_is_obviously_the_text(cli, tmp_path):
    (tmp_path / "rows.csv").write_text("left,right\nsome text,more text\n")
    ran = cli("init", "--data", "rows.csv")
    assert (ran.status, ran.codes) == (2, ["init-text-field"])
    assert "left, right" in ran.err
    assert cli("init", "--data", "rows.csv", "--text-field", "right").status == 0
    assert load_job("job.toml").data.text_field == "right"


def test_init_says_what_a_number_of_gpus_means_without_a_gpu(cli, monkeypatch):
    """Eight processes on two cores run, but are hardly what was meant."""
    for module in ("spec.load", "spec.cluster"):
        monkeypatch.setattr(f"meshwright.{module}.find_gpus", list)
        monkeypatch.setattr(f"meshwright.{module}.count_cores", lambda: 2)
    ran = cli("init", "--gpus", "8")
    assert "8 CPU processes" in ran.out
    said = " ".join(ran.err.split())
    assert "this machine has no GPU: 8 processes share 2 CPU cores" in said
    assert "--gpus 8xh100-sxm" in said
    assert "warning" not in cli("init", "--gpus", "2", "--force").err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--model", "llama3-8"], "init-model"),
        (["--gpus", "0"], "cluster-bad-on"),
        (["--gpus", "many"], "cluster-unknown-preset"),
        (["--data", "nowhere"], "init-data"),
        (["--data", "nowhere-*.txt"], "init-data"),
        (["-o", "job.yaml"], "job-not-toml"),
        (["-o", "job.JSON"], "job-not-toml"),
        (["-o", "nowhere/job.toml"], "init-not-writable"),
    ],
)
def test_init_refuses_bad_arguments_and_leaves_no_file(cli, tmp_path, arguments, code):
    ran = cli("init", *arguments)
    assert (ran.status, ran.codes) == (2, [code])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", ["part-?.txt", "part-[0-9].txt", "**/part-*.txt", "~/part-0.txt", "~/*.txt"])
def test_init_accepts_globs_and_the_home_folder(cli, tmp_path, monkeypatch, data):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "part-0.txt").write_text("some text")
    (tmp_path / "jobs").mkdir()
    assert cli("init", "--data", data, "-o", "jobs/a.toml").status == 0
    path = load_job("jobs/a.toml", to_run=False).data.path
    assert glob.glob(path, recursive=True) == [str(tmp_path / "part-0.txt")]  # noqa: PTH207


def test_init_overwrites_a_file_with_force_only(cli, tmp_path):
    (tmp_path / "job.toml").write_text("mine")
    assert cli("init").codes == ["init-exists"]
    assert (tmp_path / "job.toml").read_text() == "mine"
    assert cli("init", "--force").status == 0
    assert "demo-2m" in (tmp_path / "job.toml").read_text()


def test_init_asks_on_a_terminal_for_what_is_not_given(tmp_path):
    ours, theirs = pty.openpty()
    os.write(ours, b"tiny\n\nlocal\n")
    command = [sys.executable, "-m", "meshwright", "init"]
    done = subprocess.run(
        command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, check=False, timeout=120
    )
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 0
    assert 'preset = "tiny"' in (tmp_path / "job.toml").read_text()
