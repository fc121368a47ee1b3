"""Packing whole documents into rows: every token once, documents separated by segments."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.errors import UserError
from meshwright.data.dataset import IGNORE_INDEX, TokenDataset
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.shards import ShardFolder
from meshwright.data.tokenizer import ByteTokenizer

END = ByteTokenizer.end_of_document


def write(folder, documents, shard_tokens=10**6, loss_mask=None):
    """Write documents (lists of tokens) with one loss mask each."""
    with ShardWriter(folder, ByteTokenizer(), shard_tokens, has_loss_mask=loss_mask is not None) as writer:
        for number, document in enumerate(documents):
            document_mask = None if loss_mask is None else np.asarray(loss_mask[number], np.uint8)
            writer.add("train", np.asarray(document, np.uint16), document_mask)
        writer.finish()
    return folder


def split_rows(rows):
    """The documents of each row as lists of (input, target), and the length of the padding."""
    columns = zip(rows.tokens, rows.targets, rows.segments, rows.lengths, strict=True)
    for tokens, targets, segments, length in columns:
        assert segments[0] == 0
        assert set(np.diff(segments)) <= {0, 1}, "segments are numbered from 0 without gaps"
        pieces = [
            list(zip(tokens[segments == n].tolist(), targets[segments == n].tolist(), strict=True))
            for n in range(segments[-1] + 1)
        ]
        padding = pieces.pop() if pieces[-1][0] == (0, IGNORE_INDEX) else []
        assert all(pair == (0, IGNORE_INDEX) for pair in padding)
        assert length == len(tokens) - len(padding)
        yield pieces, len(padding)


def token_pairs(document):
    """The (input, target) pairs of a document with its end."""
    whole = [*document, END]
    return list(pairwise(whole))


documents = st.lists(st.lists(st.integers(1, 255), max_size=30), min_size=1, max_size=12)


@settings(max_examples=80)
@given(documents=documents, shard_tokens=st.integers(1, 80), seq_len=st.integers(1, 12))
def test_every_document_position_is_packed_once(documents, shard_tokens, seq_len, tmp_path_factory):
    """The pieces of all rows in order are the documents.

    Only documents longer than a row are split, into full rows.
    """
    folder = write(tmp_path_factory.mktemp("data"), documents, shard_tokens)
    dataset = TokenDataset(ShardFolder.open(folder), "train", seq_len, "document")
    rows = dataset.read(np.arange(len(dataset)))
    assert rows.tokens.shape == rows.targets.shape == rows.segments.shape == (len(dataset), seq_len)
    found, filled, padding = [], 0, 0
    for pieces, padded in split_rows(rows):
        assert sum(map(len, pieces)) + padded == seq_len
        found += pieces
        filled += sum(map(len, pieces))
        padding += padded
    expected = []
    for document in documents:
        pairs = token_pairs(document)
        expected += [pairs[i : i + seq_len] for i in range(0, len(pairs), seq_len)]
    assert found == [piece for piece in expected if piece]
    assert dataset.count_targets(np.arange(len(dataset))) == filled
    assert dataset.padding == padding
    assert dataset.dropped_tokens == sum(not document for document in documents)
    assert dataset.longest_sequence == max(map(len, documents))


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=20), seq_len=st.integers(1, 12))
def test_row_ends_only_if_the_next_piece_does_not_fit(sizes, seq_len, tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("data"), [[1] * size for size in sizes])
    dataset = TokenDataset(ShardFolder.open(folder), "train", seq_len, "document")
    rows = [pieces for pieces, _ in split_rows(dataset.read(np.arange(len(dataset))))]
    for row, following in pairwise(rows):
        assert sum(map(len, row)) + len(following[0]) > seq_len


@settings(max_examples=60)
@given(
    data=st.data(),
    documents=documents,
    shard_tokens=st.integers(1, 80),
    seq_len=st.integers(1, 12),
    mask=st.sampled_from(["causal", "document"]),
)
def test_prompt_masking_ignores_prompt_targets(
    data, documents, shard_tokens, seq_len, mask, tmp_path_factory
):
    """Targets with and without masking differ exactly where the next token is part of a prompt.

    The counts agree.
    """
    documents = [[1, *document] for document in documents]
    loss_mask = [data.draw(st.lists(st.integers(0, 1), min_size=len(d), max_size=len(d))) for d in documents]
    folder = write(tmp_path_factory.mktemp("data"), documents, shard_tokens, loss_mask)
    opened = ShardFolder.open(folder)
    masked = TokenDataset(opened, "train", seq_len, mask, prompt_masking=True)
    everything = TokenDataset(opened, "train", seq_len, mask)
    # Shards whose tokens are the loss mask: their targets are the expected mask.
    twin = write(tmp_path_factory.mktemp("twin"), [[m + 1 for m in ms] for ms in loss_mask], shard_tokens)
    mask_as_tokens = TokenDataset(ShardFolder.open(twin), "train", seq_len, mask)
    assert masked.shard_sample_counts == everything.shard_sample_counts
    for index in range(len(masked)):
        row, whole, mask_row = (d.read([index]) for d in (masked, everything, mask_as_tokens))
        assert row.tokens.tolist() == whole.tokens.tolist()
        counted = row.targets[0] != IGNORE_INDEX
        for position, target in enumerate(mask_row.targets[0].tolist()):
            if target in (1, 2):
                assert counted[position] == (target == 2)
            elif target == END:  # the end has the mask of the last token
                assert counted[position] == (mask_row.tokens[0][position] == 2)
        assert (row.targets[0][counted] == whole.targets[0][counted]).all()
        assert masked.count_targets([index]) == counted.sum()
    assert (
        masked.count_targets(np.arange(len(masked)))
        == (masked.read(np.arange(len(masked))).targets != IGNORE_INDEX).sum()
    )


def test_appended_shards_do_not_renumber_samples(tmp_path):
    documents = [[n] * (n % 17 + 1) for n in range(1, 60)]
    dataset = {}
    for name, count in (("before", 40), ("after", 59)):
        (tmp_path / name).mkdir()
        folder = write(tmp_path / name, documents[:count], shard_tokens=50)
        dataset[name] = TokenDataset.open(folder, "train", 16, "document")
    kept = len(dataset["before"].shard_sample_counts) - 1  # the last shard of the shorter one may fill up
    same = sum(dataset["before"].shard_sample_counts[:kept])
    assert same > 10
    one, other = (dataset[name].read(np.arange(same)) for name in ("before", "after"))
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.segments.tolist() == other.segments.tolist()


def test_many_shards_are_read_in_any_order(tmp_path):
    """There are more shards than the packing cache holds."""
    folder = write(tmp_path, [[n] * 9 for n in range(1, 41)], shard_tokens=20)
    dataset = TokenDataset.open(folder, "train", 12, "document")
    assert len(dataset.shard_sample_counts) > 8
    order = np.arange(len(dataset))[::-1]
    assert dataset.read(order).tokens[:, 0].tolist() == list(range(40, 0, -1))
    assert dataset.count_targets(order) == 40 * 9


def test_prompt_masking_without_a_loss_mask_is_refused(tmp_path):
    write(tmp_path, [[1, 2, 3]])
    with pytest.raises(UserError) as error:
        TokenDataset.open(tmp_path, "train", 2, prompt_masking=True)
    assert error.value.problems[0].code == "data-no-prompts"
    assert "was prepared without a template" in str(error.value)


@pytest.mark.parametrize("mask", ["causal", "document"])
def test_sample_without_targets_is_legal_but_a_train_split_is_not(mask, tmp_path):
    """A prompt longer than a row gives a sample without targets. A train split without targets is refused."""
    (tmp_path / "some").mkdir()
    (tmp_path / "none").mkdir()
    write(tmp_path / "some", [[1] * 8], loss_mask=[[0] * 6 + [1] * 2])
    dataset = TokenDataset.open(tmp_path / "some", "train", 4, mask, prompt_masking=True)
    assert [dataset.count_targets([i]) for i in range(len(dataset))] == [0, 3]
    write(tmp_path / "none", [[1] * 8], loss_mask=[[0] * 8])
    with pytest.raises(UserError) as error:
        TokenDataset.open(tmp_path / "none", "train", 4, mask, prompt_masking=True)
    assert error.value.problems[0].code == "data-no-targets"


def test_loss_mask_file_has_one_byte_per_token(tmp_path):
    """The end of a document has a byte too. Size and checksum are verified like those of other files."""
    write(tmp_path, [[1, 2, 3], [4, 5]], loss_mask=[[0, 1, 1], [1, 0]])
    assert (tmp_path / "train-00000.loss_mask.u8").read_bytes() == bytes([0, 1, 1, 1, 1, 0, 0])
    opened = ShardFolder.open(tmp_path)
    opened.verify()
    assert opened.index.to_bytes() == (tmp_path / "index.json").read_bytes()
    (tmp_path / "train-00000.loss_mask.u8").write_bytes(bytes(7))
    with pytest.raises(UserError) as error:
        opened.verify()
    assert [p.code for p in error.value.problems] == ["data-shards-broken"]
    (tmp_path / "train-00000.loss_mask.u8").write_bytes(bytes(6))
    with pytest.raises(UserError) as error:
        ShardFolder.open(tmp_path)
    assert [p.code for p in error.value.problems] == ["data-shards-broken"]
    assert "6 bytes" in str(error.value)
