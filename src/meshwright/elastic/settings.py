"""The settings of a supervisor, and what it takes over from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.core.events import Event
from meshwright.elastic.layout_change import EarlierLayout, LayoutChoice
from meshwright.elastic.policy import Budget
from meshwright.elastic.straggler_policy import StragglerHandling
from meshwright.launch.agent_pool import AgentPool
from meshwright.launch.placement import Placement


@dataclass
class SupervisorSettings:
    """How a supervisor runs the ranks of a job."""

    entry: str
    """``module:function``, called as ``function(run_dir, link)`` in each rank."""
    run_dir: Path
    world_size: int
    generation: int
    stop_grace_s: float
    listener: Callable[[Event], None]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of every rank, besides torchrun's variables."""
    preload: Sequence[str] = ()
    """Modules that the fork server imports."""
    heartbeat_timeout_s: float = 0.0
    """Time within which a silent or stuck rank is found; 0 for never."""
    budget: Budget = field(default_factory=Budget)
    """What the run may spend on failures."""
    find_checkpoint: Callable[[], str | None] = lambda: None
    """Finds the checkpoint to go on from, where there is no snapshot."""
    orphan_s: float = 0.0
    """How long the ranks go on when this process has died; 0: they are killed."""
    spares: int = 0
    """Warm processes without a rank to keep."""
    fences_unresponsive: bool = True
    """Whether a process that does not answer is fenced and may rejoin. On GPUs it is killed: it would hold
    the device memory that its successor needs."""
    agents: AgentPool | None = None
    """The agents of all nodes; by default a new one on this machine."""
    placement: Placement | None = None
    """Placement of the ranks of that new one; by default in rank order."""
    adopts: bool = False
    """Whether the ranks of these agents train already."""
    join_timeout_s: float = 300.0
    """How long to wait for the agents of all nodes."""
    furthest_step: int = 0
    """Steps that ranks to adopt have done."""
    stragglers: StragglerHandling = field(default_factory=StragglerHandling)
    """Names stragglers, and decides what to do with them; by default it names none."""
    layouts: LayoutChoice | None = None
    """Chooses another layout when devices are lost or come back; None: the layout may not change."""
    stops: Sequence[int] = ()
    """Signals that came before this supervisor: between two layouts."""
    earlier: EarlierLayout | None = None
    """The previous layout, if this one takes over its agents."""
