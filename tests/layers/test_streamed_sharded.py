"""Streamed layers inside FSDP2-wrapped forwards, on two gloo processes: the gradients are those of one plain process."""

from __future__ import annotations

import copy
import os
import socket

import pytest
import torch
import torch.multiprocessing as mp


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(rank: int, world: int, port: int, family: str, dtype: str, segments: bool) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from megaspan.attention import install as install_attention
    from megaspan.layers.dials import LayerPlan
    from megaspan.layers.streamed import Streaming
    from megaspan.plan.keep import KeepPolicy, LayerKeep
    from tests.models import assert_same_gradients, batch, gradients, tiny

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    plain = tiny(family, layers=3)
    model = copy.deepcopy(plain)
    install_attention(model)
    kept = LayerKeep(None, None) if segments else LayerKeep("host", "host")
    keep = KeepPolicy((LayerKeep("host", kept.output), kept, kept))
    streaming = Streaming(LayerPlan(tile_tokens=5, kv_heads_per_call=1 if segments else None, stream_back=segments), keep)
    assert streaming.install(model) == [None] * 3
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    for step in range(2):
        model.zero_grad()
        model(**batch(13 + rank, seed=10 * step + rank), use_cache=False).loss.backward()
        got = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        plain.zero_grad()
        for other in range(world):
            (plain(**batch(13 + other, seed=10 * step + other), use_cache=False).loss / world).backward()
        assert_same_gradients(got, gradients(plain), 1e-5 if dtype == "float32" else 0.2)
        assert all(gradient.dtype == torch.float32 for gradient in got.values())
    stats = streaming.stats()
    assert (stats.streamed, stats.attention_forwards) == (3, 2 * 3 * (2 if segments else 1))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("dtype", "segments"),
    [("float32", False), ("float32", True), pytest.param("bfloat16", False, marks=pytest.mark.full)],
)
def test_two_ranks_get_the_gradients_of_one(dtype, segments):
    """Also when a segment runs again in the backward, whose layers' weights were let go of, a head group at a time."""
    mp.spawn(_rank, (2, _free_port(), "qwen3", dtype, segments), nprocs=2)
