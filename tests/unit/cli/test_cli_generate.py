"""``meshwright generate``: errors before any process starts; chat templates."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoint-v1"


def test_generate_without_a_checkpoint_exits_2(cli, run_dir):
    ran = cli("generate", run_dir, "--json")
    assert (ran.status, ran.codes) == (2, ["checkpoint-missing"])
    assert ran.json["status"] == "error"


def test_chat_with_a_model_that_keeps_no_template_exits_2(cli):
    """A checkpoint of plain text; `--template` names one."""
    assert cli("generate", GOLDEN, "--chat", "--tokens", 1).codes == ["generate-no-template"]
    assert cli("generate", GOLDEN, "--chat", "--template", "plain", "--tokens", 1, "--json").status == 0
