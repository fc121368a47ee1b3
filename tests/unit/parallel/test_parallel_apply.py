"""All parallelism axes are applied to a model in one order, and replaced modules keep their parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.models.init import find_weight_source
from meshwright.models.linear import Linear
from meshwright.parallel import apply
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from meshwright.spec.load import load_job

ORDER = [
    *("build_local_model", "apply_context_parallel", "apply_tensor_parallel", "apply_expert_parallel"),
    *("init_weights", "apply_activation_checkpointing", "apply_block_backend", "apply_data_parallel"),
]


def test_axes_are_applied_from_the_innermost_to_the_outermost(job_file, monkeypatch):
    """The order is pp, cp, tp, ep, activation checkpointing, the block backend, then data parallel."""
    called = []

    def record(name):
        honest = getattr(apply, name)
        monkeypatch.setattr(apply, name, lambda *given: called.append(name) or honest(*given))

    for name in ORDER:
        record(name)
    job = load_job(str(job_file), ["layout.dp_replicate=1"])
    found = apply.parallelize(job, Mesh(0, 1, torch.device("cpu")), find_weight_source(job, from_hf=False))
    assert called == ORDER
    assert found.module is found.model
    assert not any(parameter.is_meta for parameter in found.model.parameters())


class OneRank:
    """A tp group of one rank without collectives."""

    rank = 0

    def prepare_input(self, x):
        return x

    def reduce_output(self, x):
        return x


@pytest.mark.parametrize("bias", [False, True])
def test_tensor_parallel_linears_take_the_parameters_and_keep_nothing_else(bias):
    """Hooks and other settings of the replaced module are not copied."""
    torch.manual_seed(1)
    linear = Linear(8, 6, bias=bias)
    x = torch.randn(3, 8)
    linear.register_forward_hook(lambda *_: pytest.fail("a hook of the replaced module"))
    for module in (
        ColumnParallelLinear(linear, OneRank(), input_prepared=False),
        RowParallelLinear(linear, OneRank()),
    ):
        assert module.weight is linear.weight
        assert module.bias is linear.bias
        assert vars(module) is not vars(linear)
        seen = []
        module.register_forward_hook(lambda *_, seen=seen: seen.append(True))
        torch.testing.assert_close(module(x), nn.functional.linear(x, linear.weight, linear.bias))
        assert seen == [True]


def test_vocab_parallel_embedding_stays_tied():
    """A head that shares the embedding's parameter still shares it after the replacement."""
    table = nn.Embedding(5, 4)
    embedding = VocabParallelEmbedding(table, OneRank())
    assert embedding.weight is table.weight
    tokens = torch.tensor([[0, 4, 2]])
    torch.testing.assert_close(embedding(tokens), table(tokens))
