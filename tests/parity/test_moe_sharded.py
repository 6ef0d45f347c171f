"""Experts and their balance loss inside FSDP2-wrapped forwards, on two gloo processes: the gradients of one plain process."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.multiprocessing as mp

from tests.layers.test_streamed_sharded import _free_port

FAMILY, COEFFICIENT = "mixtral", 0.5


def _rank(rank: int, world: int, port: int) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from megaspan.attention import install as install_attention
    from megaspan.layers.dials import LayerPlan
    from megaspan.layers.streamed import Streaming
    from tests.models import assert_same_gradients, batch, gradients, tiny

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    plain = tiny(FAMILY, output_router_logits=True, router_aux_loss_coef=COEFFICIENT)
    model: Any = copy.deepcopy(plain)
    install_attention(model)
    streaming = Streaming(LayerPlan(tile_tokens=5))
    assert streaming.install(model) == [None, None]
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    with streaming.balancing(model) as balance:
        loss = model(**batch(13 + rank, seed=rank), use_cache=False, output_router_logits=False).loss
    (loss + COEFFICIENT * balance.loss(13 + rank)).backward()
    got = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    for other in range(world):
        (plain(**batch(13 + other, seed=other), use_cache=False).loss / world).backward()
    assert_same_gradients(got, gradients(plain), 1e-4)
    assert (streaming.stats().attention_forwards, streaming.stats().passed_on) == (2, 0)
    dist.destroy_process_group()


def test_two_ranks_get_the_gradients_of_one() -> None:
    mp.spawn(_rank, (2, _free_port()), nprocs=2)
