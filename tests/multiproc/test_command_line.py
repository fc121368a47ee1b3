"""The commands in subprocesses: the whole path from text to audit, and one clear error for bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw

NO_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Missing())
from meshwright.cli import main
sys.argv = ["meshwright", *sys.argv[1:]]
main()
"""


def run(*arguments: object, cwd: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-c", code] if code else [sys.executable, "-m", "meshwright"]
    return subprocess.run(
        [*start, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def test_train_generate_audit_and_resume_work_end_to_end(job_file, corpus, tmp_path):
    """`train`, `generate`, `audit`, and a resume with tables. Without a terminal, progress is plain lines.

    A mixture, two evaluation sets, and an evaluation and a checkpoint after every step still take 25 lines.
    """
    (tmp_path / "other.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    tables = "".join(
        f'\n[[data.{table}]]\nname = "{name}"\npath = "{path}"\n'
        for table, name, path in (
            ("sources", "a", corpus),
            ("sources", "b", "other.txt"),
            ("eval", "old", "other.txt"),
            ("eval", "new", corpus),
        )
    )
    job = tmp_path / "mixture.toml"
    job.write_text(Path(job_file).read_text() + tables)
    often = ("layout.dp_replicate=2", "train.eval_every=1", "checkpoint.every_steps=1", "data.path=")
    done = run("train", job, "train.steps=10", *often, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = done.stdout + done.stderr
    assert len(printed.splitlines()) <= 25, printed
    assert "Audit: ok." in done.stdout
    assert "held-out loss" in printed
    assert "data: a mixture of a 50.0%, b 50.0%" in printed
    assert "saved)" in printed
    assert "step 10/10" in done.stderr
    assert "\x1b" not in done.stderr
    written = run("generate", "runs/tiny-1", "--prompt", "the ", "--tokens", 20, "--json", cwd=tmp_path)
    again = mw.generate(tmp_path / "runs/tiny-1", "the ", tokens=20)
    assert json.loads(written.stdout)["text"] == again, "the same seed generated another text"
    audit = run("audit", "runs/tiny-1", cwd=tmp_path)
    assert audit.returncode == 0
    assert "Audit: ok." in audit.stdout
    verbose = run("train", job, "train.steps=12", *often, "--resume", "-v", cwd=tmp_path)
    assert verbose.returncode == 0, verbose.stderr
    for table in ("Memory of every rank", "Memory in bytes", "whole run, 2 generations"):
        assert table in verbose.stdout, "the tables count the collectives of both attempts"


def test_without_torch_planning_works_and_training_names_the_extra(job_file, tmp_path):
    planned = run("plan", job_file, "-o", "plan.toml", cwd=tmp_path, code=NO_TORCH)
    assert planned.returncode == 0, planned.stderr
    assert (tmp_path / "plan.toml").exists()
    refused = run("train", job_file, cwd=tmp_path, code=NO_TORCH)
    assert refused.returncode == 2
    assert "meshwright[run]" in refused.stderr, "the error names the extra to install"
    assert refused.stderr.rstrip().endswith("[install-missing-extra]")
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_train_runs_a_written_plan_unchanged_and_quiet_prints_the_result_only(job_file, tmp_path):
    job = mw.load_job(job_file, "layout.dp_replicate=2", "train.steps=2")
    job.plan().write(tmp_path / "plan.toml")
    done = run("train", "plan.toml", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) <= 4
    ran = (tmp_path / "runs/tiny-1/plan.toml").read_text()
    assert ran == (tmp_path / "plan.toml").read_text()


def empty_folder(tmp_path: Path) -> list[str]:
    (tmp_path / "empty").mkdir()
    return ["data.path=empty"]


def short_corpus(tmp_path: Path) -> list[str]:
    (tmp_path / "short.txt").write_text("too short")
    return ["data.path=short.txt"]


def binary_corpus(tmp_path: Path) -> list[str]:
    (tmp_path / "data.bin").write_bytes(bytes(range(256)) * 40)
    return ["data.path=data.bin"]


def run_dir_in_a_file(tmp_path: Path) -> list[str]:
    (tmp_path / "file").write_text("")
    return ["run_dir=file/run"]


def used_run_dir(tmp_path: Path) -> list[str]:
    (tmp_path / "used").mkdir()
    (tmp_path / "used/events.jsonl").write_text("")
    return ["run_dir=used"]


BAD = [
    (lambda _: ["train.stepz=3"], "job-unknown-key"),
    (lambda _: ["train.steps=soon"], "job-wrong-type"),
    (lambda _: ["data.path=nowhere.txt"], "data-path-missing"),
    (empty_folder, "data-corpus-empty"),
    (short_corpus, "data-corpus-short"),
    (binary_corpus, "data-file-kind"),
    (lambda _: ["model.vocab_size=64"], "model-vocab-small"),
    (lambda _: ["data.tokenizer=byte"], "data-already-prepared"),
    (lambda _: ["data.path=builtin:tolstoy"], "data-source-unknown"),
    (run_dir_in_a_file, "run-not-writable"),
    (used_run_dir, "run-exists"),
    (lambda _: ["layout.pp=3"], "layout-pp-layers"),
    (lambda _: ["layout.tp=3"], "layout-tp-heads"),
    (lambda _: ["model.window=8"], "model-window-not-built"),
    (lambda _: ["train.precision=fp8"], "train-fp8-not-built"),
]


QUICK = {"job-unknown-key", "data-path-missing", "run-exists"}
"""Codes in ``make test``; the unit tests of ``spec`` and ``data`` have all codes."""


@pytest.mark.parametrize(
    ("spoil", "code"),
    [pytest.param(*row, id=row[1], marks=() if row[1] in QUICK else pytest.mark.slow) for row in BAD],
)
def test_bad_input_is_refused_with_its_code_and_writes_nothing(job_file, tmp_path, spoil, code):
    overrides = spoil(tmp_path)
    before = sorted(p for p in tmp_path.rglob("*"))
    refused = run("train", job_file, *overrides, "--json", cwd=tmp_path)
    assert refused.returncode == 2, refused.stderr
    assert code in [e["code"] for e in json.loads(refused.stdout)["errors"]]
    assert f"[{code}]" in refused.stderr
    assert "Traceback" not in refused.stderr
    after = sorted(p for p in tmp_path.rglob("*") if ".meshwright" not in p.parts)
    assert after == before


def test_a_folder_without_write_permission_is_refused(job_file, tmp_path):
    """Root may write everywhere, so as root the command drops that capability first."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    command = [sys.executable, "-m", "meshwright", "train", str(job_file), f"run_dir={locked / 'run'}"]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-dac_override", *command]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2, refused.stderr
    assert "[run-not-writable]" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not any(locked.iterdir())


@pytest.mark.slow
def test_more_ranks_than_cores_give_a_warning(job_file, tmp_path):
    done = run(
        "train",
        job_file,
        "layout.dp_replicate=3",
        "cluster.devices_per_node=2",
        "train.steps=1",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "warning: 3 ranks share 2 CPU cores" in done.stderr


def test_an_illegal_layout_is_refused_with_the_nearest_one_and_its_step_time(job_file, tmp_path):
    refused = run("train", job_file, "layout.pp=2", "layout.virtual_stages=2", cwd=tmp_path)
    assert "nearest layout that runs: layout.pp=2 layout.micro_batch=" in refused.stderr
    assert "/step" in refused.stderr
