"""Every exchange of attention is begun and not waited for: the collectives are asynchronous, until what they bring is read.

With fakes in place of torch's collectives, which give the same numbers either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megaspan.attention.exchange import Pool
from megaspan.attention.gather import Gather
from megaspan.attention.heads import to_heads, to_tokens
from megaspan.attention.layout import lay_out
from megaspan.attention.mask import Mask
from megaspan.attention.onway import OnTheWay

TOKENS, HEADS, SIZE = 64, 4, 2
NEW = hasattr(dist, "all_gather_single")  # torch 2.13 renames two of them
ALL_GATHER = "all_gather_single" if NEW else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if NEW else "reduce_scatter_tensor"
ALL_TO_ALL = "all_to_all_single"
PAIR: Any = SimpleNamespace(size=lambda: 2)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What was called; a collective that is waited for by itself gives nothing to wait for, as torch's does."""
    calls: list[str] = []

    def fake(name: str) -> Callable[..., Any]:
        def collective(out: torch.Tensor, *_: Any, group: Any, async_op: bool = False) -> Any:
            assert group is PAIR
            calls.append(name if async_op else f"{name}, waited for")
            out.zero_()
            return SimpleNamespace(wait=lambda: calls.append("wait")) if async_op else None

        return collective

    with ExitStack() as patches:
        for name in (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL):
            patches.enter_context(patch.object(dist, name, fake(name)))
        yield calls


def gather_of(mask: Mask) -> Gather:
    layout = lay_out([TOKENS], 2)
    return Gather(Pool(layout, mask, 0).exchange, layout.shard_tokens, PAIR, "cpu")


def bring(mask: Mask) -> OnTheWay:
    gather = gather_of(mask)
    k = torch.zeros(gather.slots, HEADS, SIZE)
    return gather.bring(k, k)


def take_home(mask: Mask, *, on_gpu: bool = False) -> OnTheWay:
    gather = gather_of(mask)
    d_pool = torch.zeros(gather.exchange.pool_tokens, 2, HEADS, SIZE)
    with patch.object(torch.Tensor, "is_cuda", on_gpu):
        return gather.take_home(d_pool)


PART = torch.zeros(8, HEADS, SIZE)
EXCHANGES: dict[str, tuple[Callable[[], OnTheWay], str]] = {
    "keys of all": (lambda: bring(Mask()), ALL_GATHER),
    "keys of a halo": (lambda: bring(Mask(window=4)), ALL_TO_ALL),
    "gradients of all, gloo": (lambda: take_home(Mask()), ALL_TO_ALL),
    "gradients of all, NCCL": (lambda: take_home(Mask(), on_gpu=True), REDUCE_SCATTER),
    "gradients of a halo": (lambda: take_home(Mask(window=4)), ALL_TO_ALL),
    "to heads": (lambda: to_heads((PART,), PAIR), ALL_TO_ALL),
    "to shared heads": (lambda: to_heads((PART,), PAIR, 2), ALL_TO_ALL),
    "to tokens": (lambda: to_tokens(PART[:, None], PAIR), ALL_TO_ALL),
    "to tokens, summed": (lambda: to_tokens(PART[:, None], PAIR, 2), ALL_TO_ALL),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_is_begun_at_once_and_waited_for_where_it_is_read(name: str, said: list[str]) -> None:
    begin, collective = EXCHANGES[name]
    going = begin()
    assert said == [collective]
    going.land()
    assert said == [collective, "wait"]
    going.land()
    assert said == [collective, "wait"], "waited for once"
