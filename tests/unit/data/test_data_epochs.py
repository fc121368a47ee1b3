"""Epochs of data that grow: every sample once per epoch, and positions that keep their meaning."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.corpus_file import parse_corpus, read_corpus, write_corpus
from meshwright.data.epochs import CorpusState, EpochRow, GrowingOrder, extend_table
from meshwright.data.identity import ShardIdentity, SourceIdentity, SplitIdentity
from meshwright.data.order import SampleOrder


def source(*counts: int) -> SourceIdentity:
    """A source with this many samples in its shards."""
    last = ShardIdentity(sum(counts), "", 1, "")
    split = SplitIdentity(len(counts), f"{counts}", last)
    return SourceIdentity("", "uint16", split, split, sum(counts), f"index {counts}")


def state(*counts: int) -> CorpusState:
    return CorpusState.first(f"data {counts}", {"": source(*counts)})


def grow(shards: list[int], steps: list[int]) -> list[list[int]]:
    """The counts of shards after each growth: a step below 10 extends the last shard, others add one."""
    found = [shards]
    for step in steps:
        old = found[-1]
        found.append([*old[:-1], old[-1] + step] if step < 10 else [*old, step])
    return found


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), max_size=5),
    st.integers(0, 2**64),
)
def test_every_epoch_reads_every_sample_once(shards, growth, seed):
    """Growth at any positions. What was read before does not change, whenever the order is built."""
    versions = grow(shards, [step for step, _ in growth])
    now, position = state(*shards), 0
    order = GrowingOrder(shards, seed, now.epochs[""], window=5)
    read: list[int] = []
    for counts, (_, ahead) in zip(versions[1:], growth, strict=True):
        read += order.samples_at(np.arange(position, position + ahead)).tolist()
        position += ahead
        now = now.grown(state(*counts), {"": position})
        order = GrowingOrder(counts, seed, now.epochs[""], window=5)
        assert order.samples_at(np.arange(position)).tolist() == read
    table, last = now.epochs[""], sum(versions[-1])
    ends = [row.begin + row.samples for row in table]
    end = max(position, ends[-1] + 2 * last)
    samples = order.samples_at(np.arange(end))
    begins = sorted({row.begin for row in table})
    for begin, following in zip(begins, [*begins[1:], end], strict=True):
        size = [row.samples for row in table if row.begin == begin][-1]
        for first in range(begin, following - size + 1, size):
            assert sorted(samples[first : first + size].tolist()) == list(range(size))


def test_data_that_did_not_grow_keep_their_order():
    counts, positions = [7, 3, 5], np.arange(60)
    table = state(*counts).epochs[""]
    growing = GrowingOrder(counts, 3, table, window=4).samples_at(positions)
    assert growing.tolist() == SampleOrder(counts, 3, window=4).samples_at(positions).tolist()


@pytest.mark.parametrize(
    ("position", "epoch", "begin"),
    [
        pytest.param(0, 0, 0, id="nothing read"),
        pytest.param(9, 0, 0, id="in the first epoch"),
        pytest.param(10, 0, 0, id="the new samples come before the old ones again"),
        pytest.param(11, 1, 10, id="the second epoch has begun"),
        pytest.param(35, 3, 30, id="later"),
    ],
)
def test_the_running_epoch_is_extended(position, epoch, begin):
    table = extend_table(state(10).epochs[""], position, source(10, 4))
    assert table[-1] == EpochRow(epoch, begin, 14, "index (10, 4)")


def test_a_checkpoint_goes_on_with_the_longer_data():
    """A checkpoint may be older than the data at the start of the run, or newer."""
    old, new = state(10), state(10, 4)
    assert old.continued(new, {"": 25}).epochs[""][-1].epoch == 2
    saved = old.grown(new, {"": 5})
    assert saved.continued(old, {"": 8}) == saved
    assert saved.continued(new, {"": 8}) == saved
    assert CorpusState("images").continued(new, {}) == new


def test_a_state_is_the_same_after_json(tmp_path):
    grown = state(10).grown(state(10, 4), {"": 5})
    assert parse_corpus(json.loads(json.dumps(asdict(grown)))) == grown
    key = write_corpus(tmp_path, grown)
    assert read_corpus(tmp_path, key) == grown
    assert write_corpus(tmp_path, state(10)) != key
