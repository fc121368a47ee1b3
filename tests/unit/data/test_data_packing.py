"""Rows of whole documents: nothing is lost, nothing is read twice, and documents do not meet."""

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
    """Documents as lists of tokens; ``marks`` has one list for each."""
    with ShardWriter(folder, ByteTokenizer(), shard_tokens, has_loss_mask=loss_mask is not None) as writer:
        for number, document in enumerate(documents):
            given_marks = None if loss_mask is None else np.asarray(loss_mask[number], np.uint8)
            writer.add("train", np.asarray(document, np.uint16), given_marks)
        writer.finish()
    return folder


def cut_rows(rows):
    """Each row as its documents: lists of (input, target), with the padding last and apart."""
    for tokens, targets, segments in zip(rows.tokens, rows.targets, rows.segments, strict=True):
        assert segments[0] == 0
        assert set(np.diff(segments)) <= {0, 1}, "numbered from 0, one after the other"
        pieces = [
            list(zip(tokens[segments == n].tolist(), targets[segments == n].tolist(), strict=True))
            for n in range(segments[-1] + 1)
        ]
        padding = pieces.pop() if pieces[-1][0] == (0, IGNORE_INDEX) else []
        assert all(pair == (0, IGNORE_INDEX) for pair in padding)
        yield pieces, len(padding)


def positions_of(document):
    whole = [*document, END]
    return list(pairwise(whole))


documents = st.lists(st.lists(st.integers(1, 255), max_size=30), min_size=1, max_size=12)


@settings(max_examples=80)
@given(documents=documents, shard_tokens=st.integers(1, 80), seq_len=st.integers(1, 12))
def test_every_position_of_every_document_is_in_one_row_once(
    documents, shard_tokens, seq_len, tmp_path_factory
):
    """Joined in order, the pieces of all rows are the documents; only long ones are cut, into full rows."""
    folder = write(tmp_path_factory.mktemp("data"), documents, shard_tokens)
    dataset = TokenDataset(ShardFolder.open(folder), "train", seq_len, "document")
    rows = dataset.read(np.arange(len(dataset)))
    assert rows.tokens.shape == rows.targets.shape == rows.segments.shape == (len(dataset), seq_len)
    found, filled, padding = [], 0, 0
    for pieces, padded in cut_rows(rows):
        assert sum(map(len, pieces)) + padded == seq_len
        found += pieces
        filled += sum(map(len, pieces))
        padding += padded
    expected = []
    for document in documents:
        pairs = positions_of(document)
        expected += [pairs[i : i + seq_len] for i in range(0, len(pairs), seq_len)]
    assert found == [piece for piece in expected if piece]
    assert dataset.count_targets(np.arange(len(dataset))) == filled
    assert dataset.padding == padding
    assert dataset.dropped_tokens == sum(not document for document in documents)
    assert dataset.longest_sequence == max(map(len, documents))


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=20), seq_len=st.integers(1, 12))
def test_a_row_is_closed_only_when_the_next_piece_does_not_fit(sizes, seq_len, tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("data"), [[1] * size for size in sizes])
    dataset = TokenDataset(ShardFolder.open(folder), "train", seq_len, "document")
    rows = [pieces for pieces, _ in cut_rows(dataset.read(np.arange(len(dataset))))]
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
def test_masked_targets_are_ignored_and_counted(
    data, documents, shard_tokens, seq_len, mask, tmp_path_factory
):
    """Targets with and without masking differ exactly where the next token is a prompt's; counts agree."""
    documents = [[1, *document] for document in documents]
    loss_mask = [data.draw(st.lists(st.integers(0, 1), min_size=len(d), max_size=len(d))) for d in documents]
    folder = write(tmp_path_factory.mktemp("data"), documents, shard_tokens, loss_mask)
    opened = ShardFolder.open(folder)
    masked = TokenDataset(opened, "train", seq_len, mask, prompt_masking=True)
    everything = TokenDataset(opened, "train", seq_len, mask)
    # The same shards with the mark in place of the token: a target's mark without our code for marks.
    twin = write(tmp_path_factory.mktemp("twin"), [[m + 1 for m in ms] for ms in loss_mask], shard_tokens)
    of_marks = TokenDataset(ShardFolder.open(twin), "train", seq_len, mask)
    assert masked.shard_sample_counts == everything.shard_sample_counts
    for index in range(len(masked)):
        row, whole, mark = (d.read([index]) for d in (masked, everything, of_marks))
        assert row.tokens.tolist() == whole.tokens.tolist()
        counted = row.targets[0] != IGNORE_INDEX
        for position, target in enumerate(mark.targets[0].tolist()):
            if target in (1, 2):
                assert counted[position] == (target == 2)
            elif target == END:  # the end belongs to what the document ends with
                assert counted[position] == (mark.tokens[0][position] == 2)
        assert (row.targets[0][counted] == whole.targets[0][counted]).all()
        assert masked.count_targets([index]) == counted.sum()
    assert (
        masked.count_targets(np.arange(len(masked)))
        == (masked.read(np.arange(len(masked))).targets != IGNORE_INDEX).sum()
    )


def test_appended_shards_renumber_nothing(tmp_path):
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
    """More shards than packings are held in memory."""
    folder = write(tmp_path, [[n] * 9 for n in range(1, 41)], shard_tokens=20)
    dataset = TokenDataset.open(folder, "train", 12, "document")
    assert len(dataset.shard_sample_counts) > 8
    order = np.arange(len(dataset))[::-1]
    assert dataset.read(order).tokens[:, 0].tolist() == list(range(40, 0, -1))
    assert dataset.count_targets(order) == 40 * 9


def test_masking_without_marks_is_refused(tmp_path):
    write(tmp_path, [[1, 2, 3]])
    with pytest.raises(UserError) as error:
        TokenDataset.open(tmp_path, "train", 2, prompt_masking=True)
    assert error.value.problems[0].code == "data-no-prompts"
    assert "was prepared without a template" in str(error.value)


@pytest.mark.parametrize("mask", ["causal", "document"])
def test_a_sample_may_be_all_prompt_but_not_a_split(mask, tmp_path):
    """A prompt longer than a row gives a sample without targets; samples without any at all are an error."""
    (tmp_path / "some").mkdir()
    (tmp_path / "none").mkdir()
    write(tmp_path / "some", [[1] * 8], loss_mask=[[0] * 6 + [1] * 2])
    dataset = TokenDataset.open(tmp_path / "some", "train", 4, mask, prompt_masking=True)
    assert [dataset.count_targets([i]) for i in range(len(dataset))] == [0, 3]
    write(tmp_path / "none", [[1] * 8], loss_mask=[[0] * 8])
    with pytest.raises(UserError) as error:
        TokenDataset.open(tmp_path / "none", "train", 4, mask, prompt_masking=True)
    assert error.value.problems[0].code == "data-no-targets"


def test_marks_are_part_of_the_format(tmp_path):
    """One byte a token, its end included; checked like the other files."""
    write(tmp_path, [[1, 2, 3], [4, 5]], loss_mask=[[0, 1, 1], [1, 0]])
    assert (tmp_path / "train-00000.loss_mask.u8").read_bytes() == bytes([0, 1, 1, 1, 1, 0, 0])
    opened = ShardFolder.open(tmp_path)
    opened.verify()
    assert opened.index.to_bytes() == (tmp_path / "index.json").read_bytes()
    (tmp_path / "train-00000.loss_mask.u8").write_bytes(bytes(7))
    with pytest.raises(UserError, match="is damaged"):
        opened.verify()
    (tmp_path / "train-00000.loss_mask.u8").write_bytes(bytes(6))
    with pytest.raises(UserError, match="has 6 bytes where the index says 7"):
        ShardFolder.open(tmp_path)
