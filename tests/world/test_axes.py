"""The mesh: sizes, products, places, and torch's mesh over as many ranks as one process can pretend to."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan import world
from megaspan.config import SFTConfig
from megaspan.config.parallel import AXES, check_heads, legal_sp, resolve
from megaspan.human import UserError
from tests.world.test_launchfile import FSDP2

EIGHT = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("given", "ranks", "sizes"),
    [
        ({}, 1, (1, 1, 1, 1)),
        ({}, 8, (1, 8, 1, 1)),
        ({"cp_size": 8}, 8, (1, 1, 8, 1)),
        ({"cp_size": 4}, 8, (1, 2, 4, 1)),
        ({"cp_size": 2, "sp_size": 2}, 8, (1, 2, 2, 2)),
        ({"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2}, 8, (2, 2, 2, 1)),
        ({"dp_replicate_size": 2, "dp_shard_size": None}, 6, (2, 3, 1, 1)),
    ],
)
def test_what_is_left_open_is_sharded(given, ranks, sizes):
    assert tuple(resolve(given, ranks).values()) == sizes


@pytest.mark.parametrize(
    ("given", "ranks", "options", "sentence"),
    [
        ({"dp_shard_size": 2, "cp_size": 4}, 4, {}, "4 processes, but dp_shard_size 2 × cp_size 4 = 8. Write dp_shard_size: 1, "
         "or start 8 processes."),
        ({"cp_size": 3}, 8, {}, "8 processes, but cp_size 3 = 3. Start 3 processes, or choose sizes whose product divides 8: "
         "1, 2, 4, 8."),
        ({"cp_size": 8}, 1, {"start": "add --nproc {}"}, "1 process, but cp_size 8 = 8. Add --nproc 8, or choose"),
        ({"cp_size": 2}, 8, {"open_shard": False}, "8 processes, but cp_size 2 = 2. Write dp_shard_size: 4"),
        ({"dp_shard_size": 1}, 2, {}, "2 processes, but dp_shard_size 1 = 1. Write dp_shard_size: 2"),
    ],
)  # fmt: skip
def test_a_wrong_product_is_one_sentence_with_the_numbers(given, ranks, options, sentence):
    """Case R92: elsewhere an index error deep in mesh code."""
    with pytest.raises(UserError) as caught:
        resolve(given, ranks, **options)
    assert str(caught.value).startswith(sentence)


@given(st.tuples(*[st.integers(1, 4)] * 4))
def test_places_are_those_of_a_block_of_ranks(sizes):
    names = dict(zip(AXES, sizes, strict=True))
    expected = itertools.product(*map(range, sizes))
    for rank, places in enumerate(expected):
        mesh = world.Mesh(**names, rank=rank)
        assert tuple(mesh.coordinate(axis) for axis in AXES) == places
        replicate, shard, cp, sp = places
        assert mesh.coordinate("shard") == (shard * mesh.cp + cp) * mesh.sp + sp
        assert mesh.coordinate("row") == cp * mesh.sp + sp
        assert mesh.coordinate("data") == replicate * mesh.dp_shard + shard
    assert mesh.size("shard") * mesh.dp_replicate == mesh.ranks == mesh.size("data") * mesh.size("row")


@pytest.mark.parametrize("sizes", [(1, 1, 8, 1), (2, 2, 2, 2), (1, 2, 1, 3), (2, 4, 1, 1)])
def test_torch_s_mesh_has_the_same_places(sizes):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh = world.Mesh(*sizes, rank=world.Mesh(*sizes).ranks - 2)
    dist.init_process_group("fake", rank=mesh.rank, world_size=mesh.ranks, store=FakeStore())
    try:
        made = world.device_axes(mesh, "cpu")
        for axis in (*AXES, "shard", "row", "data"):
            assert dist.get_world_size(made.group(axis)) == mesh.size(axis)
            assert dist.get_rank(made.group(axis)) == mesh.coordinate(axis)
        assert made.fsdp.mesh_dim_names == (("dp_replicate", "shard") if mesh.dp_replicate > 1 else ("shard",))
        assert made.fsdp.size() == mesh.ranks
        assert made.fsdp["shard"].get_local_rank() == mesh.coordinate("shard")
    finally:
        dist.destroy_process_group()


def test_sizes_come_from_options_and_launcher():
    mesh = world.mesh(SFTConfig(max_length=8, cp_size=2, sp_size=2), EIGHT)
    assert (mesh.sizes, mesh.rank, mesh.local_rank, mesh.nodes) == ((1, 2, 2, 2), 5, 1, 2)
    assert str(mesh) == "8 ranks on 2 nodes: dp_shard_size 2 × cp_size 2 × sp_size 2"
    assert str(world.mesh(SFTConfig(max_length=8), {})) == "1 rank"
    for options in ({}, {"cp_size": 8}):
        assert world.mesh(SFTConfig(max_length=8, **options), FSDP2).sizes == (1, 1, 8, 1)
    both = world.mesh(SFTConfig(max_length=8, dp_shard_size=2), FSDP2 | {"WORLD_SIZE": "16"})
    assert both.sizes == (1, 2, 8, 1)
    with pytest.raises(UserError, match=r"16 processes, but cp_size 8 = 8\. Write dp_shard_size: 2"):
        world.mesh(SFTConfig(max_length=8), FSDP2 | {"WORLD_SIZE": "16"})
    with pytest.raises(UserError, match="cp_size is 8 in accelerate's launch file and 2 in the options"):
        world.mesh(SFTConfig(max_length=8, cp_size=2), FSDP2)


def test_one_process_says_how_to_start_eight():
    with pytest.raises(UserError) as caught:
        world.mesh(SFTConfig(max_length=8, cp_size=4, sp_size=2), {})
    for command in (
        "cp_size 4 × sp_size 2 needs 8 processes, and python started one",
        "megaspan train CONFIG.yaml --nproc 8",
        "torchrun --nproc-per-node 8",
        "accelerate launch --config_file FSDP2.yaml --num_processes 8",
    ):
        assert command in str(caught.value)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "legal"),
    [
        (32, 8, (1, 2, 4, 8, 16, 32)),
        (28, 4, (1, 2, 4, 28)),
        (12, 12, (1, 2, 3, 4, 6, 12)),
        (8, 2, (1, 2, 4, 8)),
        (14, 2, (1, 2, 14)),
    ],
)
def test_sp_sizes_that_split_the_heads(heads, kv_heads, legal):
    assert legal_sp(heads, kv_heads) == legal
    for sp in range(1, heads + 2):
        if sp in legal:
            check_heads(sp, heads, kv_heads)
        else:
            with pytest.raises(UserError, match=f"{heads} query and {kv_heads} KV heads; got {sp}; allowed: 1, "):
                world.Mesh(sp=sp).check_heads(heads, kv_heads)
