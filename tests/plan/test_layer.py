"""Layers that run whole: their MLP in tiles where it has no room otherwise, and how that is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaspan.config import SFTConfig
from megaspan.plan import choose
from megaspan.plan.facts import Machine, ModelFacts
from megaspan.plan.layer import layer_bytes, whole_layer_parts
from megaspan.plan.parts import Settings

GIB = 2**30
UNKNOWN = {
    "model_type": "unknown", "num_hidden_layers": 36, "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151_936, "max_position_embeddings": 2**21,
}  # fmt: skip
FACTS = ModelFacts.from_config(UNKNOWN)
LONG = Settings(2**20, True, 2, False, True, True, True, 2048)


def plan(tokens: int, gib: int) -> object:
    return choose(SFTConfig(max_length=tokens), FACTS, Machine("GPU", gib * GIB, 900 * GIB, 16))


def test_a_tile_takes_the_place_of_the_row_in_the_mlp() -> None:
    """By hand: 76 GB of MLP of a row of a million tokens of the 4B shape become 1.9 of a tile of 16,384."""
    layer = layer_bytes(FACTS, 0, LONG)
    whole = {part.name: part.bytes for part in whole_layer_parts(FACTS, layer, LONG)}
    assert whole["one layer: MLP"] == 2**20 * 6 * 2 * 9728
    row = replace(LONG, tokens=65_536, tiled_mlp=True)
    tiled = {part.name: part.bytes for part in whole_layer_parts(FACTS, layer, row)}
    assert tiled["one tile: MLP"] == 16_384 * 6 * 2 * 9728
    assert tiled["one layer: gradient of the MLP's input"] == 65_536 * 2 * 2560
    assert tiled["one layer: weight gradients of the MLP"] == 3 * 2560 * 9728 * 6
    assert sum(whole.values()) > 3 * sum(tiled.values())
    adapter = replace(row, tokens=20_000, adapter=36 * 1000)
    parts = {part.name: part.bytes for part in whole_layer_parts(FACTS, layer, adapter)}
    assert parts["one layer: weight gradients of the MLP"] == 6000


def test_where_attention_needs_more_than_a_tile_the_tile_is_not_counted() -> None:
    layer = layer_bytes(FACTS, 0, LONG)
    names = [part.name for part in whole_layer_parts(FACTS, layer, replace(LONG, tiled_mlp=True, layer_tile=4096))]
    assert names == ["one layer: attention", "one layer: attention backward"]


def test_a_row_that_is_no_longer_than_a_tile_runs_whole() -> None:
    layer, short = layer_bytes(FACTS, 0, LONG), replace(LONG, tokens=8192)
    assert whole_layer_parts(FACTS, layer, replace(short, tiled_mlp=True)) == whole_layer_parts(FACTS, layer, short)


@pytest.mark.parametrize(("gib", "tile"), [(141, 262_144), (60, 16_384)])
def test_tiles_only_where_the_whole_has_no_room(gib: int, tile: int) -> None:
    made = plan(262_144, gib)
    assert (made.fits, made.streamed, made.layer_tile_tokens) == (True, False, tile)  # type: ignore[attr-defined]
    said = [reason for reason in made.reasons if "MLP" in reason]  # type: ignore[attr-defined]
    assert bool(said) == (tile < 262_144)


def test_rows_reach_further_by_it() -> None:
    """Without tiles a row of this shape and limit ends where attention and MLP fill the device together."""
    made = plan(65_536, 60)
    at = LONG.tokens // 4
    layer, whole, tiled = layer_bytes(FACTS, 0, LONG), replace(LONG, tokens=at), replace(LONG, tokens=at, tiled_mlp=True)
    sizes = [sum(part.bytes for part in whole_layer_parts(FACTS, layer, each)) for each in (whole, tiled)]
    assert sizes[1] < 0.65 * sizes[0]
    assert made.longest_row > 350_000  # type: ignore[attr-defined]


def test_experts_are_counted_whole() -> None:
    raw = UNKNOWN | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
    facts = ModelFacts.from_config(raw)
    facts = replace(facts, family=replace(facts.family, streamed=False))
    made = choose(SFTConfig(max_length=65_536), facts, Machine("GPU", 60 * GIB, 900 * GIB, 16))
    assert made.layer_tile_tokens == 65_536
