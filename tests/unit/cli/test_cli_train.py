"""``meshwright train``: errors before any process starts, without a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def text_job(good, tmp_path):
    """The valid job on CPU ranks, with text to train on."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / f"text/{number}.txt").write_text(f"document {number}\n" * 30)
    job = Path(good).read_text().replace('preset = "h100-sxm"', 'preset = "local"\ndevice = "cpu"')
    Path(good).write_text(job)
    return good


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        pytest.param(["model.window=8"], "model-window-not-built", marks=pytest.mark.slow),
        pytest.param(["train.stepps=1"], "job-unknown-key", marks=pytest.mark.slow),
        (["data.path=gone"], "data-path-missing"),
        (["model.vocab_size=64"], "model-vocab-small"),
        (["data.tokenizer=nonsense"], "data-tokenizer-unknown"),
        (["cluster.device=cuda", "cluster.nodes=2"], "cluster-not-here"),
        pytest.param(
            ["cluster.preset=h100-sxm", "cluster.device=cuda", "layout.dp_replicate=8"],
            "cluster-not-here",
            marks=pytest.mark.slow,
        ),
        (["--resume"], "resume-nothing"),
        pytest.param(["--resume", "run_dir=gone"], "resume-nothing", marks=pytest.mark.slow),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_train_refuses_a_bad_job_with_a_code_and_creates_no_run_folder(
    cli, text_job, tmp_path, overrides, code
):
    ran = cli("train", text_job, *overrides, "--json")
    assert ran.status == 2, ran.err
    assert ran.json["status"] == "error"
    assert code in ran.codes
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "gone").exists()


def test_train_does_not_overwrite_a_run(cli, text_job, run_dir):
    before = (run_dir / "events.jsonl").read_bytes()
    ran = cli("train", text_job, f"run_dir={run_dir}")
    assert (ran.status, ran.codes) == (2, ["run-exists"])
    assert (run_dir / "events.jsonl").read_bytes() == before


def test_a_model_that_does_not_fit_creates_no_run_folder(cli, text_job, tmp_path):
    ran = cli("train", text_job, "cluster.memory_bytes=1000")
    assert (ran.status, ran.codes) == (2, ["plan-nothing-fits"])
    assert not (tmp_path / "runs").exists()
