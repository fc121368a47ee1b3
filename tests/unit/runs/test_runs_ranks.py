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


def build(device: str = "cuda", **train: str) -> Job:
    cpu = {"preset": "local", "device": "cpu", "devices_per_node": 1, "matmul_flops_per_s": 1e11}
    tree = {
        "name": "small",
        "model": {"preset": "tiny"},
        "cluster": {"preset": "h200-sxm"} if device == "cuda" else cpu,
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


FP8 = {"precision": "fp8", "block_backend": "compile", "compile_backend": "aot_eager"}


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.12.1"])
def test_fp8_on_a_cpu_is_refused_with_an_older_torch(monkeypatch, version):
    monkeypatch.setattr("meshwright.core.packages.version", lambda _: version)
    with pytest.raises(UserError) as caught:
        settle_block_backend(build("cpu", **FP8), Warnings())
    assert [problem.code for problem in caught.value.problems] == ["train-fp8-torch"]
    assert settle_block_backend(build("cuda", **FP8), Warnings()) == build("cuda", **FP8)


@pytest.mark.parametrize("version", ["2.13.0+cpu", "3.0.0", "unknown"])
def test_fp8_on_a_cpu_is_accepted_with_a_newer_torch(monkeypatch, version):
    monkeypatch.setattr("meshwright.core.packages.version", lambda _: version)
    job = build("cpu", **FP8)
    assert settle_block_backend(job, Warnings()) is job
