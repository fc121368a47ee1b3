"""Data that changed since a checkpoint: the old shards must be first, and what was read must stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.core.errors import UserError
from meshwright.data.dataset import TokenDataset
from meshwright.data.growth import (
    DataChangedError,
    check_growth,
    describe_growth,
    identify_corpus,
    warn_of_replacement,
)
from meshwright.data.mixture import MixedSource, write_mixture
from meshwright.data.prepare import CorpusSpec, prepare_corpus

SEQ_LEN = 16
OLD, NEW = 20, 40
"""Documents before and after."""


@pytest.fixture
def prepare(tmp_path):
    """``prepare(texts)``: a prepared folder; a document of 200 bytes per text, one per shard by default."""
    count = iter(range(100))

    def prepare(texts, shard_tokens=1, **settings) -> Path:
        number = next(count)
        source = tmp_path / f"text-{number}"
        source.mkdir()
        for index, text in enumerate(texts):
            (source / f"{index:03d}.txt").write_text(f"{text} " * 25)
        out = tmp_path / f"prepared-{number}"
        spec = CorpusSpec(
            sources=(str(source),), out=str(out), eval_fraction=0.2, shard_tokens=shard_tokens, **settings
        )
        prepare_corpus(spec, Path())
        return out

    return prepare


def texts(count: int) -> list[str]:
    return [f"text {number:03d}" for number in range(count)]


def open_train(folder: Path) -> TokenDataset:
    return TokenDataset.open(folder, "train", SEQ_LEN)


def identify(folder: Path):
    return identify_corpus(folder, open_train(folder)).sources


def read_rows(folder: Path, count: int) -> np.ndarray:
    """The tokens at the first positions of the order."""
    dataset = open_train(folder)
    return dataset.read(dataset.order(seed=7).samples_at(np.arange(count))).tokens


def test_the_same_data_are_accepted_without_a_note(prepare):
    old, again = prepare(texts(OLD)), prepare(texts(OLD))
    check_growth(identify(old), again)
    assert describe_growth(identify(old), identify(again), {}) == []


def test_appended_shards_keep_the_order_of_the_epoch(prepare):
    old, new = prepare(texts(OLD)), prepare(texts(NEW))
    samples = len(open_train(old))
    check_growth(identify(old), new)
    assert np.array_equal(read_rows(new, samples), read_rows(old, samples))


@pytest.mark.parametrize("shard_tokens", [1, 1000, 10**6])
def test_every_sample_of_grown_data_is_read_once_in_the_epoch(prepare, shard_tokens):
    """Also if the last shard has grown and a part of it was read: what follows is not shuffled anew."""
    old, new = prepare(texts(OLD), shard_tokens), prepare(texts(NEW), shard_tokens)
    before, now = (identify_corpus(folder, open_train(folder)) for folder in (old, new))
    check_growth(before.sources, new)
    size, total = len(open_train(old)), len(open_train(new))
    position = size - 2
    grown = before.continued(now, {"": position})
    data, old_data = open_train(new), open_train(old)
    order = data.order(7, grown.epochs)
    was_read = old_data.read(old_data.order(7).samples_at(np.arange(size)))
    assert np.array_equal(data.read(order.samples_at(np.arange(size))).tokens, was_read.tokens)
    assert sorted(order.samples_at(np.arange(total)).tolist()) == list(range(total))
    assert sorted(order.samples_at(np.arange(total, 2 * total)).tolist()) == list(range(total))
    train, held_out = describe_growth(before.sources, now.sources, grown.epochs)
    assert f"grew from {size} to {total} samples per epoch" in train
    assert "follow at the end of epoch 1" in train
    assert "held-out data grew" in held_out


def test_data_are_opened_as_they_were(prepare):
    """A folder that has grown, without what was added: equal samples, and an equal index."""
    old, new = prepare(texts(OLD), 1000), prepare(texts(NEW), 1000)
    before = identify(old)
    for split in ("train", "eval"):
        then = TokenDataset.open(old, split, SEQ_LEN)
        again = TokenDataset.open(new, split, SEQ_LEN, identities=before)
        everything = np.arange(len(then))
        assert len(again) == len(then) < len(TokenDataset.open(new, split, SEQ_LEN))
        assert np.array_equal(again.read(everything).tokens, then.read(everything).tokens)
    documents = TokenDataset.open(new, "train", SEQ_LEN, "document", identities=before)
    assert len(documents) == len(TokenDataset.open(old, "train", SEQ_LEN, "document"))
    assert again.sources[0].index.to_bytes() == (old / "index.json").read_bytes()
    with pytest.raises(UserError, match="data-shards-broken"):
        TokenDataset.open(prepare(texts(OLD // 2)), "train", SEQ_LEN, identities=before)


def changed(place: int) -> list[str]:
    return [text.upper() if number == place else text for number, text in enumerate(texts(NEW))]


@pytest.mark.parametrize("shard_tokens", [1, 1000])
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        pytest.param(changed(1), "differ", id="a document changed"),
        pytest.param(["new", *texts(NEW)], "differ", id="inserted before"),
        pytest.param(texts(NEW)[1:], "differ", id="the first one removed"),
        pytest.param(texts(OLD // 2), "split has", id="fewer"),
        pytest.param(texts(NEW)[::-1], "differ", id="another order"),
    ],
)
def test_any_other_change_is_refused(prepare, other, reason, shard_tokens):
    old, new = prepare(texts(OLD), shard_tokens), prepare(other, shard_tokens)
    with pytest.raises(DataChangedError, match=reason):
        check_growth(identify(old), new)


def test_a_last_shard_with_other_documents_is_refused(prepare):
    """It is larger than before, and all shards before it are the same."""
    old = prepare(texts(OLD), shard_tokens=10**6)
    new = prepare([*texts(OLD - 1), *("other" for _ in range(9))], shard_tokens=10**6)
    with pytest.raises(DataChangedError, match=r"the shard train-00000.bin differs"):
        check_growth(identify(old), new)


def test_another_tokenizer_and_an_unknown_source_are_refused(prepare):
    old, new = prepare(texts(OLD)), prepare(texts(NEW), tokenizer="bpe:300")
    with pytest.raises(DataChangedError, match="another tokenizer"):
        check_growth(identify(old), new)
    with pytest.raises(DataChangedError, match="does not say which shards"):
        check_growth({}, old)


def test_each_source_of_a_mixture_has_its_own_epochs(prepare, tmp_path):
    """One source grows: its new samples come once each, the other one goes on as before."""
    first, second, grown = prepare(texts(OLD)), prepare(texts(OLD)[::-1]), prepare(texts(NEW))
    states = []
    for name, one in (("old", first), ("new", grown)):
        (tmp_path / name).mkdir()
        sources = [MixedSource("a", str(one), 1.0), MixedSource("b", str(second), 1.0)]
        write_mixture(tmp_path / name, sources)
        states.append(identify_corpus(tmp_path / name, open_train(tmp_path / name)))
    before, now = states
    check_growth(before.sources, tmp_path / "new")
    size, total = (state.sources["a"].samples for state in states)
    grown_state = before.continued(now, {"a": size - 1, "b": size - 1})
    assert [len(grown_state.epochs[name]) for name in ("a", "b")] == [2, 1]
    samples = open_train(tmp_path / "new").order(7, grown_state.epochs).samples_at(np.arange(2 * total))
    assert sorted(samples[samples < total].tolist()) == list(range(total))
    was_read = open_train(tmp_path / "old").order(7).samples_at(np.arange(2 * size))
    other, other_before = samples[samples >= total] - total, was_read[was_read >= size] - size
    assert other[:size].tolist() == other_before[:size].tolist()


def test_prepare_warns_when_the_earlier_documents_are_not_the_first_ones(prepare, tmp_path):
    old, grown = prepare(texts(OLD), 10**6), prepare(texts(NEW), 10**6)
    changed = prepare(["text before", *texts(OLD)], 10**6)
    for earlier, folder in ((old, old), (old, grown), (tmp_path / "missing", old)):
        assert warn_of_replacement(earlier, folder) == []
    (sentence,) = warn_of_replacement(old, changed)
    assert "are not the first ones any more: the shard" in sentence
