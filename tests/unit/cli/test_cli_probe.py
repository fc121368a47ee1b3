"""``meshwright probe``: measures this machine and writes a cluster file that plans use."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest

from meshwright.plan.probe_runs import PROBE_SUITES, GemmShape
from meshwright.runs.probe import choose_block_s
from quick_probe import QUICK_PROBE


@pytest.fixture
def quick(monkeypatch):
    """Measure with small shapes in a short time, one core alone; fp8 too."""
    suite = dataclasses.replace(QUICK_PROBE, fp8_gemms=(GemmShape(32, 16, 16),), all_cores=False)
    monkeypatch.setitem(PROBE_SUITES, "cpu", suite)


@pytest.fixture
def cpu_job(tmp_path):
    """A job for one CPU rank of this machine."""
    path = tmp_path / "cpu.toml"
    path.write_text(
        '[model]\npreset = "tiny"\n[data]\npath = "text"\nseq_len = 32\n'
        "[train]\nsteps = 4\nglobal_batch = 2\n[layout]\ndp_replicate = 1\n"
    )
    return str(path)


def test_the_written_cluster_file_is_used_by_plans(cli, quick, cpu_job, tmp_path):
    done = cli("probe", "--cpu", "-o", "mine.toml", "--json")
    assert done.status == 0, done.err
    assert "linear layer of 32 x 64 x 32" in done.err, "progress is printed"
    told = done.json
    assert [(row["layers"], row["block_backend"]) for row in told["checked"]] == [
        (n, "eager") for n in (1, 2, 2)
    ]
    assert all(row["measured_s"] > 0 and row["predicted_s"] > 0 for row in told["checked"])
    written = tomllib.loads((tmp_path / "mine.toml").read_text())
    assert written["probed"]["gemms"] == told["cluster"]["probed"]["gemms"]
    shapes = [(entry["rows"], entry["columns"], entry["depth"]) for entry in written["probed"]["gemms"]]
    assert (32, 64, 32) in shapes
    assert {"fp32", "fp8"} == {entry["precision"] for entry in written["probed"]["gemms"]}
    assert "meshwright probe" in written["basis"]
    assert "meshwright probe" in cli("plan", cpu_job, "cluster.file=mine.toml", "-v").out
    assert cli("probe", "--cpu", "-o", "mine.toml").status == 0, "its own file is overwritten"


def test_a_plan_file_contains_the_probed_times(cli, quick, cpu_job, tmp_path):
    """Planning again from the plan file gives the same prediction without the cluster file."""
    assert cli("probe", "--cpu", "-o", "mine.toml").status == 0
    first = cli("plan", cpu_job, "cluster.file=mine.toml", "-o", "plan.toml", "--json").json
    (tmp_path / "mine.toml").unlink()
    again = cli("plan", "plan.toml", "--json").json
    assert again["layouts"][0]["step_s"] == first["layouts"][0]["step_s"]


@pytest.mark.parametrize(
    ("wrong", "code", "hint"),
    [
        ("elementwis = 1.0", "job-unknown-key", "Did you mean cluster.probed.elementwise?"),
        (
            '[[probed.gemms]]\nprecision = "bf16"\nrow = 3',
            "job-unknown-key",
            "Did you mean cluster.probed.gemms.0.rows?",
        ),
        ("copy_bytes_per_s = 0.0", "job-out-of-range", "more than 0"),
    ],
)
def test_an_invalid_cluster_file_is_refused_with_a_hint(cli, cpu_job, tmp_path, wrong, code, hint):
    (tmp_path / "own.toml").write_text(f'preset = "local"\n[probed]\nlaunch_s = 1e-6\n{wrong}\n')
    done = cli("plan", cpu_job, "cluster.file=own.toml")
    assert done.status == 2
    assert code in done.codes, done.err
    assert hint in done.err


def test_failed_training_steps_give_a_warning_and_a_file(cli, quick, monkeypatch, tmp_path):
    """If the compiler fails, the fit of real steps is missing. The measured operations are still written."""
    from meshwright.verify.bench import machine

    def fail(plan):
        raise RuntimeError("no compiler\nand a page of text")

    monkeypatch.setattr(machine, "time_steps", fail)
    done = cli("probe", "--cpu", "-o", "mine.toml")
    assert done.status == 0
    assert "warning: no real steps" in done.err
    assert "no compiler" in done.err
    assert "a page of text" not in done.err
    assert tomllib.loads((tmp_path / "mine.toml").read_text())["probed"]["elementwise"] == 1.0


def test_a_device_without_fp8_gemms_is_probed_without_them(cli, quick, monkeypatch, tmp_path):
    from meshwright.verify.bench import machine

    def fail(device, sizes, seconds):
        raise ValueError("type fp8e4nv not supported in this architecture")

    monkeypatch.setattr(machine, "time_fp8_linear", fail)
    done = cli("probe", "--cpu", "-o", "mine.toml")
    assert done.status == 0
    assert "warning: no FP8 GEMMs" in done.err
    assert "not supported in this architecture" in done.err
    written = tomllib.loads((tmp_path / "mine.toml").read_text())
    assert {"fp32"} == {entry["precision"] for entry in written["probed"]["gemms"]}


def test_a_file_of_the_user_is_not_overwritten(cli, tmp_path):
    (tmp_path / "own.toml").write_text('device = "cpu"\n')
    assert cli("probe", "-o", "own.toml").codes == ["cluster-file-not-writable"]
    assert cli("probe", "-o", tmp_path / "nowhere" / "file.toml").codes == ["cluster-file-not-writable"]


def test_a_gpu_that_torch_does_not_see_is_refused(cli, monkeypatch):
    """The driver lists a GPU, but this torch has no CUDA."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in ("spec.load", "runs.ranks"):
        monkeypatch.setattr(f"meshwright.{module}.find_gpus", lambda: [("NVIDIA H200", 150_754_820_096)])
    done = cli("probe")
    assert (done.status, done.codes) == (2, ["cluster-not-here"]), done.err
    assert "--cpu" in done.err


def test_tune_ignores_probed_times(cli, quick, cpu_job):
    from meshwright.runs.tune import shorten
    from meshwright.spec.load import load_job

    assert cli("probe", "--cpu", "-o", "mine.toml").status == 0
    job = load_job(cpu_job, ["cluster.file=mine.toml"])
    assert job.cluster.probed is not None
    assert shorten(job, 6).cluster.probed is None


def test_the_cpu_time_per_block_is_that_of_triton_blocks_if_measured():
    assert choose_block_s({"triton": 2e-3, "compile": 1e-3}) == 2e-3
    assert choose_block_s({"compile": 1e-3}) == 1e-3
    assert choose_block_s({"torch": None}) is None
