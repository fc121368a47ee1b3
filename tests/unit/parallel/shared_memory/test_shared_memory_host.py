"""Which ranks have shared memory, and what a rank does that has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from meshwright.core.errors import UserError
from meshwright.launch.collective_memory import CollectiveMemory
from meshwright.launch.environment import COLLECTIVE_MEMORY_VARIABLE
from meshwright.parallel.shared_memory.host import HostRanks

LAYOUT = {"dp_replicate": 2, "micro_batch": 1}
ALONE = {"device": "cpu", "nodes": 2, "devices_per_node": 1}


def announce(job, backend="gloo"):
    return HostRanks(job, dist.HashStore(), 0, backend)


@pytest.fixture
def agent(monkeypatch):
    """The memory of an agent in this process."""
    memory = CollectiveMemory()
    monkeypatch.setenv(COLLECTIVE_MEMORY_VARIABLE, f"0:{memory.path(0)}")
    yield memory
    memory.close()


def test_shared_memory_without_an_agent_is_an_error(make_job, monkeypatch):
    monkeypatch.delenv(COLLECTIVE_MEMORY_VARIABLE, raising=False)
    job = make_job(layout=LAYOUT, cluster={"device": "cpu"}, train={"transport": "shared_memory"})
    with pytest.raises(UserError) as raised:
        announce(job)
    assert [problem.code for problem in raised.value.problems] == ["transport-missing"]


def test_a_rank_that_is_alone_on_its_node_needs_no_shared_memory(make_job, monkeypatch):
    """The setting has no effect there, as the plan reports: it is no error."""
    monkeypatch.delenv(COLLECTIVE_MEMORY_VARIABLE, raising=False)
    job = make_job(layout=LAYOUT, cluster=ALONE, train={"transport": "shared_memory"})
    announce(job).close()


def test_ranks_that_may_not_watch_processes_use_gloo(make_job, agent, monkeypatch):
    def refuse(pid, flags=0):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    ranks = announce(make_job(layout=LAYOUT, cluster={"device": "cpu"}))
    assert ranks.open_transport([], [[0, 1]], lambda wait: wait()) is None


def test_a_rank_that_does_not_join_leaves_no_descriptor(make_job, agent):
    job = make_job(layout=LAYOUT, cluster={"device": "cpu"})
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        announce(job).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
