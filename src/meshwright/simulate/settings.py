"""What a user may set for a simulation of failures; what is left out has a default that is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FailureSettings:
    """Settings of :meth:`meshwright.Job.simulate_failures`. None: the default."""

    every_minutes: float | None = None
    """Training between two checkpoints. Default: Daly's interval."""
    spares: int | None = None
    """Spare nodes. Default: the number with the most useful work per paid device hour."""
    save_s: float | None = None
    """Training that a save costs. Default: size of the checkpoint / bandwidth of the storage."""
    detect_s: float | None = None
    """From a failure to its detection. Default: ``elastic.heartbeat_timeout_s`` of the job."""
    restart_s: float | None = None
    """From detection to the start of the load. Default: the rest of the planner's 10 minutes."""
    load_s: float | None = None
    """Reading the checkpoint. Default: its size / bandwidth of the storage."""
    repair_hours: float = 24.0
    """From the detection of a failed node until it can be used again."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Failures per 1,000 node-days by kind. Default: the cluster's rate, in the shares of Llama 3."""
