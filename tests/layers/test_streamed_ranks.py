"""Rows that lie on several gloo ranks: loss and every gradient are those of plain transformers, document by document.

Every model goes through `prepare` and its own forward, as the trainer calls it; ranks that do not share a row have rows of
their own. The reference is an unprepared model in one process.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megaspan.attention.context import RowContext, RowRanks
from megaspan.attention.groupway import Going
from megaspan.attention.layout import lay_out
from megaspan.attention.seam import work_of
from megaspan.layers.attending import Attending
from megaspan.model import levers, prepare, wrap_lora
from megaspan.model.shard import shard
from megaspan.plan.keep import KeepPolicy, LayerKeep
from megaspan.world.axes import DeviceAxes, Mesh, device_axes
from tests.gloo import run_ranks
from tests.model.support import settings
from tests.models import VOCAB, assert_same_gradients, gradients, tiny

DEVICE, HOST = LayerKeep("device", "device"), LayerKeep("host", "host")
KEEPS = {
    "one": KeepPolicy((DEVICE,)),
    "device": KeepPolicy((DEVICE,) * 3),
    "host": KeepPolicy((HOST, HOST, DEVICE)),
    "attention again": KeepPolicy((LayerKeep("host", None),) * 3),
    "segments": KeepPolicy((LayerKeep("host", "host"), LayerKeep(None, "host"), LayerKeep(None, None))),
}
ROWS = ((29,), (13, 1, 20, 9), (3,), (1, 1, 40, 17, 5))


def by_hand(keep: str | None, *, tile: int = 5, heads: int | None = 1, back: bool = False) -> Any:
    """A plan with tiles that divide nothing; `keep` None checkpoints whole layers."""
    return SimpleNamespace(
        checkpoint=True,
        offload=True,
        loss_tile_tokens=7,
        host_limit=2**34,
        streamed=keep is not None,
        layer_tile_tokens=tile,
        kv_heads_per_call=heads,
        host_for_layers=2**34,
        model=SimpleNamespace(layers=1 if keep == "one" else 3),
        keep=KEEPS["host" if keep is None else keep],
        stream_back=back,
        project_ahead=False,
    )


def row_of(lengths: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a row and what each has to predict, -100 at the ends of documents and for a share of the others."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(VOCAB, size=sum(lengths))
    labels = np.append(ids[1:], -100)
    labels[np.cumsum(lengths) - 1] = -100
    trained = draw.random(len(ids)) > 0.2
    trained[sum(lengths[: int(np.argmax(lengths))])] = True
    labels[~trained] = -100
    return ids, labels


def plain_step(plain: Any, rows: list[tuple[Sequence[int], int]], items: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of these rows, document by document, by transformers itself."""
    plain.zero_grad()
    total = 0.0
    for lengths, seed in rows:
        ids, labels = (torch.from_numpy(each) for each in row_of(lengths, seed))
        for part, wanted in zip(ids.split(list(lengths)), labels.split(list(lengths)), strict=True):
            logits = plain(input_ids=part[None], use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum", ignore_index=-100) / items
            loss.backward()
            total += float(loss.detach())
    return total, gradients(plain)


def ranks_of(axes: DeviceAxes, mesh: Mesh) -> RowRanks:
    return RowRanks(axes.group("cp") if mesh.cp > 1 else None, axes.group("sp") if mesh.sp > 1 else None)


def inputs_of(model: Any, row: RowContext, lengths: Sequence[int], seed: int) -> dict[str, Any]:
    """What a rank is given of a row."""
    ids, labels = row_of(lengths, seed)
    return {
        "input_ids": torch.from_numpy(row.shard(ids, 0))[None],
        "shift_labels": torch.from_numpy(row.shard(labels, -100))[None],
        "position_ids": row.positions[None],
        "megaspan_row": row,
    }


def same_as_plain(
    rank: int,
    world: int,
    sizes: tuple[int, int, int],
    family: str,
    plan: dict[str, Any],
    rows: Sequence[Sequence[int]],
    sharded: bool = True,
    overrides: dict[str, Any] | None = None,
) -> None:
    """Every row once, one a data rank at a time."""
    mesh = Mesh(dp_shard=sizes[0], cp=sizes[1], sp=sizes[2], rank=rank)
    axes = device_axes(mesh, "cpu")
    dtype = torch.float32 if family == "gpt_oss" else torch.float64  # torch multiplies groups of experts in no wider type
    plain: Any = tiny(family, layers=3, dtype=dtype, **(overrides or {}))
    model: Any = copy.deepcopy(plain)
    work = work_of(model)
    if sharded:
        shard(model, axes.fsdp, masters=False, compute=dtype)
    prepare(model, settings(cp_size=mesh.cp, sp_size=mesh.sp), by_hand(**plan))
    placed = levers(model)
    assert placed is not None
    if plan["keep"] is not None:
        assert placed.checkpointing.reasons == [None] * 3
    steps = len(rows) // sizes[0]
    for step in range(steps):
        here = [(rows[step * sizes[0] + number], 10 * step + number) for number in range(sizes[0])]
        items = sum(int((row_of(*each)[1] >= 0).sum()) for each in here)
        lengths, seed = here[mesh.coordinate("data")]
        layout = lay_out(lengths, mesh.cp, sp_size=mesh.sp, work=work)
        row = RowContext(layout, ranks_of(axes, mesh), "cpu")
        model.zero_grad()
        output = model(**inputs_of(model, row, lengths, seed), num_items_in_batch=items)
        output.loss.backward()
        total = output.loss.detach().clone()
        dist.all_reduce(total)
        with torch.no_grad():
            evaluated = model(**inputs_of(model, row, lengths, seed), num_items_in_batch=items).loss
        assert float(evaluated) == pytest.approx(float(output.loss.detach()), rel=1e-6, abs=1e-12)
        want_loss, want = plain_step(plain, here, items)
        assert float(total) == pytest.approx(want_loss, rel=1e-6), (float(total), want_loss)
        got = {}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            got[name] = torch.zeros(parameter.shape) if gradient is None else gradient.full_tensor() if sharded else gradient
            if not sharded:
                dist.all_reduce(got[name])
        assert_same_gradients(got, want, 1e-4 if dtype == torch.float32 else 1e-6)
    if plan["keep"] is not None:
        stats = placed.checkpointing.stats()
        again = sum(layer.output is None for layer in KEEPS[plan["keep"]].layers)
        assert (stats.streamed, stats.passed_on) == (3, 0)
        assert (stats.attention_forwards, stats.attention_backwards) == (steps * (6 + again), steps * 3)


GROUPS = {"num_attention_heads": 8, "num_key_value_heads": 4}
CASES: list[tuple[Any, ...]] = [
    ((2, 2, 1), "llama", {"keep": "host"}, [ROWS[0], ROWS[1]]),
    ((2, 2, 1), "gpt_oss", {"keep": "segments", "back": True}, [ROWS[3], ROWS[2]]),
    ((2, 2, 1), "gemma3", {"keep": "attention again"}, [ROWS[0], ROWS[3]]),
    ((2, 2, 1), "qwen3", {"keep": None}, [ROWS[1], ROWS[0]]),
    ((2, 1, 2), "qwen3", {"keep": "host", "back": True}, [ROWS[0], ROWS[1]]),
    ((2, 1, 2), "gpt_oss", {"keep": "device"}, [ROWS[3], ROWS[2]]),
    ((2, 1, 2), "gemma3", {"keep": None}, [ROWS[0], ROWS[3]]),
    ((2, 1, 2), "llama", {"keep": "segments"}, [ROWS[3], ROWS[2]], False, GROUPS),
    ((1, 2, 2), "llama", {"keep": "host", "back": True}, [ROWS[1], ROWS[2]], True, GROUPS),
    ((1, 2, 2), "gpt_oss", {"keep": "segments"}, [ROWS[0], ROWS[3]], True, GROUPS),
    ((1, 2, 2), "gemma3", {"keep": None}, [ROWS[1], ROWS[2]]),
    ((1, 4, 1), "gemma3", {"keep": "device", "heads": None, "tile": 64}, [ROWS[2], ROWS[3]]),
    ((1, 4, 1), "gpt_oss", {"keep": None}, [ROWS[2], ROWS[0]]),
    ((1, 1, 4), "qwen3", {"keep": "host"}, [ROWS[3], ROWS[2]]),  # more ranks than KV heads
]


def begun_one_ahead(rank: int, world: int) -> None:
    """The exchange of the next head group is begun before a group is attended, gradients land after the next group's backward.

    A row that exchanges nothing has one group at a time.
    """
    calls: list[str] = []
    alive: weakref.WeakSet[Attending] = weakref.WeakSet()
    most = 0

    def spy(name: str, real: Any) -> Any:
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal most
            calls.append(name)
            if name == "begin":
                alive.add(self)
                most = max(most, len(alive))
            return real(self, *args, **kwargs)

        return called

    axes = device_axes(Mesh(dp_shard=2, cp=2, rank=rank), "cpu")
    model = prepare(tiny("qwen3", layers=1, **GROUPS), settings(), by_hand("one"))
    targets = [("begin", Attending, "__init__"), ("attend", Attending, "forward"), ("back", Attending, "backward")]
    # Four groups of one KV head; a row that is cut, and one of which each rank has a whole document.
    ahead = ["begin", "begin", "attend", "begin", "attend", "begin", "attend", "attend"]
    back = ["begin", "begin", "back", "begin", "back", "land", "begin", "back", "land", "back", "land", "land"]
    alone = ["begin", "attend"] * 4 + ["begin", "back"] + ["begin", "back", "land"] * 3 + ["land"]
    with ExitStack() as patches:
        for name, owner, method in [*targets, ("land", Going, "land")]:
            patches.enter_context(patch.object(owner, method, spy(name, getattr(owner, method))))
        for lengths, wanted, groups in (((29,), ahead + back, 2), ((16, 16), alone, 1)):
            row = RowContext(lay_out(lengths, 2), RowRanks(axes.group("cp")), "cpu")
            calls.clear()
            most = 0
            model(**inputs_of(model, row, lengths, 0), num_items_in_batch=10).loss.backward()
            assert calls == wanted, (lengths, calls)
            assert most == groups, (lengths, most)


def dropout_is_that_of_one_rank(rank: int, world: int, sizes: tuple[int, int, int], keep: str | None) -> None:
    """Adapters with dropout: masks go by the token's number in the row, whichever rank it is on."""
    mesh = Mesh(dp_shard=sizes[0], cp=sizes[1], sp=sizes[2], rank=rank)
    axes = device_axes(mesh, "cpu")
    args = settings(use_peft=True, lora_r=4, lora_target_modules="all-linear", lora_dropout=0.4)
    torch.manual_seed(0)
    one: Any = wrap_lora(tiny("llama", layers=3, dtype=torch.float64), args)
    for name, parameter in one.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    many: Any = copy.deepcopy(one)
    shard(many, axes.fsdp, masters=False, compute=torch.float64)
    for model in (one, many):
        prepare(model, args, by_hand(keep))
    lengths, losses = ROWS[1], []
    for model, layout, ranks in (
        (one, lay_out(lengths, 1), RowRanks()),
        (many, lay_out(lengths, mesh.cp, sp_size=mesh.sp), ranks_of(axes, mesh)),
    ):
        row = RowContext(layout, ranks, "cpu")
        loss = model(**inputs_of(model, row, lengths, 0), num_items_in_batch=10, megaspan_seed=77).loss
        loss.backward()
        losses.append(loss.detach())
    dist.all_reduce(losses[1], group=axes.group("row"))
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=1e-9)
    trained = {name: parameter for name, parameter in many.named_parameters() if parameter.requires_grad}
    got = {name: parameter.grad.full_tensor() / mesh.dp_shard for name, parameter in trained.items()}  # of as many equal rows
    assert_same_gradients(got, gradients(one), 1e-8)


@pytest.mark.full  # a minute of four processes; tests/parity/test_ranks.py holds the same through the trainer in every run
def test_ranks_find_what_one_plain_process_finds() -> None:
    """Also where most of a row's slots are padding: three tokens on four ranks."""
    dropout = [(dropout_is_that_of_one_rank, (sizes, keep)) for sizes, keep in (((2, 2, 1), "host"), ((2, 1, 2), None))]
    run_ranks(4, [*((same_as_plain, case) for case in CASES), *dropout, (begun_one_ahead, ())])
