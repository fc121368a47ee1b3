"""What the supervisor sends to agents to start ranks and spares."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.elastic.rank_view import RankView
from meshwright.launch.agent_pool import AgentPool
from meshwright.launch.environment import DEVICE_VARIABLE, NODE_VARIABLE, PEAK_VARIABLE
from meshwright.launch.rank_process import RankCommand

LOGS = "logs"


@dataclass(frozen=True)
class RankStarter:
    """Starts the processes of one layout."""

    entry: str
    """``module:function``, called as ``function(run_dir, link)`` in each rank."""
    run_dir: Path
    world_size: int
    environment: Mapping[str, str]
    """Environment of every rank, besides torchrun's variables."""
    keep_snapshots: bool
    agents: AgentPool
    layout_generation: int
    """First generation of the layout: names the plan of its snapshots."""

    def log(self, rank: int) -> Path:
        """The file with the output of a rank."""
        return self.run_dir / LOGS / f"rank-{rank}.log"

    def start(self, rank: RankView, command: RankCommand) -> None:
        """Let the agent of a rank start a process for it."""
        rank.alive = True
        device = self.agents.placement.devices[rank.rank]
        own = {
            "RANK": str(rank.rank),
            DEVICE_VARIABLE: str(device.number),
            "LOCAL_WORLD_SIZE": str(len(self.agents.placement.ranks_on(device.node))),
            NODE_VARIABLE: str(device.node),
        }
        if rank.peak_flops_per_s is not None:
            own[PEAK_VARIABLE] = repr(rank.peak_flops_per_s)
        self.agents.send(
            rank.rank,
            {
                "do": "start",
                "rank": rank.rank,
                "entry": self.entry,
                "run_dir": str(self.run_dir),
                "environment": {**self._shared_environment(), **own},
                "log": str(self.log(rank.rank)),
                "command": command.as_dict(),
                "keep_snapshots": self.keep_snapshots,
                "layout_generation": self.layout_generation,
            },
        )

    def keep_spares(self, count: int) -> None:
        """Let every agent keep a number of processes without a rank."""
        self.agents.broadcast(
            {
                "do": "keep_spares",
                "count": count,
                "entry": self.entry,
                "run_dir": str(self.run_dir),
                "environment": self._shared_environment(),
                "log": str(self.run_dir / LOGS / "spares.log"),
            }
        )

    def _shared_environment(self) -> dict[str, str]:
        """Environment of all ranks and spares."""
        environment = {**self.environment, "WORLD_SIZE": str(self.world_size)}
        if self.world_size > 1:
            environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", self.agents.interface)
        return environment
