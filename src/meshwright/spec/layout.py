"""The layout: how the model is spread over the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from meshwright.spec.fields import SECTION_CONFIG, Count, Flag, Location, Natural

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first; `ep` divides dp_shard x cp x tp and adds no ranks."""
DEGREES = (*AXES, "ep", "etp")
V_SCHEDULES = ("zbv", "dualpipe-v")
"""Pipeline schedules with two stages a rank, laid out in a V: the first rank holds the first and the last."""
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh axes and how a step is cut up."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    mode: Literal["auto", "given"] = "auto"
    """`auto` lets the planner choose; naming any degree makes it `given`."""
    pp: Count = 1
    """Pipeline stages."""
    dp_replicate: Count = 1
    """Replicas that each hold the whole state (DDP)."""
    dp_shard: Count = 1
    """Ranks that share one copy of the state (ZeRO)."""
    cp: Count = 1
    """Ranks that share one sequence."""
    tp: Count = 1
    """Ranks that share each matrix."""
    ep: Count = 1
    """Ranks that share the experts."""
    etp: Count = 1
    """Ranks that share one expert's matrices."""
    zero: Annotated[int, Field(ge=0, le=3, strict=True)] = 0
    """ZeRO stage over dp_shard x cp: 1 optimizer, 2 + gradients, 3 + parameters."""
    accumulate: Literal["sharded", "deferred"] = "sharded"
    """When gradients of micro-batches are reduced under ZeRO."""
    sequence_parallel: Flag = False
    """Shard norms and residual along the sequence within tp."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v"] = "1f1b"
    """Pipeline schedule."""
    virtual_stages: Count = 1
    """Stages a pipeline rank holds; `zbv` and `dualpipe-v` have 2, also if left out."""
    stage_layers: tuple[Count, ...] | None = None
    """Layers of each pipeline stage, first to last; by their predicted cost if left out."""
    schedule_file: Location | None = None
    """A schedule of your own in place of `schedule`: see `meshwright schedule pipeline --file`."""
    context: Literal["ring", "ulysses"] = "ring"
    """How cp exchanges keys and values."""
    micro_batch: Count | None = None
    """Samples in one forward pass on a rank; the largest that fits if left out."""
    recompute: Recompute = "none"
    """What is computed again in the backward pass: norms and activations (selective), or whole blocks."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What leaves the device between uses."""
    prefetch: Natural = 1
    """Layers gathered ahead under ZeRO-3."""
    bucket_mb: Annotated[float, Field(gt=0, le=65536, strict=True)] = 25.0
    """Size of one gradient all-reduce of DDP, in MiB."""

    @property
    def world_size(self) -> int:
        """Ranks that the layout needs."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_degree(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def named_degrees(self) -> str:
        """The degrees above one, as overrides; `one process` if there are none."""
        named = [f"layout.{axis}={getattr(self, axis)}" for axis in DEGREES if getattr(self, axis) > 1]
        return " ".join(named) or "one process (layout.dp_replicate=1)"
