"""Data that changed since a checkpoint: the old shards must be first, and what was read must stay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.data.dataset import TokenDataset
from meshwright.data.growth import DataChangedError, check_growth, describe_growth, identify_sources
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
    return identify_sources(folder, open_train(folder).source_counts)


def read_rows(folder: Path, count: int) -> np.ndarray:
    """The tokens at the first positions of the order."""
    dataset = open_train(folder)
    return dataset.read(dataset.order(seed=7).samples_at(np.arange(count))).tokens


def test_the_same_data_are_accepted_without_a_note(prepare):
    old, again = prepare(texts(OLD)), prepare(texts(OLD))
    check_growth(identify(old), again, {"": 5})
    assert describe_growth(identify(old), identify(again), {"": 5}) == []


def test_appended_shards_keep_the_order_of_the_epoch(prepare):
    old, new = prepare(texts(OLD)), prepare(texts(NEW))
    samples = len(open_train(old))
    for position in (0, 1, samples):
        check_growth(identify(old), new, {"": position})
    assert np.array_equal(read_rows(new, samples), read_rows(old, samples))
    train, held_out = describe_growth(identify(old), identify(new), {"": samples})
    assert f"grew from {samples} to {len(open_train(new))} samples per epoch" in train
    assert "the samples so far are the same" in train
    assert "held-out data grew" in held_out


def test_after_an_epoch_the_note_says_where_it_goes_on(prepare):
    old, new = prepare(texts(OLD)), prepare(texts(NEW))
    position = len(open_train(old)) + 1
    check_growth(identify(old), new, {"": position})
    note = describe_growth(identify(old), identify(new), {"": position})[0]
    assert f"sample {position} of epoch 1, and some samples come again" in note


def test_a_last_shard_that_grew_is_accepted_until_it_is_read(prepare):
    """What was read before it is read alike. In it the order is another one."""
    old, new = prepare(texts(OLD), shard_tokens=1000), prepare(texts(NEW), shard_tokens=1000)
    before = identify(old)[""]
    unread = before.samples - before.last_samples
    assert 0 < unread < before.samples
    check_growth({"": before}, new, {"": unread})
    assert np.array_equal(read_rows(new, unread), read_rows(old, unread))
    assert not np.array_equal(read_rows(new, before.samples), read_rows(old, before.samples))
    with pytest.raises(DataChangedError, match="has grown, and some of its samples were read already"):
        check_growth({"": before}, new, {"": unread + 1})


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
    """Also at position 0: the data are not those of the run."""
    old, new = prepare(texts(OLD), shard_tokens), prepare(other, shard_tokens)
    with pytest.raises(DataChangedError, match=reason):
        check_growth(identify(old), new, {"": 0})


def test_a_last_shard_with_other_documents_is_refused(prepare):
    """It is larger than before, and all shards before it are the same."""
    old = prepare(texts(OLD), shard_tokens=10**6)
    new = prepare([*texts(OLD - 1), *("other" for _ in range(9))], shard_tokens=10**6)
    with pytest.raises(DataChangedError, match=r"the shard train-00000.bin differs"):
        check_growth(identify(old), new, {"": 0})


def test_another_tokenizer_and_an_unknown_source_are_refused(prepare):
    old, new = prepare(texts(OLD)), prepare(texts(NEW), tokenizer="bpe:300")
    with pytest.raises(DataChangedError, match="another tokenizer"):
        check_growth(identify(old), new, {"": 0})
    with pytest.raises(DataChangedError, match="does not say which shards"):
        check_growth({}, old, {"": 0})


def test_each_source_of_a_mixture_has_its_own_position(prepare, tmp_path):
    """The last shard of one source grew: only the samples that were read from it matter."""
    first, second = prepare(texts(OLD), 1000), prepare(texts(OLD)[::-1], 1000)
    grown = prepare(texts(NEW), 1000)
    for name, one in (("old", first), ("new", grown)):
        (tmp_path / name).mkdir()
        sources = [MixedSource("a", str(one), 1.0), MixedSource("b", str(second), 3.0)]
        write_mixture(tmp_path / name, sources)
    before = identify(tmp_path / "old")
    unread = before["a"].samples - before["a"].last_samples
    check_growth(before, tmp_path / "new", {"a": unread, "b": 10**6})
    with pytest.raises(DataChangedError, match="source a: the shard train-"):
        check_growth(before, tmp_path / "new", {"a": unread + 1, "b": 0})
