"""The mesh: sizes, products, places, and torch's mesh over as many ranks as one process can pretend to."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import shlex
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan import world
from megaspan.config import SFTConfig
from megaspan.config.parallel import AXES, OPTIONS, check_heads, legal_sp, resolve
from megaspan.config.retype import retyped
from megaspan.human import UserError
from megaspan.launch import processes
from megaspan.plan import RankSizes
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


TRAIN = ["/usr/bin/megaspan", "train", "run.yaml", "--nproc", "2", "--cp-size=3"]


@pytest.mark.parametrize(
    ("given", "ranks", "options", "words", "sentence"),
    [
        ({"cp_size": 3}, 2, {}, TRAIN, "cp_size 3 takes 3 processes, or a multiple of that; got 2; allowed: 3, 6, 9, … "
         "processes, or sizes whose product divides 2. Type megaspan train run.yaml --nproc 3 --cp-size=3, or "
         "megaspan train run.yaml --nproc 2 --cp_size 2."),
        ({"cp_size": 8}, 2, {"most": 2}, TRAIN, "cp_size 8 takes 8 processes, or a multiple of that; got 2; allowed: 8, 16, "
         "24, … processes, or sizes whose product divides 2. Type megaspan train run.yaml --nproc 2 --cp_size 2."),
        ({"dp_shard_size": 2, "cp_size": 4}, 4, {}, ["-c"], "dp_shard_size 2 × cp_size 4 take 8 processes; got 4; allowed: 8 "
         "processes, or sizes whose product is 4. Start 8 processes, or write dp_shard_size: 1."),
        ({"cp_size": 2}, 8, {"open_shard": False}, ["-c"], "cp_size 2 takes 2 processes; got 8; allowed: 2 processes, or sizes "
         "whose product is 8. Start 2 processes, or write dp_shard_size: 4."),
        ({"dp_shard_size": 1}, 2, {}, ["-c"], "dp_shard_size 1 takes 1 process; got 2; allowed: 1 process, or sizes whose "
         "product is 2. Start 1 process, or write dp_shard_size: 2."),
        ({"sp_size": 2}, 1, {}, ["-c"], "sp_size 2 takes 2 processes, or a multiple of that; got 1; allowed: 2, 4, 6, … "
         "processes, or all sizes 1. Start 2 processes, or write sp_size: 1."),
    ],
)  # fmt: skip
def test_a_wrong_product_is_one_sentence_with_what_to_type(monkeypatch, given, ranks, options, words, sentence):
    """Case R92: elsewhere an index error deep in mesh code."""
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(UserError) as caught:
        resolve(given, ranks, **options)
    assert str(caught.value) == sentence


SIZES = st.dictionaries(st.sampled_from(OPTIONS), st.one_of(st.none(), st.integers(1, 6)))


@given(SIZES, st.integers(1, 24), st.booleans(), st.sampled_from([None, (4, 2), (32, 8), (6, 3), (1, 1)]))
def test_what_is_said_to_type_is_taken(given, ranks, open_shard, heads):
    """By the number of processes, and by the model's heads where they are known."""
    said = []
    with contextlib.suppress(UserError):
        resolve(given, ranks, open_shard=open_shard, again=lambda *words: said.append(words) or "x", heads=lambda: heads)
    for count, sizes in said:
        found = resolve(given | sizes, count, open_shard=open_shard)
        assert all(found[option.removesuffix("_size")] == size for option, size in sizes.items())
        if heads is not None:
            check_heads(found["sp"], *heads)


def test_a_product_that_is_wrong_of_a_size_that_heads_refuse_is_one_sentence(monkeypatch, tmp_path):
    """In `megaspan plan` and `megaspan train`, with what both allow."""
    entries = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 8,
               "num_key_value_heads": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(entries))
    config = SFTConfig(model_name_or_path=str(tmp_path), sp_size=3, use_cpu=True, max_length=64)
    monkeypatch.setattr("sys.argv", ["megaspan", "train", "a.yaml", "--nproc", "2", "--sp_size", "3"])
    for call in (lambda: RankSizes.of(config, 2), lambda: processes(2, config)):
        with pytest.raises(UserError) as caught:
            call()
        assert str(caught.value) == (
            "sp_size 3 takes 3 processes, or a multiple of that, and this model has 4 query and 2 KV heads, which that does "
            "not split; got 2; allowed: sizes whose product divides 2, with sp_size 1, 2. "
            "Type megaspan train a.yaml --nproc 2 --sp_size 2."
        )


@pytest.mark.parametrize(
    ("words", "processes", "sizes", "typed"),
    [
        ("megaspan train --nproc=4 --cp_size 3 --lr 1", 3, {}, "type megaspan train --nproc 3 --cp_size 3 --lr 1"),
        ("/a/megaspan/__main__.py plan a.yaml", 2, {"sp_size": 2}, "type megaspan plan a.yaml --nproc 2 --sp_size 2"),
        ("megaspan train 'my run.yaml' --sp-size 3", None, {"sp_size": 1, "cp_size": 3},
         "type megaspan train 'my run.yaml' --sp_size 1 --cp_size 3"),
        ("megaspan", 2, {}, "start 2 processes"),
        ("script.py", None, {"cp_size": 2, "sp_size": 1}, "write cp_size: 2, sp_size: 1"),
    ],
)  # fmt: skip
def test_the_command_line_is_retyped(words, processes, sizes, typed):
    assert retyped(processes, sizes, shlex.split(words)) == typed


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
def test_torch_s_mesh_has_the_same_places(sizes, monkeypatch):
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
        # torch gives groups along an axis its own timeout, which a long save of one rank would outlast.
        set_to = {}
        monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda timeout, group: set_to.update({group: timeout}))
        made.set_timeout(timedelta(hours=2))
        used = {made.group(axis) for axis in (*AXES, "shard", "row", "data")} | set(made.fsdp.get_all_groups())
        assert set_to == dict.fromkeys(used, timedelta(hours=2))
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
    with pytest.raises(UserError, match=r"got 16; .* or write parallelism_config_dp_shard_size: 2\.$"):
        world.mesh(SFTConfig(max_length=8), FSDP2 | {"WORLD_SIZE": "16"})
    with pytest.raises(UserError, match="cp_size is 8 in accelerate's launch file and 2 in the options"):
        world.mesh(SFTConfig(max_length=8, cp_size=2), FSDP2)


def test_a_script_is_told_its_own_command(monkeypatch, tmp_path):
    script = tmp_path / "my train.py"
    script.touch()
    monkeypatch.setattr("sys.argv", [str(script), "--lr", "1e-5"])
    monkeypatch.setattr("__main__.__spec__", None)
    for environ, command in (
        ({}, "torchrun --nproc-per-node 8"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "torchrun --nproc-per-node 8"),
        ({"WORLD_SIZE": "12", "RANK": "0", "LOCAL_WORLD_SIZE": "6"}, "torchrun --nnodes 2 --nproc-per-node 4"),
        ({"WORLD_SIZE": "2", "RANK": "0", "ACCELERATE_MIXED_PRECISION": "no"},
         "accelerate launch --config_file FSDP2.yaml --num_processes 8"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"cp_size 4 × sp_size 2 take 8 processes") as caught:
            world.mesh(SFTConfig(max_length=8, cp_size=4, sp_size=2), environ)
        assert f" Type {command} '{script}' --lr 1e-5, or write " in str(caught.value)
    monkeypatch.setattr("__main__.__spec__", importlib.util.spec_from_loader("jobs.train", None))
    with pytest.raises(UserError, match=r"Type torchrun --nproc-per-node 8 -m jobs\.train --lr 1e-5, or write "):
        world.mesh(SFTConfig(max_length=8, cp_size=8), {})


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


def test_what_sp_cannot_split_is_left_to_cp(monkeypatch):
    monkeypatch.setattr("sys.argv", ["megaspan", "train", "a.yaml", "--sp_size", "6"])
    with pytest.raises(UserError, match=r": type megaspan train a\.yaml --sp_size 2 --cp_size 6\.$"):
        check_heads(6, 32, 8, cp_size=2)
