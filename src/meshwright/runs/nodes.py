"""The supervisor's side of a run on several nodes: where agents join, and what they get and check."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from meshwright.core.errors import Problem, UserError
from meshwright.core.object_path import AnyPath, parse_location
from meshwright.data.fingerprint import fingerprint_folder
from meshwright.launch.assignment import ASSIGNMENT_FILE, Assignment
from meshwright.launch.channel import Message
from meshwright.launch.join import JoinListener
from meshwright.launch.network import Address, ListenOptions
from meshwright.launch.placement import Placement
from meshwright.launch.remote_nodes import RemoteNodes
from meshwright.launch.token_file import create_token
from meshwright.plan.contract import PLAN_FILE, PlanContract
from meshwright.runs.ranks import refuse_nodes
from meshwright.runs.reporter import Reporter
from meshwright.spec.cluster import Cluster

NONCE_FILE = ".node-check"
"""In ``checkpoint.dir``: agents read it, to show that they reach the folder."""


@dataclass(frozen=True)
class NodeListener:
    """Where the agents of the other nodes join."""

    listener: JoinListener
    token_file: Path

    @classmethod
    @contextlib.contextmanager
    def opened(
        cls, cluster: Cluster, options: ListenOptions, reporter: Reporter
    ) -> Iterator[NodeListener | None]:
        """Listen for agents, if the cluster has several nodes; None otherwise.

        Raises:
            UserError: The address or the token file cannot be used, or one is missing.
        """
        if cluster.nodes == 1:
            options.refuse("with cluster.nodes=1", fix="Set cluster.nodes")
            yield None
            return
        if options.address is None or options.token_file is None:
            raise refuse_nodes(cluster.nodes)
        found = cls._open(cluster, options.address, options.token_file, reporter)
        try:
            yield found
        finally:
            found.listener.close()

    @classmethod
    def _open(cls, cluster: Cluster, listen: str, token_file: Path, reporter: Reporter) -> NodeListener:
        address = Address.parse(listen, "listen")
        found = cls(JoinListener(address, create_token(token_file)), token_file)
        others = "another node" if cluster.nodes == 2 else f"{cluster.nodes - 1} other nodes"
        reporter.progress(f"run on {others}, with a copy of the token file (mode 0600):")
        reporter.progress(f"  meshwright agent --join {found.listener.address} --token-file {token_file}")
        return found

    def serve(self, plan: PlanContract, assignment: Assignment, adopting: bool = False) -> RemoteNodes:
        """Accept the agents of a run.

        Args:
            plan: Plan of the run.
            assignment: Assignment of the run, with absolute paths.
            adopting: Whether their ranks still train and are taken over.
        """
        command = _NodeCommand(plan, assignment)
        count, torch = plan.job.cluster.nodes, version("torch")
        orphan_s = plan.job.elastic.orphan_s
        return RemoteNodes(self.listener, count, command.run, command.describe, adopting, torch, orphan_s)


def place_ranks(plan: PlanContract, assignment: Assignment | None = None) -> Placement:
    """The device of each rank: as the assignment has it, or as planned.

    Raises:
        UserError: A node would have no rank.
    """
    if assignment is not None and assignment.placement is not None:
        return Placement.from_pairs(assignment.placement)
    require_ranks(plan)
    return Placement.from_plan(plan.rank_placement)


def require_ranks(plan: PlanContract) -> None:
    """Check that every node has a rank.

    Raises:
        UserError: A node would have none.
    """
    cluster, ranks, placed = plan.job.cluster, plan.world_size, plan.rank_placement
    used = len(placed.list_nodes())
    if used < cluster.nodes:
        rule = f"leaves a node without a rank: {ranks} ranks, {placed.per_node} per node"
        fix = f"Use cluster.nodes={used}, or set cluster.devices_per_node"
        if plan.placement:
            rule, fix = f"leaves a node without a rank: layout.placement uses {used}", "Place a rank on each"
        raise UserError(Problem("node-idle", rule, path="cluster.nodes", value=cluster.nodes, fix=fix))


def make_absolute(assignment: Assignment) -> Assignment:
    """The assignment with absolute paths: other nodes have another working folder."""
    found = replace(
        assignment,
        checkpoint_dir=str(parse_location(assignment.checkpoint_dir).resolve()),
        resume_from=str(parse_location(assignment.resume_from).resolve()) if assignment.resume_from else None,
        stores=[str(store.resolve()) for store in _list_stores(assignment)],
        eval_sets={name: str(Path(folder).resolve()) for name, folder in assignment.eval_sets.items()},
    )
    found.write()
    return found


def remove_nonces(assignment: Assignment) -> None:
    """Delete the files that showed the agents that they reach the checkpoints."""
    for store in _list_stores(assignment):
        with contextlib.suppress(OSError):
            for path in store.glob(f"{NONCE_FILE}-*"):
                path.unlink(missing_ok=True)


def _list_stores(assignment: Assignment) -> list[AnyPath]:
    return [parse_location(store) for store in assignment.stores or [assignment.checkpoint_dir]]


def read_files(run_dir: Path, *names: str) -> dict[str, str]:
    """Files of the run folder, for those of other nodes."""
    return {name: (run_dir / name).read_text(encoding="utf-8") for name in names}


class _NodeCommand:
    """The data that an agent gets when it joins: files of its ranks, and the paths that it must reach."""

    def __init__(self, plan: PlanContract, assignment: Assignment) -> None:
        self._plan, self._assignment = plan, assignment
        run_dir = Path(assignment.run_dir).resolve()
        self.run = f"{socket.gethostname()}:{run_dir}"
        data = [assignment.data_dir, *assignment.eval_sets.values()]
        hf = getattr(plan.job.model, "hf", None)
        if assignment.hf_weights and hf is not None:
            data.append(hf)
        self._data = {folder: fingerprint_folder(Path(folder)) for folder in data}

    def describe(self, node: int) -> Message:
        """The command for one node, with the files as they are now."""
        run_dir = Path(self._assignment.run_dir)
        nonce, stores = secrets.token_hex(16), _list_stores(self._assignment)
        for store in stores:
            with contextlib.suppress(OSError):  # then the agent reports that it does not find it
                store.mkdir(parents=True, exist_ok=True)
                (store / f"{NONCE_FILE}-{node}").write_text(nonce, encoding="utf-8")
        return {
            "do": "prepare",
            "run": self.run,
            "node": node,
            "name": run_dir.resolve().name,
            "orphan_s": self._plan.job.elastic.orphan_s,
            "files": read_files(run_dir, PLAN_FILE, ASSIGNMENT_FILE),
            "checkpoints": [
                {"path": str(store), "file": f"{NONCE_FILE}-{node}", "nonce": nonce} for store in stores
            ],
            "data": self._data,
        }
