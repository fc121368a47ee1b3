"""The records of a file: JSON Lines, JSON, CSV and Parquet, one at a time.

A JSON file may be an array of records, an object with one array of records beside other values
(``{"version": 1, "info": {...}, "data": [...]}``), an object of records by name, a single record, or JSON
Lines. Arrays are parsed element by element, so that memory does not grow with the file.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from meshwright.core.errors import missing_package
from meshwright.data.files import BadDataError, Kind, decode_chunks

Record = tuple[str, Any]
"""Where it is in the file, such as ``:3`` for line 3, and its content; or why it cannot be read."""

WHOLE_JSON_CHARACTERS = 16 * 1024**2
"""A JSON object up to this size is parsed whole; a larger one must be an object of records."""
MAX_RECORD_CHARACTERS = 256 * 1024**2
"""The largest record of a JSON array."""
MAX_METADATA = 16
"""Objects before the array of a large file that are taken for its metadata; more are records by name."""

MAX_LINE_BYTES = 64 * 1024**2
"""The longest line of JSON Lines: a broken file may have one of any length."""

_SKIP_BYTES = 1024**2
_PARQUET_ROWS = 64
_SPACE = " \t\r\n"


def iter_records(
    kind: Kind,
    stream: IO[bytes],
    columns: tuple[str, ...],
    record_fields: tuple[str, ...],
    part: tuple[int, int] | None = None,
) -> Iterator[Record]:
    """The records of a file, in order.

    A bad record of JSON Lines or CSV comes as a :class:`BadDataError` in place of its content, because the
    next record can still be read.

    Args:
        kind: Kind of the file; not text.
        stream: Its decompressed content.
        columns: The only columns that are needed; empty for all. Parquet reads no others.
        record_fields: A JSON object with one of these is a record, not a container of records.
        part: Only the lines of JSON Lines that start in this range of bytes; they are numbered from 1.

    Raises:
        BadDataError: The file itself is malformed.
    """
    if kind == "jsonl":
        return _read_jsonl(stream, part)
    if kind == "json":
        return _JsonReader(decode_chunks(stream), record_fields).records()
    if kind == "parquet":
        return _read_parquet(stream, columns)
    return _read_csv(stream, "\t" if kind == "tsv" else ",", columns)


def _read_jsonl(stream: IO[bytes], part: tuple[int, int] | None) -> Iterator[Record]:
    for number, line in enumerate(_lines(stream, part), start=1):
        where = f":{number}"
        if line is None:
            reason = f"a line of more than {MAX_LINE_BYTES // 1024**2} MiB"
            yield where, BadDataError("data-line-long", reason, "Split it into several records")
            continue
        if not line.strip():
            continue
        try:
            yield where, json.loads(line)
        except UnicodeDecodeError as error:
            yield where, BadDataError("data-not-utf8", f"not UTF-8: {error.reason}", "Convert it to UTF-8")
        except (ValueError, RecursionError) as error:
            yield where, BadDataError("data-bad-json", f"not JSON: {error}", "Correct the line")


def _lines(stream: IO[bytes], part: tuple[int, int] | None) -> Iterator[bytes | None]:
    """The lines of a stream, or those that start in a part of it; None for one that is too long."""
    at, end = part or (0, sys.maxsize)
    if at > 0:  # the line that starts before belongs to the part before
        stream.seek(at - 1)
        at += sum(map(len, _rest_of_line(stream))) - 1
    while at < end and (line := stream.readline(MAX_LINE_BYTES)):
        at += len(line)
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            at += sum(map(len, _rest_of_line(stream)))
            yield None
        else:
            yield line


def _rest_of_line(stream: IO[bytes]) -> Iterator[bytes]:
    """The blocks up to the end of the line."""
    while block := stream.readline(_SKIP_BYTES):
        yield block
        if block.endswith(b"\n"):
            return


def _read_csv(stream: IO[bytes], delimiter: str, columns: tuple[str, ...]) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)  # the default refuses fields above 128 KiB
    text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    rows = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = next(rows, None)
        if header and not set(columns) & set(header):
            _check_delimiter(header, delimiter)
        for row in rows:
            if not row:
                continue
            where = f":{rows.line_num}"
            if len(row) == len(header or ()):
                yield where, dict(zip(header or (), row, strict=True))
            else:
                reason = f"the row has {len(row)} fields and the header {len(header or ())}"
                yield where, BadDataError("data-bad-csv", reason, "Quote fields that contain the delimiter")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 after line {rows.line_num}"
        raise BadDataError("data-not-utf8", reason, "Convert it to UTF-8") from error
    except csv.Error as error:
        fix = "Quote fields that contain quotes or line breaks"
        raise BadDataError("data-bad-csv", f"line {rows.line_num}: {error}", fix) from error
    finally:
        text.detach()


def _check_delimiter(header: list[str], delimiter: str) -> None:
    """Refuse a header of one column whose name looks like several, separated by another delimiter.

    Raises:
        BadDataError: With the delimiter that it seems to have.
    """
    others = {";": "semicolons", "\t": "tabs", ",": "commas", "|": "bars"}
    found = next((name for sign, name in others.items() if sign != delimiter and sign in header[0]), None)
    if len(header) == 1 and found:
        reason = f"its header {header[0]!r} is one column: the fields seem to be separated by {found}"
        fix = f"Separate them by {others[delimiter]}"
        fix += ", or by tabs in a .tsv file" if delimiter == "," else ", or by commas in a .csv file"
        raise BadDataError("data-bad-csv", reason, fix)


def _read_parquet(stream: IO[bytes], columns: tuple[str, ...]) -> Iterator[Record]:
    try:
        import pyarrow  # noqa: PLC0415 - optional
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError as error:
        raise missing_package("pyarrow", "data", "a .parquet file") from error
    try:
        with _seekable(stream) as seekable:
            file = pyarrow.parquet.ParquetFile(seekable, buffer_size=1024**2, pre_buffer=False)
            found = [name for name in columns if name in file.schema_arrow.names]
            number = 0
            for batch in file.iter_batches(_PARQUET_ROWS, columns=found or None, use_threads=False):
                for record in batch.to_pylist():
                    number += 1
                    yield f" row {number}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise BadDataError("data-bad-parquet", f"not a Parquet file: {error}") from error


@contextmanager
def _seekable(stream: IO[bytes]) -> Iterator[IO[bytes]]:
    """The stream, or a temporary copy: Parquet has its index at the end."""
    if isinstance(stream, io.BufferedReader) and stream.seekable():
        yield stream
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy)
        copy.seek(0)
        yield copy


class _JsonReader:
    """Parses the text of a JSON file piece by piece."""

    def __init__(self, chunks: Iterable[str], record_fields: tuple[str, ...]) -> None:
        self._chunks = iter(chunks)
        self._record_fields = record_fields
        self._decode = json.JSONDecoder().raw_decode
        self._text = ""
        self._at = 0
        self._line = 1
        """Line at which the text in memory starts."""
        self._ended = False

    def records(self) -> Iterator[Record]:
        """The records of the file."""
        for number, record in enumerate(self._top(), start=1):
            yield f" record {number}", record

    def _top(self) -> Iterator[Any]:
        first = self._peek()
        if first == "[":
            yield from self._array()
        elif first == "{":
            yield from self._object()
        elif first:
            raise self._error("it is neither an array nor an object of records")
        if self._peek():
            raise self._error("there is text after the end")

    def _object(self) -> Iterator[Any]:
        """JSON Lines, one whole object, or a large object of records."""
        while len(self._text) - self._at < WHOLE_JSON_CHARACTERS and self._read():
            pass
        try:
            content, end = self._decode(self._text, self._at)
        except RecursionError as error:
            raise self._error("it is nested too deeply") from error
        except ValueError as error:
            if self._ended:
                raise self._error(error) from error
            is_container = False
            for record in self._members():
                is_container = True
                yield record
            if not is_container:
                raise _large_record() from error
            return
        self._at = end
        if self._peek() == "{":  # JSON Lines
            yield content
            while self._peek():
                yield self._value()
        else:
            yield from _records_of(content, self._record_fields)

    def _array(self) -> Iterator[Any]:
        """The elements of an array."""
        for _ in self._items("]"):
            yield self._value()

    def _members(self) -> Iterator[Any]:
        """The records of a large object: the elements of its arrays; without an array, its objects."""
        objects: list[Any] = []
        has_array = by_name = False
        for _ in self._items("}"):
            key = self._value()
            self._expect(":")
            if key in self._record_fields and self._peek() != "{":
                raise _large_record()
            if self._peek() == "[":
                has_array = True
                yield from self._array()
            elif isinstance(value := self._value(), dict) and (by_name or not has_array):
                objects.append(value)
                by_name = by_name or len(objects) > MAX_METADATA
                if by_name:
                    yield from objects
                    objects = []
        if not has_array:
            yield from objects

    def _items(self, closing: str) -> Iterator[None]:
        """Goes to each item of an array or object; the caller parses it."""
        self._at += 1
        if self._peek() != closing:
            while True:
                yield
                if self._peek() == closing:
                    break
                self._expect(",")
        self._at += 1

    def _value(self) -> Any:
        """The next value; more text is read until it is complete."""
        self._peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except RecursionError as error:
                raise self._error("it is nested too deeply") from error
            except ValueError as error:
                bad = self._error(error)
                if len(self._text) - self._at > MAX_RECORD_CHARACTERS or not self._read():
                    raise bad from error
                continue
            if end == len(self._text) and self._read():  # a number may go on
                continue
            self._at = end
            return value

    def _expect(self, character: str) -> None:
        if self._peek() != character:
            raise self._error(f"{character!r} is missing")
        self._at += 1

    def _peek(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def _read(self) -> bool:
        """Drop the text that was parsed, and read as much as is left, at least one chunk."""
        left = len(self._text) - self._at
        self._line += self._text.count("\n", 0, self._at)
        parts, size = [self._text[self._at :]], 0
        while not self._ended and size <= left:
            chunk = next(self._chunks, None)
            self._ended = chunk is None
            parts.append(chunk or "")
            size += len(chunk or "")
        self._text, self._at = "".join(parts), 0
        return size > 0

    def _error(self, error: ValueError | str) -> BadDataError:
        at, reason = self._at, str(error)
        if isinstance(error, json.JSONDecodeError):
            at, reason = error.pos, error.msg
        line = self._line + self._text.count("\n", 0, at)
        return BadDataError("data-bad-json", f"not JSON at line {line}: {reason}", "Correct the file")


def _large_record() -> BadDataError:
    reason = f"a single record of more than {WHOLE_JSON_CHARACTERS:,} characters"
    return BadDataError("data-bad-json", reason, "Write it as one line of a .jsonl file")


def _records_of(content: dict[str, Any], record_fields: tuple[str, ...]) -> Iterator[Any]:
    """The records of an object: of its only array of objects, or by name; else it is the record.

    Raises:
        BadDataError: It has several arrays of objects, and is no record itself.
    """
    lists = {key: value for key, value in content.items() if value and isinstance(value, list)}
    arrays = {key: array for key, array in lists.items() if all(isinstance(item, dict) for item in array)}
    if arrays and not any(field in content for field in record_fields):
        if len(arrays) > 1:
            reason = f"an object with several arrays of records: {', '.join(arrays)}"
            longest = max(arrays, key=lambda key: len(arrays[key]))
            fix = f"Write the records of one as JSON Lines: jq -c '.{longest}[]'"
            raise BadDataError("data-bad-json", reason, fix)
        (records,) = arrays.values()
        yield from records
    elif content and all(isinstance(value, dict) for value in content.values()):
        yield from content.values()
    else:
        yield content
