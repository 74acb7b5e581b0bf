"""Documents of text files, JSON lines and Parquet tables, streamed, without holding a file in memory."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PIECE = 1 << 20  # bytes of a document of a text file; a longer file becomes several documents
ROWS = 1024  # rows of a Parquet table in memory at a time


def documents(path: Path, field: str = "text") -> Iterator[str]:
    """Yield the documents in ``path``: rows of a ``.parquet``, lines of a ``.jsonl``, else the text itself in pieces of 1 MiB.

    Args:
        path: the file.
        field: column or key that holds the text.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is damaged, not UTF-8 or lacks ``field``, with the line or row.
        ModuleNotFoundError: for a Parquet file without pyarrow.
    """
    reader = {".parquet": _parquet, ".jsonl": _lines}.get(path.suffix)
    return _pieces(path) if reader is None else reader(path, field)


def _pieces(path: Path) -> Iterator[str]:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name files, or a pattern such as {path / '*.txt'}")
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        try:
            while content := file.read(PIECE):
                if text := decoder.decode(content):
                    yield text
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error.reason} before byte {file.tell()}; convert it first") from None


def _lines(path: Path, field: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    content = json.loads(line)
                except ValueError:
                    raise ValueError(f"{path}, line {number}, is not JSON") from None
                yield _text(content.get(field) if isinstance(content, dict) else None, f"{path}, line {number}", field)


def _parquet(path: Path, field: str) -> Iterator[str]:
    from pyarrow import ArrowInvalid, parquet

    try:
        table = parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path} is damaged or not a Parquet file: {error}") from None
    with table:
        if field not in table.schema_arrow.names:
            raise ValueError(f"{path} has no column {field!r}, only {', '.join(table.schema_arrow.names)}: choose one with --field")
        number = 0
        for batch in table.iter_batches(ROWS, columns=[field]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield _text(value, f"{path}, row {number}", field)


def _text(value: Any, place: str, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}, has no text under {field!r}")
    return value
