"""``meshwright probe`` on a GPU: it predicts the training steps that it measures."""

from __future__ import annotations

import json

import pytest

pytestmark = [
    pytest.mark.gpu,
    # Raised inside torch: its compiler reads .grad of non-leaf tensors.
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning", "ignore:.*:DeprecationWarning"),
]


def test_measured_steps_are_predicted_within_5_percent(tmp_path, monkeypatch, capfd):
    """The peak is predicted within 3%."""
    from meshwright.cli.output import Output
    from meshwright.cli.probe import probe_machine

    monkeypatch.chdir(tmp_path)
    assert probe_machine(Output(as_json=True), False, tmp_path / "cluster.toml") == 0
    out, progress = capfd.readouterr()
    result = json.loads(out)
    assert result["cluster"]["probed"]["compiled"]
    assert [row["block_backend"] for row in result["checked"]] == ["triton", "triton", "compile"], progress
    for row in result["checked"]:
        assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=0.05)
        assert row["predicted_peak_bytes"] == pytest.approx(row["measured_peak_bytes"], rel=0.03)
