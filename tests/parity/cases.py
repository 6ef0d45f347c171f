"""Cases of training over several ranks: the meshes, the settings that are crossed, and the rows of each case's window.

A case is a mesh, a family, its heads, a kind of row, what is labelled, how layers run, how many rows a window has and what
trains. Rows hold what other systems fell over: documents shorter than a chunk, over, on and exactly at the edges of shards, one
token long; lengths from 1 to 17, 698 and primes; windows without a label and labels that all lie on one rank.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megaspan.config.parallel import legal_sp
from megaspan.data import Row
from tests.models import VOCAB, WINDOW
from tests.parity import own
from tests.parity.pairwise import Case

IGNORED, LAYERS = -100, 3

Sizes = tuple[int, int, int, int]  # dp_replicate, dp_shard, cp, sp

ONE: tuple[Sizes, ...] = ((1, 1, 1, 1),)
TWO: tuple[Sizes, ...] = ((1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2))
THREE: tuple[Sizes, ...] = ((1, 3, 1, 1), (1, 1, 3, 1), (1, 1, 1, 3))
FOUR: tuple[Sizes, ...] = ((1, 1, 4, 1), (1, 1, 1, 4), (1, 1, 2, 2), (1, 2, 2, 1), (2, 1, 2, 1), (2, 2, 1, 1))
EIGHT: tuple[Sizes, ...] = ((1, 1, 8, 1), (1, 1, 1, 8), (1, 1, 4, 2), (1, 2, 2, 2), (2, 2, 2, 1), (1, 1, 2, 4), (2, 1, 1, 4))

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "gemma3": ("gemma3", {}),
    "gemma2": ("gemma2", {}),
    "gpt_oss": ("gpt_oss", {}),
    "qwen3_moe": ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
}
EXPERTS = ("gpt_oss", "qwen3_moe", *own.WITH_EXPERTS)  # in fp32: torch multiplies groups of experts in no wider type

# Documents of the rows of a window, as many of them as the window has rows, and padding behind them. Of "edges" all documents
# end where a rank's tokens end, on 2, 3, 4 or 8 ranks; "lengths" are of the case's own choice, from 1 to 17, and "1 to 17" is a
# window of all of them.
ROWS: dict[str, tuple[tuple[int, ...], ...]] = {
    "plain": ((64,), (20,), (44,), (26,)),
    "long": ((698, 3, 1), (101,), (698,), (37,)),
    "packed": ((13, 1, 20, 9), (5, 17, 2), (1, 1, 19, 8), (30, 3)),
    "edges": ((6,) * 8, (12,) * 6, (24, 6, 6, 12), (12,) * 4),
    "singles": ((*(1,) * 7, 9, *(1,) * 6), (1,) * 13, (2, *(1,) * 9), (1,) * 5),
    "padded": ((21,), (6, 12), (15,), (3, 1)),
}
PADDING = 3

# How a layer runs: all heads and the row in one tile; one KV head a call, tiles that divide nothing and segments of layers;
# what was kept read back in tiles; checkpointed whole. Tiles are those of one rank alone: see `plan_of`.
PATHS: dict[str, dict[str, Any]] = {
    "streamed": {"keep": "device", "heads": None, "tile": 1024},
    "segments": {"keep": "segments", "heads": 1, "tile": 19},
    "back": {"keep": "host", "heads": 1, "tile": 23, "back": True},
    "whole": {"keep": None},
}

# How many labels the rows have: all; none in the last one; one in the whole window; in turn 5, 64, 0 and 1, side by side, from
# one of them on, so that a rank may have all or none.
LABELS = ("all", "none in one", "one", "uneven")
UNEVEN = (5, 64, 0, 1)

FACTORS: dict[str, Sequence[Any]] = {
    "family": tuple(FAMILIES),
    "heads": ((4, 2), (8, 2), (28, 4), (12, 12)),
    "rows": (*ROWS, "lengths"),
    "labels": LABELS,
    "path": tuple(PATHS),
    "window": ("one", "two", "odd", "joined"),
    "trains": ("all", "frozen embedding", "lora"),
}


def possible(case: Case) -> bool:
    """Whether a case, or a part of one, can be: sp ranks split the heads, and 28 heads of 698 tokens are left to others."""
    heads = case.get("heads")
    if heads is None:
        return True
    splits = "mesh" not in case or case["mesh"][3] in legal_sp(*heads)
    return splits and not (heads == (28, 4) and case.get("rows") == "long")


def dealt(cases: Sequence[Case], factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Case]:
    """The cases, each with a value of every other factor by luck; the same ones for the same seed."""
    generator = random.Random(seed)
    found = []
    for case in cases:
        full = dict(case)
        for name, values in factors.items():
            full[name] = generator.choice([value for value in values if possible(full | {name: value})])
        found.append(full)
    return found


def window_of(case: Case) -> tuple[list[Row], int]:
    """The rows of a step, and how many of them run in one forward.

    A window has a row for each data rank, or two, or two without one so that a rank has none left, or two that run as one.
    """
    data = math.prod(case["mesh"][:2])
    count = data * (1 if case["window"] == "one" else 2) - (case["window"] == "odd" and data > 1)
    count = max(count, 1 if case["labels"] in ("all", "one") else 2, 17 * (case["rows"] == "1 to 17"))
    first = _seed(case) % count
    # The one label is in the first row from here that has a token to train.
    with_one = next((n for n in (*range(first, count), *range(first)) if max(_documents(case, n)) > 1), -1)
    rows = [_row(case, number, {"one": number == with_one}.get(case["labels"], number == count - 1)) for number in range(count)]
    return rows, 2 if case["window"] == "joined" else 1


def _row(case: Case, number: int, chosen: bool) -> Row:
    """A row of a window; the chosen one is the one without labels, or the one with one."""
    draw = np.random.default_rng(number)
    documents = _documents(case, number)
    tokens = sum(documents)
    # All different where only one token is trained, so that the embedding's gradient says which tokens it saw.
    distinct = case["labels"] == "one" and tokens <= VOCAB
    ids = draw.permutation(VOCAB)[:tokens] if distinct else draw.integers(VOCAB, size=tokens)
    labels = ids.copy()
    labels[np.cumsum((0, *documents[:-1]))] = IGNORED
    wanted = {
        "all": tokens,
        "none in one": 0 if chosen else tokens,
        "one": int(chosen),
        "uneven": UNEVEN[(number + _seed(case)) % len(UNEVEN)],
    }[case["labels"]]
    labelled = np.flatnonzero(labels != IGNORED)
    first = draw.integers(max(1, len(labelled) - wanted + 1))
    kept = labelled[first : first + wanted]
    labels[np.setdiff1d(np.arange(tokens), kept)] = IGNORED
    padding = PADDING if case["rows"] == "padded" else 0
    ids, labels = np.append(ids, np.zeros(padding, np.int64)), np.append(labels, np.full(padding, IGNORED))
    return Row(ids, labels, documents, padding, documents)


def _documents(case: Case, number: int) -> tuple[int, ...]:
    if case["rows"] == "lengths":
        return (int(np.random.default_rng(_seed(case)).permutation(17)[number % 17]) + 1,)
    if case["rows"] == "1 to 17":
        return (number % 17 + 1,)
    # Of long rows, which take time, a window has the pack or the single one.
    return ROWS[case["rows"]][(number + _seed(case) * (case["rows"] == "long")) % 4]


def _seed(case: Case) -> int:
    """A number of a case's own."""
    return zlib.crc32(repr(sorted(case.items())).encode())


def plan_of(case: Case) -> dict[str, Any]:
    """How the layers run, as `by_hand` takes it: a few tiles of whatever a rank has of a row, and a few calls."""
    plan = dict(PATHS[case["path"]])
    if "tile" in plan:
        tile = 97 if case["rows"] == "long" else plan["tile"]
        plan["tile"] = max(3, tile // math.prod(case["mesh"][2:]))
    if plan.get("heads") and case["heads"] == (12, 12):
        plan["heads"] = 5
    return plan


def is_moe_balanced(case: Case) -> bool:
    """Whether the family's balance loss is on.

    Checkpointed layers keep no router logits, which is refused; and it counts padding that was asked for, where transformers'
    own mask would leave it out.
    """
    balanced = case["family"] == "qwen3_moe" or case["family"] in own.BALANCED
    return balanced and case["path"] != "whole" and case["rows"] != "padded"


def seen_by_the_label(case: Case, rows: Sequence[Row]) -> set[int] | None:
    """P2: ids of the tokens that the window's one label depends on; None where the embedding's gradient does not tell.

    They are those of its document up to the one before it, and no farther back than all layers' windows together reach.
    """
    tells = case["trains"] == "all" and case["family"] != "llama tied" and not is_moe_balanced(case)
    places = [(row, int(place)) for row in rows for place in np.flatnonzero(row.labels != IGNORED)]
    if case["labels"] != "one" or len(places) != 1 or not tells or len(places[0][0].input_ids) > VOCAB:
        return None
    row, place = places[0]
    starts = np.cumsum((0, *row.document_lengths))
    first = int(starts[starts < place].max()) if place else 0
    if case["family"] == "mistral":
        first = max(first, place - 1 - LAYERS * (WINDOW - 1))
    return set(row.input_ids[first:place].tolist())


def stretches(rows: Sequence[Row]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids and labels of each document of rows; padding is none."""
    for row in rows:
        ends = np.cumsum(row.document_lengths)
        for length, end in zip(row.document_lengths, ends, strict=True):
            yield row.input_ids[end - length : end], row.labels[end - length : end]
