"""``meshwright probe`` measures with all cores busy, and plans of several ranks use that."""

from __future__ import annotations

import tomllib

import pytest
import tomli_w

import meshwright as mw
from meshwright.plan.probe_runs import PROBE_SUITES
from meshwright.spec.cluster import count_cores
from quick_probe import QUICK_PROBE


@pytest.mark.skipif(count_cores() < 2, reason="needs two cores")
def test_plans_of_two_ranks_use_what_was_measured_on_all_cores(job_file, tmp_path, monkeypatch):
    monkeypatch.setitem(PROBE_SUITES, "cpu", QUICK_PROBE)
    file = tmp_path / "mine.toml"
    mw.probe(str(file), cpu=True)
    table = tomllib.loads(file.read_text())
    probed = table["probed"]
    busy = probed["all_cores"]
    shapes = [(gemm["rows"], gemm["columns"], gemm["depth"]) for gemm in probed["gemms"]]
    assert [(gemm["rows"], gemm["columns"], gemm["depth"]) for gemm in busy["gemms"]] == shapes
    assert all(busy[key] > 0 for key in ("copy_bytes_per_s", "optimizer_bytes_per_s", "launch_s"))
    busy["step_s"] = 100.0  # so that the source of a prediction can be told
    file.write_text(tomli_w.dumps(table))
    steps = [
        mw.load_job(str(job_file), f"cluster.file={file}", f"layout.dp_replicate={ranks}").plan().step_s
        for ranks in (1, 2)
    ]
    assert steps[0] < 100 < steps[1]
