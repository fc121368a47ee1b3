"""``meshwright eval``: one JSON object with a row for each held-out set."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint-v1"


def test_json_has_one_row_for_each_set(cli, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    ran = cli("eval", GOLDEN, "--data", text, "--data", f"again={text}", "--samples", 2, "--json")
    assert ran.status == 0, ran.err
    first, second = ran.json["sets"]
    assert (first["name"], second["name"]) == ("text", "again")
    assert first.keys() == {"name", "path", "loss", "perplexity", "accuracy", "targets", "samples"}
    assert {**first, "name": "", "path": ""} == {**second, "name": "", "path": ""}


def test_eval_without_a_set_exits_2(cli):
    assert cli("eval", GOLDEN).codes == ["eval-set-name"]
