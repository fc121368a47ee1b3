"""Values of all ranks are gathered as JSON, not as pickles, and a text that is too long is refused by all."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.elastic.supervisor import Supervisor
from meshwright.measure.collective_counter import CollectiveCounter
from meshwright.parallel.json_gather import MAX_BYTES, all_gather_json
from meshwright.parallel.mesh import Mesh, destroy_mesh, init_mesh
from meshwright.spec.load import load_job


def value_of(rank: int):
    """Of another length on each rank; with a checksum of 64 bits, and a name that is not ASCII."""
    return [f"höst-{rank}" * (1 + 50 * rank), {"sum": 2**63 - rank, "nothing": None}]


def gather(run_dir, listener):
    """One rank."""
    mesh = init_mesh(load_job(run_dir + "/job.toml", ["layout.dp_replicate=2"]), CollectiveCounter())
    assert all_gather_json(value_of(mesh.rank), mesh) == [value_of(0), value_of(1)]
    try:
        all_gather_json("x" * (MAX_BYTES if mesh.rank else 1), mesh)
    except ValueError as error:
        refused = str(error)
    listener({"event": "gathered", "rank": mesh.rank, "refused": refused})
    destroy_mesh(mesh)
    return 0


def test_ranks_gather_values_of_different_length(job_file, tmp_path):
    events = []
    Supervisor(f"{__name__}:gather", tmp_path, 2, 0, 10.0, events.append).run()
    refused = [event["refused"] for event in events if event["event"] == "gathered"]
    assert refused == [f"rank 1 has {MAX_BYTES + 2} bytes; at most {MAX_BYTES} are sent"] * 2


def test_one_process_gets_its_own_value():
    alone = Mesh(0, 1, torch.device("cpu"))
    (found,) = all_gather_json({"norm": math.inf, "ranks": (1, 2)}, alone)
    assert found == {"norm": math.inf, "ranks": [1, 2]}
    with pytest.raises(TypeError):
        all_gather_json(object(), alone)
