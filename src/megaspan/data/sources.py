"""What the user named → where its documents are.

`dataset_name` may be a file, a folder, a glob, a folder that `datasets` wrote, or a name on the hub; `datasets` is a list of
such; from Python also lists and `datasets` objects. A local path always wins over a hub name, and what looks like a path is
never asked of the hub. Everything is decided here, before the first token, and every refusal names what exists instead.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaspan.data.names import OTHER_RECORDS, READ, UNPACK, is_path, not_in_the_cache, not_on_the_hub, nothing_there
from megaspan.data.readers import JsonLines, Source, TextFiles
from megaspan.data.tables import Listed, Parquet, Stream, Table
from megaspan.data.textfiles import NAMES, RECORDS, SkippedFiles, ending, is_text_name, kept_by_a_run, text_of, walk
from megaspan.human import UserError
from megaspan.plan.facts import no_way_to_the_hub


@dataclass(frozen=True)
class Wish:
    """How sources are read: the options that concern reading, out of the configuration.

    Attributes:
        split: name of the split that is wanted.
        train_split: name of the training split; a plain file belongs to it.
        text_field: column with the text.
        streaming: read `datasets` as a stream.
        shuffle: documents will be asked for in another order, so they must be addressable.
    """

    split: str
    train_split: str
    text_field: str = "text"
    streaming: bool = False
    shuffle: bool = False


@dataclass(frozen=True)
class Entry:
    """One dataset as a configuration names it (the keys of TRL's `datasets` entries)."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: Any = None
    columns: Sequence[str] | None = None


def open_entry(entry: Entry, wish: Wish) -> list[Source]:
    """The sources behind one named dataset.

    Raises:
        UserError: nothing is there, or it has no such split.
    """
    path = Path(entry.path).expanduser()
    picked = entry.data_files is not None or entry.data_dir is not None
    if os.path.isdir(path):
        return [_from_datasets(entry, wish)] if picked else _folder(entry, path, wish)
    matches = [] if picked else [path] if os.path.isfile(path) else _matches(entry.path)
    if matches:
        _plain(entry, wish)
        return _files(entry, matches, wish)
    if is_path(entry.path) and not (picked and os.path.isfile(path)):
        raise nothing_there(entry.path)
    return [_from_datasets(entry, wish)]


def open_object(data: Any, wish: Wish) -> list[Source]:
    """The sources behind what was passed from Python: a path or name, a list, or an object of `datasets`."""
    if isinstance(data, str | Path):
        return open_entry(Entry(str(data)), wish)
    if _is_datasets(data, "DatasetDict", "IterableDatasetDict"):
        if wish.split not in data:
            raise UserError(f"the dataset has no split {wish.split!r}", allowed=", ".join(data))
        data = data[wish.split]
    if _is_datasets(data, "Dataset"):
        return [Table("the dataset", lambda: data, None, wish.text_field)]
    if _is_datasets(data, "IterableDataset"):
        _no_shuffle(wish, "an IterableDataset")
        return [Stream("the dataset", lambda: data, None, wish.text_field)]
    if isinstance(data, Mapping):
        raise UserError(f"a dataset from Python cannot be a mapping (of {', '.join(map(str, data))})", do=_PYTHON_DATA)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return [Listed("the list", data, wish.text_field)]
    raise UserError("this object holds no documents", found=type(data).__name__, do=_PYTHON_DATA)


_PYTHON_DATA = "Pass a path, a list of texts, a list of lists of ids, or a datasets.Dataset (Dataset.from_dict makes one)"


def _folder(entry: Entry, folder: Path, wish: Wish) -> list[Source]:
    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        _plain(entry, wish, any_split=True)
        return [_from_disk(entry, folder, wish)]
    if _has_split_folders(folder, wish):
        if not (folder / wish.split).is_dir():
            there = [name for name in _subfolders(folder) if _holds_documents(folder / name)]
            raise UserError(f"{entry.path} has no split {wish.split!r}", allowed=", ".join(there))
        folder = folder / wish.split
        wish = Wish(wish.split, wish.split, wish.text_field, wish.streaming, wish.shuffle)
    files = walk(folder)
    if not files:
        what = f"{entry.path} is an empty folder (hidden files, caches and runs are not looked at)"
        raise UserError(what, allowed=READ, do="Put the text there, or check the name")
    records = [path for path in files if ending(path) in RECORDS]
    beside = [path for path in files if is_text_name(path) and path.stem.lower() not in NAMES]
    if records and not beside:
        if any(ending(path) == "parquet" or _names_a_split(path.relative_to(folder)) for path in files) or entry.name:
            return [_from_datasets(Entry(str(folder), entry.name, columns=entry.columns), wish)]
        _plain(entry, wish)
        return _files(entry, records, wish)
    _plain(entry, wish)
    skipped = SkippedFiles()
    taken = text_of(folder, files, skipped)
    if not taken:
        raise UserError(
            f"{entry.path} holds no file that is read: {'; '.join(skipped.lines())}",
            allowed="endings of text and code (.txt, .md, .py, …), .jsonl, .ndjson and .parquet",
            do=f"To take other endings write a glob such as {Path(entry.path)}/**/*{_an_ending(files)}",
        )
    return [TextFiles(entry.path, taken, skipped=skipped)]


def _an_ending(files: Sequence[Path]) -> str:
    """The most frequent ending, for an example that would work."""
    endings = [path.suffix for path in files if path.suffix]
    return max(endings, key=endings.count, default=".log")


def _names_a_split(path: Path) -> bool:
    """Whether `datasets` would read a split out of this name, or (a dataset card) finds them described in this file."""
    words = re.split(r"[^a-z]+", path.as_posix().lower())
    return path.name.lower() == "readme.md" or not {"train", "test", "validation", "valid", "val", "dev", "eval"}.isdisjoint(
        words
    )


def _has_split_folders(folder: Path, wish: Wish) -> bool:
    """Whether the folder is divided by split: it has a folder of the training split's name, and otherwise only other splits."""
    run = kept_by_a_run(folder)
    inside = [path for path in folder.iterdir() if not path.name.startswith(".") and path.name not in run]
    others = [path for path in inside if not path.is_dir() and path.stem.lower() not in NAMES]
    splits = {wish.train_split, wish.split, "train", "test", "validation", "dev", "eval"}
    beside = [folder / name for name in _subfolders(folder) if name not in splits]
    return not others and (folder / wish.train_split).is_dir() and not any(map(_holds_documents, beside))


def _holds_documents(folder: Path) -> bool:
    """Whether there is text or a file of records below, and not runs alone."""
    return any(is_text_name(path) or ending(path) in RECORDS for path in walk(folder))


def _subfolders(folder: Path) -> list[str]:
    run = kept_by_a_run(folder)
    places = [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sorted(path.name for path in places if path.name not in run)


def _files(entry: Entry, paths: Sequence[Path], wish: Wish) -> list[Source]:
    """Files that the user named, one by one or by a glob: text in one source, every file of records in its own."""
    sources: list[Source] = []
    text = [path for path in paths if ending(path) not in (*RECORDS, *UNPACK, *OTHER_RECORDS)]
    if entry.columns and text:
        raise UserError(f"{entry.path} is text, which has no columns ({', '.join(entry.columns)})", do="Remove columns")
    for path in paths:
        kind = ending(path)
        if kind in UNPACK:
            raise UserError(f"{path} is packed", do="Unpack it first")
        if kind in OTHER_RECORDS:
            reader = kind if kind != "tsv" else "csv"
            do = f"Write datasets: [{{path: {reader}, data_files: {path}}}], or convert it to .jsonl or .parquet"
            raise UserError(f"{path} is not read directly", allowed="text files, .jsonl, .ndjson and .parquet", do=do)
        columns = list(entry.columns) if entry.columns else None
        if kind == "parquet" and wish.shuffle:
            sources.append(_from_datasets(Entry("parquet", data_files=str(path), columns=columns), wish))
        elif kind == "parquet":
            sources.append(Parquet(path, wish.text_field, columns))
        elif kind in RECORDS:
            sources.append(JsonLines(path, wish.text_field, columns))
    if text:
        sources.insert(0, TextFiles(entry.path, text, strict=len(paths) == 1))
    return sources


def _matches(pattern: str) -> list[Path]:
    if not glob.has_magic(pattern):
        return []
    return sorted(Path(match) for match in glob.glob(str(Path(pattern).expanduser()), recursive=True) if Path(match).is_file())


def _plain(entry: Entry, wish: Wish, *, any_split: bool = False) -> None:
    """Files have one split and no configuration name."""
    if entry.name is not None:
        raise UserError(
            f"{entry.path} is local, so it has no configuration {entry.name!r}", do="Remove dataset_config (or name)"
        )
    if wish.split != wish.train_split and not any_split:
        raise UserError(
            f"{entry.path} has no split {wish.split!r}: files are one split",
            do=f"Pass held-out data of its own, or divide the folder into {wish.train_split}/ and {wish.split}/",
        )


def _from_disk(entry: Entry, folder: Path, wish: Wish) -> Source:
    """A folder written by `save_to_disk`."""
    import datasets

    place = folder
    if (folder / "dataset_dict.json").exists():
        place = folder / wish.split
        if not place.is_dir():
            raise UserError(f"{entry.path} has no split {wish.split!r}", allowed=", ".join(_subfolders(folder)))
    elif wish.split != wish.train_split:
        raise UserError(f"{entry.path} has no split {wish.split!r}: it was saved as one dataset")
    columns = list(entry.columns) if entry.columns else None
    return Table(entry.path, lambda: datasets.load_from_disk(str(place)), None, wish.text_field, columns)


def _from_datasets(entry: Entry, wish: Wish) -> Source:
    """Whatever `datasets.load_dataset` reads: a hub name, a local folder of records, or a format with data_files."""
    import datasets

    on_hub = not Path(entry.path).exists() and ("/" in entry.path or (entry.data_files is None and entry.data_dir is None))
    unreachable = None
    if on_hub and not datasets.config.HF_HUB_OFFLINE:
        unreachable = no_way_to_the_hub(entry.path, kind="dataset")
    try:
        with _cache_alone() if unreachable else contextlib.nullcontext():
            builder = datasets.load_dataset_builder(
                entry.path, name=entry.name, data_dir=entry.data_dir, data_files=entry.data_files
            )
    except (FileNotFoundError, ValueError, OSError) as error:
        said = str(error).partition(" with any supported extension [")[0]  # dozens of endings
        reason = textwrap.shorten(said or type(error).__name__, 200, placeholder=" …")
        if on_hub and (unreachable or datasets.config.HF_HUB_OFFLINE):
            raise not_in_the_cache(entry.path, unreachable) from error
        if entry.data_files is None and entry.data_dir is None and entry.name is None and not Path(entry.path).exists():
            raise not_on_the_hub(entry.path, reason) from error
        asked = {"name": entry.name, "data_dir": entry.data_dir, "data_files": entry.data_files}
        options = ", ".join(f"{key}: {value}" for key, value in asked.items() if value is not None)
        raise UserError(
            f"the dataset {entry.path}{f' ({options})' if options else ''} cannot be opened: {reason}",
            do="Check its path, name (dataset_config), data_dir and data_files: relative paths begin where megaspan is started",
        ) from error
    splits = list(builder.info.splits or builder.config.data_files or ())
    if splits and wish.split.split("[")[0] not in splits:
        raise UserError(f"{entry.path} has no split {wish.split!r}", allowed=", ".join(map(str, splits)))
    files = builder.config.data_files
    parts = {str(split): [list(map(str, files[split])), files[split].origin_metadata] for split in files} if files else {}
    identity = [entry.path, builder.config.name, builder.hash, str(builder.config.version), parts, wish.split]
    columns = list(entry.columns) if entry.columns else None
    if wish.streaming:
        _no_shuffle(wish, "a stream")
        load = lambda: builder.as_streaming_dataset(wish.split)  # noqa: E731
        return Stream(entry.path, load, identity, wish.text_field, columns)

    def prepared() -> Any:
        try:
            builder.download_and_prepare()
        except datasets.exceptions.DatasetsError as error:
            raise UserError(f"{entry.path} cannot be prepared: {str(error.__cause__ or error).splitlines()[0]}") from error
        return builder.as_dataset(wish.split)

    return Table(entry.path, prepared, identity, wish.text_field, columns)


@contextlib.contextmanager
def _cache_alone() -> Iterator[None]:
    """Without a way to the hub `datasets` asks six times, for 30 s, before it looks into its cache; this is its own switch."""
    from datasets import config

    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _no_shuffle(wish: Wish, what: str) -> None:
    if wish.shuffle:
        raise UserError(
            f"shuffle_dataset needs every document within reach, and {what} gives them one by one",
            do="Set dataset_streaming: false, or shuffle_dataset: false",
        )


def _is_datasets(data: Any, *names: str) -> bool:
    """Whether `data` is one of these classes of `datasets`, without importing it for those who do not use it."""
    return any(kind.__module__.split(".")[0] == "datasets" and kind.__name__ in names for kind in type(data).__mro__)
