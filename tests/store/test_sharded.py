"""Checkpoints and final saves of models that are cut over gloo ranks: the files of one rank, for any number of ranks."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megaspan.config import SFTConfig
from megaspan.human import UserError
from megaspan.model.shard import shard
from megaspan.optimizer import Optimizer
from megaspan.plan.states import StatePlan
from megaspan.store import checkpoint as checkpoint_file
from megaspan.store import (
    export,
    latest_checkpoint,
    load_checkpoint,
    rehearse_save,
    save_checkpoint,
    save_model,
)
from megaspan.store import sharded as sharded_file
from megaspan.store.tensors import TensorFile
from tests.gloo import run_ranks
from tests.models import batch, tiny, tiny_tokenizer

STEPS = 4
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"family": "qwen3", "dtype": torch.float32, "tied": True},
    "masters": {"family": "qwen3", "dtype": torch.bfloat16, "tied": True},
    "moe": {"family": "qwen3_moe", "dtype": torch.float32},
}
if importlib.util.find_spec("bitsandbytes") is not None:
    KINDS["eight"] = {"family": "qwen3", "dtype": torch.bfloat16, "vocab_size": 257, "intermediate_size": 256}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def start(kind: str, world: int = 1, *, states: StatePlan | None = None, lora: bool = False) -> tuple[Any, Optimizer]:
    """A new model and optimizer, always the same ones; whole, or cut over `world` ranks."""
    known = dict(KINDS[kind])
    dtype = known["dtype"]
    model: Any = tiny(known.pop("family"), layers=2, **known)
    if lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(2)
        adapter = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    if world > 1:
        shard(model, init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)), masters=True, compute=dtype)
    optim = "adamw_8bit" if kind == "eight" else "adamw_torch"
    config = SFTConfig(max_length=64, learning_rate=0.01, weight_decay=0.1, optim=optim)
    return model, Optimizer(model, config, STEPS, states=states)


def train(model: Any, optimizer: Optimizer, first: int, last: int, world: int = 1) -> None:
    """Steps `first` … `last` - 1, each on one row, which on many ranks all of them have."""
    for step in range(first, last):
        optimizer.last_row()
        (model(**batch(24, seed=step), use_cache=False).loss / world).backward()
        optimizer.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a checkpoint; not the random states, which another process has others of."""
    found = {name: tensor.clone() for name, tensor in TensorFile(path / "state.safetensors").items() if "optimizer" in name}
    weights = "model.safetensors" if (path / "model.safetensors").exists() else "trainable.safetensors"
    return found | {name: tensor.clone() for name, tensor in TensorFile(path / weights).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(tensor, other[name]), name


def passes_through(rank: int, world: int, kind: str, folder: str, single: str, states: StatePlan | None) -> None:
    """What one rank has written is read by many, and what they write of it is what one rank has written."""
    model, optimizer = start(kind, world, states=states)
    assert load_checkpoint(Path(single), model, optimizer, identity={"data": "abc"})["step"] == 2
    again = save_checkpoint(Path(folder), model=model, optimizer=optimizer, progress={"step": 2}, identity={"data": "abc"})
    same(tensors(again), tensors(Path(single)))
    names = {path.name for path in Path(single).iterdir()}
    assert {path.name for path in again.iterdir()} == names
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (Path(single) / name).read_bytes(), name
    # Where the ranks go on from it, the state is a new one, the same on any number of ranks.
    train(model, optimizer, 2, 3, world)
    save_checkpoint(Path(folder), model=model, optimizer=optimizer, progress={"step": 3})
    optimizer.close()


def goes_on(rank: int, world: int, kind: str, source: str, folder: str) -> None:
    """Many ranks continue from what as many, or another number of ranks, have written."""
    model, optimizer = start(kind, world)
    load_checkpoint(Path(source), model, optimizer)
    drawn = torch.rand(3)
    train(model, optimizer, 3, 4, world)
    save_checkpoint(Path(folder), model=model, optimizer=optimizer, progress={"step": 4})
    states = [None] * world
    dist.all_gather_object(states, drawn)
    assert rank or all(torch.equal(state, drawn) for state in states)


def small_pieces(rank: int, world: int) -> None:
    """Every tensor travels in several pieces, as large ones do."""
    sharded_file.PIECE_BYTES = 4096


def random_states_come_back(rank: int, world: int, folder: str) -> None:
    model, optimizer = start("fp32", world)
    torch.manual_seed(100 + rank)
    path = save_checkpoint(Path(folder), model=model, optimizer=optimizer, progress={"step": 0})
    drawn = torch.rand(3)
    load_checkpoint(path, model, optimizer)
    assert torch.equal(torch.rand(3), drawn)
    many = json.loads((path / "state.json").read_text())
    assert len(many["random_of_other_ranks"]) == world - 1


def final_save_is_that_of_one_rank(rank: int, world: int, kind: str, folder: str, single: str) -> None:
    model, _ = start(kind, world)
    out = save_model(model, tiny_tokenizer(), folder)
    assert out == Path(folder)
    names = sorted(path.name for path in Path(single).iterdir())
    assert sorted(path.name for path in out.iterdir()) == names
    for name in names:
        assert (out / name).read_bytes() == (Path(single) / name).read_bytes(), name
    save_model(model, None, out, dtype=torch.bfloat16)
    saved = TensorFile(out / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    run = Path(f"{folder}-run")
    save_model(model, None, run)
    if rank == 0:
        (run / "run.json").write_text("{}")
    dist.barrier()
    save_model(model, None, run)  # into a folder that holds other things
    assert (run / "run.json").exists()


def adapter_is_saved_as_one_rank_does(rank: int, world: int, folder: str, single: str) -> None:
    model, optimizer = start("masters", world, lora=True)
    train(model, optimizer, 0, 1, world)
    path = save_checkpoint(Path(folder), model=model, optimizer=optimizer, progress={"step": 1})
    assert (path / "trainable.safetensors").exists()
    model, optimizer = start("masters", world, lora=True)
    load_checkpoint(Path(single) / "checkpoint-1", model, optimizer)
    out = save_model(model, None, Path(folder) / "model")
    want = Path(single) / "model"
    assert sorted(each.name for each in out.iterdir()) == sorted(each.name for each in want.iterdir())
    same(dict(TensorFile(out / "adapter_model.safetensors")), dict(TensorFile(want / "adapter_model.safetensors")))
    settings = [json.loads((each / "adapter_config.json").read_text()) for each in (out, want)]
    for each in settings:
        each["target_modules"].sort()  # a set, in any order
    assert settings[0] == settings[1]


def a_full_disk_is_said_on_every_rank(rank: int, world: int, folder: str) -> None:
    model, optimizer = start("fp32", world)
    save_checkpoint(Path(folder), model=model, optimizer=optimizer, progress={"step": 1})
    write = checkpoint_file.write_tensors

    def fill(path: Path, tensors: Any, feed: Any = None) -> int:
        if path.name == "state.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, tensors, feed)

    train(model, optimizer, 0, 1, world)
    checkpoint_file.write_tensors = fill
    try:
        with pytest.raises(UserError, match=r"filled up .* of checkpoint-2; it was removed again"):
            save_checkpoint(Path(folder), model=model, optimizer=optimizer, progress={"step": 2})
    finally:
        checkpoint_file.write_tensors = write
    assert sorted(path.name for path in Path(folder).iterdir()) == ["checkpoint-1"]
    save_checkpoint(Path(folder), model=model, optimizer=optimizer, progress={"step": 2}, keep=1)
    assert [path.name for path in Path(folder).iterdir()] == ["checkpoint-2"]


def what_does_not_fit_is_refused_on_every_rank(rank: int, world: int, folder: str, single: str) -> None:
    model, optimizer = start("fp32", world)
    before = [whole(parameter).clone() for parameter in model.parameters()]
    with pytest.raises(UserError, match=r"there is no checkpoint .*allowed: complete checkpoints in .*: checkpoint-2"):
        load_checkpoint(Path(single).parent / "checkpoint-7", model, optimizer)
    with pytest.raises(UserError, match="data was 'abc' and is 'def'"):
        load_checkpoint(Path(single), model, optimizer, identity={"data": "def"})
    damaged = Path(folder) / "checkpoint-9"
    if rank == 0:
        save = Path(single)
        damaged.mkdir(parents=True)
        for path in save.iterdir():
            (damaged / path.name).write_bytes(path.read_bytes())
        content = bytearray((damaged / "state.safetensors").read_bytes())
        content[-1] ^= 1
        (damaged / "state.safetensors").write_bytes(content)
    dist.barrier()
    with pytest.raises(UserError, match=r"is damaged: state\.safetensors changed"):
        load_checkpoint(damaged, model, optimizer)
    assert all(torch.equal(whole(parameter), was) for parameter, was in zip(model.parameters(), before, strict=True))


def rehearsal(rank: int, world: int, folder: str) -> None:
    model, optimizer = start("masters", world)
    found = rehearse_save(
        folder, model=model, optimizer=optimizer, optimizer_bytes=optimizer.state_bytes, saves=1, progress={"step": 0}
    )
    train(model, optimizer, 0, 1, world)
    path = save_checkpoint(Path(folder), model=model, optimizer=optimizer, progress={"step": 1})
    written = sum((path / name).stat().st_size for name in ("model.safetensors", "state.safetensors"))
    assert abs(written - found.checkpoint_bytes) < 0.1 * written + 40_000  # headers and random states
    assert found.model_bytes == sum(parameter.numel() * 2 for parameter in model.parameters())


def a_rank_that_dies(rank: int, world: int, folder: str) -> None:
    model, optimizer = start("fp32", world)
    save_checkpoint(Path(folder), model=model, optimizer=optimizer, progress={"step": 1})
    if rank == 1:
        take = sharded_file.Feed._pieces

        def die(self: Any, part: Any) -> Any:
            if len(part.shape) == 1:
                os._exit(1)
            return take(self, part)

        sharded_file.Feed._pieces = die  # type: ignore[method-assign]
    try:
        save_checkpoint(Path(folder), model=model, optimizer=optimizer, progress={"step": 2})
    finally:
        (Path(folder) / "seen").write_text("\n".join(sorted(path.name for path in Path(folder).iterdir())))


@pytest.fixture
def single(tmp_path: Path) -> dict[str, Path]:
    """What one rank writes."""
    found = {}
    for kind in KINDS:
        model, optimizer = start(kind)
        train(model, optimizer, 0, 2)
        found[kind] = save_checkpoint(
            tmp_path / f"{kind}-one", model=model, optimizer=optimizer, progress={"step": 2}, identity={"data": "abc"}
        )
        train(model, optimizer, 2, 4)
        save_checkpoint(tmp_path / f"{kind}-all", model=model, optimizer=optimizer, progress={"step": 4})
        save_model(start(kind)[0], tiny_tokenizer(), tmp_path / f"{kind}-model")
    model, optimizer = start("masters", lora=True)
    train(model, optimizer, 0, 1)
    save_checkpoint(tmp_path / "lora", model=model, optimizer=optimizer, progress={"step": 1})
    save_model(model, None, tmp_path / "lora" / "model")
    return found


def close(one: Path, other: Path, kind: str) -> None:
    """Two ways to the same step differ by the rounding of sums."""
    left, right = tensors(one), tensors(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        if tensor.is_floating_point() and not name.endswith("step"):
            far = float((tensor.float() - right[name].float()).norm() / right[name].float().norm().clamp(min=1e-6))
            assert far < (2e-2 if kind == "masters" else 2e-3), (name, far)


def test_any_number_of_ranks_continues_from_any_other(tmp_path: Path, single: dict[str, Path]) -> None:
    host = StatePlan("host", "host")
    two = [(passes_through, (kind, str(tmp_path / f"{kind}-two"), str(single[kind]), None)) for kind in KINDS]
    two.append((passes_through, ("masters", str(tmp_path / "masters-host"), str(single["masters"]), host)))
    two += [
        (final_save_is_that_of_one_rank, (kind, str(tmp_path / f"{kind}-out"), str(tmp_path / f"{kind}-model")))
        for kind in KINDS
    ]
    run_ranks(
        2,
        [
            (small_pieces, ()),
            *two,
            (random_states_come_back, (str(tmp_path / "random"),)),
            (adapter_is_saved_as_one_rank_does, (str(tmp_path / "lora-two"), str(tmp_path / "lora"))),
            (a_full_disk_is_said_on_every_rank, (str(tmp_path / "full"),)),
            (what_does_not_fit_is_refused_on_every_rank, (str(tmp_path / "bad"), str(single["fp32"]))),
            (rehearsal, (str(tmp_path / "rehearsal"),)),
        ],
    )
    for kind in KINDS:  # one rank goes on from two
        model, optimizer = start(kind)
        assert load_checkpoint(tmp_path / f"{kind}-two" / "checkpoint-3", model, optimizer)["step"] == 3
        train(model, optimizer, 3, 4)
        path = save_checkpoint(tmp_path / f"{kind}-then-one", model=model, optimizer=optimizer, progress={"step": 4})
        close(path, tmp_path / f"{kind}-all" / "checkpoint-4", kind)
    run_ranks(4, [(goes_on, ("masters", str(tmp_path / "masters-two" / "checkpoint-3"), str(tmp_path / "four")))])
    close(tmp_path / "four" / "checkpoint-4", tmp_path / "masters-all" / "checkpoint-4", "masters")
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    assert AutoPeftModelForCausalLM is not None
    exported = export(tmp_path / "four", tmp_path / "exported")
    plain = AutoModelForCausalLM.from_pretrained(exported)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    base = tiny("qwen3", layers=2, dtype=torch.bfloat16, tied=True)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "lora-two" / "model"))
    assert torch.isfinite(loaded(**batch(9)).loss)


def test_a_rank_that_dies_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"terminated|exit code|Connection|closed"):
        run_ranks(2, [(a_rank_that_dies, (str(tmp_path),))])
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    model, optimizer = start("fp32")
    assert load_checkpoint(tmp_path / "checkpoint-1", model, optimizer)["step"] == 1
    assert not (tmp_path / "checkpoint-2").exists()
