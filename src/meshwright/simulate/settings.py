"""The settings of a simulation of failures; defaults are printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.core.errors import Problem, UserError


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
    """Failures per 1,000 node-days by kind. Default: the cluster's rate, in the shares of Llama 3; no
    preemptions."""
    repair: str = "fixed"
    """Distribution of the repair time: ``fixed`` or ``exponential``."""
    nodes_per_switch: int = 1
    """Nodes that a switch failure takes out of service."""
    snapshot_minutes: float | None = None
    """Training between in-memory snapshots. Default: no snapshots."""
    snapshot_cost_s: float | None = None
    """Training that a snapshot costs. Default: state of a device / ``cluster.host_bytes_per_s``."""
    replan: bool | None = None
    """Go on with fewer nodes instead of waiting, and grow when nodes are back. Default: whether
    ``elastic.may_change`` of the job allows it."""
    min_nodes: int | None = None
    """Fewest nodes to go on with. Default: the fewest on which the planner finds a layout."""
    nodes_per_replica: int | None = None
    """A run with fewer nodes has a multiple of this. Default: nodes of ``pp x cp x tp`` devices; 1
    if ``elastic.may_change`` is ``any``."""
    price_factor: float = 1.0
    """Price of preemptible machines over ``cluster.cost_per_hour``."""
    notice_s: float = 30.0
    """From the notice of a preemption until the node is gone."""
    replace_hours: float = 1.0
    """From a preemption until another node is there."""

    @staticmethod
    def check_goodput(goodput: float) -> None:
        """Refuse a goodput that is no share.

        Raises:
            UserError: It is below 0 or above 1.
        """
        if not 0 <= goodput <= 1:
            rule, fix = "must be between 0 and 1", "Use a share such as 0.59"
            raise UserError(
                Problem("simulate-goodput", rule, "observed_goodput", goodput, fix, is_argument=True)
            )
