"""``meshwright probe`` on a GPU: the real steps that it takes are those that it then predicts."""

from __future__ import annotations

import json

import pytest

pytestmark = [
    pytest.mark.gpu,
    # Torch's own: its compiler looks at .grad of what is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning", "ignore:.*:DeprecationWarning"),
]


def test_real_steps_are_predicted(tmp_path, monkeypatch, capfd):
    from meshwright.cli.output import Output
    from meshwright.cli.probe import probe_machine

    monkeypatch.chdir(tmp_path)
    assert probe_machine(Output(as_json=True), False, tmp_path / "cluster.toml") == 0
    out, progress = capfd.readouterr()
    told = json.loads(out)
    assert told["cluster"]["probed"]["compiled"]
    assert [row["block_backend"] for row in told["checked"]] == ["triton", "triton", "compile"], progress
    for row in told["checked"]:
        assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=0.05)
        assert row["predicted_peak_bytes"] == pytest.approx(row["measured_peak_bytes"], rel=0.03)
