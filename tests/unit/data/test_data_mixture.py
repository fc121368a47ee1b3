"""Mixtures: the share of each source is exact in every window, and a position needs no history."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.core.errors import UserError
from meshwright.data.dataset import TokenDataset
from meshwright.data.mixture import (
    MAX_PERIOD,
    MIXTURE_FILE,
    MixedSource,
    MixtureOrder,
    MixturePattern,
    read_mixture,
    write_mixture,
)
from meshwright.data.order import SampleOrder
from meshwright.data.prepare import CorpusSpec, prepare_corpus

WEIGHTS = st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0, 2.0, 3.0, 7.0]), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_every_window_has_the_share_of_each_source(weights):
    assume(any(weights))
    pattern = MixturePattern(weights)
    shares = np.asarray(weights) / sum(weights)
    source, index = pattern.locate(np.arange(2 * pattern.period + 3))
    taken = np.cumsum(source[:, None] == np.arange(len(weights)), axis=0)
    wanted = np.arange(1, len(source) + 1)[:, None] * shares
    assert np.abs(taken - wanted).max() < 1, "up to any position, off by less than one sample"
    period = taken[pattern.period :] - taken[: -pattern.period]
    assert (period == np.asarray(pattern.counts)).all(), "any window of one period is exact"
    assert np.asarray(pattern.counts) / pattern.period == pytest.approx(shares)
    for number in range(len(weights)):
        assert index[source == number].tolist() == list(range((source == number).sum()))


def test_the_count_of_a_position_needs_no_history():
    pattern = MixturePattern([0.7, 0.2, 0.1])
    assert pattern.counts == (7, 2, 1)
    source, _ = pattern.locate(np.arange(95))
    for position in (0, 1, 10, 37, 94):
        assert pattern.count(position) == [(source[:position] == n).sum() for n in range(3)]
    assert pattern.count(10**12) == [7 * 10**11, 2 * 10**11, 10**11]


def test_weights_with_a_long_period_are_rounded():
    pattern = MixturePattern([1, 3.14159265, 0])
    assert pattern.period == MAX_PERIOD
    assert pattern.counts[0] / MAX_PERIOD == pytest.approx(1 / 4.14159265, abs=1 / MAX_PERIOD)
    assert pattern.counts[2] == 0


def test_source_with_a_tiny_weight_has_a_sample_in_every_period():
    assert MixturePattern([1, 1e-6]).counts[1] == 1


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -0.5], []])
def test_weights_must_add_up_to_something(weights):
    with pytest.raises(ValueError, match="weights"):
        MixturePattern(weights)


def build_order(counts, weights, seed):
    return MixtureOrder([SampleOrder(shards, seed) for shards in counts], weights)


def test_each_source_keeps_its_own_order_and_epochs():
    """The small source is read several times while the large one is read once."""
    counts = [[70, 30], [4]]
    order = build_order(counts, [3, 1], seed=5)
    samples = order.samples_at(np.arange(80))
    first, second = samples[samples < 100], samples[samples >= 100] - 100
    assert first.tolist() == SampleOrder([70, 30], 5).samples_at(np.arange(60)).tolist()
    assert second.tolist() == SampleOrder([4], 5).samples_at(np.arange(20)).tolist()
    assert sorted(second[:4].tolist()) == [0, 1, 2, 3], "an epoch of the small source"
    assert order.samples_at([77, 3]).tolist() == samples[[77, 3]].tolist(), "any position, alone"
    assert samples.tolist() != build_order(counts, [3, 1], seed=6).samples_at(np.arange(80)).tolist()


@pytest.fixture
def mixed(tmp_path):
    """A mixture of one source of a's and one of b's."""
    sources = []
    for letter, weight in (("a", 3.0), ("b", 1.0)):
        (tmp_path / f"{letter}.txt").write_text(letter * 2000)
        prepare_corpus(CorpusSpec((f"{letter}.txt",), letter, eval_fraction=0.1, shard_tokens=700), tmp_path)
        sources.append(MixedSource(letter, str(tmp_path / letter), weight))
    (tmp_path / "mixed").mkdir()
    write_mixture(tmp_path / "mixed", sources)
    assert list(read_mixture(tmp_path / "mixed")) == sources
    return tmp_path


def letters(dataset, samples) -> list[str]:
    return [chr(row[0]) for row in dataset.read(samples).tokens]


def test_a_mixture_is_read_from_its_folders(mixed):
    dataset = TokenDataset.open(mixed / "mixed", "train", 16)
    alone = [TokenDataset.open(mixed / letter, "train", 16) for letter in "ab"]
    assert len(dataset) == sum(map(len, alone))
    assert dataset.tokens == sum(part.tokens for part in alone)
    assert dataset.count_targets(range(len(dataset))) == 16 * len(dataset)
    order = dataset.order(seed=1)
    assert "".join(letters(dataset, order.samples_at(np.arange(8)))).count("a") == 6
    assert letters(dataset, [0, len(dataset) - 1]) == ["a", "b"]


def test_an_evaluation_has_the_share_of_each_source(mixed):
    dataset = TokenDataset.open(mixed / "mixed", "eval", 16)
    assert letters(dataset, dataset.first_samples(8)) == ["a"] * 6 + ["b"] * 2
    assert len(dataset.first_samples(10_000)) == len(dataset)
    plain = TokenDataset.open(mixed / "a", "eval", 16)
    assert plain.first_samples(3).tolist() == [0, 1, 2]


def test_a_mixture_of_another_version_is_refused(tmp_path):
    write_mixture(tmp_path, [MixedSource("a", "a", 1.0)])
    path = tmp_path / MIXTURE_FILE
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(UserError) as error:
        read_mixture(tmp_path)
    assert [problem.code for problem in error.value.problems] == ["data-shards-broken"]
