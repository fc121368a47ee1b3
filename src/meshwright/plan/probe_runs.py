"""The measurements of ``meshwright probe``: GEMM and attention shapes, and small models for real steps.

The shapes are those of the small models, so that the rest of their steps can be fitted, and some others, so
that shapes of other models have a neighbour.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from meshwright.layout.gemms import list_linears
from meshwright.plan.build import plan_from
from meshwright.plan.contract import PlanContract
from meshwright.plan.predict import predict
from meshwright.plan.time.probed import MeasuredStep
from meshwright.plan.time.triton_block_bytes import block_bytes
from meshwright.spec.cluster import Cluster
from meshwright.spec.execution import resolve_block_backend
from meshwright.spec.job import Job
from meshwright.spec.load import build_job
from meshwright.spec.model import DecoderModel


class GemmShape(NamedTuple):
    """A linear layer's GEMM: rows, output width, input width."""

    rows: int
    columns: int
    depth: int


class AttentionShape(NamedTuple):
    """Attention: sequences, query and key heads, head width, sequence length."""

    batch: int
    heads: int
    kv_heads: int
    head_size: int
    seq_len: int


@dataclass(frozen=True)
class ProbeSuite:
    """The measurements on one kind of device."""

    precision: Literal["fp32", "bf16"]
    """Precision of GEMMs, attention and steps; the other one is measured on a large GEMM only."""
    compiled: bool
    gemms: tuple[GemmShape, ...]
    """Beside the shapes of the small models."""
    fp8_gemms: tuple[GemmShape, ...]
    """The same in fp8."""
    attention: tuple[AttentionShape, ...]
    large_gemm_size: int
    """Size of the large square GEMM."""
    copy_elements: int
    """Elements of the large copy."""
    optimizer_elements: int
    """Elements of the optimizer step."""
    seconds: float
    """Measuring time per operation."""
    steps: int
    models: tuple[dict[str, Any], ...]
    """The small models: model table, sequence length, batch, block backend."""
    all_cores: bool = False
    """Whether all is measured again with the same work on every core."""
    collective_sizes: tuple[int, ...] = ()
    """Bytes of the collectives between ranks: up to those of a gradient bucket, and more."""
    collective_s: float = 0.0
    """Measuring time of all collectives."""


def _small(layers: int, width: int, heads: tuple[int, int], ffn: int, vocab_size: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": width,
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "ffn_size": ffn,
        "vocab_size": vocab_size,
        "tied_embeddings": False,
    }


PROBE_SUITES = {
    "cuda": ProbeSuite(
        precision="bf16",
        compiled=True,
        gemms=(
            GemmShape(32768, 17920, 2560),
            GemmShape(32768, 3584, 2560),
            GemmShape(32768, 2560, 8960),
            GemmShape(16384, 5120, 3584),
            GemmShape(8192, 5120, 5120),
            GemmShape(16384, 28672, 4096),
            GemmShape(16384, 4096, 14336),
            GemmShape(4096, 98304, 2560),
            GemmShape(2048, 1024, 1024),
            GemmShape(1024, 512, 2048),
        ),
        fp8_gemms=(
            GemmShape(32768, 17920, 2560),
            GemmShape(32768, 3584, 2560),
            GemmShape(32768, 2560, 8960),
            GemmShape(16384, 5120, 3584),
            GemmShape(16384, 28672, 4096),
            GemmShape(2048, 1024, 1024),
        ),
        attention=(
            AttentionShape(8, 32, 8, 64, 2048),
            AttentionShape(2, 32, 8, 64, 8192),
            AttentionShape(1, 32, 8, 64, 32768),
            AttentionShape(8, 24, 8, 128, 2048),
            AttentionShape(1, 24, 8, 128, 16384),
        ),
        large_gemm_size=8192,
        copy_elements=2**28,
        optimizer_elements=2**28,
        seconds=0.1,
        steps=13,
        models=tuple(
            {
                "model": _small(layers, 1536, (12, 4), 6144, 32768),
                "seq_len": 4096,
                "batch": 4,
                "block_backend": backend,
            }
            for layers, backend in ((2, "triton"), (6, "triton"), (6, "compile"))
        ),
    ),
    "cpu": ProbeSuite(
        precision="fp32",
        compiled=False,
        gemms=(
            GemmShape(256, 192, 64),
            GemmShape(1024, 256, 64),
            GemmShape(128, 512, 512),
            GemmShape(256, 4096, 256),
            GemmShape(256, 1024, 1024),
            GemmShape(1024, 1024, 1024),
            GemmShape(2048, 2048, 512),
        ),
        fp8_gemms=(),
        attention=(
            AttentionShape(2, 16, 8, 8, 128),
            AttentionShape(2, 4, 2, 32, 512),
            AttentionShape(16, 4, 2, 16, 64),
            AttentionShape(4, 16, 4, 64, 128),
            AttentionShape(1, 8, 8, 128, 256),
        ),
        large_gemm_size=1024,
        copy_elements=2**24,
        optimizer_elements=2**22,
        seconds=0.03,
        steps=13,
        models=(
            {"model": _small(4, 64, (4, 2), 192, 256), "seq_len": 32, "batch": 2},
            {"model": _small(12, 64, (8, 4), 192, 256), "seq_len": 64, "batch": 2},
            {"model": _small(2, 128, (4, 4), 512, 512), "seq_len": 128, "batch": 8},
            {"model": _small(1, 256, (8, 4), 768, 1024), "seq_len": 128, "batch": 2},
            {"model": _small(4, 256, (8, 4), 768, 1024), "seq_len": 128, "batch": 2},
            {"model": _small(1, 384, (6, 6), 1024, 12288), "seq_len": 32, "batch": 1},
        ),
        all_cores=True,
        collective_sizes=(1 << 10, 1 << 16, 1 << 20, 1 << 23, 1 << 25),
        collective_s=25.0,
    ),
}


@dataclass(frozen=True)
class ProbeRun:
    """A small model in one process, with one micro-batch per step."""

    plan: PlanContract
    touched_bytes: int

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return _decoder(self.plan.job).num_layers

    @property
    def block_backend(self) -> str:
        """The backend that computes its blocks."""
        return resolve_block_backend(self.plan.job)

    def measured_step(self, step_s: float) -> MeasuredStep:
        """The measured step, with its job."""
        return MeasuredStep(self.plan.job, self.plan.micro_batches, self.touched_bytes, step_s)


def find_cluster(cpu_only: bool) -> Cluster:
    """This machine, as the preset ``local`` detects it; or only its CPU, if it has GPUs."""
    table = {"preset": "local"} | ({"device": "cpu"} if cpu_only else {})
    return _build_job(PROBE_SUITES["cpu"], PROBE_SUITES["cpu"].models[0], table).cluster


def list_runs(suite: ProbeSuite, cluster: Cluster) -> list[ProbeRun]:
    """The small models, planned."""
    table = {k: v for k, v in dataclasses.asdict(cluster).items() if v is not None}
    runs = []
    for model in suite.models:
        job = _build_job(suite, model, table)
        prediction = predict(job, job.layout)
        runs.append(ProbeRun(plan_from(prediction), prediction.ledger.touched_bytes))
    return runs


def _build_job(suite: ProbeSuite, small: dict[str, Any], cluster: dict[str, Any]) -> Job:
    train = {"steps": suite.steps, "global_batch": small["batch"], "precision": suite.precision}
    layout = {"dp_replicate": 1, "micro_batch": small["batch"]}
    if suite.compiled:
        train |= {"block_backend": small["block_backend"], "residual_dtype": suite.precision}
        layout |= {"recompute": "selective"}
    return build_job(
        {
            "name": "probe",
            "model": small["model"],
            "data": {"path": "-", "seq_len": small["seq_len"]},
            "train": train,
            "layout": layout,
            "cluster": cluster,
        }
    )


def list_gemms(suite: ProbeSuite, jobs: list[Job]) -> list[GemmShape]:
    """GEMM shapes: those of the small models, then the others."""
    found = [GemmShape(*linear[:3]) for job in jobs for linear in list_linears(job, _decoder(job), 1)]
    return list(dict.fromkeys([*found, *suite.gemms]))


def list_fp8_gemms(suite: ProbeSuite, jobs: list[Job]) -> list[GemmShape]:
    """GEMM shapes in fp8: those of blocks, not of the head."""
    if not suite.fp8_gemms:
        return []
    linears = [linear for job in jobs for linear in list_linears(job, _decoder(job), 1) if linear.in_block]
    return list(dict.fromkeys([*(GemmShape(*linear[:3]) for linear in linears), *suite.fp8_gemms]))


def list_attention(suite: ProbeSuite, jobs: list[Job]) -> list[AttentionShape]:
    """Attention shapes: those of the small models, then the others."""
    found = [
        AttentionShape(
            job.layout.micro_batch or 1,
            model.num_heads,
            model.num_kv_heads,
            model.head_size,
            job.data.seq_len,
        )
        for job in jobs
        for model in (_decoder(job),)
    ]
    return list(dict.fromkeys([*found, *suite.attention]))


def count_block_bytes(job: Job) -> int:
    """Bytes that the Triton kernels move for one block of a job."""
    return (job.layout.micro_batch or 1) * job.data.seq_len * block_bytes(job, _decoder(job))


def _decoder(job: Job) -> DecoderModel:
    assert isinstance(job.model, DecoderModel), "decoders are probed"
    return job.model
