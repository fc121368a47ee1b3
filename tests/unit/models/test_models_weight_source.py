"""Initial weights: the rows that a rank draws are those of the full parameter."""

from __future__ import annotations

import dataclasses
from typing import cast

import pytest
import torch
from torch import nn

from meshwright.models import weight_source
from meshwright.models.init import fill
from meshwright.models.weight_source import BLOCK_SIZE, RandomWeights, ZeroWeights, draw
from meshwright.parallel.build import ShardedWeights
from meshwright.parallel.local_shards import LocalShards
from meshwright.spec.model import DecoderModel

MODEL = DecoderModel(
    num_layers=1, hidden_size=96, num_heads=2, num_kv_heads=2, ffn_size=64, vocab_size=25_001
)
"""The embedding has 2.3 blocks; its rows do not end where blocks do."""
SEED = 5


def test_rows_are_those_of_the_full_tensor_with_any_number_of_threads():
    full = RandomWeights(MODEL, SEED).full_tensor("embed.weight")
    assert full.shape == (25_001, 96)
    for threads in (1, 3):
        weights = RandomWeights(MODEL, SEED, threads)
        for first, last in ((0, 1), (0, 25_001), (10_922, 10_924), (7, 24_000), (25_000, 25_001)):
            assert torch.equal(weights.rows("embed.weight", first, last), full[first:last])


def test_every_block_has_numbers_of_its_own():
    values = draw("w", 3 * BLOCK_SIZE, range(3 * BLOCK_SIZE), SEED, 0.02).view(3, BLOCK_SIZE)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert torch.corrcoef(torch.stack((values[one], values[other])))[0, 1].abs() < 0.005
    assert values.std().item() == pytest.approx(0.02, rel=0.01)
    assert values.mean().abs().item() < 1e-4


def test_values_of_later_blocks_are_frozen():
    """A change would silently change every run with a parameter of more than a million values."""
    expected = [-0.008902053348720074, -0.0230715312063694, -0.0063328552059829235]
    values = draw("embed.weight", BLOCK_SIZE + 3, range(BLOCK_SIZE, BLOCK_SIZE + 3), 0, 0.02)
    assert values.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_a_shard_is_filled_with_the_rows_that_torch_chunk_gives_it(shards):
    """Seven shards of 25,001 rows: the last one is smaller."""
    weights = RandomWeights(MODEL, SEED)
    full = weights.full_tensor("embed.weight")
    for shard in range(shards):
        with torch.device("meta"):
            network = nn.ModuleDict({"embed": nn.Embedding(25_001, 96)})
        fill(network, ["embed.weight"], weights, torch.device("cpu"), shard, shards)
        found = network["embed"].weight.detach().chunk(shards)[shard]
        assert torch.equal(found, full.chunk(shards)[shard])


def test_a_rank_without_rows_draws_none(monkeypatch):
    """Of 5 rows in 4 shards the fourth rank has none."""
    few = dataclasses.replace(MODEL, vocab_size=5)
    network = nn.ModuleDict({"embed": nn.Embedding(5, 96)})
    drawn = []
    monkeypatch.setattr(weight_source, "draw", lambda *arguments: drawn.append(arguments))
    fill(network, ["embed.weight"], RandomWeights(few, SEED), torch.device("cpu"), 3, 4)
    assert drawn == []


def test_a_rank_draws_the_blocks_of_its_rows_only(monkeypatch):
    drawn = []

    def count(name: str, size: int, part: range, *others: float) -> torch.Tensor:
        drawn.append(len(part))
        return torch.zeros(len(part))

    monkeypatch.setattr(weight_source, "draw", count)
    with torch.device("meta"):
        network = nn.ModuleDict({"embed": nn.Embedding(25_001, 96)})
    fill(network, ["embed.weight"], RandomWeights(MODEL, SEED), torch.device("cpu"), 1, 8)
    assert drawn == [3_126 * 96]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_run_that_loads_its_weights_copies_none_to_the_device(monkeypatch, shards, device):
    """They are zeroed where they are allocated. The other rows of a shard stay as they are."""
    monkeypatch.setattr(ZeroWeights, "full_tensor", lambda self, name: pytest.fail("made on the CPU"))
    with torch.device(device):
        network = nn.ModuleDict({"embed": nn.Embedding(25_001, 96)})
        if device == "cpu":
            nn.init.ones_(network["embed"].weight)
    fill(network, ["embed.weight"], ZeroWeights(MODEL), torch.device("cpu"), 1 % shards, shards)
    chunks = network["embed"].weight.detach().chunk(shards)
    assert not chunks[1 % shards].any()
    if shards > 1 and device == "cpu":
        assert chunks[0].all()


def test_shards_of_zeros_are_zeros():
    """A rank with tp or ep asks ``ShardedWeights``, which passes on that nothing needs to be copied."""
    shards = cast("LocalShards", None)  # not asked
    assert ShardedWeights(ZeroWeights(MODEL), shards).is_zero
    assert not ShardedWeights(RandomWeights(MODEL, SEED), shards).is_zero
