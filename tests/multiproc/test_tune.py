"""``meshwright tune`` on real ranks: a layout that dies is a row, and the cluster file predicts closer."""

from __future__ import annotations

import json
import math
from pathlib import Path

from meshwright.cli.output import Output
from meshwright.cli.tune import tune_job
from meshwright.plan.predict import predict
from meshwright.spec.load import load_job


def test_layouts_are_tried_and_the_file_makes_the_plan_closer(job_file, tmp_path, monkeypatch, capfd):
    """Replicas run, on two ranks, and are audited; shards raise, and do not end the tuning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshwright.runs.measure.ENTRY", "planted:scaling_of_replicas_alone")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    status = tune_job(Output(as_json=True), str(job_file), [], top=3, steps=6, out=Path("cluster.toml"))
    out, err = capfd.readouterr()
    assert status == 0, err
    result = json.loads(out)
    ran = [row for row in result["rows"] if row["step_s"] is not None]
    failed = result["rows"][len(ran) :]
    assert ran, "replicas are among the best"
    assert failed, "shards are among the best"
    assert [row["step_s"] for row in ran] == sorted(row["step_s"] for row in ran)
    for row in ran:
        assert row["audit_ok"], err
        assert row["world_size"] == 2
        assert abs(row["peak_memory_bytes"] / row["predicted_peak_memory_bytes"] - 1) < 0.05
    for row in failed:
        assert "dp_shard=2" in row["layout"]
        assert (row["step_s"], row["audit_ok"]) == (None, None)
        assert "only replicas are for this test" in row["reason"]
    assert result["error_after"] < result["error_before"]

    def error(*overrides: str) -> float:
        """How far predictions are off that a fresh plan of the same job makes."""
        misses = []
        for row in ran:
            job = load_job(str(job_file), [*overrides, *row["layout"].split()])
            misses.append(abs(math.log(predict(job, job.layout).time.total_s / row["step_s"])))
        return sum(misses) / len(misses)

    assert error("cluster.file=cluster.toml") < error()
