"""The layout: how a job is parallelised over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field, Tag

from meshwright.spec.fields import SECTION_CONFIG, Count, Flag, Location, Natural

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first; `ep` divides dp_shard x cp x tp and adds no ranks."""
DEGREES = (*AXES, "ep", "etp")
V_SCHEDULES = ("zbv", "dualpipe-v")
"""V-shaped pipeline schedules, with two stages per rank: rank 0 holds the first and the last stage."""
Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe-v"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
Context = Literal["ring", "ulysses"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "all"]
Accumulate = Literal["sharded", "deferred"]
PlacementRule = Literal["auto", "rank-order"]


def _placement_kind(value: Any) -> str:
    return "slots" if isinstance(value, list | tuple) else "rule"


Placement = PlacementRule | tuple[int, ...]
TaggedPlacement = Annotated[
    Annotated[PlacementRule, Tag("rule")] | Annotated[tuple[Natural, ...], Tag("slots")],
    Discriminator(_placement_kind),
]
"""The placement as pydantic reads it: a rule, or a list of slots."""
PLACEMENT_TAGS = ("rule", "slots")


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh axes, and how a step runs on them."""

    __pydantic_config__: ClassVar[ConfigDict] = SECTION_CONFIG

    mode: Literal["auto", "given"] = "auto"
    """`auto`: the planner chooses. Setting any degree makes it `given`."""
    pp: Count = 1
    """Pipeline parallel degree."""
    dp_replicate: Count = 1
    """Replicated data parallel degree (DDP); with dp_shard above 1, hybrid sharding (HSDP)."""
    dp_shard: Count = 1
    """Sharded data parallel degree (ZeRO, FSDP)."""
    cp: Count = 1
    """Context parallel degree: ranks that split each sequence."""
    tp: Count = 1
    """Tensor parallel degree: ranks that split each linear layer."""
    ep: Count = 1
    """Expert parallel degree: ranks that split the experts of a layer."""
    etp: Count = 1
    """Expert tensor parallel degree: ranks that split each expert."""
    zero: Annotated[int, Field(ge=0, le=3, strict=True)] = 0
    """ZeRO stage over dp_shard x cp: 1 shards the optimizer state, 2 also gradients, 3 also parameters.
    2 and 3 are FSDP2; 2 shards parameters between steps, too (`reshard_after_forward=False`)."""
    accumulate: Accumulate = "sharded"
    """Gradient accumulation under ZeRO-2 and 3: reduce-scatter per micro-batch (`sharded`), or once per step
    (`deferred`; keeps full gradients)."""
    sequence_parallel: Flag = False
    """Shard norms and residual stream along the sequence over tp."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule."""
    virtual_stages: Count = 1
    """Pipeline stages per rank; 2 for `zbv` and `dualpipe-v`."""
    stage_layers: tuple[Count, ...] | None = None
    """Layers of each pipeline stage, first to last; balanced by predicted cost if left out."""
    schedule_file: Location | None = None
    """File with a custom schedule, instead of `schedule`: see `meshwright schedule pipeline --file`."""
    context: Context = "ring"
    """Context parallel method: ring attention, or Ulysses (all-to-all over heads)."""
    micro_batch: Count | None = None
    """Samples per rank in one forward pass; the largest size that fits if left out."""
    recompute: Recompute = "none"
    """Activation checkpointing: recompute norms and activation functions (`selective`) or blocks (`full`)."""
    offload: Offload = "none"
    """State kept in CPU memory between uses: none, the optimizer state, or all state."""
    prefetch: Natural = 1
    """Layers that ZeRO-3 all-gathers ahead."""
    bucket_mb: Annotated[float, Field(gt=0, le=65536, strict=True)] = 25.0
    """Size of a DDP gradient bucket, in MiB."""

    placement: TaggedPlacement = "auto"
    """Device slot of each rank; slots are the devices of node 0, then those of node 1, and so on. `auto`: the
    planner searches the placement with the shortest step; `rank-order`: rank r has slot r; or a list with
    the slot of each rank."""
    backup_replicas: Natural = 0
    """Replicas of dp_replicate that compute samples of slow replicas again. A step uses the gradients that
    are finished first; dp_replicate - backup_replicas replicas read different samples."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_degree(self) -> int:
        """Ranks that read different samples."""
        return max(1, self.dp_replicate - self.backup_replicas) * self.dp_shard

    def named_degrees(self) -> str:
        """The degrees above one and the backup replicas, as overrides; `one process` if there are none."""
        named = [f"layout.{axis}={getattr(self, axis)}" for axis in DEGREES if getattr(self, axis) > 1]
        named += [f"layout.backup_replicas={self.backup_replicas}"] if self.backup_replicas else []
        return " ".join(named) or "one process (layout.dp_replicate=1)"
