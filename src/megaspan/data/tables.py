"""Records in tables and lists: parquet, `datasets` objects, and what is passed from Python.

Parquet and Arrow are read in batches measured in bytes, because an Arrow array of text ends at 2³¹ bytes: three documents of
800 MB in one batch are too many (datasets#615, #648). Lists of ids come as arrays, without a Python object for each number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from megaspan.data.readers import Source, choose_renderer
from megaspan.data.records import Document, Renderer, render_records, token_ids
from megaspan.data.textfiles import stamp
from megaspan.human import UserError

_BATCH_BYTES = 8 * 2**20


class Parquet(Source):
    """The records of one parquet file, read as a stream in batches of a few megabytes."""

    def __init__(self, path: Path, text_field: str, columns: Sequence[str] | None = None) -> None:
        super().__init__(str(path))
        self._path = path
        self._text_field = text_field
        self._columns = columns

    @override
    def identity(self) -> Any:
        return ["parquet", stamp([self._path]), self._text_field, self._columns]

    @override
    def documents(self) -> Iterator[Document]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(self._path)
        except (pa.ArrowException, OSError) as error:
            do = "Write it again, or rename it if it is something else"
            raise UserError(f"{self._path} is no parquet file: {str(error).splitlines()[0]}", do=do) from error
        with file:
            renderer = choose_renderer(file.schema_arrow.names, self._columns, self._text_field, self.name)
            groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
            size = sum(group.total_byte_size for group in groups)
            batch = _batch_size(size, file.metadata.num_rows)
            number = 0
            tables = file.iter_batches(batch_size=batch, columns=list(renderer.columns))
            while True:
                try:
                    table = next(tables, None)
                except (pa.ArrowException, OSError) as error:
                    what = f"{self._path} is damaged behind record {number}: {str(error).splitlines()[0]}"
                    raise UserError(what, do="Write or copy it again") from error
                if table is None:
                    return
                for record in _arrow_records(table):
                    number += 1
                    yield renderer.render(record, f"{self._path}, record {number}")


class Table(Source):
    """A `datasets.Dataset`, opened only when its documents are read.

    Args:
        name: what the user called it.
        load: opens the dataset.
        identity: what changes when the data changes; None takes the dataset's own fingerprint.
        text_field: column with the text.
        columns: the columns to look at; None is all.
    """

    def __init__(
        self, name: str, load: Callable[[], Any], identity: Any | None, text_field: str, columns: Sequence[str] | None = None
    ) -> None:
        super().__init__(name)
        self._load = load
        self._identity = identity
        self._text_field = text_field
        self._columns = columns
        self._opened: tuple[Any, Renderer] | None = None

    @override
    def identity(self) -> Any:
        known = self._identity if self._identity is not None else self._load()._fingerprint
        return ["dataset", known, self._text_field, self._columns]

    @override
    def documents(self) -> Iterator[Document]:
        dataset, renderer = self._open()
        number = 0
        for table in dataset.iter(batch_size=_batch_size(dataset.data.nbytes, len(dataset))):
            for record in _arrow_records(table):
                number += 1
                yield renderer.render(record, f"{self.name}, record {number}")

    @override
    def count(self) -> int:
        return len(self._open()[0])

    @override
    def document(self, index: int) -> Document:
        dataset, renderer = self._open()
        record = next(iter(_arrow_records(dataset[index : index + 1])))
        return renderer.render(record, f"{self.name}, record {index + 1}")

    def _open(self) -> tuple[Any, Renderer]:
        if self._opened is None:
            dataset = self._load()
            renderer = choose_renderer(dataset.column_names, self._columns, self._text_field, self.name)
            self._opened = dataset.select_columns(list(renderer.columns)).with_format("arrow"), renderer
        return self._opened


class Stream(Source):
    """A `datasets.IterableDataset`: read once, in order."""

    def __init__(
        self, name: str, load: Callable[[], Any], identity: Any | None, text_field: str, columns: Sequence[str] | None = None
    ) -> None:
        super().__init__(name)
        self._load = load
        self._identity = identity
        self._text_field = text_field
        self._columns = columns

    @override
    def identity(self) -> Any | None:
        return None if self._identity is None else ["stream", self._identity, self._text_field, self._columns]

    @override
    def documents(self) -> Iterator[Document]:
        renderer: Renderer | None = None
        for number, record in enumerate(self._load(), start=1):
            if renderer is None:
                renderer = choose_renderer(list(record), self._columns, self._text_field, self.name, more=True)
            yield renderer.render(record, f"{self.name}, record {number}")


class Listed(Source):
    """A list from Python: texts, lists of ids, or records with a text column or `input_ids`."""

    def __init__(self, name: str, items: Sequence[Any], text_field: str) -> None:
        super().__init__(name)
        self._items = items
        self._text_field = text_field
        self._renderer: Renderer | None = None

    @override
    def identity(self) -> Any:
        """A hash of the content: a list has no name to be known by."""
        digest = hashlib.sha256()
        for document in self.documents():
            for part in (document.text, document.ids, document.trained, document.lengths):
                data = (
                    b"" if part is None else part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part.tobytes()
                )
                digest.update(f"{type(part).__name__}{len(data)}:".encode())
                digest.update(data)
        return ["list", digest.hexdigest()]

    @override
    def documents(self) -> Iterator[Document]:
        for index in range(len(self._items)):
            yield self.document(index)

    @override
    def count(self) -> int:
        return len(self._items)

    @override
    def document(self, index: int) -> Document:
        item = self._items[index]
        place = f"{self.name}, item {index}"
        if item is None or isinstance(item, str):
            return Document(place, text=item)
        if isinstance(item, Mapping):
            if self._renderer is None:
                self._renderer = render_records(list(item), self._text_field, self.name, more=True)
            return self._renderer.render(item, place)
        return Document(place, ids=token_ids(item, place))


def _batch_size(size: int, records: int) -> int:
    """Records in a batch so that it stays at a few megabytes, whatever one record holds."""
    return max(1, min(1000, _BATCH_BYTES * max(records, 1) // max(size, 1)))


def _arrow_records(table: Any) -> Iterator[dict[str, Any]]:
    """The rows of an Arrow table or batch; lists of numbers come as numpy arrays, without a Python object for each number."""
    names = table.schema.names
    for row in range(table.num_rows):
        yield {name: _value(table.column(name)[row]) for name in names}


def _value(scalar: Any) -> Any:
    import pyarrow as pa

    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar) and pa.types.is_integer(
        scalar.values.type
    ):
        return scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()
