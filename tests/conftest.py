"""Fixtures of all tests: the environment of torch, a corpus, a small job, and training on real ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from meshwright.launch.environment import prepare_environment

pytest_plugins = ("sharding",)

prepare_environment(threads=1)  # before anything imports torch
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("meshwright", deadline=None, derandomize=True)  # the machine may be busy
settings.load_profile("meshwright")

TINY = """
name = "tiny"
[model]
preset = "tiny"
[data]
path = "{corpus}"
seq_len = 32
[train]
steps = 6
global_batch = 12
lr = 3e-3
warmup = 2
eval_samples = 16
[cluster]
device = "cpu"
devices_per_node = 2
matmul_flops_per_s = 1e11
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty small text documents."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        lines = [
            f"document {number} line {line}: {'the quick brown fox ' * (line % 5)}" for line in range(40)
        ]
        (folder / f"{number:02d}.txt").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus as shards of byte tokens; an eighth is held out."""
    from meshwright.data.prepare import CorpusSpec, prepare_corpus

    out = tmp_path_factory.mktemp("prepared") / "bytes"
    prepare_corpus(CorpusSpec(sources=(str(corpus),), out=str(out), eval_fraction=0.125), Path())
    return out


@pytest.fixture(scope="session")
def job_text(prepared: Path) -> str:
    """A small job in TOML."""
    return TINY.format(corpus=prepared)


@pytest.fixture
def job_file(tmp_path: Path, job_text: str) -> Path:
    """The small job in a file."""
    path = tmp_path / "job.toml"
    path.write_text(job_text)
    return path


@pytest.fixture
def use_hf_folder(job_file: Path) -> Callable[[Path], None]:
    """``use_hf_folder(folder)``: let the small job start from a Hugging Face folder."""

    def use(folder: Path) -> None:
        job_file.write_text(job_file.read_text().replace('preset = "tiny"', f'hf = "{folder}"'))

    return use


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    status: int
    result: dict[str, Any]
    run_dir: Path
    messages: str

    @property
    def losses(self) -> list[float]:
        return self.result["losses"]


@pytest.fixture
def train(job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Train with real rank processes and check the exit status; 0 includes a clean audit.

    The report page has no charts: drawing them takes as long as a short run. A failed run does not end the
    fork server: the next run would import torch again.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("meshwright.report.html.can_draw", lambda: False)
    monkeypatch.setattr("meshwright.runs.start.end_server", lambda: None)

    def run(*overrides: str, resume: bool = False, expect: int = 0) -> Trained:
        from meshwright.cli.output import Output
        from meshwright.cli.train import run_training

        capfd.readouterr()
        status = run_training(Output(as_json=True), str(job_file), list(overrides), resume)
        out, err = capfd.readouterr()
        assert status == expect, f"exit status {status}, expected {expect}\n{err}"
        result = json.loads(out)
        return Trained(status, result, Path(result.get("run_dir", "")), err)

    return run


@pytest.fixture(scope="session")
def s3_server():
    """A real S3 server in a process of its own, with an empty bucket."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    from s3_server import S3Server

    server = S3Server()
    yield server
    server.end()


@pytest.fixture
def s3(s3_server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The URL of an empty prefix of that server; the environment has its address and credentials."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{tmp_path.parent.name}/{tmp_path.name}"
