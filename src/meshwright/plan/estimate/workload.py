"""The workload that is estimated: a model and its batch on a cluster, run by a framework."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.layout.hierarchy import find_hierarchy
from meshwright.layout.optimizer_state import predict_optimizer
from meshwright.layout.parameters import count_parameters, list_parameters, residual_bytes
from meshwright.plan.memory.compiled import is_compiled, weight_copies_line
from meshwright.plan.profiles import PROFILES, Profile, compiled_profile
from meshwright.spec.cluster import Cluster
from meshwright.spec.execution import (
    resolve_node_transport,
    uses_bf16_weight_copies,
    uses_eager_blocks,
    uses_triton_blocks,
)
from meshwright.spec.job import Job, Train
from meshwright.spec.layout import Layout
from meshwright.spec.model import DecoderModel


class OptimizerRate(NamedTuple):
    """Cost of one optimizer step per parameter."""

    moved_bytes: float
    flops: float
    state_bytes: float
    """Bytes of the state: what streaming copies in each direction."""


@dataclass(frozen=True)
class Workload:
    """All inputs of the formulas except the layout."""

    model: DecoderModel
    cluster: Cluster
    seq_len: int
    global_batch: int
    precision: str
    """Precision of GEMMs: `fp32`, `bf16`, `fp16`, `fp8` or `fp4`."""
    profile: Profile
    recipe: str = ""
    """How fp8 or fp4 scales: `current`, `delayed`, `mxfp8`, `subchannel`, `rowwise`, `nvfp4`."""
    compiled: bool = False
    """Whether blocks are compiled (for profiles that allow both)."""
    document_mask: bool = False
    compiled_job: Job | None = None
    """The job, if its compiled steps have their own ledger: in layouts with unsharded layers."""
    copy_bytes: float = 0.0
    """Bytes of the bf16 weight copies that live from step to step, if a run keeps them."""
    residual_bytes: float = 2.0
    """Bytes of an element of the residual stream, which a pipeline stage sends to the next."""
    optimizer: OptimizerRate | None = None
    """Cost of the optimizer per parameter; None: that of the profile, with AdamW."""
    probed_job: Job | None = None
    """The job, if its cluster was probed."""
    transport: str = ""
    """What runs the collectives inside a node; empty: unknown."""
    bucket_bytes: float = float("inf")
    """Size of a gradient bucket."""

    hierarchical_all_reduce: bool = False
    """Whether DDP all-reduces gradients in phases, where the ranks span nodes."""

    @classmethod
    def of(cls, job: Job) -> Workload:
        """The workload of a decoder's job."""
        if not isinstance(job.model, DecoderModel):
            raise TypeError(f"a workload is of a decoder, not {type(job.model).__name__}")
        own, unsharded_job = job.train.runtime == "meshwright", dataclasses.replace(job, layout=Layout())
        profile = PROFILES[job.train.runtime]
        if not uses_eager_blocks(job) and job.cluster.device == "cuda":
            triton = uses_triton_blocks(unsharded_job)
            experts = job.model.num_experts is not None
            profile = compiled_profile(profile, triton, experts, job.train.fp8_weight_grads)
        return cls(
            model=job.model,
            cluster=job.cluster,
            seq_len=job.data.seq_len,
            global_batch=job.train.global_batch,
            precision=job.train.precision,
            profile=profile,
            recipe="rowwise" if job.train.precision == "fp8" and job.train.runtime == "meshwright" else "",
            compiled=not uses_eager_blocks(job),
            document_mask=job.data.mask == "document",
            compiled_job=job if own and is_compiled(unsharded_job) else None,
            copy_bytes=float(weight_copies_line(job, job.model).bytes)
            if own and uses_bf16_weight_copies(unsharded_job)
            else 0.0,
            residual_bytes=float(residual_bytes(job.train)) if own else 2.0,
            optimizer=_optimizer_rate(job.model, job.train) if own else None,
            hierarchical_all_reduce=own and find_hierarchy(job) is not None,
            probed_job=None if job.cluster.probed is None else job,
            transport=resolve_node_transport(job) if own else "",
            bucket_bytes=job.layout.bucket_mb * 2**20 if own else float("inf"),
        )

    @property
    def wire_bytes(self) -> float:
        """Bytes of an activation element in a collective."""
        return 4.0 if self.precision == "fp32" else 2.0


@functools.lru_cache(maxsize=64)
def _optimizer_rate(model: DecoderModel, train: Train) -> OptimizerRate:
    """Cost of the optimizer per parameter; in low precision it also writes 16-bit weights."""
    parameters = list_parameters(model)
    cost, count = predict_optimizer(parameters, train), count_parameters(model)
    copies = 0.0 if train.precision == "fp32" else 2.0
    return OptimizerRate(cost.moved_bytes / count + copies, cost.flops / count, cost.state_bytes / count)
