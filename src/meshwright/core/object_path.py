"""Paths in S3-compatible object stores, with the methods of ``pathlib`` that are needed.

``parse_location`` makes a ``Path`` or, from a URL, an :class:`ObjectPath`. Code that keeps to their common
methods works with both. An object store has no folders and no rename: an object appears as a whole when its
upload ends. Credentials and the address of the server come from the environment (``AWS_ACCESS_KEY_ID``,
``AWS_ENDPOINT_URL``, ...), never from a job.
"""

from __future__ import annotations

import fnmatch
import functools
import io
import os
import re
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.core.errors import Problem, UserError
from meshwright.core.files import folder_bytes, replace_bytes
from meshwright.core.packages import require_packages

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3",)
"""Schemes of the URLs that are accepted: those that are tested."""
PART_BYTES = 2**24
"""An upload sends that much at a time."""
MAX_PARTS = 9_000
"""An S3 upload has at most 10,000 parts."""
READ_BYTES = 2**23
"""Read by one request."""
READS_AT_ONCE = 4
"""Requests of one read at the same time."""
UPLOADS_AT_ONCE = 4
"""Parts of one file that are sent at the same time."""
CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, RETRY_S = 5, 60, 30
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3} [\w ]+)")
_REASONS = {
    "NoSuchBucket": "the bucket does not exist",
    "AccessDenied": "access is denied",
    "InvalidAccessKeyId": "the access key is not known",
    "SignatureDoesNotMatch": "the secret key is wrong",
}


class StoreError(OSError):
    """An object store that cannot be reached, or refuses; the message has the reason."""


class BinaryWriter(Protocol):
    """A file that is being written."""

    def write(self, data: Any, /) -> Any:
        """Add bytes."""


@dataclass(frozen=True, order=True)
class ObjectPath:
    """An object, or the common prefix of objects, which takes the place of a folder."""

    bucket: str
    """URL of the bucket: ``s3://name``."""
    key: str
    """Without a leading or trailing slash; empty for the bucket."""

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.bucket, f"{self.key}/{name}".lstrip("/"))

    @property
    def name(self) -> str:
        """The last part."""
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        """The end of the name, from its last dot."""
        return PurePosixPath(self.key).suffix

    @property
    def parent(self) -> ObjectPath:
        """Without the last part."""
        return ObjectPath(self.bucket, self.key.rpartition("/")[0])

    def absolute(self) -> ObjectPath:
        """Itself: a URL is absolute."""
        return self

    resolve = absolute

    def is_symlink(self) -> bool:
        """Never."""
        return False

    def lstat(self) -> Any:
        """Size and kind, as of a plain file.

        Raises:
            FileNotFoundError: There is no such object.
        """
        with _reporting(self) as store:
            facts = _obstore().head(store, self.key)
        return SimpleNamespace(st_size=facts["size"], st_mode=stat.S_IFREG)

    stat = lstat

    def is_file(self) -> bool:
        """Whether there is such an object."""
        try:
            self.lstat()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether there are objects below."""
        return next(self._list(), None) is not None

    def exists(self) -> bool:
        """Whether there is such an object, or objects below."""
        return self.is_dir() or (bool(self.key) and self.is_file())

    def list_sizes(self) -> dict[str, int]:
        """Sizes of all objects below, by their paths from here."""
        return dict(self._list())

    def glob(self, pattern: str) -> Iterator[ObjectPath]:
        """The objects and prefixes below that match a pattern, whose stars do not match a slash."""
        depth, seen = pattern.count("/") + 1, set[str]()
        for path in self.list_sizes():
            parts = path.split("/")
            found = "/".join(parts[:depth])
            matches = len(parts) >= depth and all(
                fnmatch.fnmatchcase(part, wanted)
                for part, wanted in zip(parts, pattern.split("/"), strict=False)
            )
            if matches and found not in seen:
                seen.add(found)
                yield self / found

    def iterdir(self) -> Iterator[ObjectPath]:
        """The objects and prefixes directly below."""
        return self.glob("*")

    def read_bytes(self) -> bytes:
        """The whole object."""
        with _reporting(self) as store:
            return bytes(_obstore().get(store, self.key).bytes())

    def read_text(self, encoding: str = "utf-8") -> str:
        """The whole object as text."""
        return self.read_bytes().decode(encoding)

    def read_range(self, start: int, size: int) -> bytearray:
        """A part of the object."""
        data = bytearray(size)

        def fetch(offset: int) -> None:
            count = min(READ_BYTES, size - offset)
            with _reporting(self) as store:
                found = _obstore().get_range(store, self.key, start=start + offset, length=count)
            data[offset : offset + count] = memoryview(found)

        if size <= READ_BYTES:
            if size:
                fetch(0)
            return data
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:  # a large part in one request may time out
            list(pool.map(fetch, range(0, size, READ_BYTES)))
        return data

    def write_bytes(self, content: bytes) -> None:
        """Write the object as a whole; replaces an older one."""
        with _reporting(self) as store:
            _obstore().put(store, self.key, content, use_multipart=False)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Write the object as a whole; replaces an older one."""
        self.write_bytes(text.encode(encoding))

    def create(self, content: bytes) -> None:
        """Write the object if there is none (a conditional put: of two writers one succeeds).

        Raises:
            FileExistsError: There is one.
        """
        with _reporting(self) as store:
            _obstore().put(store, self.key, content, mode="create", use_multipart=False)

    def read_with_tag(self) -> tuple[bytes, str]:
        """The object, and its version tag."""
        with _reporting(self) as store:
            found = _obstore().get(store, self.key)
            return bytes(found.bytes()), str(found.meta["e_tag"])

    def replace_version(self, content: bytes, tag: str) -> str:
        """Replace the object if it still has this tag; returns the new tag.

        Raises:
            FileExistsError: It was changed in between.
        """
        with _reporting(self) as store:
            done = _obstore().put(store, self.key, content, mode={"e_tag": tag}, use_multipart=False)
            return str(done["e_tag"])

    def touch(self) -> None:
        """Write an empty object."""
        self.write_bytes(b"")

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Check that the store is reached: prefixes need not be created."""
        next(self._list(), None)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object."""
        with suppress(FileNotFoundError) if missing_ok else nullcontext(), _reporting(self) as store:
            _obstore().delete(store, self.key)

    def remove_below(self) -> None:
        """Remove all objects below."""
        if names := [f"{self.key}/{name}" for name in self.list_sizes()]:
            with _reporting(self) as store:
                _obstore().delete(store, names)

    def open(self, mode: str = "rb") -> Any:
        """Read the object as a file."""
        assert mode == "rb", "open_new writes"
        return io.BufferedReader(_ObjectReader(self, self.lstat().st_size), READ_BYTES)

    def _list(self) -> Iterator[tuple[str, int]]:
        """Path from here and size of every object below."""
        prefix = f"{self.key}/" if self.key else ""
        with _reporting(self) as store:
            for batch in _obstore().list(store, prefix=prefix or None):
                for entry in batch:
                    path = str(entry["path"])
                    if path.startswith(prefix):
                        yield path.removeprefix(prefix), int(entry["size"])


class _ObjectReader(io.RawIOBase):
    """An object as a file that can be read."""

    def __init__(self, path: ObjectPath, size: int) -> None:
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        buffer[:count] = self._path.read_range(self._at, count)
        self._at += count
        return count


AnyPath = Path | ObjectPath


def is_url(text: str) -> bool:
    """Whether a location is that of an object store."""
    return "://" in text


def parse_location(location: str | AnyPath) -> AnyPath:
    """The path of a folder, or of an object store for a URL such as ``s3://bucket/prefix``.

    Raises:
        UserError: The URL is not one that is supported, or the package for it is missing.
    """
    if isinstance(location, ObjectPath) or not is_url(str(location)):
        return location if isinstance(location, ObjectPath) else Path(location)
    scheme, _, rest = str(location).partition("://")
    bucket, _, key = rest.partition("/")
    parts = [part for part in key.split("/") if part]
    if scheme not in SCHEMES or not bucket or any(part in (".", "..") for part in parts):
        rule, fix = "is not the URL of an object store", "Write s3://BUCKET/PREFIX, or a folder"
        raise UserError(Problem("store-url", rule, path=str(location), fix=fix))
    require_packages(("obstore", "stores"), needed_for=f"{scheme}://")
    return ObjectPath(f"{scheme}://{bucket}", "/".join(parts))


def tree_bytes(path: AnyPath) -> int:
    """Bytes of all files below."""
    return sum(path.list_sizes().values()) if isinstance(path, ObjectPath) else folder_bytes(path)


def remove_tree(path: AnyPath) -> None:
    """Remove a folder with all its files; links are not followed. What is missing is no error."""
    if isinstance(path, ObjectPath):
        path.remove_below()
    elif path.is_symlink():
        path.unlink(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path)


def write_whole(path: AnyPath, content: bytes) -> None:
    """Write a file durably: a reader sees all of it or nothing; replaces an older one."""
    if isinstance(path, ObjectPath):
        path.write_bytes(content)
    else:
        replace_bytes(path, content)


@contextmanager
def open_new(path: AnyPath, size: int) -> Iterator[BinaryWriter]:
    """Write a new file in pieces. At the end it is durable; after an error it is not complete.

    Args:
        path: There is no such file.
        size: About how large it will be.
    """
    if isinstance(path, ObjectPath):
        with _reporting(path) as store:
            yield from _upload(store, path.key, size)
        return
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def read_range(path: AnyPath, start: int, size: int) -> bytearray:
    """A part of a file; shorter where the file ends before."""
    if isinstance(path, ObjectPath):
        return path.read_range(start, size)
    data = bytearray(size)
    with path.open("rb") as file:
        file.seek(start)
        return data[: file.readinto(data)] if size else data


def _upload(store: ObjectStore, key: str, size: int) -> Iterator[BinaryWriter]:
    part = max(PART_BYTES, size // MAX_PARTS)
    writer = _obstore().open_writer(store, key, buffer_size=part, max_concurrency=UPLOADS_AT_ONCE)
    yield writer
    writer.close()  # after an error it is not called: then there is no object


def _obstore() -> Any:
    import obstore  # noqa: PLC0415  (an optional package)

    return obstore


@functools.cache
def _open_store(bucket: str, endpoint: str | None, process: int) -> ObjectStore:
    """The connection to a bucket. Its threads do not survive a fork: every process has its own."""
    from obstore.store import from_url  # noqa: PLC0415

    options: Any = {"connect_timeout": f"{CONNECT_TIMEOUT_S}s", "timeout": f"{REQUEST_TIMEOUT_S}s"}
    if (endpoint or "").startswith("http://"):
        options["allow_http"] = True
    retry: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=RETRY_S)}
    return from_url(bucket, client_options=options, retry_config=retry)


@contextmanager
def _reporting(path: ObjectPath) -> Iterator[ObjectStore]:
    """The store of a path; what it raises inside becomes an OSError with a short reason."""
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError  # noqa: PLC0415

    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
    try:
        yield _open_store(path.bucket, endpoint, os.getpid())
    except (AlreadyExistsError, PreconditionError) as error:
        raise FileExistsError(f"{path}: exists already, or was changed meanwhile") from error
    except FileNotFoundError as error:
        if "NoSuchBucket" not in str(error):
            raise FileNotFoundError(f"{path}: no such object") from error
        raise StoreError(f"{path}: {_REASONS['NoSuchBucket']}") from error
    except (BaseError, PermissionError) as error:
        raise StoreError(f"{path}: {_explain(str(error))}") from error


def _explain(text: str) -> str:
    """The reason in an error of the store, which is many lines long."""
    code, status = _CODE.search(text), _STATUS.search(text)
    if code:
        return _REASONS.get(code[1], code[1])
    if "/latest/api/token" in text or "/latest/meta-data" in text:  # the last place to look for them
        return "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if status:
        return f"the server answers {status[1]}"
    if "error sending request" in text or "HTTP error" in text:
        return "the server cannot be reached"
    return text.splitlines()[0]
