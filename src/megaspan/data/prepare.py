"""`prepare_rows`: from what the user named to rows in a token store, with the ledger.

The store is found by a key over everything that shapes it: the files (path, size, time) or the dataset's own fingerprint, the
tokenizer, the options, the format of this package. With the same key the second start reads nothing, and a line says so (R23).
Nothing here is collective: ranks that prepare the same rows wait for a file lock, not in a process group with a timeout (R82).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaspan.data.build import Preparation, check_lost, order_seed
from megaspan.data.readers import JsonLines, Source
from megaspan.data.rows import Rows
from megaspan.data.sources import Entry, Wish, open_entry, open_object
from megaspan.data.tables import Parquet
from megaspan.data.tokenise import tokenizer_hash
from megaspan.data.tokenstore import FORMAT, alone, open_store
from megaspan.human import UserError, format_seconds

if TYPE_CHECKING:
    from megaspan.config import SFTConfig

_LOOKED_INTO = 32  # files, of which the first record is read: milliseconds each


def prepare_rows(
    config: SFTConfig,
    tokenizer: Any | None,
    split: str = "train",
    dataset: Any | None = None,
    *,
    eos_id: int | Any | None = ...,
    cache_folder: str | Path | None = None,
    report: Callable[[str], None] = print,
) -> Rows:
    """Tokenises and cuts the data of one split into rows, or finds them prepared.

    Args:
        config: the options that concern data.
        tokenizer: a transformers tokenizer; None when all data is `input_ids`.
        split: "train" or "test": which of `dataset_train_split` and `dataset_test_split` is read.
        dataset: data from Python in place of the configuration's: a path, a list, a `datasets` object.
        eos_id: end-of-text token; by default `config.eos_token`, or the tokenizer's own; None appends none. What the
            tokenizer puts in front of a text is put in front of every document of text.
        cache_folder: folder of the token stores; by default `~/.cache/megaspan/rows`.
        report: takes the lines about reuse, progress and the ledger.

    Raises:
        UserError: no data, no text in it, nothing to train, more lost than `max_lost_tokens`, an illegal padding.
    """
    return open_data(config, tokenizer, split, dataset, eos_id=eos_id).rows(cache_folder=cache_folder, report=report)


@dataclass(frozen=True)
class OpenData:
    """The data of one split, of which all that can be seen without reading it is as it should be. Made by `open_data`."""

    config: SFTConfig
    tokenizer: Any | None
    eos: int | None
    split: str
    sources: list[Source]

    def rows(self, *, cache_folder: str | Path | None = None, report: Callable[[str], None] = print) -> Rows:
        """Tokenises and cuts the data into rows, or finds them prepared; arguments and errors as in `prepare_rows`."""
        config, tokenizer, eos, sources = self.config, self.tokenizer, self.eos, self.sources
        identities = [source.identity() for source in sources]
        key = None if None in identities else _key(config, tokenizer, eos, identities)
        cache = _cache(config, cache_folder, report)
        started = time.monotonic()
        preparation = Preparation(config, tokenizer, eos, sources, cache, report)
        if key is None:
            store, reused = preparation.run(None), False
        else:
            with alone(cache, key, lambda: report(f"data: waiting for another process that prepares the {self.split} rows")):
                found = open_store(cache / key)
                store, reused = (found, True) if found is not None else (preparation.run(key), False)
        pad_id = getattr(tokenizer, "pad_token_id", None)
        pad_id = pad_id if pad_id is not None else eos if eos is not None else 0
        rows = Rows(store, reused=reused, pad_to_multiple_of=config.pad_to_multiple_of, pad_id=pad_id)
        took = format_seconds(time.monotonic() - started)
        report(f"data: {self.split} rows {'reused' if reused else 'prepared'} in {took}: {store.folder}")
        for note in store.facts["notes"]:
            report(f"data: {note}")
        report(rows.ledger.table(self.split))
        check_lost(config, rows.ledger)
        return rows


def open_data(
    config: SFTConfig,
    tokenizer: Any | None,
    split: str = "train",
    dataset: Any | None = None,
    *,
    eos_id: int | Any | None = ...,
) -> OpenData:
    """Finds the data of one split and reads no more than first records: no row is made before all data is known to be there.

    Arguments as in `prepare_rows`.

    Raises:
        UserError: no data or no such split, a first record without the column, an end-of-text token that is none, a row too
            short, an illegal padding.
    """
    if config.max_length < 2:
        what = "a row of one token has nothing to train: each token is predicted from those before it"
        raise UserError(what, got=config.max_length, allowed="2 or more", option="max_length")
    multiple = config.pad_to_multiple_of
    if multiple and config.max_length % multiple:
        raise UserError(
            f"pad_to_multiple_of would make rows longer than max_length: {config.max_length:,} is no multiple of it",
            got=multiple,
            do="Remove pad_to_multiple_of (it is never needed here), or round max_length",
        )
    eos = _eos_id(config, tokenizer) if eos_id is ... else eos_id
    wish = _wish(config, split)
    sources = _open_sources(config, wish, dataset)
    for source in sources[:_LOOKED_INTO]:
        if isinstance(source, JsonLines | Parquet):  # a wrong column would be found when all before it is tokenised
            next(iter(source.documents()), None)
    return OpenData(config, tokenizer, eos, wish.split, sources)


def _eos_id(config: SFTConfig, tokenizer: Any | None) -> int | None:
    if config.eos_token is None:
        return getattr(tokenizer, "eos_token_id", None)
    known = None if tokenizer is None else tokenizer.get_vocab().get(config.eos_token)
    if known is None:
        raise UserError(
            "eos_token is not in the tokenizer's vocabulary", got=config.eos_token, do="Remove it to take the tokenizer's"
        )
    return int(known)


def _wish(config: SFTConfig, split: str) -> Wish:
    train, test = config.dataset_train_split, config.dataset_test_split
    name = {"train": train, "test": test}.get(split, split)
    return Wish(name, train, config.dataset_text_field, config.dataset_streaming, config.shuffle_dataset)


def _open_sources(config: SFTConfig, wish: Wish, dataset: Any | None) -> list[Source]:
    if dataset is not None:
        # data given from Python is this split, whatever its files are called
        return open_object(dataset, wish if hasattr(dataset, "keys") else replace(wish, train_split=wish.split))
    if config.datasets:
        found: list[Source] = []
        for entry in config.datasets:
            named = Entry(entry["path"], *(entry.get(key) for key in ("name", "data_dir", "data_files", "columns")))
            split = entry.get("split") or wish.train_split
            chosen = split if wish.split == wish.train_split else wish.split
            found += open_entry(named, replace(wish, split=chosen, train_split=split))
        return found
    if config.dataset_name is None:
        raise UserError("no data", do="Set dataset_name to a file, a folder, a glob or a hub name")
    return open_entry(Entry(config.dataset_name, config.dataset_config), wish)


def _key(config: SFTConfig, tokenizer: Any | None, eos: int | None, identities: list[Any]) -> str:
    facts = {
        "format": FORMAT,
        "tokenizer": tokenizer_hash(tokenizer),
        "eos": eos,
        "sources": identities,
        "max_length": config.max_length,
        "packing": _packing(config),
        "max_rows": config.max_rows,
        "order": order_seed(config) if config.shuffle_dataset else None,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _packing(config: SFTConfig) -> str:
    if not config.packing:
        return config.overlong
    return config.packing_strategy if config.packing_strategy == "wrapped" else f"{config.packing_strategy} {config.overlong}"


def _cache(config: SFTConfig, wanted: str | Path | None, report: Callable[[str], None]) -> Path:
    folder = Path(wanted) if wanted is not None else Path.home() / ".cache" / "megaspan" / "rows"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError as error:
        if wanted is not None:
            raise UserError(f"rows cannot be kept in {folder}: {error.strerror}") from error
        here = Path(config.output_dir) / "rows"
        here.mkdir(parents=True, exist_ok=True)
        report(f"data: {folder} cannot be written ({error.strerror}), so the rows are kept in {here}")
        return here
