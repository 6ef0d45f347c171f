"""What is not really token-wise, over two ranks: dropout of adapters in layers and head, the balance loss, rotary tables.

The reference is the same prepared model in one process with the whole row, which other tests hold against plain transformers.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from megaspan.attention.context import RowContext, RowRanks
from megaspan.attention.layout import lay_out
from megaspan.layers.dropout import row_seed
from megaspan.model import prepare
from megaspan.model.shard import shard
from megaspan.world.axes import Mesh, device_axes
from tests.gloo import run_ranks
from tests.layers.test_streamed_ranks import by_hand, inputs_of, ranks_of
from tests.model.support import settings
from tests.models import assert_same_gradients, gradients, tiny

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 6, "lora_dropout": 0.3, "init_lora_weights": False}
HEAD = LORA | {"target_modules": ["q_proj", "o_proj", "down_proj", "lm_head"]}
BY_LENGTH = {
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 4.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.3 * i for i in range(8)],
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}  # fmt: skip
EXPERTS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
CASES: list[tuple[str, str, str | None, tuple[int, ...], dict[str, Any]]] = [
    ("cp", "qwen3", "host", (29,), {"lora": HEAD}),
    ("sp", "qwen3", "host", (13, 1, 20, 9), {"lora": HEAD, "loss_type": "nll"}),
    ("cp", "llama", None, (13, 1, 20, 9), {"lora": HEAD}),
    ("sp", "llama", None, (3,), {"lora": HEAD}),
    ("cp", "qwen3_moe", "segments", (13, 1, 20), EXPERTS),
    ("sp", "qwen3_moe", "host", (29,), {"sharded": True} | EXPERTS),
    ("cp", "mixtral", "host", (3,), {"sharded": True} | EXPERTS),
    ("cp", "llama", "host", (29,), {"rope_parameters": BY_LENGTH["longrope"], "max_position_embeddings": 64}),
    ("cp", "llama", None, (29, 4), {"rope_parameters": BY_LENGTH["dynamic"], "max_position_embeddings": 16}),
    ("sp", "llama", "host", (29,), {"rope_parameters": BY_LENGTH["dynamic"], "max_position_embeddings": 16}),
]


def compare(rank: int, world: int) -> None:
    for axis, family, keep, lengths, options in CASES:
        try:
            _compare(rank, axis, family, keep, lengths, **options)
        except BaseException as error:
            raise AssertionError(f"{axis}: {family}, {keep}, row {lengths}, {options}") from error


def _compare(
    rank: int,
    axis: str,
    family: str,
    keep: str | None,
    lengths: tuple[int, ...],
    *,
    lora: dict[str, Any] | None = None,
    loss_type: str = "chunked_nll",
    sharded: bool = False,
    **overrides: Any,
) -> None:
    mesh = Mesh(**{axis: 2}, rank=rank)  # type: ignore[arg-type]
    axes = device_axes(mesh, "cpu")
    dtype = torch.float32 if "experts" in str(tiny(family).state_dict().keys()) else torch.float64
    whole: Any = tiny(family, layers=3, dtype=dtype, **overrides)
    if lora is not None:
        torch.manual_seed(0)
        whole = get_peft_model(whole, LoraConfig(**lora, task_type="CAUSAL_LM")).to(dtype).train()
    mine = copy.deepcopy(whole)
    if sharded:
        shard(mine, axes.fsdp, masters=False, compute=dtype)
    past = {"loss_type": loss_type, "allow_past_window": True}
    prepare(whole, settings(**past), by_hand(keep))
    prepare(mine, settings(**{f"{axis}_size": 2}, **past), by_hand(keep))

    seed = row_seed(0, 3, 1)
    alone = RowContext(lay_out(lengths, 1), RowRanks(), "cpu")
    want = whole(**inputs_of(whole, alone, lengths, 5), num_items_in_batch=40, megaspan_seed=seed)
    want.loss.backward()
    torch.manual_seed(100 + rank)  # the ranks' generators are in no common state
    layout = lay_out(lengths, mesh.cp, sp_size=mesh.sp)
    row = RowContext(layout, ranks_of(axes, mesh), "cpu")
    got = mine(**inputs_of(mine, row, lengths, 5), num_items_in_batch=40, megaspan_seed=seed)
    got.loss.backward()
    total = got.loss.detach().clone()
    dist.all_reduce(total)
    assert float(total) == pytest.approx(float(want.loss.detach()), rel=1e-6)
    if got.aux_loss is not None:
        share = got.aux_loss.detach().clone()
        dist.all_reduce(share)
        assert float(share) == pytest.approx(float(want.aux_loss.detach()), rel=1e-6)
    found = {}
    for name, parameter in mine.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            if sharded:
                found[name] = gradient.full_tensor()  # type: ignore[union-attr]
            else:
                found[name] = torch.zeros_like(parameter) if gradient is None else gradient
                dist.all_reduce(found[name])
    assert_same_gradients(found, gradients(whole), 1e-4 if dtype == torch.float32 else 1e-6)


def test_two_ranks_find_what_one_finds() -> None:
    run_ranks(2, [(compare, ())])
