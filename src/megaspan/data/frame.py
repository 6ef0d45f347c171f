"""What a model's own tokenizer puts around a text: its beginning of text, and sometimes an end.

Llama and Gemma were trained on documents that begin with a token of their own, and Gemma reads badly without it; Qwen and
SmolLM2 have none. Where a tokenizer keeps this differs (a template, a post-processor, `add_bos_token`, Python code), so it is
found by trying: a short text is encoded with and without special tokens, and what stands around it is the frame. TRL encodes
every document with special tokens, so a run that moves from there trains on the same ids.

An end that the tokenizer adds must be the end-of-text token, which every document gets once anyway. Any other is refused: a
document with two different ends is no text that a causal model was trained on, and `eos_token` says which one is meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megaspan.human import UserError

_SAMPLES = ("a", "A", "0", ".")


@dataclass(frozen=True)
class Frame:
    """The tokens around every document of text.

    Attributes:
        front: ids of the beginning of text, often none or one.
        end: id of the end of text, or none.
    """

    front: tuple[int, ...]
    end: tuple[int, ...]

    def begin(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """The first ids of a document, uint32 [T], behind the beginning of text; and how many were added.

        What the text itself brings of it is not doubled.
        """
        own = next(size for size in range(len(self.front), -1, -1) if tuple(ids[:size].tolist()) == self.front[:size])
        return np.concatenate([np.asarray(self.front, np.uint32), ids[own:]]), len(self.front) - own

    def finish(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """The last ids of a document, uint32 [T], with the end of text, once; and how many were added."""
        if tuple(ids[len(ids) - len(self.end) :].tolist()) == self.end:
            return ids, 0
        return np.concatenate([ids, np.asarray(self.end, np.uint32)]), len(self.end)


def find_frame(tokenizer: Any, eos_id: int | None) -> Frame:
    """The frame of this tokenizer, with `eos_id` as its end.

    Raises:
        UserError: the tokenizer ends texts with something else than `eos_id`, or changes a text when it adds special tokens.
    """
    name = type(tokenizer).__name__
    for sample in _SAMPLES:
        plain = ids_by_class(tokenizer, sample)
        if plain:
            break
    else:
        raise UserError(f"{name} gives no token for any of {', '.join(_SAMPLES)}", do="Give input_ids in place of text")
    full = ids_by_class(tokenizer, sample, special=True)
    size = len(plain)
    at = next((start for start in range(len(full) - size + 1) if full[start : start + size] == plain), None)
    if at is None:
        raise UserError(
            f"{name} changes a text when it adds special tokens: {sample!r} is {plain} without and {full} with them",
            do="Give input_ids in place of text",
        )
    front, end = tuple(full[:at]), tuple(full[at + size :])
    wanted = () if eos_id is None else (eos_id,)
    if end not in ((), wanted):
        shown = tokenizer.decode(list(end))
        raise UserError(
            f"{name} ends every text with {shown}",
            allowed="nothing: no end of text is set" if eos_id is None else f"the end of text, {tokenizer.decode([eos_id])}",
            do=f"Set eos_token: {shown!r}" if len(end) == 1 else "Take that out of tokenizer.json, or give input_ids",
        )
    return Frame(front, wanted)


def framed_samples(tokenizer: Any) -> list[list[int]]:
    """Short texts with what the tokenizer puts around them, for the key of a store."""
    return [ids_by_class(tokenizer, sample, special=True) for sample in _SAMPLES]


def ids_by_class(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Ids of a text by the tokenizer's own class, whatever its backend does; `special` as the tokenizer frames it."""
    return list(tokenizer(text, add_special_tokens=special, truncation=False, padding=False, verbose=False)["input_ids"])
