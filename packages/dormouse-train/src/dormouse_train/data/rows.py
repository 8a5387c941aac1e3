"""Files whose rows are documents: JSON lines and Parquet. A document's bytes are the UTF-8 of its text field."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dormouse_train.errors import UserError, missing_extra

LINE_LIMIT = 64 << 20
"""Longest JSON line, a guard of memory against a file that holds no lines."""
READ_AHEAD = 1 << 20
"""Bytes of a Parquet file that are decoded at a time, in whole rows, and at most so many of these."""
MOST_ROWS = 256


def json_lines(file: BinaryIO, path: Path, field: str) -> Iterator[bytes]:
    """The documents of a stream with one JSON object a line, in order; empty ones and those that are null left out.

    Lines end with a newline and nothing else. Bytes that are no UTF-8 stay what they are, and a lone surrogate escape
    becomes its three bytes. Errors: `UserError` naming the line that is no object, too long, or lacks the text.
    """
    number = 0
    while line := file.readline(LINE_LIMIT + 1):
        number += 1
        if len(line) > LINE_LIMIT:
            raise UserError(
                f"data: line {number} of {path} is longer than {LINE_LIMIT:,} bytes; write one document a line"
            )
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        if document := _text(_object(line, number, path), field, f"line {number} of {path}"):
            yield document


def _object(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        raise UserError(f"data: line {number} of {path} is not JSON ({error}); mend or drop the line") from None
    if not isinstance(row, dict):
        raise UserError(f"data: line {number} of {path} is no JSON object; write one object a line")
    return row


def _text(row: dict[str, Any], field: str, where: str) -> bytes:
    if field not in row:
        raise UserError(f"data: {where} has no field '{field}'; {_set_the_field(list(row))}")
    value = row[field]
    if value is None:
        return b""
    if not isinstance(value, str):
        raise UserError(f"data: '{field}' of {where} is no text but {value!r:.60}; {_set_the_field(list(row))}")
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")


def parquet(path: Path, field: str) -> Iterator[bytes]:
    """The documents of a Parquet file in order, empty and null ones left out; strings and binary alike are as they are.

    About a mebibyte is decoded at a time, by the mean size of a row in its row group, or a page where those are longer.
    Errors: `UserError` for a damaged file, a column that is missing or holds neither strings nor binary, or without the
    extra `data`.
    """
    try:
        import pyarrow
        from pyarrow import parquet as files
    except ImportError:
        raise missing_extra(f"data: {path} is a Parquet file", "pyarrow", "data") from None
    try:
        with files.ParquetFile(path, buffer_size=READ_AHEAD, pre_buffer=False) as file:
            _check_column(file.schema_arrow, field, path)
            for group in range(file.num_row_groups):
                rows = _rows_at_a_time(file.metadata.row_group(group))
                for batch in file.iter_batches(rows, row_groups=[group], columns=[field], use_threads=False):
                    for value in batch.column(0).cast(pyarrow.large_binary()):
                        if document := value.as_py():
                            yield document
    except MemoryError:
        raise
    except pyarrow.ArrowException as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise UserError(f"data: {path} is not a whole Parquet file ({first}); write it again") from None


def _rows_at_a_time(group: Any) -> int:
    return max(1, min(MOST_ROWS, READ_AHEAD * group.num_rows // max(1, group.total_byte_size)))


def _check_column(schema: Any, field: str, path: Path) -> None:
    if field not in schema.names:
        raise UserError(f"data: {path} has no column '{field}'; {_set_the_field(schema.names)}")
    kind = schema.field(field).type
    if str(kind) not in {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}:
        raise UserError(f"data: the column '{field}' of {path} holds {kind}, no text; {_set_the_field(schema.names)}")


def _set_the_field(names: list[str]) -> str:
    return f"set data.text_field to the one that holds the text (there are: {', '.join(map(repr, names)) or 'none'})"
