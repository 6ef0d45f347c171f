"""Places that hold documents, each yielding one document at a time: the interface, text files, JSON lines.

A corpus for million-token rows is tens of gigabytes and one of its documents can be hundreds of megabytes, so nothing here
holds more than one document. JSON lines are read by their own offsets, without a second copy in another format.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from megaspan.data.records import Document, Renderer, render_records
from megaspan.data.textfiles import SkippedFiles, read_text, stamp
from megaspan.human import UserError


class Source(ABC):
    """Documents in a fixed order.

    Attributes:
        name: what the user called it, for messages and the ledger.
        skipped: files that were left out, known once the documents were read.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.skipped = SkippedFiles()

    @abstractmethod
    def identity(self) -> Any | None:
        """Everything that changes when the documents change, as JSON; None where only reading would tell."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Every document, in order."""

    def count(self) -> int | None:
        """How many documents there are, where `document` can be asked for any of them; None for a stream."""
        return None

    def document(self, index: int) -> Document | None:
        """The document at `index`; None where a file turned out to be no text (counted in `skipped`)."""
        raise NotImplementedError(f"{type(self).__name__} is a stream")


class TextFiles(Source):
    """One file, one document, as UTF-8.

    Args:
        name: what the user called these files.
        paths: the files, in order.
        strict: a file that cannot be read as text is an error, not skipped (the user named it).
        skipped: files that were left out already.
    """

    def __init__(self, name: str, paths: Sequence[Path], *, strict: bool = False, skipped: SkippedFiles | None = None) -> None:
        super().__init__(name)
        self.skipped = skipped or self.skipped
        self._paths = list(paths)
        self._strict = strict

    @override
    def identity(self) -> Any:
        return ["files", stamp(self._paths)]

    @override
    def documents(self) -> Iterator[Document]:
        for index in range(len(self._paths)):
            if (document := self.document(index)) is not None:
                yield document

    @override
    def count(self) -> int:
        return len(self._paths)

    @override
    def document(self, index: int) -> Document | None:
        path = self._paths[index]
        text, why = read_text(path)
        if text is not None:
            return Document(str(path), text=text)
        if self._strict:
            raise UserError(f"{path} is no text: {why}", allowed="UTF-8 text, .jsonl or .parquet", do="Convert it to UTF-8")
        self.skipped.add(why, path.name)
        return None


class JsonLines(Source):
    """One JSON object a line, with a text column or `input_ids`; empty lines are no records."""

    def __init__(self, path: Path, text_field: str, columns: Sequence[str] | None = None) -> None:
        super().__init__(str(path))
        self._path = path
        self._text_field = text_field
        self._columns = columns
        self._renderer: Renderer | None = None
        self._offsets: np.ndarray | None = None

    @override
    def identity(self) -> Any:
        return ["jsonl", stamp([self._path]), self._text_field, self._columns]

    @override
    def documents(self) -> Iterator[Document]:
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield self._parse(line, number)

    @override
    def count(self) -> int:
        return len(self._lines())

    @override
    def document(self, index: int) -> Document:
        offset, number = self._lines()[index]
        with self._path.open("rb") as lines:
            lines.seek(int(offset))
            return self._parse(lines.readline(), int(number))

    def _lines(self) -> np.ndarray:
        """Byte offset and line number of every record, int64 [records, 2], from one pass over the file."""
        if self._offsets is None:
            found, offset = [], 0
            with self._path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        found.append((offset, number))
                    offset += len(line)
            self._offsets = np.array(found, dtype=np.int64).reshape(-1, 2)
        return self._offsets

    def _parse(self, line: bytes, number: int) -> Document:
        place = f"{self._path}, line {number}"
        try:
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            do = "Mend or remove this line; a file of one long list is not read, nor is an object over several lines"
            raise UserError(f"{place} is no JSON: {_why(error)}", allowed="one JSON object a line", do=do) from error
        if not isinstance(record, dict):
            what = {"list": "a list", "str": "a text", "NoneType": "null", "bool": "true or false"}.get(type(record).__name__)
            do = 'Write every record on a line of its own: {"text": "…"}'
            raise UserError(f"{place} holds {what or 'a number'}", allowed="one JSON object a line", do=do)
        if self._renderer is None:
            self._renderer = choose_renderer(list(record), self._columns, self._text_field, self.name, more=True)
        return self._renderer.render(record, place)


def _why(error: UnicodeDecodeError | json.JSONDecodeError | RecursionError) -> str:
    """What is wrong with a line, and where in it."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return f"{error.msg.removesuffix(' at')}, at character {error.pos + 1}"


def choose_renderer(
    existing: Sequence[str], wanted: Sequence[str] | None, text_field: str, name: str, *, more: bool = False
) -> Renderer:
    """The renderer for a dataset with the columns `existing`, of which the user wants some or (None) all.

    With `more`, later records may have further columns.

    Raises:
        UserError: a wanted column is not there, or none holds text or ids.
    """
    missing = [column for column in wanted or () if column not in existing]
    if missing:
        raise UserError(f"{name} has no column {missing[0]!r}, which columns asks for", allowed=", ".join(existing))
    return render_records(list(wanted or existing), text_field, name, more=more and not wanted)
