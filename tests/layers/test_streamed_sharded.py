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


def _rank(rank: int, world: int, port: int, family: str, dtype: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from megaspan.attention import install as install_attention
    from megaspan.layers.stream import LayerPlan
    from megaspan.layers.streamed import Streaming
    from tests.models import assert_same_gradients, batch, gradients, tiny

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    plain = tiny(family)
    model = copy.deepcopy(plain)
    install_attention(model)
    streaming = Streaming(LayerPlan(tile_tokens=5), offload=True)
    assert streaming.install(model) == [None, None]
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
    assert (stats.streamed, stats.attention_forwards) == (2, 4)
    dist.destroy_process_group()


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), pytest.param("qwen3", "bfloat16", marks=pytest.mark.full)])
def test_two_ranks_get_the_gradients_of_one(family, dtype):
    mp.spawn(_rank, (2, _free_port(), family, dtype), nprocs=2)
