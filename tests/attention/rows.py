"""Rows to try layouts and slices on, and their masks by definition."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from megaspan.attention.layout import TokenLayout
from megaspan.attention.mask import Mask
from megaspan.attention.slices import Slices


def documents(most: int = 80) -> st.SearchStrategy[list[int]]:
    """Rows of 1 to `most` tokens, with one-token documents and documents of equal lengths."""
    length = st.one_of(st.just(1), st.integers(1, 8), st.sampled_from([8, 16]), st.integers(1, most))
    return st.lists(length, min_size=1, max_size=12).map(lambda lengths: _at_most(lengths, most))


def masks() -> st.SearchStrategy[Mask]:
    size = st.integers(1, 40)
    return st.one_of(st.just(Mask()), size.map(lambda window: Mask(window=window)), size.map(lambda chunk: Mask(chunk=chunk)))


def visible(lengths: list[int], mask: Mask) -> np.ndarray:
    """Which keys [T, T] each token of a packed row sees."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    seen = (document[:, None] == document) & (position[:, None] >= position)
    if mask.window is not None:
        seen &= position[:, None] - position < mask.window
    if mask.chunk is not None:
        seen &= position[:, None] // mask.chunk == position // mask.chunk
    return seen


def packings(count: int) -> Iterator[tuple[list[int], int]]:
    """Document lengths as packed rows have them, and a number of ranks."""
    draw = np.random.default_rng(0)
    for number in range(count):
        tokens, cp = int(draw.choice([65_536, 131_072, 1_048_576])), int(draw.choice([2, 3, 4, 8]))
        n = max(2, tokens // int(draw.choice([512, 2048, 8192, 32_768])))
        kinds = (
            draw.lognormal(0, draw.uniform(0.3, 2), n),
            draw.pareto(draw.uniform(0.9, 2.5), n) + 0.05,
            draw.uniform(0.05, 1, n),
            np.ones(n),
        )
        shares = kinds[number % 4]
        yield np.maximum(1, shares / shares.sum() * tokens).astype(int).tolist(), cp


def _at_most(lengths: list[int], most: int) -> list[int]:
    kept: list[int] = []
    for length in lengths:
        if sum(kept) < most:
            kept.append(min(length, most - sum(kept)))
    return kept


def pools(layout: TokenLayout, plans: list[Slices], shards: list[np.ndarray]) -> list[np.ndarray]:
    """What every rank's pool holds after the exchange, by what the plans of all ranks say of sending and receiving."""
    first = plans[0].exchange
    if first.gathered:
        pool = np.concatenate([shard[: first.gathered] for shard in shards])
        return [pool] * layout.cp_size
    sent = []  # of each rank, the share of each receiver
    for shard, plan in zip(shards, plans, strict=True):
        borders = np.cumsum(plan.exchange.send_tokens)
        assert borders[-1] == plan.exchange.sends.total
        sent.append(np.split(shard[plan.exchange.sends.index()], borders[:-1]))
    filled = []
    for rank, (shard, plan) in enumerate(zip(shards, plans, strict=True)):
        arrives = [sent[sender][rank] for sender in range(layout.cp_size)]
        assert tuple(len(part) for part in arrives) == plan.exchange.receive_tokens
        filled.append(np.concatenate([shard, *arrives]))
    return filled
