"""What ``meshwright probe`` measures: shapes of products and attention, and small models for real steps.

The shapes are those of the small models, so that what is left of their steps is not products, and some
around them, so that shapes of other models have a neighbour.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from meshwright.layout.gemms import list_linears
from meshwright.plan.contract import Plan, plan_of
from meshwright.plan.predict import predict
from meshwright.plan.time.probed import Timed
from meshwright.plan.time.triton_block_bytes import block_bytes
from meshwright.spec.cluster import Cluster
from meshwright.spec.execution import runs_own_kernels
from meshwright.spec.job import Job
from meshwright.spec.load import build_job
from meshwright.spec.model import DecoderModel


class Sizes(NamedTuple):
    """Rows, width of the output and of the input of a linear layer."""

    rows: int
    columns: int
    depth: int


class Heads(NamedTuple):
    """Attention: sequences, query and key heads, their width, the length of a sequence."""

    batch: int
    heads: int
    kv_heads: int
    head_size: int
    seq_len: int


@dataclass(frozen=True)
class Programme:
    """What is measured on a kind of device."""

    precision: Literal["fp32", "bf16"]
    """Of the products of shapes, attention and steps; of the other one a large product is measured."""
    compiled: bool
    products: tuple[Sizes, ...]
    """Beside those of the small models."""
    scaled: tuple[Sizes, ...]
    """Likewise, in 8 bits."""
    attention: tuple[Heads, ...]
    large: int
    """Sides of the large product."""
    copied: int
    """Elements of a copy."""
    updated: int
    """Elements that an optimizer moves."""
    seconds: float
    """For each operation."""
    steps: int
    models: tuple[dict[str, Any], ...]
    """Tables of jobs: model, data and train."""


def _small(layers: int, width: int, heads: tuple[int, int], ffn: int, words: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": width,
        "num_heads": heads[0],
        "num_kv_heads": heads[1],
        "ffn_size": ffn,
        "vocab_size": words,
        "tied_embeddings": False,
    }


PROGRAMMES = {
    "cuda": Programme(
        precision="bf16",
        compiled=True,
        products=(
            Sizes(32768, 17920, 2560),
            Sizes(32768, 3584, 2560),
            Sizes(32768, 2560, 8960),
            Sizes(16384, 5120, 3584),
            Sizes(8192, 5120, 5120),
            Sizes(16384, 28672, 4096),
            Sizes(16384, 4096, 14336),
            Sizes(4096, 98304, 2560),
            Sizes(2048, 1024, 1024),
            Sizes(1024, 512, 2048),
        ),
        scaled=(
            Sizes(32768, 17920, 2560),
            Sizes(32768, 3584, 2560),
            Sizes(32768, 2560, 8960),
            Sizes(16384, 5120, 3584),
            Sizes(16384, 28672, 4096),
            Sizes(2048, 1024, 1024),
        ),
        attention=(
            Heads(8, 32, 8, 64, 2048),
            Heads(2, 32, 8, 64, 8192),
            Heads(1, 32, 8, 64, 32768),
            Heads(8, 24, 8, 128, 2048),
            Heads(1, 24, 8, 128, 16384),
        ),
        large=8192,
        copied=2**28,
        updated=2**28,
        seconds=0.1,
        steps=13,
        models=tuple(
            {
                "model": _small(layers, 1536, (12, 4), 6144, 32768),
                "seq_len": 4096,
                "batch": 4,
                "kernels": kernels,
            }
            for layers, kernels in ((2, "own"), (6, "own"), (6, "compiled"))
        ),
    ),
    "cpu": Programme(
        precision="fp32",
        compiled=False,
        products=(
            Sizes(256, 192, 64),
            Sizes(1024, 256, 64),
            Sizes(128, 512, 512),
            Sizes(256, 4096, 256),
            Sizes(256, 1024, 1024),
            Sizes(1024, 1024, 1024),
            Sizes(2048, 2048, 512),
        ),
        scaled=(),
        attention=(Heads(2, 4, 2, 32, 512), Heads(16, 4, 2, 16, 64), Heads(4, 16, 4, 64, 128)),
        large=1024,
        copied=2**24,
        updated=2**22,
        seconds=0.03,
        steps=13,
        models=(
            {"model": _small(4, 64, (4, 2), 192, 256), "seq_len": 32, "batch": 2},
            {"model": _small(1, 256, (8, 4), 768, 1024), "seq_len": 128, "batch": 2},
            {"model": _small(4, 256, (8, 4), 768, 1024), "seq_len": 128, "batch": 2},
        ),
    ),
}


@dataclass(frozen=True)
class SmallRun:
    """A small model in one process, in one micro-batch a step."""

    plan: Plan
    touched_bytes: int

    @property
    def layers(self) -> int:
        """Of the model."""
        return _decoder(self.plan.job).num_layers

    @property
    def kernels(self) -> str:
        """Whose are between its products: ``own``, ``compiled``, or torch's, one for each operation."""
        if runs_own_kernels(self.plan.job):
            return "own"
        return "compiled" if self.plan.job.train.compile else "torch"

    def timed(self, step_s: float) -> Timed:
        """With what its step took."""
        return Timed(self.plan.job, self.plan.micro_batches, self.touched_bytes, step_s)


def find_cluster(only_cores: bool) -> Cluster:
    """This machine, as the preset ``local`` finds it; or its cores, also where it has GPUs."""
    table = {"preset": "local"} | ({"device": "cpu"} if only_cores else {})
    return _build_job(PROGRAMMES["cpu"], PROGRAMMES["cpu"].models[0], table).cluster


def list_runs(programme: Programme, cluster: Cluster) -> list[SmallRun]:
    """The small models."""
    table = {k: v for k, v in dataclasses.asdict(cluster).items() if v is not None}
    runs = []
    for model in programme.models:
        job = _build_job(programme, model, table)
        prediction = predict(job, job.layout)
        runs.append(SmallRun(plan_of(prediction), prediction.ledger.touched_bytes))
    return runs


def _build_job(programme: Programme, small: dict[str, Any], cluster: dict[str, Any]) -> Job:
    train = {"steps": programme.steps, "global_batch": small["batch"], "precision": programme.precision}
    layout = {"dp_replicate": 1, "micro_batch": small["batch"]}
    if programme.compiled:
        train |= {"compile": True, "residual": programme.precision, "kernels": small["kernels"]}
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


def list_products(programme: Programme, jobs: list[Job]) -> list[Sizes]:
    """Shapes of products: of the small models, then the others."""
    found = [Sizes(*linear[:3]) for job in jobs for linear in list_linears(job, _decoder(job), 1)]
    return list(dict.fromkeys([*found, *programme.products]))


def list_scaled(programme: Programme, jobs: list[Job]) -> list[Sizes]:
    """Likewise, in 8 bits: of blocks, not of heads."""
    if not programme.scaled:
        return []
    linears = [linear for job in jobs for linear in list_linears(job, _decoder(job), 1) if linear.again]
    return list(dict.fromkeys([*(Sizes(*linear[:3]) for linear in linears), *programme.scaled]))


def list_attention(programme: Programme, jobs: list[Job]) -> list[Heads]:
    """Shapes of attention, likewise."""
    found = [
        Heads(
            job.layout.micro_batch or 1,
            model.num_heads,
            model.num_kv_heads,
            model.head_size,
            job.data.seq_len,
        )
        for job in jobs
        for model in (_decoder(job),)
    ]
    return list(dict.fromkeys([*found, *programme.attention]))


def count_block_bytes(job: Job) -> int:
    """What our own kernels move for a block of a job."""
    return (job.layout.micro_batch or 1) * job.data.seq_len * block_bytes(job, _decoder(job))


def _decoder(job: Job) -> DecoderModel:
    assert isinstance(job.model, DecoderModel), "decoders are probed"
    return job.model
