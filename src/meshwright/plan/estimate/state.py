"""Parameters, gradients, master weights and optimizer state of a rank, by ZeRO stage and framework."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.layout.parameters import FLOAT32_BYTES
from meshwright.plan.estimate.grid import Flags, Floats, Grid
from meshwright.plan.estimate.terms import Sum, Term
from meshwright.plan.estimate.weights import LocalWeightCounts
from meshwright.plan.estimate.workload import Workload

FLOAT32 = float(FLOAT32_BYTES)
ACTIVATION_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 2.0, "fp4": 2.0}
"""Bytes of a weight or activation that is not float32; fp8 and fp4 are formats of GEMMs, not of state."""
ADAM_MOMENTS = 2.0
STATE_LINES = ("parameters", "gradients", "master weights", "optimizer")


@dataclass(frozen=True)
class Sharding:
    """Over how many ranks the state is sharded."""

    dense: Floats
    """dp_shard x cp."""
    experts: Floats
    """Ranks that shard an expert's state: dp_shard x cp x tp over ep x etp."""
    parameters: Flags
    gradients: Flags
    optimizer: Flags

    @classmethod
    def of(cls, workload: Workload, grid: Grid) -> Sharding:
        """The sharding of each layout; deferred gradients stay unsharded until the last micro-batch."""
        rules = workload.profile.memory
        shared = (grid.dp_shard * grid.cp).astype(np.float64)
        several = grid.micro_batches(workload.global_batch) > 1
        whole = (grid.accumulate == 1) & several
        if rules.pipeline_unsharded:
            whole = whole | ((grid.pp > 1) & several)
        return cls(
            dense=shared,
            experts=np.maximum(shared * grid.tp / (grid.ep * grid.etp), 1.0),
            parameters=grid.zero >= (2 if rules.zero2_shards_parameters else 3),
            gradients=(grid.zero >= 2) & ~whole,
            optimizer=grid.zero >= 1,
        )

    def shard(self, local: LocalWeightCounts, where: Flags, bytes_each: float, there: Flags) -> Sum:
        """Bytes of a rank's elements, sharded in some layouts, on the device in some."""
        dense = Term("dense", (local.dense, bytes_each, there), np.where(where, self.dense, 1.0))
        if not local.routed:
            return Sum.of(dense)
        experts = Term("experts", (local.experts, bytes_each, there), np.where(where, self.experts, 1.0))
        return Sum.of(dense, experts)


@dataclass(frozen=True)
class StateBytes:
    """Bytes per element of each kind of state."""

    parameter: float
    gradient: float
    master: float
    optimizer: float

    @classmethod
    def of(cls, workload: Workload) -> StateBytes:
        """In the profile's framework at the workload's precision."""
        rules, low = workload.profile.memory, ACTIVATION_BYTES[workload.precision]
        gradient, moments = rules.gradient_bytes, ADAM_MOMENTS * rules.moment_bytes
        if workload.precision == "fp32":
            return cls(FLOAT32, FLOAT32, 0.0, moments)
        if workload.precision == "fp16" and rules.fp16_gradient_bytes is not None:
            gradient, moments = rules.fp16_gradient_bytes, moments + rules.step_gradient_bytes
        if rules.master_weights:
            return cls(low, gradient, rules.master_bytes, moments)
        return cls(FLOAT32, gradient, 0.0, moments)


def state_lines(
    workload: Workload, grid: Grid, local: LocalWeightCounts, sharding: Sharding
) -> dict[str, Sum]:
    """The four lines of a rank's state on the device; offloaded state is left out."""
    each = StateBytes.of(workload)
    stays, resident = grid.offload == 0, grid.offload != 2
    sums = (
        sharding.shard(local, sharding.parameters, each.parameter, resident),
        sharding.shard(local, sharding.gradients, each.gradient, resident),
        sharding.shard(local, sharding.optimizer, each.master, stays),
        sharding.shard(local, sharding.optimizer, each.optimizer, stays),
    )
    return dict(zip(STATE_LINES, sums, strict=True))
