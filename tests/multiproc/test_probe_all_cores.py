"""``meshwright probe`` measures with all cores busy, and plans of several ranks use that."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest
import tomli_w

import meshwright as mw
from meshwright.plan.probe_runs import PROBE_SUITES, AttentionShape, GemmShape
from meshwright.spec.cluster import count_cores

TINY = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 64, "vocab_size": 64}
QUICK = dataclasses.replace(
    PROBE_SUITES["cpu"],
    gemms=(GemmShape(32, 64, 32),),
    attention=(AttentionShape(1, 4, 2, 8, 32),),
    large_gemm_size=128,
    copy_elements=2**16,
    optimizer_elements=2**14,
    seconds=1e-4,
    steps=5,
    models=tuple(
        {"model": TINY | {"num_layers": layers}, "seq_len": 16, "batch": batch}
        for layers, batch in ((1, 2), (2, 2), (2, 4))
    ),
    collective_sizes=(),
)


@pytest.mark.skipif(count_cores() < 2, reason="needs two cores")
def test_plans_of_two_ranks_use_what_was_measured_on_all_cores(job_file, tmp_path, monkeypatch):
    monkeypatch.setitem(PROBE_SUITES, "cpu", QUICK)
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
