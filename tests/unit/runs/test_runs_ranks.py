"""The checks before ranks start: a block backend that this machine can build."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.core.errors import UserError
from meshwright.runs.ranks import settle_block_backend
from meshwright.runs.reporter import Reporter
from meshwright.spec.execution import resolve_block_backend
from meshwright.spec.job import Job
from meshwright.spec.load import build_job


class Warnings(Reporter):
    """Keeps the warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def warning(self, text: str) -> None:
        self.texts.append(text)


def build(**train: str) -> Job:
    tree = {
        "name": "small",
        "model": {"preset": "tiny"},
        "cluster": {"preset": "h200-sxm"},
        "data": {"path": "text", "seq_len": 32},
        "train": {"steps": 4, "global_batch": 8, "precision": "bf16", **train},
    }
    return build_job(tree, to_run=False)


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.mark.usefixtures("no_compiler")
def test_default_backend_falls_back_to_eager_without_a_compiler():
    job, reporter = build(), Warnings()
    assert resolve_block_backend(job) == "triton"
    settled = settle_block_backend(job, reporter)
    assert settled == dataclasses.replace(job, train=dataclasses.replace(job.train, block_backend="eager"))
    (warning,) = reporter.texts
    assert warning.startswith("train.block_backend=eager: ")
    assert "no-such-compiler" in warning


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    "train",
    [{"block_backend": "compile"}, {"block_backend": "triton"}, {"precision": "fp8"}],
    ids=str,
)
def test_named_backend_and_fp8_are_refused_without_a_compiler(train):
    with pytest.raises(UserError) as caught:
        settle_block_backend(build(**train), Warnings())
    assert [problem.code for problem in caught.value.problems] == ["train-compile-no-compiler"]


@pytest.mark.usefixtures("no_compiler")
def test_eager_blocks_need_no_compiler():
    job, reporter = build(block_backend="eager"), Warnings()
    assert settle_block_backend(job, reporter) is job
    assert reporter.texts == []


def test_default_backend_stays_with_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "sh")
    job = build()
    assert settle_block_backend(job, Warnings()) is job
