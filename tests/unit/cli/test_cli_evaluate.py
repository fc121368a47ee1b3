"""``meshwright eval``: one JSON object with a row for each held-out set; the page's commands; bad input."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "checkpoint-v1"
TEXT = "the quick brown fox jumps over the lazy dog\n"


def test_json_has_one_row_for_each_set(cli, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 40)
    ran = cli("eval", GOLDEN, "--data", text, "--data", f"again={text}", "--samples", 2, "--json")
    assert ran.status == 0, ran.err
    first, second = ran.json["sets"]
    assert (first["name"], second["name"]) == ("text", "again")
    assert first.keys() == {"name", "path", "loss", "perplexity", "accuracy", "targets", "samples"}
    assert {**first, "name": "", "path": ""} == {**second, "name": "", "path": ""}
    low = cli("eval", GOLDEN, "--data", text, "--samples", 2, "--precision", "bf16", "--json").json["sets"][0]
    assert low["loss"] != first["loss"]
    assert low["loss"] == pytest.approx(first["loss"], rel=1e-2)


def test_every_token_of_a_set_but_the_first_is_a_target(cli, tmp_path, monkeypatch):
    """Also of a set that is shorter than one sample; bytes and the end of the document."""
    monkeypatch.chdir(tmp_path)
    for content in ("short", TEXT * 40):
        (tmp_path / "text.txt").write_text(content)
        ran = cli("eval", GOLDEN, "--data", "text.txt", "--json")
        assert ran.json["sets"][0]["targets"] == len(content), ran.err
        assert "epochs" not in ran.err


def test_the_commands_of_the_page_run(cli, tmp_path, monkeypatch):
    """With a run of a chat model, a Hugging Face folder, and files of these names."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN, tmp_path / "runs/job-1/checkpoints/step-00000002")
    assert cli("checkpoint", "export", GOLDEN, "models/my-llama").status == 0
    (tmp_path / "held-out.txt").write_text(TEXT)
    (tmp_path / "general.txt").write_text(TEXT)
    (tmp_path / "my-domain.jsonl").write_text(json.dumps({"prompt": "a?", "answer": "b"}))
    page = (ROOT / "docs" / "evaluate.md").read_text()
    commands = re.findall(r"^meshwright (eval .*)$", page, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        ran = cli(*shlex.split(command))
        assert ran.status == 0, f"{command}: {ran.err}"


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("eval-no-data", ()),
        ("data-path-missing", ("--data", "nowhere.txt")),
        ("data-path-missing", ("--data", "nowhere/")),
        ("data-corpus-empty", ("--data", "empty.txt")),
        ("data-corpus-empty", ("--data", "folder")),
        ("data-not-for-text", ("--data", "images")),
        ("data-file-kind", ("--data", "picture.png")),
        ("data-needs-template", ("--data", "chat.jsonl")),
        ("data-field-missing", ("--data", "other.csv")),
        ("eval-override", ("--data", "text.txt", "data.tokenizer=byte")),
        ("eval-override", ("--data", "text.txt", "data.eval_fraction=0.5")),
        ("eval-override", ("--data", "text.txt", "train.lr=1")),
        ("eval-override", ("--data", "text.txt", "data.template=chatml")),
        ("eval-override", ("--data", "text.txt", "data.prompt_masking=true")),
        ("api-argument", ("--data", "text.txt", "--precision", "fp8")),
    ],
)
def test_bad_input_exits_2(cli, tmp_path, monkeypatch, code, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "images.npy").write_bytes(b"")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": "a?", "answer": "b"}))
    (tmp_path / "other.csv").write_text("id,body\n1,x\n")
    ran = cli("eval", GOLDEN, *arguments)
    assert (ran.status, ran.codes) == (2, [code])
