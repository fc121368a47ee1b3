"""``meshwright generate``: errors before any process starts."""

from __future__ import annotations


def test_generate_without_a_checkpoint_exits_2(cli, run_dir):
    ran = cli("generate", run_dir, "--json")
    assert (ran.status, ran.codes) == (2, ["checkpoint-missing"])
    assert ran.json["status"] == "error"
