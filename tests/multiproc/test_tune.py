"""``meshwright tune`` on real ranks: it reports failed layouts, and its cluster file improves predictions."""

from __future__ import annotations

import json
import math
from pathlib import Path

from meshwright.cli.output import Output
from meshwright.cli.tune import tune_job
from meshwright.plan.predict import predict
from meshwright.spec.load import load_job


def test_tune_ranks_layouts_and_its_cluster_file_improves_predictions(job_file, tmp_path, monkeypatch, capfd):
    """Replicated layouts run on two ranks and pass the audit. Sharded ones raise and become failed rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshwright.runs.measure.ENTRY", "injected_faults:fail_unless_replicated")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    status = tune_job(Output(as_json=True), str(job_file), [], top=3, steps=6, out=Path("cluster.toml"))
    out, err = capfd.readouterr()
    assert status == 0, err
    result = json.loads(out)
    ran = [row for row in result["rows"] if row["step_s"] is not None]
    failed = result["rows"][len(ran) :]
    assert ran, "one of the best three layouts is replicated"
    assert failed, "one of the best three layouts is sharded"
    assert [row["step_s"] for row in ran] == sorted(row["step_s"] for row in ran)
    for row in ran:
        assert row["audit_ok"], err
        assert row["world_size"] == 2
        assert abs(row["peak_memory_bytes"] / row["predicted_peak_memory_bytes"] - 1) < 0.05
    for row in failed:
        assert "dp_shard=2" in row["layout"]
        assert (row["step_s"], row["audit_ok"]) == (None, None)
        assert "raised by the test" in row["reason"]
    assert result["error_after"] < result["error_before"]

    def error(*overrides: str) -> float:
        """Mean absolute log error of the predicted step times."""
        errors = []
        for row in ran:
            job = load_job(str(job_file), [*overrides, *row["layout"].split()])
            errors.append(abs(math.log(predict(job, job.layout).time.total_s / row["step_s"])))
        return sum(errors) / len(errors)

    assert error("cluster.file=cluster.toml") < error()
