"""The parsers of checkpoints accept what was written, and answer any other bytes with a ``ValueError``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from checkpoint_files import manifest_of, save
from meshwright.checkpoint.drafts import new_draft
from meshwright.checkpoint.manifest import MANIFEST, encode_checked, parse_manifest, read_manifest
from meshwright.checkpoint.tensor_files import CheckpointReader
from meshwright.core.errors import UserError
from meshwright.core.tensor_header import read_tensor_header

FEW, MANY = settings(max_examples=80), settings(max_examples=300)
NUMBERS = st.sampled_from(
    [0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**400, -0.0, 1e308, float("nan"), float("inf")]
)
TEXTS = st.sampled_from(
    ["", "..", "../x", "/etc/passwd", "a\0b", "\ud800", "F32", "x" * 300, "rank-00000.safetensors"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("c"), ranks=2, small_files={"tokenizer.json": b"{}"})


@st.composite
def edits(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with some slices removed, repeated, overwritten or moved."""
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, len(data)))
        stop = draw(st.integers(first, min(len(data), first + draw(st.sampled_from([1, 8, 200])))))
        piece = draw(
            st.sampled_from([b"", data[first:stop] * 2, b" ", b"0", b"1", b'"', b"}", b"\xff"])
            | st.binary(max_size=8)
        )
        data = data[:first] + piece + data[stop:]
    return data


def list_places(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """The keys that lead to each value of a JSON document."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from list_places(inner, (*place, key))


def replace_at(value: Any, place: tuple, new: Any) -> Any:
    if not place:
        return new
    copy = value.copy()
    copy[place[0]] = replace_at(value[place[0]], place[1:], new)
    return copy


@MANY
@given(data=st.data())
def test_changed_bytes_of_a_manifest_are_never_accepted(checkpoint, data):
    written = (checkpoint / MANIFEST).read_bytes()
    changed = data.draw(edits(written))
    try:
        manifest = parse_manifest(changed)
    except (ValueError, RecursionError):
        return
    assert manifest == parse_manifest(written)
    assert changed == written


@MANY
@given(data=st.data())
def test_any_content_with_a_right_checksum_is_a_manifest_or_a_value_error(checkpoint, data):
    """Somebody else may have written it. What is accepted is read to the end, or refused with a reason."""
    written = json.loads((checkpoint / MANIFEST).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(list(list_places(written))))
        changed = replace_at(written, place, data.draw(VALUES))
        written = changed if isinstance(changed, dict) else written
    try:
        manifest = parse_manifest(encode_checked(written))
    except (ValueError, RecursionError):
        return
    try:
        saved = CheckpointReader(checkpoint, manifest)
        assert all(saved.read(name) is not None for name in saved.names() if saved.facts(name).bytes < 2**20)
        saved.read_model()
    except UserError as error:
        assert error.problems[0].code == "checkpoint-broken"  # noqa: PT017


def test_a_manifest_that_claims_to_be_of_format_1_needs_the_files_of_format_1(tmp_path):
    """Format 1 has no checksum of the manifest; format 2 cannot be read as format 1."""
    path = save(tmp_path, ranks=2) / MANIFEST
    content = json.loads(path.read_bytes())
    del content["sha256"]
    path.write_text(json.dumps({**content, "version": 1, "step": 7}))
    with pytest.raises(UserError, match=r"model\.safetensors.*\[checkpoint-broken\]"):
        read_manifest(path.parent)


@FEW
@given(data=st.data())
@example(data=None)
def test_any_file_of_tensors_is_read_or_a_value_error(checkpoint, tmp_path_factory, data):
    written = (checkpoint / "rank-00000.safetensors").read_bytes()
    path = tmp_path_factory.mktemp("t") / "file"
    path.write_bytes(written if data is None else data.draw(edits(written)))
    try:
        found = read_tensor_header(path)
    except ValueError:
        assert data is not None
        return
    assert all(0 <= info.offset <= info.offset + info.bytes <= path.stat().st_size for info in found.values())


@FEW
@given(data=st.data())
def test_any_vote_counts_as_it_was_written_or_not_at_all(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("d")
    draft = new_draft(root, 4, 0)
    draft.open()
    draft.propose(manifest_of(world_size=2))
    draft.vote(1, {})
    (path,) = draft.folder.glob("*.vote")
    before = draft.read_votes()
    written = path.read_bytes()
    path.write_bytes(data.draw(edits(written)))
    draft = new_draft(draft.root, 4, 0)  # a draft reads a good vote once
    assert draft.read_votes() == ({} if path.read_bytes() != written else before)
    name = data.draw(st.text("rank-0123456789.efusd", min_size=1, max_size=20))
    (draft.folder / f"{name}x.refused").touch()
    draft.read_votes()
