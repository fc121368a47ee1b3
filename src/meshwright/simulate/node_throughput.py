"""The throughput of a job on fewer nodes than it was planned for, with the layout that the planner finds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from meshwright.layout.parameters import count_parameters
from meshwright.plan.memory.fit import usable_bytes
from meshwright.plan.predict import complete_layout, predict
from meshwright.plan.search.fewer_devices import list_data_layouts, list_fewer
from meshwright.plan.search.find import find_layouts, with_cluster
from meshwright.plan.sizing import CHECKPOINT_BYTES
from meshwright.spec.job import Job
from meshwright.spec.layout import Layout
from meshwright.spec.legality.table import find_problems, with_layout
from meshwright.spec.model import DecoderModel

SEARCH_S = 2.0
"""Longest search of one number of nodes, in CPU seconds."""
Throughput = tuple[tuple[int, float], ...]
"""Numbers of nodes, ascending, with their share of the throughput of the complete run."""


def does_replan(job: Job, replan: bool | None) -> bool:
    """Whether a run goes on with fewer nodes: as set, else by ``elastic.may_change``."""
    return job.elastic.may_change != "nothing" if replan is None else replan


def replica_nodes(job: Job) -> int:
    """Nodes of one data-parallel replica, by the job's degrees; 1 if the whole layout may change."""
    layout = job.layout
    if job.elastic.may_change == "any":
        return 1
    return math.ceil(layout.pp * layout.cp * layout.tp / job.cluster.devices_per_node)


def least_nodes(job: Job) -> int:
    """A lower bound: weights and optimizer state must fit the memory of all devices."""
    room = job.cluster.devices_per_node * usable_bytes(job.cluster)
    return max(1, math.ceil(CHECKPOINT_BYTES * count_parameters(job.model) / room))


class NodePlanner:
    """Plans a job on fewer nodes; each number of nodes once."""

    def __init__(self, job: Job) -> None:
        """Plan nothing yet.

        Args:
            job: On the whole of its cluster.
        """
        self.job = job
        self.is_searched = isinstance(job.model, DecoderModel) and (
            job.layout.mode == "auto" or job.elastic.may_change == "any"
        )
        """Whether the planner chooses the layout for fewer nodes, and not only its data-parallel degrees."""
        self._step_s: dict[int, float | None] = {}

    def step_s(self, nodes: int) -> float | None:
        """The predicted step of the best layout that uses every device of so many nodes; None without one.

        Layouts do not offload. Where the layout is not searched, some devices may be idle.
        """
        if nodes not in self._step_s:
            given = self.job.layout.mode == "given" and nodes == self.job.cluster.nodes
            searched = self.is_searched and not given
            self._step_s[nodes] = self._search(nodes) if searched else self._predict(nodes)
        return self._step_s[nodes]

    def _search(self, nodes: int) -> float | None:
        if nodes < least_nodes(self.job):
            return None
        worlds = [nodes * self.job.cluster.devices_per_node]
        smaller = with_cluster(self.job, nodes=nodes)
        found = find_layouts(smaller, {"offload": "none"}, 1, worlds=worlds, budget_s=SEARCH_S)
        return found.best[0].step_s if found.best else None

    def _predict(self, nodes: int) -> float | None:
        """For the job's layout with other data-parallel degrees."""
        smaller, layout = with_cluster(self.job, nodes=nodes), self.job.layout
        if layout.mode == "auto":  # an image model
            return None
        layouts: Iterable[Layout] = [layout]
        if nodes < self.job.cluster.nodes:
            anew = replace(layout, placement="auto")
            layouts = list_data_layouts(anew, smaller.cluster.world_size, smaller)
        for changed in layouts:
            settled = with_layout(smaller, complete_layout(smaller, changed))
            if not find_problems(settled, to_run=False):
                prediction = predict(settled, settled.layout)
                if prediction.fits:
                    return prediction.step_s
        return None

    def find_fewest(self) -> int | None:
        """The fewest nodes that hold the job without offloading: the lower bound, and doublings of it.

        A job with a given layout needs the nodes of one replica, unless the whole layout may change. None if
        the cluster does not hold the job.
        """
        most = self.job.cluster.nodes
        if not self.is_searched:
            return min(replica_nodes(self.job), most)
        nodes = least_nodes(self.job)
        while nodes < most:
            if self.step_s(nodes) is not None:
                return nodes
            nodes *= 2
        return most if self.step_s(most) is not None else None

    def find_throughput(self, fewest: int, most_missing: int, each: int) -> Throughput:
        """The throughput of fewer nodes, with their best layouts; empty if the planner does not find it.

        Args:
            fewest: Nodes to go on with.
            most_missing: Nodes that are hardly ever missing at once; fewer nodes are not planned.
            each: Nodes of one replica.
        """
        nodes, found = self.job.cluster.nodes, []
        full_s = self.step_s(nodes)
        if full_s is None:
            return ()
        tried = [replicas * each for replicas in list_fewer((nodes - 1) // each)]
        for fewer in [*(fewer for fewer in tried if fewer > fewest), fewest]:
            if fewer < nodes and (step_s := self.step_s(fewer)):
                found.append((fewer, min(1.0, full_s / step_s)))
            if found and fewer <= nodes - most_missing:
                break
        return (*sorted(found), (nodes, 1.0)) if found else ()
