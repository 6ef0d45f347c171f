"""Faults of other systems that sharing rows could have (`docs/faults.md`): labels at edges, masks in silence, ranks apart."""

from __future__ import annotations

import copy
import dataclasses
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megaspan import world
from megaspan.attention.context import RowContext, RowRanks
from megaspan.attention.layout import lay_out
from megaspan.attention.mask import Mask
from megaspan.data import Row
from megaspan.data.prepare import OpenData
from megaspan.human import UserError
from megaspan.model import prepare, wrap_lora
from megaspan.model.shard import shard
from megaspan.trainer.share import Share
from megaspan.world.axes import Mesh, device_axes
from tests.data import given
from tests.gloo import run_ranks
from tests.layers.test_streamed_ranks import by_hand, inputs_of, plain_step, ranks_of, row_of
from tests.layers.test_tiled_mlp import whole
from tests.model.support import settings
from tests.model.test_kinds import Shifted
from tests.models import assert_same_gradients, tiny
from tests.parity.ranks import check_alone
from tests.trainer.support import documents, model_folder, trainer

__all__ = ["model_folder"]


@contextmanager
def pretended(ranks: int, rank: int) -> Iterator[Share]:
    """The share of one of `ranks` ranks that split rows by tokens, in one process: nothing may be sent."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield Share(torch.device("cpu"), Mesh(cp=ranks, rank=rank), RowRanks(cp=dist.group.WORLD))
    finally:
        dist.destroy_process_group()


def targets(rows: list[Row], ranks: int) -> list[dict[int, int]]:
    """Of each row, what each token is asked to predict, by its number in the row."""
    found: list[dict[int, int]] = [{} for _ in rows]
    for rank in range(ranks):
        with pretended(ranks, rank) as share:
            for row, asked in zip(rows, found, strict=True):
                inputs = share.inputs(row)
                numbers, labels = inputs["megaspan_row"].token_index.tolist(), inputs["shift_labels"][0].tolist()
                asked |= {number: label for number, label in zip(numbers, labels, strict=True) if label != -100}
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_token_at_the_edge_of_a_shard_has_its_target(ranks: int) -> None:
    """R01: sixteen tokens have fifteen targets; each token alone, those behind an edge too, is asked of the one before it."""
    ids = np.arange(100, 116)
    alone = [np.where(np.arange(16) == place, ids, -100) for place in range(1, 16)]
    rows = [Row(ids, labels, (16,)) for labels in (ids, *alone)]
    found = targets(rows, ranks)
    assert found[0] == {place: int(ids[place + 1]) for place in range(15)}
    assert found[1:] == [{place: int(ids[place + 1])} for place in range(15)]


def test_positions_that_start_again_are_documents_on_every_rank(tmp_path: Path) -> None:
    """R24: five documents of 1,024 tokens, packed elsewhere, with the packing option off."""
    lengths = (500, 1, 300, 23, 200)
    record = {
        "input_ids": list(range(1024)),
        "position_ids": [position for length in lengths for position in range(length)],
    }
    (row,) = given.prepare(tmp_path, [record], packing=False, max_length=1024)
    positions = np.array(record["position_ids"])
    for rank in range(2):
        with pretended(2, rank) as share:
            inputs = share.inputs(row)
            context = inputs["megaspan_row"]
            assert context.layout.lengths.tolist() == list(lengths)
            assert inputs["position_ids"][0].tolist() == positions[context.token_index.numpy()].tolist()


@pytest.mark.parametrize("lengths", [(131_072,), (437,) * 299 + (409,)], ids=["one document", "300 documents"])
def test_nothing_of_a_row_is_as_large_as_a_mask(lengths: tuple[int, ...]) -> None:
    """R31: ids, labels, positions and all plans of 131,072 tokens; a mask of booleans is 16 GiB."""
    ids = np.arange(131_072)
    row = Row(ids, ids.copy(), lengths, attention_lengths=lengths)
    with pretended(4, 1) as share:
        tracemalloc.start()
        try:
            context = share.inputs(row)["megaspan_row"]
            for mask in (Mask(), Mask(window=1024)):
                context.plan(mask)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 300 * 131_072


def test_text_is_prepared_before_ranks_wait_for_each_other(tmp_path, model_folder, monkeypatch) -> None:
    """R82: while one rank tokenises, there is no process group yet whose timeout could end the others."""
    order: list[str] = []
    rows, connect = OpenData.rows, world.Ranks.connect
    monkeypatch.setattr(OpenData, "rows", lambda *args, **more: order.append("rows") or rows(*args, **more))
    monkeypatch.setattr(world.Ranks, "connect", lambda self: order.append("connect") or connect(self))
    monkeypatch.setattr(world, "same_everywhere", lambda name, digest: order.append(name))
    trainer(model_folder, tmp_path, documents([40, 30]), eval_dataset=documents([20]), eval_strategy="epoch", max_steps=1)
    assert order[:3] == ["rows", "rows", "connect"]


def test_packing_that_a_model_cannot_have_is_refused(tmp_path) -> None:
    """R94: not switched off in silence; joined without masks, the same model trains."""
    model: Any = tiny("qwen3", vocab_size=320)
    model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
    packed = {"packing": True, "packing_strategy": "bfd", "eos_token": None}
    with pytest.raises(UserError, match=r'model\.layers\.1\.mlp \(Shifted\).* packing_strategy="wrapped"'):
        trainer(copy.deepcopy(model), tmp_path / "packed", documents([20, 9, 5]), **packed)
    trainer(copy.deepcopy(model), tmp_path / "joined", documents([20, 9, 5]), packing=True)
    plain = trainer(model, tmp_path / "plain", documents([20, 9, 5]))
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp \(Shifted\)"):  # later, and for held-out rows alone
        plain.evaluate([documents([29])[0] | {"seq_lengths": [20, 9]}])


# --- two ranks ----------------------------------------------------------------------------------------------------------------


@patch("megaspan.layers.streamed.prove_family", lambda *_: None)
def models_take_turns(rank: int, world_size: int) -> None:
    """R38: two models of other numbers of heads, one with a KV head for two ranks, take turns step by step."""
    mesh, pairs = Mesh(sp=2, rank=rank), []
    axes = device_axes(mesh, "cpu")
    assert axes is not None
    for heads, kv_heads in ((12, 12), (4, 1)):
        sizes = {"hidden_size": 96, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
        plain: Any = tiny("llama", layers=1, dtype=torch.float64, **sizes)
        pairs.append((plain, prepare(copy.deepcopy(plain), settings(sp_size=2), by_hand("one"))))
    for seed, lengths in enumerate(((29,), (13, 4))):
        for plain, model in pairs:
            row = RowContext(lay_out(lengths, 1, sp_size=2), ranks_of(axes, mesh), "cpu")
            items = int((row_of(lengths, seed)[1] >= 0).sum())
            model.zero_grad()
            model(**inputs_of(model, row, lengths, seed), num_items_in_batch=items).loss.backward()
            found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
            for gradient in found.values():
                dist.all_reduce(gradient)
            assert_same_gradients(found, plain_step(plain, [(lengths, seed)], items)[1], 1e-6)


def padding_is_not_balanced(rank: int, world_size: int) -> None:
    """R13: packed documents with padding behind them; losses and routers' gradients are those of the documents alone."""
    case = {"family": "qwen3_moe", "heads": (4, 2), "rows": "padded", "labels": "all", "window": "two", "trains": "all"}
    with patch("tests.parity.ranks.is_moe_balanced", lambda case: True):
        for mesh, path in (((1, 1, 2, 1), "segments"), ((1, 1, 1, 2), "streamed")):
            said = check_alone(case | {"mesh": mesh, "path": path}, rank)
            assert said is None, said


@patch("megaspan.layers.streamed.prove_family", lambda *_: None)  # which is held elsewhere
def tiles_of_other_numbers(rank: int, world_size: int) -> None:
    """R66: rows of 29 and of 6 tokens in tiles of 5, in layers that stream and in whole ones, with biases, with LoRA."""
    axes = device_axes(Mesh(dp_shard=2, rank=rank), "cpu")
    assert axes is not None
    for keep, targets in (("host", "all-linear"), (None, ["fc1", "fc2", "q_proj"])):
        for adapter in (False, True):
            plain: Any = tiny("qwen2", layers=3, dtype=torch.float64) if keep else whole("phi")
            args = settings(use_peft=True, lora_r=4, lora_target_modules=targets, lora_dropout=0.0) if adapter else settings()
            if adapter:
                torch.manual_seed(0)
                plain = wrap_lora(plain, args).double()
                for name, parameter in plain.named_parameters():
                    if "lora_B" in name:
                        torch.nn.init.normal_(parameter, std=0.1)
            assert any(name.endswith("bias") for name, _ in plain.named_parameters())
            model: Any = copy.deepcopy(plain)
            shard(model, axes.fsdp, masters=False, compute=torch.float64)
            prepare(model, args, by_hand(keep, tile=5))
            rows = [((29,), 1), ((6,), 2)]
            items = sum(int((row_of(*row)[1] >= 0).sum()) for row in rows)
            lengths, seed = rows[rank]
            row = RowContext(lay_out(lengths, 1), RowRanks(), "cpu")
            model(**inputs_of(model, row, lengths, seed), num_items_in_batch=items, megaspan_seed=0).loss.backward()
            found = {
                name: parameter.grad.full_tensor() for name, parameter in model.named_parameters() if parameter.requires_grad
            }
            assert adapter == all("lora" in name for name in found)
            assert_same_gradients(found, plain_step(plain, rows, items)[1], 1e-5)  # the reference's softmax is fp32


@patch("megaspan.layers.streamed.prove_family", lambda *_: None)
def what_was_asked_for_is_what_runs(rank: int, world_size: int, folder: Path, out: Path) -> None:
    """R93: the tokens of a rank that the header tells are those that its layers see. R84: ranks with other rows are stopped."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    run = trainer(folder, out, documents([40, 11]), eval_dataset=documents([40]), use_cpu=True, cp_size=2, max_steps=1)
    seen: list[int] = []
    first = run.model.model.layers[0]
    first.register_forward_pre_hook(lambda module, args, kwargs: seen.append(args[0].shape[1]), with_kwargs=True)
    heart = run._job.ranks.heart
    assert heart is not None
    with patch.object(heart, "beat", wraps=heart.beat) as beat:
        run.evaluate()
    assert [each.args[0] for each in beat.call_args_list] == [
        "evaluation row 1",
        "after the evaluation",
    ]
    assert seen == [20]
    assert run._job._spread() == "20 on each of its 2 ranks"
    run.evaluate(documents([9]))
    with pytest.raises(UserError, match="the held-out data differs between ranks: rank 1 has"):
        run.evaluate(documents([9], seed=rank))
    with pytest.raises(UserError, match="the data differs between ranks: rank 1 has"):
        trainer(folder, out, documents([40, 11], seed=rank), use_cpu=True, cp_size=2, max_steps=1)
    heart.close()


def test_two_ranks(tmp_path, model_folder) -> None:
    asked = (what_was_asked_for_is_what_runs, (model_folder, tmp_path))
    run_ranks(2, [(models_take_turns, ()), (padding_is_not_balanced, ()), (tiles_of_other_numbers, ()), asked])


def test_the_header_tells_the_tokens_of_a_rank(tmp_path, model_folder) -> None:
    """R93, R95: lengths are those of whole rows, and what a rank has of one is told beside it."""
    job = trainer(model_folder, tmp_path, documents([40, 30]), max_steps=1)._job
    for sizes, told in (({"cp": 8}, "5 on each of its 8 ranks"), ({"cp": 3, "sp": 2}, "7 on each of its 6 ranks")):
        mesh = Mesh(**sizes)
        there = dataclasses.replace(job, ranks=world.Ranks(mesh, job.device), share=dataclasses.replace(job.share, mesh=mesh))
        assert there._spread() == told
