"""Attention over ranks against attention of the whole row by definition, in fp64: output, log-sum-exp and all gradients."""

from __future__ import annotations

from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megaspan.attention import context
from megaspan.attention.attend import attend_backward, attend_forward
from megaspan.attention.context import ContextPlan, RowContext, RowRanks
from megaspan.attention.gather import Gather
from megaspan.attention.heads import to_tokens
from megaspan.attention.kernel import Scoring
from megaspan.attention.layout import lay_out
from megaspan.attention.mask import Mask
from megaspan.attention.onway import OnTheWay
from megaspan.attention.segments import Segments
from megaspan.attention.work import Work
from megaspan.plan.ranks import kv_heads_a_call
from tests.attention.reference import dense, distance
from tests.attention.rows import visible
from tests.gloo import run_ranks

SIZE = 4
BOUND = 1e-10
FULL = Mask()


class Row(NamedTuple):
    documents: tuple[int, ...]
    mask: Mask = FULL
    heads: tuple[int, int] = (4, 2)
    sinks: bool = False
    wanted: int | None = None  # KV heads a call


class Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    sink: Tensor | None


def tensors(row: Row, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = row.heads
    parts = [
        torch.randn(sum(row.documents), n, SIZE, generator=generator, dtype=torch.float64)
        for n in (heads, kv_heads, kv_heads, heads)
    ]
    return Tensors(*parts, torch.randn(heads, generator=generator, dtype=torch.float64) if row.sinks else None)


def whole(row: Row, x: Tensors) -> list[Tensor]:
    """Output, log-sum-exp, dq, dk, dv and the gradient of the sinks, of the whole row, by definition and autograd."""
    leaves = [part.clone().requires_grad_() for part in (x.q, x.k, x.v, *([] if x.sink is None else [x.sink]))]
    seen = torch.from_numpy(visible(list(row.documents), row.mask))
    out, lse = dense(*leaves[:3], SIZE**-0.5, sink=leaves[3] if row.sinks else None, seen=seen)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, x.d_out)]


def over_ranks(row: Row, x: Tensors, cp: int, sp: int, ranks: RowRanks, work: Work | None = None):
    """The same from this rank, as the layer will call it, by token of the row."""
    layout = lay_out(row.documents, cp, sp_size=sp, work=work)
    plan = RowContext(layout, ranks, "cpu").plan(row.mask)
    rank = dist.get_rank(ranks.cp) if ranks.cp else 0
    part = layout.part(dist.get_rank(ranks.sp) if ranks.sp else 0)
    index = torch.from_numpy(layout.token_index(rank))[part]
    # Padding slots hold what would be seen if anything read them.
    local = [torch.full((len(index), *t.shape[1:]), float("nan"), dtype=t.dtype) for t in x[:4]]
    for mine, all_of_it in zip(local, x[:4], strict=True):
        mine[index >= 0] = all_of_it[index[index >= 0]]
    q, k, v, d_out = local
    scoring, (heads, kv_heads) = Scoring(SIZE**-0.5, row.mask.window), row.heads
    step = kv_heads_a_call(kv_heads, sp, row.wanted) or kv_heads
    share = heads // kv_heads
    ends = [(n, min(n + step, kv_heads)) for n in range(0, kv_heads, step)]
    groups = [(slice(n * share, m * share), slice(n, m)) for n, m in ends]
    sinks = [None if x.sink is None else x.sink[h] for h, _ in groups]

    def start(number: int, outs: list[Tensor] | None = None):
        if number == len(groups):
            return None
        h, g = groups[number]
        return plan.start(q[:, h], k[:, g], v[:, g], *([] if outs is None else [outs[number], d_out[:, h]]))

    outs, lses, going = [], [], []
    started = start(0)
    for number, sink in enumerate(sinks):
        coming = start(number + 1)
        out, lse = plan.attend(started, scoring, sink)
        outs.append(out.land())
        lses.append(lse)
        started = coming
    started = start(0, outs)
    for number, sink in enumerate(sinks):
        coming = start(number + 1, outs)
        going.append(plan.attend_backward(started, lses[number], scoring, sink))
        started = coming
    landed = [each.land() for each in going]
    gradients = [torch.cat([each[n] for each in landed], 1) for n in range(3)]
    d_sink = None if x.sink is None else torch.cat([each.d_sink_H for each in going])
    return layout, index, torch.cat(outs, 1), lses, gradients, d_sink, groups


def check(row: Row, cp: int, sp: int, ranks: RowRanks, everyone: dist.ProcessGroup | None = None) -> None:
    # Where a row has one document and a full mask, its layout is the same for both measures of work.
    works = (None, Work({row.mask: 1}, 0)) if row.mask != FULL or len(row.documents) > 1 else (None,)
    for seed, work in enumerate(works):
        x = tensors(row, seed)
        out, lse, *expected = whole(row, x)
        layout, index, got, lses, gradients, d_sink, groups = over_ranks(row, x, cp, sp, ranks, work)
        real = index >= 0
        tokens = index[real]
        for mine, want in zip([got, *gradients], [out, *expected[:3]], strict=True):
            assert mine.dtype == want.dtype
            assert mine.shape == (len(index), *want.shape[1:])
            assert (mine[~real] == 0).all(), "padding"
            # Against the whole row's size: a rank's share may be one token whose gradient is 0.
            assert float((mine[real] - want[tokens]).norm()) <= BOUND * max(1.0, float(want.norm()))
        # The log-sum-exp is that of the heads attended here, of all slots of the shard.
        slots = torch.from_numpy(layout.token_index(dist.get_rank(ranks.cp) if ranks.cp else 0))
        sp_rank = dist.get_rank(ranks.sp) if ranks.sp else 0
        for (heads, _), mine in zip(groups, lses, strict=True):
            each = (heads.stop - heads.start) // sp
            want = lse[heads][sp_rank * each : (sp_rank + 1) * each]
            assert mine.shape == (each, layout.shard_tokens)
            torch.testing.assert_close(mine[:, slots >= 0], want[:, slots[slots >= 0]], rtol=BOUND, atol=BOUND)
            assert (mine[:, slots < 0] == 0).all()
        if d_sink is not None:
            if everyone is not None:
                dist.all_reduce(d_sink, group=everyone)
            assert distance(d_sink, expected[3]) < BOUND


ROWS = [
    *(Row((tokens,)) for tokens in (*range(1, 18), 97)),
    Row((97,), heads=(8, 2), sinks=True, wanted=1),
    Row((64,), Mask(window=8)),
    Row((64,), Mask(window=8), sinks=True, wanted=1),
    Row((64,), Mask(window=1)),  # needs nobody, and is cut
    Row((64,), Mask(window=40)),  # a halo over several ranks, or a gather
    Row((61,), Mask(window=17), wanted=1),
    Row((7,), Mask(window=3)),
    Row((64,), Mask(chunk=8)),
    Row((64, 5), Mask(chunk=24)),
    Row((3, 4, 5, 1, 30), wanted=1),
    Row((70, 3, 1)),
    Row((30, 10, 1), sinks=True),
    Row((20, 20)),
    Row((1, 1, 1)),
    Row((1,) * 17, Mask(window=2)),
    Row((16,) * 4),
    Row((16,) * 5, sinks=True),
    Row((5,) * 12, Mask(window=4)),
    Row((40, 1, 1, 1, 1, 20), Mask(window=3), sinks=True, wanted=1),
    Row((50, 2, 2, 40, 1), Mask(window=8)),
    Row((33, 7, 25)),
]
MANY_HEADS = [Row((13,), heads=(12, 12), wanted=1), Row((9, 1, 8), heads=(12, 12), wanted=2)]
SHARED_HEADS = [Row((13,), heads=(8, 2), wanted=1), Row((9, 1, 8), Mask(window=3), heads=(8, 2), sinks=True)]
# All on four ranks: a start takes longer than all rows. A rank's number in its group is not its number in the world.
MESHES = {
    "2": (((0, 1), 2, 1), ((2, 3), 1, 2)),
    "3": (((0, 1, 2), 3, 1),),
    "3, heads": (((1, 2, 3), 1, 3),),
    "4": (((0, 1, 2, 3), 4, 1),),
    "4, heads": (((0, 1, 2, 3), 1, 4),),
    "2 x 2": (((0, 1, 2, 3), 2, 2),),
}


def rows_of(sp: int) -> list[Row]:
    if sp == 3:
        return [*MANY_HEADS, *(row._replace(heads=(6, 3)) for row in ROWS[::2])]
    rows = ROWS if sp < 4 else [row._replace(heads=(8, 4)) if row.wanted else row for row in ROWS]
    return [*rows, *MANY_HEADS, *SHARED_HEADS]


def each_row(rank: int, world: int, name: str) -> None:
    made = [(mesh(rank, members, cp, sp), cp, sp) for members, cp, sp in MESHES[name]]  # by all ranks
    for (ranks, everyone), cp, sp in made:
        for row in rows_of(sp) if everyone else []:
            try:
                check(row, cp, sp, ranks, everyone)
            except BaseException as error:
                raise AssertionError(f"cp {cp}, sp {sp}: {row}") from error


def mesh(rank: int, members: tuple[int, ...], cp: int, sp: int) -> tuple[RowRanks, dist.ProcessGroup | None]:
    """This rank's groups, and that of all ranks of the row: None if it is none of them."""
    cps = [dist.new_group([members[place * sp + head] for place in range(cp)]) for head in range(sp)]
    sps = [dist.new_group([members[place * sp + head] for head in range(sp)]) for place in range(cp)]
    everyone = dist.new_group(list(members))
    if rank not in members:
        return RowRanks(), None
    place = members.index(rank)
    return RowRanks(cps[place % sp] if cp > 1 else None, sps[place // sp] if sp > 1 else None), everyone


def only_wanted_collectives(rank: int, world: int) -> None:
    """Whole documents and a window of one token call nobody; a window of eight brings its halo by one collective a group."""
    ranks = RowRanks(dist.group.WORLD)
    calls: list[str] = []
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    real = {name: getattr(dist, name) for name in (gather, "all_to_all_single")}

    def counting(name: str):
        return lambda *args, **kwargs: (calls.append(name), real[name](*args, **kwargs))[1]

    for name in real:
        setattr(dist, name, counting(name))
    try:
        for row, wanted in (
            (Row((16,) * world), []),
            (Row((64,), Mask(window=1)), []),
            (Row((64,), Mask(window=2)), ["all_to_all_single"] * 3),  # keys; keys again and gradients
            (Row((64,)), [gather, gather, "all_to_all_single"]),
            (Row((1,)), []),
        ):
            calls.clear()
            over_ranks(row, tensors(row), world, 1, ranks)
            assert calls == wanted, row
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def half_precision(rank: int, world: int, cp: int, sp: int, window: int | None, tokens: int) -> None:
    """Gradients of keys travel and are summed in fp32 wherever several ranks have a part: no worse than those of one rank."""
    row = Row((tokens,), Mask(window), heads=(8, 2))
    x, (ranks, _) = tensors(row), mesh(rank, tuple(range(world)), cp, sp)
    exact = whole(row, x)
    rounded = Tensors(*(part.bfloat16() for part in x[:4]), None)
    out, lse = attend_forward(*rounded[:3], scale=SIZE**-0.5, window=window)
    dq, dk, dv, _ = attend_backward(rounded.d_out, *rounded[:3], out, lse, scale=SIZE**-0.5, window=window)
    summed = []

    def home(gather: Gather, d_pool: Tensor) -> OnTheWay:
        summed.append(d_pool.dtype)
        return take_home(gather, d_pool)

    def tokens_of(parts: Tensor, group: dist.ProcessGroup, replicas: int = 1) -> OnTheWay:
        summed.extend([parts.dtype] if replicas > 1 else [])
        return to_tokens(parts, group, replicas)

    take_home = Gather.take_home
    with patch.object(Gather, "take_home", home), patch.object(context, "to_tokens", tokens_of):
        _, index, my_out, _, gradients, _, _ = over_ranks(row, rounded, cp, sp, ranks)
    assert set(summed) == {torch.float32}
    real = index[index >= 0]
    references = [exact[0], *exact[2:]]
    for mine, one, reference in zip([my_out, *gradients], [out, dq, dk, dv], references, strict=True):
        assert mine.dtype == torch.bfloat16
        assert distance(mine[index >= 0], reference[real]) <= 1.2 * distance(one[real], reference[real])


# Of 200 tokens four sp ranks pad nothing, and one call is all there is to do; of 197 they pad.
SIZES = ((4, 1, None, 197), (4, 1, 20, 197), (1, 4, None, 197), (1, 4, None, 200), (2, 2, None, 197))
HALVES = [(half_precision, sizes) for sizes in SIZES]


def test_ranks_find_what_one_process_finds():
    run_ranks(4, [*((each_row, (name,)) for name in MESHES), *HALVES, (only_wanted_collectives, ()), (what_a_rank_holds, ())])


@pytest.mark.parametrize("row", [*ROWS, *MANY_HEADS, *SHARED_HEADS], ids=str)
def test_one_rank(row):
    check(row, 1, 1, RowRanks())


def test_one_rank_is_attend_to_the_bit():
    row = Row((9, 1, 8), Mask(window=5), heads=(8, 2), sinks=True)
    x = tensors(row)
    options = dict(scale=SIZE**-0.5, window=5, sink_H=x.sink, segments=Segments.documents(row.documents, "cpu"))
    out, lse = attend_forward(x.q, x.k, x.v, **options)
    gradients = attend_backward(x.d_out, x.q, x.k, x.v, out, lse, **options)
    _, _, mine, (my_lse,), mine_back, d_sink, _ = over_ranks(row, x, 1, 1, RowRanks())
    for one, other in zip([out, lse, *gradients], [mine, my_lse, *mine_back, d_sink], strict=True):
        assert torch.equal(one, other)


def test_a_row_has_a_plan_for_each_kind_of_layer():
    row = RowContext(lay_out([8], 1), RowRanks(), "cpu")
    assert row.plan(FULL) is row.plan(Mask())
    assert row.plan(Mask(window=3)) is not row.plan(FULL)
    assert row.plan(Mask(window=3)).mask == Mask(window=3)
    assert row.asked == 5


def what_a_rank_holds(rank: int, world: int) -> None:
    """Slots, tokens, positions and numbers of tokens on each rank; together they are the row, padding apart."""
    ranks, _ = mesh(rank, tuple(range(world)), 2, 2)
    documents = (5, 1, 7)
    numbers = np.arange(13) * 10
    for layout in (lay_out(documents, 2, sp_size=2), lay_out([1], 2, sp_size=2)):
        row = RowContext(layout, ranks, "cpu")
        assert len(row.positions) == len(row.token_index) == row.slots == layout.shard_tokens // 2
        real = row.token_index < layout.tokens
        assert real.tolist() == [True] * row.tokens + [False] * (row.slots - row.tokens)
        assert (row.positions[~real] == 0).all()
        starts = torch.tensor([0, 0, 0, 0, 0, 5, 6, 6, 6, 6, 6, 6, 6])
        assert torch.equal(row.positions[real], (row.token_index - starts[row.token_index.clamp(max=12)])[real])
        mine = row.shard(numbers[: layout.tokens], fill=-100)
        assert mine.tolist() == [10 * int(t) if t < layout.tokens else -100 for t in row.token_index]
        everywhere = [torch.zeros(row.slots, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(everywhere, row.token_index)
        assert sorted(t for part in everywhere for t in part.tolist() if t < layout.tokens) == list(range(layout.tokens))


def test_head_groups_that_ranks_can_share():
    assert kv_heads_a_call(8, 1, None) is None
    assert [kv_heads_a_call(8, sp, 1) for sp in (1, 2, 4, 8, 16)] == [1, 2, 4, None, None]
    assert kv_heads_a_call(12, 3, 2) == 6


def test_what_does_not_fit_is_refused():
    plan = ContextPlan.of(lay_out([8], 1), FULL, RowRanks(), "cpu")
    q, k = torch.zeros(7, 4, SIZE), torch.zeros(7, 2, SIZE)
    with pytest.raises(ValueError, match="7 queries"):
        plan.start(q, k, k)
    q, k = torch.zeros(8, 4, SIZE), torch.zeros(8, 2, SIZE)
    with pytest.raises(ValueError, match="window of 3"):
        plan.attend(plan.start(q, k, k), Scoring(1.0, 3))
    with pytest.raises(ValueError, match="without attention's output"):
        plan.attend_backward(plan.start(q, k, k), torch.zeros(4, 8), Scoring(1.0))
    with pytest.raises(ValueError, match="a layout for"):
        ContextPlan.of(lay_out([8], 2), FULL, RowRanks(), "cpu")
