"""Files of text and records: their kind by name, decompression, and decoding.

The kind comes from the suffix, before that of the compression (``a.jsonl.gz``). A file of an unknown kind is
refused, to avoid training on the syntax of a format by accident.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal, NamedTuple, cast

from meshwright.core.errors import missing_package

Kind = Literal["text", "jsonl", "json", "csv", "tsv", "parquet"]
Compression = Literal["gzip", "zstd"]

_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_RECORDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_PROSE = "txt text md markdown rst log tex"
_CODE = (
    "py pyi c h cc cpp cxx hh hpp cu cuh java js jsx ts tsx go rs rb php pl r jl lua sh bash sql scala kt"
    " swift cs hs ml el clj f90 f asm s"
)
_TEXT = frozenset(["", *(f".{suffix}" for suffix in f"{_PROSE} {_CODE}".split())])

CHUNK_BYTES = 128 * 1024


class BadDataError(ValueError):
    """A file or a record that cannot be used, with the code of the problem."""

    def __init__(self, code: str, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.code = code
        self.fix = fix


class FileKind(NamedTuple):
    """Kind and compression of a file, from its name."""

    kind: Kind
    compression: Compression | None


def file_kind(path: Path) -> FileKind:
    """The kind of a file, by its suffixes.

    Raises:
        BadDataError: The kind is not one that is read.
    """
    compression = _COMPRESSIONS.get(path.suffix.lower())
    suffix = Path(path.stem).suffix.lower() if compression else path.suffix.lower()
    if suffix in _TEXT:
        return FileKind("text", compression)
    if suffix in _RECORDS:
        return FileKind(_RECORDS[suffix], compression)
    fix = f"Use {', '.join(_RECORDS)} or .txt files, also as .gz or .zst; rename plain text to .txt"
    raise BadDataError("data-file-kind", f"files of the kind {suffix} are not read", fix)


@contextmanager
def open_file(path: Path, compression: Compression | None) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The decompressed content, and the file itself, whose position shows the progress.

    Raises:
        BadDataError: While reading, if the compressed content is truncated or damaged.
        UserError: The package for the compression is not installed.
    """
    with path.open("rb") as raw:
        if compression is None:
            yield raw, raw
            return
        try:
            yield _decompress(raw, compression), raw
        except (EOFError, zlib.error, OSError) as error:  # pyarrow raises OSError
            reason = f"it cannot be decompressed: the {compression} file is truncated or damaged ({error})"
            raise BadDataError("data-bad-compression", reason, "Download or compress it again") from error


def _decompress(raw: IO[bytes], compression: Compression) -> IO[bytes]:
    if compression == "gzip":
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    try:
        import pyarrow  # noqa: PLC0415 - optional
    except ImportError as error:
        raise missing_package("pyarrow", "data", "a .zst file") from error
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd"))


def decode_chunks(stream: IO[bytes]) -> Iterator[str]:
    """The text of a stream of UTF-8, chunk by chunk, without a byte-order mark.

    Raises:
        BadDataError: It is not UTF-8, or binary.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    while True:
        data = stream.read(CHUNK_BYTES)
        if b"\0" in data:
            raise BadDataError("data-not-utf8", "binary: it has zero bytes", "Use files with UTF-8 text")
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 at byte {offset - pending + error.start}"
            raise BadDataError("data-not-utf8", reason, "Convert it to UTF-8") from error
        if offset == 0:
            text = text.removeprefix("\ufeff")
        offset += len(data)
        if text:
            yield text
        if not data:
            return
