"""Samples of a prepared corpus: packing, reading one or many, across shards and processes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import UserError
from meshwright.data.dataset import IGNORE_INDEX, TokenDataset
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.shards import ShardFolder
from meshwright.data.tokenizer import ByteTokenizer


def write(folder, lengths, shard_tokens, held_out=3):
    """Write documents of these lengths. Their tokens are consecutive numbers, so wrong offsets show."""
    value = 0
    with ShardWriter(folder, ByteTokenizer(), shard_tokens) as writer:
        for length in lengths:
            writer.add("train", (value + np.arange(length)) % 256)
            value += length
        writer.add("eval", np.arange(held_out))
        writer.finish()
    return folder


@pytest.fixture
def folder(tmp_path):
    """A prepared folder with two train shards."""
    return write(tmp_path, [10, 20, 5, 40, 1], shard_tokens=40)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=10),
    shard_tokens=st.integers(1, 100),
    seq_len=st.integers(1, 12),
)
def test_samples_are_consecutive_windows_of_each_shard(lengths, shard_tokens, seq_len, tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("data"), lengths, shard_tokens)
    opened = ShardFolder.open(folder)
    dataset = TokenDataset(opened, "train", seq_len)
    expected, dropped = [], 0
    for shard in opened.index.splits.train.shards:
        tokens = opened.map_tokens(shard).tolist()
        count = 0
        while (count + 1) * seq_len < len(tokens):
            begin = count * seq_len
            expected.append(tokens[begin : begin + seq_len + 1])
            count += 1
        dropped += len(tokens) - (count * seq_len + 1 if count else 0)
    assert len(dataset) == sum(dataset.shard_sample_counts) == len(expected)
    assert dataset.is_empty == (not expected)
    rows = dataset.read(np.arange(len(dataset)))
    assert rows.tokens.tolist() == [row[:-1] for row in expected]
    assert rows.targets.tolist() == [row[1:] for row in expected]
    assert rows.segments is None
    assert dataset.padding == 0
    assert dataset.count_targets(np.arange(len(dataset))) == rows.targets.size
    assert dataset.dropped_tokens == dropped
    assert dataset.tokens == sum(lengths) + len(lengths)


def test_read_returns_samples_in_the_given_order(folder):
    dataset = TokenDataset.open(folder, "train", 4)
    wanted = [len(dataset) - 1, 0, 7, 0, 3]
    batch = dataset.read(wanted).tokens
    assert (batch.dtype, batch.shape) == (np.int64, (5, 4))
    assert batch.tolist() == [dataset.read([i]).tokens[0].tolist() for i in wanted]
    assert dataset.read([]).tokens.shape == (0, 4)
    assert dataset.count_targets([]) == 0


def test_sample_index_out_of_range_raises(folder):
    dataset = TokenDataset.open(folder, "train", 4)
    for index in (-1, len(dataset)):
        for call in (dataset.read, dataset.count_targets):
            with pytest.raises(IndexError):
                call([0, index])


def test_samples_are_copies(folder):
    """Changing a sample in place does not change the memory map."""
    dataset = TokenDataset.open(folder, "train", 4)
    before = dataset.read([0]).tokens.tolist()
    dataset.read([0]).tokens[:] = 0
    assert dataset.read([0]).tokens.tolist() == before


def test_consecutive_reads_reuse_the_memory_map(folder, monkeypatch):
    """Mapping the file for every micro-batch would dominate the data loading time."""
    mapped = []
    real = ShardFolder.map_tokens
    monkeypatch.setattr(ShardFolder, "map_tokens", lambda self, s: mapped.append(s.file) or real(self, s))
    dataset = TokenDataset.open(folder, "train", 4)
    counts = dataset.shard_sample_counts
    assert len(counts) > 1
    assert counts[0] > 1
    for sample in (0, 1, 0, counts[0], 0):
        dataset.read([sample])
    assert len(mapped) == 2


@pytest.mark.parametrize("mask", ["causal", "document"])
def test_dataset_pickles_without_its_data(folder, mask):
    dataset = TokenDataset.open(folder, "train", 4, mask)
    dataset.read(np.arange(len(dataset)))
    dataset.count_targets([0])
    sent = pickle.dumps(dataset)
    assert len(sent) < 4000
    assert pickle.loads(sent).read([3]).tokens.tolist() == dataset.read([3]).tokens.tolist()


def test_dataset_loads_its_tokenizer(folder):
    dataset = TokenDataset.open(folder, "train", 4)
    assert (dataset.vocab_size, dataset.end_of_document, dataset.tokenizer_folder) == (257, 256, folder)
    assert dataset.load_tokenizer().name == "byte"
    (folder / "tokenizer.json").write_text('{"meshwright_tokenizer":"byte","version":1}')
    assert dataset.load_tokenizer().name == "byte", "the same tokenizer with other white space"


def test_replaced_tokenizer_is_refused(folder):
    pytest.importorskip("tokenizers")
    from meshwright.data.tokenizer import BpeTokenizer

    BpeTokenizer.train(["abc"], 300).save(folder)
    with pytest.raises(UserError) as error:
        TokenDataset.open(folder, "train", 4).load_tokenizer()
    assert error.value.problems[0].code == "data-shards-broken"


def test_shards_shorter_than_one_sample_are_refused(folder):
    with pytest.raises(UserError) as error:
        TokenDataset.open(folder, "train", 41)
    assert str(error.value) == (
        f"data.seq_len=41 needs 42 tokens in one shard, and the longest shard of {folder} has 41. "
        "Use data.seq_len=40 or less, or add text. [data-corpus-short]"
    )
    assert len(TokenDataset.open(folder, "train", 40)) == 1


@pytest.mark.parametrize("masked", [False, True])
def test_eval_split_has_every_token_and_pads_its_last_sample(tmp_path, masked):
    """Also if it is shorter than one sample; the train split drops an incomplete sample."""
    loss_mask = np.array([0, 1, 0, 1, 1, 1, 1], np.uint8) if masked else None
    with ShardWriter(tmp_path, ByteTokenizer(), 100, has_loss_mask=masked) as writer:
        for split in ("train", "eval"):
            writer.add(split, np.arange(7), loss_mask)
        writer.finish()
    dataset = TokenDataset.open(tmp_path, "eval", 5, "causal", masked)
    rows = dataset.read([0, 1])
    end, none = ByteTokenizer.end_of_document, IGNORE_INDEX
    assert rows.tokens.tolist() == [[0, 1, 2, 3, 4], [5, 6, 0, 0, 0]]
    assert rows.targets.tolist() == [[1, none if masked else 2, 3, 4, 5], [6, end, none, none, none]]
    assert [dataset.count_targets([n]) for n in (0, 1)] == [4 if masked else 5, 2]
    assert (dataset.dropped_tokens, dataset.padding) == (0, 3)
    assert len(TokenDataset.open(tmp_path, "eval", 100, "causal", masked)) == 1
    train = TokenDataset.open(tmp_path, "train", 5, "causal", masked)
    assert (len(train), train.dropped_tokens) == (1, 2)


def test_invalid_arguments_raise_value_errors(folder):
    with pytest.raises(ValueError, match="seq_len=0 must be at least 1"):
        TokenDataset.open(folder, "train", 0)
    with pytest.raises(ValueError, match="split 'test'"):
        TokenDataset.open(folder, "test", 4)
