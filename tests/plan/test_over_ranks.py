"""The head groups of a streamed layer over ranks hold what the plan says: every storage of the code is followed.

One process is each rank in turn: a fake process group takes collectives and moves nothing. Attention is FlashAttention 4's
stand-in, which allocates what the kernel does, and sums come home as on GPUs, by a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaspan.attention import AttentionCall, gather, groupway
from megaspan.attention.context import ContextPlan, RowContext, RowRanks
from megaspan.attention.flash4 import Flash4
from megaspan.attention.kernel import Kernel, Scoring
from megaspan.attention.layout import lay_out
from megaspan.attention.mask import Mask
from megaspan.attention.onway import OnTheWay
from megaspan.attention.planned import packed_row
from megaspan.attention.rehearsal import StandIn
from megaspan.attention.slices import plan_slices
from megaspan.layers.dials import LayerPlan
from megaspan.layers.groups import HeadGroup
from megaspan.layers.stream import LayerRun
from megaspan.plan import RankSizes, over_ranks
from megaspan.plan.facts import ModelFacts
from megaspan.plan.over_ranks import backward_group, forward_group, keys_of
from megaspan.plan.parts import Settings, bytes_of
from megaspan.plan.streamed import tile_bytes
from tests.plan.live import Live

SIZE = 32
TOKENS = 8192
CAST = 2**12


class Layer(NamedTuple):
    cp: int
    sp: int
    heads: int
    kv_heads: int
    groups: int
    window: int | None = None


LAYERS = [
    Layer(2, 1, 16, 8, 4),
    Layer(2, 1, 32, 8, 2),
    Layer(2, 1, 12, 6, 3),
    Layer(2, 1, 6, 6, 3),  # one query head a KV head: the kernel has no sums of dk and dv
    Layer(2, 1, 16, 8, 1),
    Layer(4, 1, 16, 4, 4),
    Layer(4, 1, 12, 3, 3),
    Layer(8, 1, 16, 4, 4),
    Layer(2, 1, 16, 8, 4, 513),
    Layer(4, 1, 16, 4, 4, 257),
    Layer(1, 2, 32, 8, 2),
    Layer(1, 2, 16, 8, 4),
    Layer(1, 2, 12, 12, 3),
    Layer(1, 4, 32, 4, 1),
    Layer(2, 2, 32, 8, 2),
    Layer(2, 2, 16, 8, 4),
    Layer(4, 2, 24, 6, 3),
    Layer(2, 2, 12, 12, 3),
]


def facts_of(layer: Layer) -> ModelFacts:
    sizes = {
        "model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64,
        "head_dim": SIZE, "num_attention_heads": layer.heads, "num_key_value_heads": layer.kv_heads,
    }  # fmt: skip
    window = {"sliding_window": layer.window, "use_sliding_window": True, "layer_types": ["sliding_attention"]}
    return ModelFacts.from_config(sizes | (window if layer.window else {}))


def settings_of(layer: Layer) -> Settings:
    each = layer.kv_heads // layer.groups // layer.sp if layer.groups > 1 else None
    ranks = RankSizes(cp=layer.cp, sp=layer.sp)
    return Settings(
        TOKENS, True, 2, True, True, True, True, 2048, streamed=True, layer_tile=256, kv_heads_per_call=each, ranks=ranks
    )


@contextmanager
def as_rank(layer: Layer, rank: int) -> Iterator[RowRanks]:
    """This process as one of the ranks that share a row."""
    cp, sp = layer.cp, layer.sp
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=cp * sp)
    try:
        cps = [dist.new_group([place * sp + head for place in range(cp)]) for head in range(sp)]
        sps = [dist.new_group([place * sp + head for head in range(sp)]) for place in range(cp)]
        yield RowRanks(cps[rank % sp] if cp > 1 else None, sps[rank // sp] if sp > 1 else None)
    finally:
        dist.destroy_process_group()


def as_on_gpus(d_pool: Tensor, slots: int, group: dist.ProcessGroup) -> OnTheWay:
    """What `gather._sum_to_owners` holds there."""
    arrives = d_pool.new_empty(slots, *d_pool.shape[1:])
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return OnTheWay(arrives, d_pool, reduce(arrives, d_pool, group=group, async_op=True))


class Run:
    """A layer's head groups on one rank: what `LayerRun` needs for them, and nothing else."""

    def __init__(self, layer: Layer, context: ContextPlan, tokens: int, slots: int) -> None:
        self.layer, self.tokens = layer, tokens
        self.kernels: tuple[Kernel, ...] = (StandIn(Flash4()),)
        each, share = layer.kv_heads // layer.groups, layer.heads // layer.kv_heads
        starts = range(0, layer.kv_heads, each)
        groups = tuple(HeadGroup(slice(s, s + each), slice(s * share, (s + each) * share)) for s in starts)
        plan, counts = LayerPlan(stream_back=True), SimpleNamespace(forwards=0)
        self.run = SimpleNamespace(
            groups=groups, context=context, plan=plan, counts=counts, _projected=self.projected, _aside=lambda *_: None
        )
        self.out, self.d_out = ([self.row(share * each) for _ in groups] for _ in range(2))
        self.lse = [torch.empty(1, share * each // layer.sp, slots) for _ in groups]

    def row(self, heads: int) -> Tensor:
        return torch.empty(1, self.tokens, heads, SIZE, dtype=torch.bfloat16)

    def projected(self, x: Any, cuts: list[slice], group: HeadGroup, _: None) -> AttentionCall:
        q, k, v = (self.row(heads.stop - heads.start).transpose(1, 2) for heads in (group.heads, group.kv, group.kv))
        return AttentionCall(q, k, v, Scoring(1.0, self.layer.window), None, self.kernels)

    def backward(self, fetched: bool) -> None:
        def output_of(number: int, _: Any) -> tuple[Tensor, Tensor]:
            out, lse = self.out[number], self.lse[number]
            return (out.clone(), lse.clone()) if fetched else (out, lse)

        kept = SimpleNamespace(input_tiles=None, output_of=output_of)
        LayerRun._attend_backward(self.run, [slice(0, self.tokens)], self.d_out, kept, None)  # type: ignore[arg-type]

    def forward(self) -> None:
        stores = SimpleNamespace(land=lambda: None)
        kept = SimpleNamespace(stores=stores, keep_output=lambda out, lse, place: None)
        LayerRun._attend(self.run, lambda cuts: iter(()), [slice(0, self.tokens)], kept, "host")  # type: ignore[arg-type]


def held(
    layer: Layer, rank: int, documents: tuple[int, ...] = (TOKENS,), *, fetched: bool = False, forward: bool = False
) -> int:
    """Most bytes that a rank holds while a layer's head groups are attended, beside attention's output and its gradient.

    Args:
        layer: its heads.
        rank: of all.
        documents: of the row.
        fetched: the output waits elsewhere, and is fetched group by group; then what is here of it counts.
        forward: not the backward.
    """
    with as_rank(layer, rank) as ranks, ExitStack() as patches:
        patches.enter_context(patch.object(gather, "_sum_to_owners", as_on_gpus))
        patches.enter_context(patch.object(Flash4, "refusal", lambda self, case: None))
        patches.enter_context(patch.object(groupway, "CAST_ELEMENTS", CAST))
        layout = lay_out(documents, layer.cp, sp_size=layer.sp)
        row = RowContext(layout, ranks, "cpu")
        context = row.plan(Mask(window=layer.window))
        with Live() as live:
            run = Run(layer, context, row.slots, layout.shard_tokens)
            before = live.now
            live.restart()
            run.forward() if forward else run.backward(fetched)
        return live.peak - before


def ranks_of(layer: Layer) -> range:
    """Those that attend other tokens; the heads of a shard are alike."""
    return range(0, layer.cp * layer.sp, layer.sp)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_worst_rank_holds_what_is_planned(layer: Layer) -> None:
    facts, s = facts_of(layer), settings_of(layer)
    with patch.object(over_ranks, "CAST_ELEMENTS", CAST):
        planned = bytes_of(backward_group(facts, s))
    assert max(held(layer, rank) for rank in ranks_of(layer)) == pytest.approx(planned, rel=0.01)
    # A plan's forward counts the outputs of two groups beside; they are not always there.
    out = min(2, layer.groups) * s.slots * (layer.heads // layer.groups) * (2 * SIZE + 4)
    most = max(held(layer, rank, forward=True) for rank in ranks_of(layer))
    planned = bytes_of(forward_group(facts, s))
    assert 0.75 * planned <= most <= planned + 1.01 * out


@pytest.mark.parametrize("layer", LAYERS[::2], ids=str)
def test_outputs_that_wait_elsewhere_are_here_as_planned(layer: Layer) -> None:
    """Never more, and no more than one group's less: the plan counts the same at all moments."""
    facts, s = facts_of(layer), replace(settings_of(layer), stream_back=True)
    with patch.object(over_ranks, "CAST_ELEMENTS", CAST):
        planned = bytes_of(backward_group(facts, s)) + tile_bytes(facts, s, "attention")[1]
    most = max(held(layer, rank, fetched=True) for rank in ranks_of(layer))
    out = s.slots * (layer.heads // layer.groups) * (2 * SIZE + 4)
    assert 0.99 * planned - out <= most <= 1.01 * planned


DOCUMENTS = [
    (8128, 64),
    (3000, 5000, 192),
    (8000, 96, 96),
    (6200, 996, 996),
    (2000, 2000, 2000, 2192),
    (512,) * 16,
    (128,) * 64,
    (16,) * 512,
    (4096, *(64,) * 64),
]


@pytest.mark.parametrize("documents", DOCUMENTS, ids=lambda documents: f"{documents[0]}, {len(documents)} documents")
@pytest.mark.parametrize("layer", [LAYERS[0], LAYERS[4], LAYERS[6], LAYERS[14]], ids=str)
def test_a_packed_row_holds_no_more_than_a_plain_one(layer: Layer, documents: tuple[int, ...]) -> None:
    """Neither keys of several cut documents twice, nor a tile of a kernel's sums for each document at once."""
    with patch.object(over_ranks, "CAST_ELEMENTS", CAST):
        planned = bytes_of(backward_group(facts_of(layer), settings_of(layer)))
    # Shards of packed rows are not quite equal, and a few documents may have tiles of their own.
    assert max(held(layer, rank, documents) for rank in ranks_of(layer)) <= 1.01 * planned


@pytest.mark.parametrize("documents", [*DOCUMENTS[:5], (700, 900, 1200, 800, 1500, 900, 1100, 1092)], ids=len)
@pytest.mark.parametrize("layer", [*LAYERS[8:10], Layer(4, 1, 16, 8, 2, 1000), Layer(8, 1, 16, 4, 4, 100)], ids=str)
def test_windows_of_cut_documents_are_counted_where_rows_are_there(layer: Layer, documents: tuple[int, ...]) -> None:
    """Each document that is cut brings halos: up to half as much again as a plain row's group holds."""
    facts, s, layout = facts_of(layer), settings_of(layer), lay_out(documents, layer.cp)
    with patch.object(over_ranks, "CAST_ELEMENTS", CAST):
        planned = bytes_of(backward_group(facts, replace(s, packed=packed_row(layout, facts))))
        unknown = bytes_of(backward_group(facts, replace(s, packs=True)))
        assert planned >= 0.999 * bytes_of(backward_group(facts, s))
    most = max(held(layer, rank, documents) for rank in ranks_of(layer))
    assert most <= 1.01 * planned
    assert most <= 1.01 * unknown


@pytest.mark.parametrize("documents", DOCUMENTS[-4:], ids=lambda documents: f"{len(documents)} documents")
@pytest.mark.parametrize("groups", [1, 4])
def test_nor_on_one_rank(documents: tuple[int, ...], groups: int) -> None:
    """Documents of 16 tokens would hold nine times the sums of a plain row."""
    layer = Layer(1, 1, 16, 8, groups)
    assert held(layer, 0, documents) <= 1.03 * held(layer, 0)


@pytest.mark.parametrize("window", [None, 17, 200, 700, 2000])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_a_plain_row_is_read_as_planned(cp: int, window: int | None) -> None:
    layer = Layer(cp, 1, 2, 1, 1, window)
    layout = lay_out([TOKENS], cp)
    found = [plan_slices(layout, Mask(window=window), rank) for rank in range(cp)]
    planned = [keys_of(settings_of(layer), window, rank) for rank in range(cp)]
    for each, keys in zip(found, planned, strict=True):
        assert len(each.keys.index()) == keys.copied
        assert [int(call.key_lengths.sum()) for call in each.calls] == [seen for _, seen in keys.calls]
        shares = [(call.queries.stop - call.queries.start) / layout.shard_tokens for call in each.calls]
        assert shares == [share for share, _ in keys.calls]
    assert max(each.exchange.pool_tokens for each in found) <= max(keys.pool for keys in planned)


def test_gradients_of_a_group_land_once() -> None:
    """Whoever keeps the name of what has landed holds nothing by it: `LayerRun` does, until the next group is attended."""
    layer = LAYERS[0]
    with as_rank(layer, 0) as ranks, patch.object(Flash4, "refusal", lambda self, case: None):
        context = RowContext(lay_out([64], 2), ranks, "cpu").plan(Mask())
        q, k = (torch.zeros(32, heads, SIZE, dtype=torch.bfloat16) for heads in (2, 1))
        kernels: tuple[Kernel, ...] = (StandIn(Flash4()),)
        _, lse = context.attend(context.start(q, k, k), Scoring(1.0), kernels=kernels)
        with Live(free=(q, k, lse, context.keys)) as live:
            going = context.attend_backward(context.start(q, k, k, q, q), lse, Scoring(1.0), kernels=kernels)
            found = going.land()
            assert live.now == sum(each.untyped_storage().nbytes() for each in found[:2])  # dk and dv share theirs
        with pytest.raises(AssertionError, match="once"):
            going.land()
