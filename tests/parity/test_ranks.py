"""P1, P2 and P3 over several ranks: loss, sums and every gradient of a window are those of plain transformers in one process,
however ranks share its rows, tokens and heads; one label sees what it should and nothing else.

A table of all pairs of settings for 1, 2, 3, 4 and 8 ranks, all cases of a number of ranks in one process group. The cases are
those of `cases.py`; what runs, and against what, is in `ranks.py`. `docs/many-gpus.md` names the masks and meshes of this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megaspan.attention.context import RowContext
from megaspan.attention.gather import Gather
from megaspan.attention.layout import lay_out
from megaspan.config.parallel import legal_sp
from megaspan.layers.balance import Balance
from megaspan.trainer.share import Share, trained_tokens
from tests.gloo import run_ranks
from tests.parity import cases as the_cases
from tests.parity.cases import EIGHT, FACTORS, FOUR, ONE, THREE, TWO, UNEVEN, Sizes, dealt, possible, window_of
from tests.parity.pairwise import Case, cross, pairwise
from tests.parity.ranks import check, check_alone, check_masters

# What one and two ranks have shown of layers that work token by token, and of caps, need not be shown on every mesh; and a case
# on eight ranks takes eight times as long as on one.
MOST = {"family": tuple(family for family in FACTORS["family"] if family not in ("qwen3", "granite", "olmo2"))}
FEWER = {
    "family": ("llama tied", "gemma3", "gpt_oss", "qwen3_moe"),
    "rows": ("lengths", "packed", "edges", "singles"),
    "labels": ("all", "one", "uneven"),
    "path": ("streamed", "segments", "whole"),
    "window": ("one", "odd", "joined"),
    "trains": ("all", "lora"),
}
FEWEST = {
    "family": ("llama tied", "gemma3", "gpt_oss"),
    "heads": ((4, 2), (8, 2), (12, 12)),
    "rows": ("lengths", "packed", "edges"),
    "path": ("streamed", "segments"),
}
PLAIN: Case = {
    "family": "qwen3", "heads": (4, 2), "rows": "plain", "labels": "all", "path": "streamed", "window": "two", "trains": "all"
}  # fmt: skip
MESHES: dict[int, tuple[Sizes, ...]] = {1: ONE, 2: TWO, 3: THREE, 4: FOUR, 8: EIGHT}
# What meets every mesh, though not every other setting there: an embedding without a gradient, caps, and on eight ranks seven
# query heads a KV head. sp 3 and sp 8 split only one shape of FACTORS: another one each, a KV head a rank.
RARE: Case = {"family": "gemma2", "trains": "frozen embedding"}
BEGUN: dict[int, list[Case]] = {
    3: [RARE | {"mesh": mesh} | ({"heads": (9, 3)} if mesh[3] == 3 else {}) for mesh in THREE],
    4: [RARE | {"mesh": mesh} for mesh in FOUR],
    8: [RARE | {"mesh": mesh, "heads": (16, 8) if mesh[3] == 8 else (28, 4)} for mesh in EIGHT[:5]],
}
# The seeds are those, of some hundred, with the fewest rows that hold all lengths and label counts.
PAIRS: dict[int, list[Case]] = {
    1: pairwise({"mesh": ONE} | FACTORS | FEWER, 68, possible),
    2: pairwise({"mesh": TWO} | FACTORS | MOST, 72, possible),
    3: pairwise({"mesh": THREE} | FACTORS | FEWER, 468, possible, BEGUN[3]),
    4: pairwise({"mesh": FOUR} | FACTORS | FEWER, 323, possible, BEGUN[4]),
    8: pairwise({"mesh": EIGHT[:5]} | FACTORS | FEWER | FEWEST, 426, possible, BEGUN[8]),
}


def with_heads(case: Case) -> Case:
    """The case with heads that its mesh splits."""
    return case | {"heads": next(heads for heads in FACTORS["heads"] if possible(case | {"heads": heads}))}


def seen(meshes: Sequence[Sizes]) -> list[Case]:
    """P2: one label on every mesh, in layers of which all have a window, or of which some see all."""
    kinds = (
        {"family": "mistral"},
        {"family": "gpt_oss", "rows": "edges", "path": "segments"},
        {"family": "mistral", "rows": "packed", "path": "segments"},
        {"rows": "packed"},
    )
    cases = (kinds[number % 4] | {"mesh": mesh} for number, mesh in enumerate(meshes))
    return [with_heads(PLAIN | {"labels": "one", "window": "one"} | case) for case in cases]


def all_lengths(mesh: Sizes) -> Case:
    """Rows of 1 to 17 tokens in one window."""
    return with_heads(PLAIN | {"mesh": mesh, "family": "gemma3", "rows": "1 to 17", "window": "one"})


def long(meshes: Sequence[Sizes]) -> list[Case]:
    """Rows of 698 tokens and of primes, with 5, 64, 0 and 1 labels."""
    kinds = ({"path": "segments"}, {"family": "gemma3", "path": "back", "trains": "lora"}, {"family": "gpt_oss"})
    cases = (kinds[number % 3] | {"mesh": mesh} for number, mesh in enumerate(meshes))
    return [with_heads(PLAIN | {"rows": "long", "labels": "uneven", "window": "one"} | case) for case in cases]


OTHERS = [PLAIN | {"mesh": TWO[1], "family": "granite", "path": "back"}, PLAIN | {"mesh": TWO[2], "family": "olmo2"}]
TABLES: dict[int, list[Case]] = {
    1: [*PAIRS[1], *seen(ONE), all_lengths(ONE[0]), *long(ONE)],
    2: [*PAIRS[2], *seen(TWO), all_lengths(TWO[1]), *OTHERS],
    3: [*PAIRS[3], *seen(THREE), *long(THREE[1:])],
    4: [*PAIRS[4], *seen(FOUR[:4]), *long(FOUR[:2])],
    8: [*PAIRS[8], *seen(EIGHT[:3]), *long(EIGHT[:1])],
}
SECONDS = 300  # that a rank may wait for another on a machine that does something else too


def masters(meshes: Any) -> list[Case]:
    return [with_heads(PLAIN | {"mesh": mesh, "rows": "packed", "path": "segments"}) for mesh in meshes]


def nothing_trained(rank: int, world: int) -> None:
    """A window without a label anywhere: every rank runs its rows, and no gradient is anything but zero."""
    case = PLAIN | {"mesh": TWO[0] if world == 2 else FOUR[3], "labels": "none in one", "window": "one"}
    with patch.dict(the_cases.ROWS, {"plain": ((1,) * 13, (9,))}):
        assert sum(trained_tokens(row) for row in window_of(case)[0]) == 0
        check(rank, world, [case])


@contextmanager
def local_positions() -> Any:
    """Tokens of a shard are counted from its start."""
    with patch.object(RowContext, "positions", property(lambda self: torch.arange(self.slots))):
        yield


@contextmanager
def labels_moved_in_the_shard() -> Any:
    """The last token of a shard is trained by none, others by whatever lies next to them."""
    right = Share.inputs

    def inputs(self: Share, row: Any) -> dict[str, Any]:
        found = right(self, row)
        labels = found["megaspan_row"].shard(row.labels, -100)
        found["shift_labels"] = torch.from_numpy(labels).roll(-1)[None]
        return found

    with patch.object(Share, "inputs", inputs):
        yield


@contextmanager
def summed_twice() -> Any:
    """Gradients of keys and values that come home over cp are counted twice."""
    right = Gather.take_home
    with patch.object(Gather, "take_home", lambda self, d_pool: right(self, 2 * d_pool)):
        yield


@contextmanager
def means_over_ranks() -> Any:
    """Gradients of ranks are averaged, as FSDP2 would by itself."""
    from torch.distributed.fsdp import FSDPModule

    with (
        patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None),
        patch.object(FSDPModule, "set_force_sum_reduction_for_comms", lambda self, wish: None),
    ):
        yield


@contextmanager
def balanced_alone() -> Any:
    """Each rank's experts are balanced by its own tokens."""
    with patch.object(Balance, "over_row", lambda self, number: number.detach().clone()):
        yield


@contextmanager
def seeds_of_forwards() -> Any:
    """Dropout by a rank's own count of forwards, and not by the row."""
    with patch("megaspan.trainer.step.row_seed", lambda seed, step, row: 5):
        yield


@contextmanager
def documents_joined() -> Any:
    """Documents of a packed row see each other (R25)."""
    with patch.object(Share, "stretches", staticmethod(lambda row: (len(row.input_ids),))):
        yield


FAULTS = (
    (local_positions, {"mesh": TWO[1]}),
    (local_positions, {"mesh": TWO[2], "family": "gemma3", "path": "whole"}),
    (labels_moved_in_the_shard, {"mesh": TWO[1]}),
    (labels_moved_in_the_shard, {"mesh": TWO[2], "rows": "packed"}),
    (summed_twice, {"mesh": TWO[1], "trains": "lora"}),
    (means_over_ranks, {"mesh": TWO[0]}),
    (means_over_ranks, {"mesh": TWO[2]}),
    (balanced_alone, {"mesh": TWO[1], "family": "qwen3_moe"}),
    (seeds_of_forwards, {"mesh": TWO[0], "trains": "lora"}),
    (documents_joined, {"mesh": TWO[2], "rows": "packed", "labels": "one"}),
)


def faults_are_noticed(rank: int, world: int) -> None:
    for fault, changes in FAULTS:
        with ExitStack() as broken:
            broken.enter_context(fault())
            assert check_alone(PLAIN | changes, rank) is not None, f"{fault.__name__} passes, {changes}"


MORE: dict[int, list[Any]] = {
    2: [(check_masters, (masters(TWO),)), (nothing_trained, ()), (faults_are_noticed, ())],
    4: [(check_masters, (masters(FOUR[2:4]),)), (nothing_trained, ())],
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", TABLES)
def test_every_pair_of_settings(world: int) -> None:
    run_ranks(world, [(check, (TABLES[world],)), *MORE.get(world, [])], seconds=SECONDS)


def test_tables_are_of_the_size_they_should_have() -> None:
    assert sum(len(table) for table in TABLES.values()) <= 250
    assert len(TABLES[8]) <= 40


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_tables_hold_every_length_label_count_and_edge(world: int) -> None:
    windows = [(case, window_of(case)[0]) for case in TABLES[world]]
    rows = [row for _, window in windows for row in window]
    lengths = {len(row.input_ids) for row in rows}
    assert lengths >= {*range(1, 18), 64}
    assert lengths & {698, 702}
    assert lengths & {37, 101}
    assert {trained_tokens(row) for case, window in windows if case["labels"] == "uneven" for row in window} >= set(UNEVEN)
    found: set[str] = set()
    for case, window in windows:
        for row in window:
            found |= _where_documents_lie(row.document_lengths, *case["mesh"][2:])
    assert found == {"one token", "shorter than a chunk", "over an edge", "starts at an edge", "ends at an edge"}


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_mesh_meets_frozen_embeddings_caps_and_more_than_one_shape_of_heads(world: int) -> None:
    for mesh in dict.fromkeys(case["mesh"] for case in PAIRS[world]):
        met = [case for case in PAIRS[world] if case["mesh"] == mesh]
        assert "frozen embedding" in {case["trains"] for case in met}, mesh
        assert "gemma2" in {case["family"] for case in met}, mesh
        heads = {case["heads"] for case in met}
        assert len(heads) > 1, mesh
        assert (28, 4) in heads or mesh[3] not in legal_sp(28, 4), mesh


def _where_documents_lie(lengths: Sequence[int], cp: int, sp: int) -> set[str]:
    """How documents of a packed row lie to the edges of ranks' tokens."""
    if cp * sp == 1 or len(lengths) == 1:
        return set()
    layout = lay_out(lengths, cp, sp_size=sp)
    parts = [layout.token_index(rank)[layout.part(place)] for rank in range(cp) for place in range(sp)]
    held = [part[part >= 0] for part in parts if part[0] >= 0]
    document = np.repeat(np.arange(len(lengths)), lengths)
    on_ranks = Counter(number for part in held for number in set(document[part].tolist()))
    found = {
        "one token": 1 in lengths,
        "shorter than a chunk": min(lengths) < sum(lengths) / (2 * cp * sp),
        "over an edge": max(on_ranks.values()) > 1,
        "starts at an edge": any(part[0] in np.cumsum((0, *lengths)) for part in held),
        "ends at an edge": any(part[-1] + 1 in np.cumsum(lengths) for part in held),
    }
    return {name for name, there in found.items() if there}


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("world", MESHES)
def test_other_tables(world: int, seed: int) -> None:
    """Two more tables of all pairs of all settings."""
    table = pairwise({"mesh": MESHES[world]} | FACTORS, seed, possible)
    more = [(check_masters, (masters(MESHES[world]),))] if world > 1 else []
    run_ranks(world, [(check, (table,)), *more], seconds=SECONDS)


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("path", FACTORS["path"])
@pytest.mark.parametrize("world", MESHES)
def test_every_family_on_every_kind_of_row_and_layer(world: int, path: str) -> None:
    crossed = cross({"path": (path,)} | {name: FACTORS[name] for name in ("family", "rows")})
    others = {"mesh": MESHES[world]} | {name: values for name, values in FACTORS.items() if name not in crossed[0]}
    run_ranks(world, [(check, (dealt(crossed, others),))], seconds=SECONDS)
