"""Initial weights of a rank with tp or ep: the rows of its shard, without the rest of a parameter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from meshwright.layout.axes import EXPERT_AXIS, axis_rank, expert_axis
from meshwright.layout.parameters import list_parameters
from meshwright.layout.tensor_parallel import is_kv_projection, is_tp_replicated
from meshwright.models import weight_source
from meshwright.models.weight_source import RandomWeights
from meshwright.parallel.build import ShardedWeights
from meshwright.parallel.local_shards import LocalShards

LAYOUTS = (
    {"tp": 2},
    {"tp": 4, "dp_shard": 2, "zero": 3},
    {"ep": 2, "dp_shard": 2},
    {"ep": 2, "etp": 2, "tp": 2, "dp_shard": 2, "sequence_parallel": True},
)


MODEL = {
    "num_layers": 2, "hidden_size": 64, "num_heads": 8, "num_kv_heads": 2, "ffn_size": 96, "vocab_size": 1001,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 32, "shared_experts": 1}


@pytest.fixture
def shards_of(make_job):
    """``shards_of(layout, rank)``: a job with experts where the layout has ep, and the shards of a rank."""

    def make(layout, rank):
        model = {"preset": None, **MODEL, **(EXPERTS if "ep" in layout else {})}
        job = make_job(model=model, layout={"micro_batch": 1, **layout}, train={"global_batch": 8})
        group = SimpleNamespace(
            size=lambda: expert_axis(job.layout).size,
            rank=lambda: axis_rank(job.layout, rank, EXPERT_AXIS),
            group_name="",
        )
        groups = {EXPERT_AXIS: group} if "ep" in layout else {}
        mesh = SimpleNamespace(rank=rank, groups=groups, group=groups.get)
        replicas = max(1, job.layout.tp // job.model.num_kv_heads)

        def replicas_of(name):
            return job.layout.tp if is_tp_replicated(name) else replicas if is_kv_projection(name) else 1

        tp = SimpleNamespace(size=job.layout.tp, replicas_of=replicas_of) if job.layout.tp > 1 else None
        return job, LocalShards(job, mesh, tp)

    return make


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_of_a_shard_are_those_of_the_full_parameter(shards_of, layout):
    """Of every parameter and rank; vocabularies that tp does not divide end with zeros."""
    for rank in range(4):
        job, shards = shards_of(layout, rank)
        weights = RandomWeights(job.model, 5)
        sharded = ShardedWeights(weights, shards)
        for parameter in list_parameters(job.model):
            name = parameter.name
            expected = shards.shard(name, weights.full_tensor(name))
            assert torch.equal(sharded.full_tensor(name), expected), (rank, name)
            for first, last in ((0, 1), (1, len(expected)), (len(expected) // 2, len(expected))):
                assert torch.equal(sharded.rows(name, first, last), expected[first:last]), (rank, name)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_rank_draws_no_rows_of_others(shards_of, monkeypatch, layout):
    """Of a matrix whose rows tp or ep shards. Where columns are sharded, it draws whole rows."""
    job, shards = shards_of(layout, 1)
    sharded, drawn = ShardedWeights(RandomWeights(job.model, 5), shards), []

    def count(name: str, size: int, part: range, *others: float) -> torch.Tensor:
        drawn.append(len(part))
        return torch.zeros(len(part))

    monkeypatch.setattr(weight_source, "draw", count)
    saved = False
    for parameter in list_parameters(job.model):
        drawn.clear()
        found = sharded.full_tensor(parameter.name)
        if len(parameter.shape) > 1 and found.shape[1:] == parameter.shape[1:]:
            assert sum(drawn) <= found.numel(), parameter.name
            saved = saved or found.numel() < parameter.count
    assert saved
