"""Paths in an object store, against a real S3 server process."""

from __future__ import annotations

import hashlib
import os

import pytest

from meshwright.core.errors import UserError
from meshwright.core.object_path import (
    PART_BYTES,
    ObjectPath,
    StoreError,
    open_new,
    parse_location,
    read_range,
    remove_tree,
    tree_bytes,
    write_whole,
)


@pytest.fixture
def root(s3):
    found = parse_location(s3)
    assert isinstance(found, ObjectPath)
    return found


def test_objects_are_written_read_listed_and_removed_like_files(root):
    assert not root.exists()
    write_whole(root / "a" / "x", b"123")
    write_whole(root / "a" / "y", b"4")
    write_whole(root / "b", b"56789")
    assert (root / "a" / "x").read_bytes() == b"123"
    assert root.list_sizes() == {"a/x": 3, "a/y": 1, "b": 5}
    assert tree_bytes(root) == 9
    assert sorted(str(path) for path in root.glob("*/x")) == [f"{root}/a/x"]
    assert sorted(path.name for path in root.iterdir()) == ["a", "b"]
    assert ((root / "a").is_dir(), (root / "a").is_file(), (root / "b").is_file()) == (True, False, True)
    remove_tree(root / "a")
    assert root.list_sizes() == {"b": 5}


def test_a_conditional_put_creates_once_and_replaces_only_the_version_it_knows(root):
    path = root / "manifest.json"
    path.create(b"first")
    with pytest.raises(FileExistsError):
        path.create(b"second")
    content, tag = path.read_with_tag()
    assert content == b"first"
    path.replace_version(b"third", tag)
    with pytest.raises(FileExistsError):
        path.replace_version(b"fourth", tag)
    assert path.read_bytes() == b"third"


def test_a_large_file_is_uploaded_in_parts_and_read_by_ranges(root):
    content = os.urandom(2 * PART_BYTES + 1000)
    with open_new(root / "large", len(content)) as file:
        for start in range(0, len(content), 5_000_000):
            file.write(memoryview(content)[start : start + 5_000_000])
    assert (root / "large").stat().st_size == len(content)
    assert bytes(read_range(root / "large", PART_BYTES - 5, 10)) == content[PART_BYTES - 5 : PART_BYTES + 5]
    with (root / "large").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").digest() == hashlib.sha256(content).digest()


def test_an_upload_that_fails_leaves_no_object(root):
    def upload():
        with open_new(root / "large", 10) as file:
            file.write(bytes(2 * PART_BYTES))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        upload()
    assert not (root / "large").exists()


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://", "s3:///x", "s3://bucket/../x", "http://host/x"])
def test_other_urls_are_refused(url):
    with pytest.raises(UserError) as refused:
        parse_location(url)
    assert refused.value.problems[0].code == "store-url"


def test_a_missing_bucket_missing_credentials_and_a_server_that_is_gone_are_told_apart(s3, monkeypatch):
    with pytest.raises(StoreError, match="the bucket does not exist"):
        (parse_location("s3://no-such-bucket/x") / "a").write_bytes(b"")
    with pytest.raises(StoreError, match="the bucket does not exist"):
        parse_location("s3://no-such-bucket/x").mkdir()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match="cannot be reached"):
        parse_location("s3://another/x").mkdir()
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")  # of the machine, if it were Amazon's
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="there are no credentials: set AWS_ACCESS_KEY_ID"):
        parse_location("s3://third/x").mkdir()
