"""A configuration and a tokenizer for tests of the data part."""

from __future__ import annotations

from typing import Any

import numpy as np

from megaspan.config import SFTConfig
from megaspan.data import Rows, prepare_rows


class Digits:
    """A tokenizer written in Python: one id a character, 1 is the end of text, 2 is special and padding."""

    all_special_ids = (1, 2)
    eos_token_id = 1
    pad_token_id = 2

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [{"$": 1, "#": 2}.get(letter, ord(letter)) for letter in text]}

    def get_vocab(self) -> dict[str, int]:
        return {"$": 1, "#": 2, **{chr(code): code for code in range(32, 127)}}

    def decode(self, ids: list[int]) -> str:
        return "".join({1: "$", 2: "#"}.get(token, chr(token)) for token in ids)


class Framing(Digits):
    """The same, which puts 3 (^) in front of a text by itself, and what `end` says behind it; the text may hold ^ itself."""

    all_special_ids = (1, 2, 3)

    def __init__(self, front: tuple[int, ...] = (3,), end: tuple[int, ...] = ()) -> None:
        self.front, self.end = front, end

    def __call__(self, text: str, *, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        ids = [{"$": 1, "#": 2, "^": 3}.get(letter, ord(letter)) for letter in text]
        return {"input_ids": [*self.front, *ids, *self.end] if add_special_tokens else ids}

    def decode(self, ids: list[int]) -> str:
        return "".join({1: "$", 2: "#", 3: "^"}.get(token, chr(token)) for token in ids)


def config(**options: Any) -> SFTConfig:
    return SFTConfig(**{"max_length": 8, **options})


def prepare(folder: Any, data: Any = None, tokenizer: Any = None, *, said: list[str] | None = None, **options: Any) -> Rows:
    """Rows of `data` (or of what `options` name) with the store in `folder`; what is reported goes to `said`."""
    keys = ("split", "eos_id")
    own = {key: options.pop(key) for key in keys if key in options}
    lines = said if said is not None else []
    return prepare_rows(config(**options), tokenizer or Digits(), dataset=data, cache_folder=folder, report=lines.append, **own)


def texts_of(rows: Rows) -> list[str]:
    """Every row as the letters of `Digits` and `Framing`."""
    return [Framing().decode(row.input_ids.tolist()) for row in rows]


def trained_of(rows: Rows) -> list[str]:
    """Every row with a point where a token is not trained."""
    return [
        "".join(
            "." if label == -100 else chr(token) if token > 3 else "$#^"[token - 1]
            for token, label in zip(row.input_ids, row.labels, strict=True)
        )
        for row in rows
    ]


def ids_of(rows: Rows) -> np.ndarray:
    """All ids one after the other, without padding."""
    return np.concatenate([row.input_ids[: len(row.input_ids) - row.padding] for row in rows])


def prepare_in_a_process(folder: str, results: Any) -> None:
    """Runs in a process of its own."""
    rows = prepare(folder, ["abcdefghij" * 50] * 200)
    results.put((rows.fingerprint, rows.reused, len(rows), int(ids_of(rows).sum())))
