"""Models cut over gloo ranks: loss, gradients and updates are those of one plain process; weights come straight into shards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megaspan.human import UserError
from megaspan.layers.shards import compute_dtype, local, rows_of
from megaspan.model import levers, prepare, wrap_lora
from megaspan.model.fill import fill_buffers, fill_pretrained, fill_random, skeleton
from megaspan.model.load import load_model
from megaspan.model.shard import materialise, reset, shard, sharding_mesh, shards
from megaspan.model.sharded import load_sharded
from megaspan.model.source import Source
from megaspan.model.tables import Table
from megaspan.optimizer import Optimizer
from megaspan.plan.states import StatePlan
from megaspan.world.axes import Mesh, device_axes
from tests.gloo import run_ranks
from tests.model.support import plan, settings
from tests.models import assert_same_gradients, batch, gradients, save_model_folder, tiny, tiny_config


def test_a_table_that_there_is_no_room_to_gather_stays_as_it_is() -> None:
    """And the error is the one of the memory, not of what was to be given back."""
    words = torch.nn.Embedding(6, 4)
    shard_of_it, held = words.weight, words.weight.untyped_storage().nbytes()
    table = Table(shard_of_it, [(words, "weight")])
    full = patch.object(table, "_gather", side_effect=torch.OutOfMemoryError("full"))
    with full, pytest.raises(torch.OutOfMemoryError, match="full"):
        words(torch.tensor([1]))
    assert words.weight is shard_of_it
    assert words.weight.untyped_storage().nbytes() == held


def mesh_of(world: int, replicate: int = 1) -> Any:
    if replicate == 1:
        return init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    sizes = {"dp_replicate": replicate, "dp_shard": 1, "cp": world // replicate, "sp": 1}
    axes = device_axes(Mesh(**sizes, rank=torch.distributed.get_rank(), local_rank=0, nodes=1), "cpu")
    assert sharding_mesh(axes.root).get_group(1).size() == sharding_mesh(axes.fsdp).get_group(1).size() == world // replicate
    return axes.fsdp


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter, DTensor)
            found[name] = torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.full_tensor()
    return found


def rows(world: int, seed: int, vocab: int = 128) -> list[dict[str, torch.Tensor]]:
    """A row for each rank, of different lengths; the second rank's is without a label."""
    found = [batch(13 + rank, vocab, seed=10 * seed + rank) for rank in range(world)]
    found[1]["labels"][:] = -100
    return found


def count(rows: list[dict[str, torch.Tensor]]) -> int:
    return sum(int((row["labels"][:, 1:] != -100).sum()) for row in rows)


def lora(model: Any, **changes: Any) -> Any:
    torch.manual_seed(3)
    wrapped = wrap_lora(model, settings(use_peft=True, lora_r=4, lora_target_modules="all-linear", lora_dropout=0.0, **changes))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return wrapped


def same_step_as_one_process(
    rank: int,
    world: int,
    family: str,
    *,
    tied: bool = False,
    adapter: bool = False,
    prepared_first: bool = False,
    replicate: int = 1,
    dtype: torch.dtype = torch.float64,
    train_head: bool = False,
    loss: str = "chunked_nll",
    **overrides: Any,
) -> None:
    plain: Any = tiny(family, tied=tied, layers=2, dtype=dtype, **overrides)
    if adapter:
        changes = {"lora_modules_to_save": ["lm_head"]} if train_head else {}
        plain = lora(plain, **changes)
    model: Any = copy.deepcopy(plain)
    args, by_hand = settings(learning_rate=0.01, max_grad_norm=0.1, loss_type=loss), plan(heads=1)
    if dtype == torch.float64:  # transformers' own loss is fp32: layouts are compared with each other
        prepare(plain, args, by_hand)
    if prepared_first:
        prepare(model, args, by_hand)
    shard(model, mesh_of(world, replicate), masters=True, compute=dtype)
    if not prepared_first:
        prepare(model, args, by_hand)
    placed = levers(model)
    assert placed is not None
    assert placed.checkpointing is not None
    assert placed.checkpointing.reasons == [None, None]
    cut = shards(model)
    assert cut is not None
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    one, many = Optimizer(plain, args, 3), Optimizer(model, args, 3)
    for step in range(2 if dtype == torch.float64 else 1):
        windows = [rows(world, 2 * step + number) for number in range(2)]
        items = sum(count(window) for window in windows)
        before = [table.gathers for table in cut.tables]
        total = torch.zeros((), dtype=torch.float64)
        wanted = 0.0
        for window in windows:
            output = model(**window[rank], num_items_in_batch=items)
            output.loss.backward()
            total += output.loss.detach().double()
            for row in window:
                part = plain(**row, num_items_in_batch=items, use_cache=False).loss
                part.backward()
                wanted += float(part.detach())
        torch.distributed.all_reduce(total)
        assert float(total) == pytest.approx(wanted, rel=1e-9 if dtype == torch.float64 else 1e-6), (step, float(total), wanted)
        assert all(table.gathers - earlier <= 2 * len(windows) for table, earlier in zip(cut.tables, before, strict=True))
        tolerance = 1e-9 if dtype == torch.float64 else 1e-5
        assert_same_gradients(whole_gradients(model), gradients(plain), tolerance)
        assert many.clip(0.1) == pytest.approx(one.clip(0.1), rel=tolerance)
        many.step()
        one.step()
        for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            # AdamW divides by the gradient's size: in fp32 the rounding of a tiny one is a whole step.
            far = float((whole(got.detach()) - want.detach()).abs().max())
            assert far <= (1e-7 if dtype == torch.float64 else 0.02), (name, far)
        many.zero_grad()
        one.zero_grad()
    with torch.no_grad():
        got = model.eval()(**batch(9, seed=5)).loss
        assert float(got) == pytest.approx(
            float(plain.eval()(**batch(9, seed=5)).loss), rel=1e-7 if dtype == torch.float64 else 1e-3
        )
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@contextmanager
def reduced_types(model: torch.nn.Module) -> Iterator[list[torch.dtype]]:
    """Types of all that ranks reduce and scatter, one for each reduction: the type in which they add.

    FSDP2 reduces a gradient in its policy's type, or, where that is the type it gathers in, in the gradient's own: so both are
    looked at, the policy of every unit and what comes to the collective.
    """
    cut = shards(model)
    assert cut is not None
    for unit in cut.units:
        assert unit._get_fsdp_state()._mp_policy.reduce_dtype == torch.float32
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    right, found = getattr(dist, name), []

    def reduce(*given: Any, **named: Any) -> Any:
        (dtype,) = {each.dtype for each in (*given, *named.values()) if isinstance(each, torch.Tensor)}
        found.append(dtype)
        return right(*given, **named)

    with patch.object(dist, name, reduce):
        yield found


def bf16_is_summed_in_fp32(rank: int, world: int) -> None:
    """Gradients of a cut bf16 model are no farther from the exact ones than those of bf16 on one device."""
    exact = tiny("qwen3", tied=True, layers=2, dtype=torch.float32)
    model, plain = copy.deepcopy(exact), copy.deepcopy(exact).to(torch.bfloat16)
    shard(model, mesh_of(world), masters=True, compute=torch.bfloat16)
    prepare(model, settings(), plan())
    assert all(local(parameter).dtype == torch.float32 for parameter in model.parameters())
    assert all(compute_dtype(parameter) == torch.bfloat16 for parameter in model.parameters())
    for parameter in plain.parameters():
        parameter.grad_dtype = torch.float32
    prepare(plain, settings(), plan())
    window = rows(world, 7)
    with reduced_types(model) as types:
        model(**window[rank], num_items_in_batch=count(window)).loss.backward()
    assert types == [torch.float32] * 5, f"{types}: of two layers, the norm behind them, the words twice"
    for row in window:
        for other in (exact, plain):
            other(**row, num_items_in_batch=count(window)).loss.backward()
    want, error, ours = gradients(exact), 0.0, 0.0
    for name, got in whole_gradients(model).items():
        assert got.dtype == torch.float32
        ours += float((got - want[name]).square().sum())
        error += float((gradients(plain)[name] - want[name]).square().sum())
    assert 0 < ours <= 1.5**2 * error
    found = []
    for module, weight in ((model.model.layers[0], "mlp.up_proj.weight"), (model.model.embed_tokens, "weight")):
        module.register_forward_pre_hook(lambda module, _, weight=weight: found.append(module.get_parameter(weight)))
    model(**window[rank]).loss.backward()
    assert [(weight.dtype, weight.grad_dtype) for weight in found] == [(torch.bfloat16, torch.float32)] * 2


def states_may_lie_anywhere(rank: int, world: int, family: str, changes: dict[str, Any]) -> None:
    """Updates in the backward, gradients and moments on the host: the same weights, also where a rank holds no row.

    Bit for bit but for a tied table, whose four gradients of two rows are summed in another order on the host.
    """
    weights, steps = [], 1 if changes.get("tied") else 3
    for states in (None, StatePlan("update", "device"), StatePlan("host", "host"), StatePlan("update", "host")):
        model = tiny(family, **changes)
        shard(model, mesh_of(world), masters=True, compute=torch.float32)
        prepare(model, settings(), plan())
        optimizer = Optimizer(model, settings(max_grad_norm=0.0, learning_rate=0.01), 3, states=states)
        for step in range(steps):
            for number in range(2):
                if number == 1:
                    optimizer.last_row()
                model(**batch(12, seed=world * step + rank + 10 * number)).loss.backward()
            optimizer.clip(0.0)
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        assert {int(each["step"]) for each in state["parameters"].values()} == {steps}
        weights.append([local(parameter.detach()).clone() for parameter in model.parameters()])
        optimizer.close()
    for other in weights[1:]:
        assert all(torch.allclose(one, two, rtol=0, atol=1e-6) for one, two in zip(weights[0], other, strict=True))
        assert all(torch.equal(one, two) for one, two in zip(weights[0][1:], other[1:], strict=True))


def pure_bf16(rank: int, world: int) -> None:
    model = tiny("qwen3", dtype=torch.bfloat16)
    shard(model, mesh_of(world), masters=False, compute=torch.bfloat16)
    prepare(model, settings(), plan())
    model(**batch(12, seed=rank)).loss.backward()
    assert {local(parameter).dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="masters are made when the model is sharded"):
        Optimizer(model, settings(), 1)
    Optimizer(model, settings(dtype="bfloat16"), 1).step()


def weights_without_gradients_are_not_reduced(rank: int, world: int) -> None:
    model = lora(tiny("qwen3"))
    shard(model, mesh_of(world), masters=True, compute=torch.bfloat16)
    prepare(model, settings(), plan())
    with reduced_types(model) as types:
        model(**batch(12, seed=rank)).loss.backward()
    assert types == [torch.float32] * model.config.num_hidden_layers, types
    cut = shards(model)
    assert cut is not None
    assert [table.reductions for table in cut.tables] == [0] * len(cut.tables)
    kept = {name: local(parameter).dtype for name, parameter in model.named_parameters()}
    assert {dtype for name, dtype in kept.items() if "lora" in name} == {torch.float32}
    assert {dtype for name, dtype in kept.items() if "lora" not in name} == {torch.bfloat16}
    assert all((parameter.grad is not None) == ("lora" in name) for name, parameter in model.named_parameters())


def the_embedding_is_not_held_to_the_end_of_the_backward(rank: int, world: int) -> None:
    model = tiny("qwen3", tied=True)
    shard(model, mesh_of(world), masters=True, compute=torch.float32)
    embedding = model.get_input_embeddings()
    found = embedding(torch.tensor([[1, 5, 1]]))
    leaf = found.grad_fn.next_functions[0][0].variable
    assert leaf.shape[0] == model.config.vocab_size
    assert leaf.untyped_storage().nbytes() == 0
    found.sum().backward()
    gradient = embedding.weight.grad.full_tensor()
    assert [float(gradient[word].mean()) for word in (1, 5, 2)] == [2 * world, world, 0]


def the_output_layer_is_held_only_where_a_backward_reads_it(rank: int, world: int, tied: bool, loss_type: str) -> None:
    """The loss's graph holds its leaf; the memory of what is read in the forward alone is given back behind the loss."""
    model: Any = tiny("qwen3", tied=tied)
    shard(model, mesh_of(world), masters=True, compute=torch.float32)
    prepare(model, settings(loss_type=loss_type), plan())
    cut = shards(model)
    assert cut is not None
    table = next(each for each in cut.tables if each.holds(model.lm_head.weight))
    row = batch(12, seed=rank)
    leaves: list[torch.Tensor] = []
    gather = table._gather
    with patch.object(table, "_gather", lambda: (leaves.append(gather()), leaves[-1])[1]):
        loss = model(**row).loss
    assert leaves[-1].untyped_storage().nbytes() == (leaves[-1].nbytes if loss_type == "nll" else 0)
    loss.backward()
    assert bool(whole(model.lm_head.weight.grad).abs().sum() > 0)


def whoever_reads_the_output_layer_beside_the_logits_may(rank: int, world: int, tied: bool) -> None:
    """A hook that computes with the detached weight too: the backward of that comes after the weight's own gradient."""
    model: Any = tiny("qwen3", tied=tied)
    shard(model, mesh_of(world), masters=True, compute=torch.float32)
    prepare(model, settings(), plan())
    extra: list[torch.Tensor] = []

    def also(module: Any, inputs: tuple[torch.Tensor], _: Any) -> None:
        extra.append((inputs[0] @ module.weight.detach().T).square().mean())

    hook = model.lm_head.register_forward_hook(also, prepend=True)
    logits = model(input_ids=batch(12, seed=rank)["input_ids"]).logits
    (logits.square().mean() + extra[0]).backward()
    hook.remove()
    assert bool(whole(model.lm_head.weight.grad).abs().sum() > 0)


def a_step_that_was_broken_off_leaves_shards(rank: int, world: int) -> None:
    model = tiny("qwen3", layers=2)
    shard(model, mesh_of(world), masters=True, compute=torch.float32)

    def stop(wanted: tuple[str, int], phase: str, layer: int) -> None:
        if (phase, layer) == wanted:
            raise KeyboardInterrupt

    prepare(model, settings(), plan())
    placed = levers(model)
    assert placed is not None
    model(**batch(12, seed=rank)).loss.backward()
    want = whole_gradients(model)
    for wanted in (("forward", 1), ("backward", 0), ("backward", 1)):
        model.zero_grad()
        placed.on_layer = partial(stop, wanted)
        with pytest.raises(KeyboardInterrupt):
            model(**batch(12, seed=rank)).loss.backward()
        placed.on_layer = None
        assert placed.checkpointing is not None
        placed.checkpointing.discard()
        reset(model)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        model.zero_grad()
        model(**batch(12, seed=rank)).loss.backward()
        assert_same_gradients(whole_gradients(model), want, 1e-12)


def random_weights_are_those_of_one_device(rank: int, world: int, family: str, tied: bool, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, tied=tied)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        one = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    state = torch.get_rng_state()
    plain, model = skeleton(config, dtype), skeleton(config, dtype)
    shard(model, mesh_of(world), masters=True, compute=dtype)
    materialise(model, "cpu")
    fill_random(model, plain, 5, torch.device("cpu"))
    assert torch.equal(state, torch.get_rng_state())
    same_weights_and_buffers(model, one)


def same_weights_and_buffers(model: torch.nn.Module, one: torch.nn.Module) -> None:
    got = dict([*model.named_parameters(), *model.named_buffers()])
    want = dict([*one.named_parameters(), *one.named_buffers()])
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(whole(got[name]).to(tensor.dtype), tensor), name


def folder_weights_are_those_of_one_device(rank: int, world: int, family: str, folder: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    one, config = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoConfig.from_pretrained(folder)
    plain, model = skeleton(config, torch.float32), skeleton(config, torch.float32)
    shard(model, mesh_of(world), masters=True, compute=torch.float32)
    materialise(model, "cpu")
    assert fill_pretrained(model, plain, Source(folder, folder, "folder"), torch.device("cpu")) == 0
    same_weights_and_buffers(model, one)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == config.tie_word_embeddings


def load_sharded_is_load_model(rank: int, world: int, name: str, adapter: bool, saved: list[str] | None) -> None:
    args = settings(model_name_or_path=name, use_peft=adapter, lora_modules_to_save=saved, bf16=False, seed=11)
    torch.manual_seed(4)
    one = load_model(args, "cpu")
    one = wrap_lora(one, args) if adapter else one
    torch.manual_seed(4)
    many = load_sharded(args, "cpu", mesh_of(world))
    same_weights_and_buffers(many.model, one.model)
    assert (many.commit, many.origin, many.rope, many.facts) == (one.commit, one.origin, one.rope, one.facts)
    assert (many.model.training, many.random_weights) == (True, one.random_weights)
    wants = [{name for name, part in each.model.named_parameters() if part.requires_grad} for each in (one, many)]
    assert wants[0] == wants[1]


def missing_weights_are_named(rank: int, world: int, folder: str) -> None:
    with pytest.raises(UserError, match="lacks 1 weights"):
        load_sharded(settings(model_name_or_path=folder), "cpu", mesh_of(world))


def loading_holds_little_more_than_shards(rank: int, world: int, folder: str, small: str) -> None:
    """Over the ranks of a node, at any moment: the shards and 0.3 of the checkpoint. The imports are not counted."""
    load_sharded(settings(model_name_or_path=small, dtype="bfloat16"), "cpu", mesh_of(world))
    args = settings(model_name_or_path=folder, dtype="bfloat16")
    size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    loaded = load_sharded(args, "cpu", mesh_of(world))
    above = torch.tensor(float(_status("VmHWM") - before))
    held = sum(local(parameter).numel() * 2 for parameter in loaded.model.parameters())
    assert held < 0.6 * size
    torch.distributed.all_reduce(above)
    assert float(above) <= 1.3 * size, f"{float(above) / size:.2f} of the checkpoint"


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))


def test_rows_are_cut_as_torch_cuts_them():
    for total in range(12):
        for ranks in range(1, 6):
            chunks = [len(chunk) for chunk in torch.arange(total).chunk(ranks)] if total else []
            cuts = [rows_of(total, ranks, rank) for rank in range(ranks)]
            assert [cut.stop - cut.start for cut in cuts if cut.stop > cut.start] == [length for length in chunks if length]
            assert [index for cut in cuts for index in range(total)[cut]] == list(range(total))


def test_weights_that_must_stay_in_fp32_are_refused():
    model = tiny("qwen3")
    model._keep_in_fp32_modules_strict = {"q_norm"}
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM wants model\.layers\.0\.self_attn\.q_norm\.weight in fp32"):
        shard(model, None, masters=True, compute=torch.bfloat16)


def test_a_weight_that_only_its_constructor_knows_is_refused():
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(4.0), persistent=False)

    plain, model = (skeleton(tiny_config("qwen3"), torch.float32) for _ in range(2))
    for each in (plain, model):
        each.model.own = Own()
    with pytest.raises(UserError, match=r"leaves model\.own\.table to its constructor"):
        fill_buffers(model, plain, torch.device("cpu"))


def test_loading_holds_little_more_than_shards(tmp_path, monkeypatch):
    """In processes of their own, which read how memory is to be given back when they start."""
    # What is let go of is given back to the system at once, so that the peak is that of what was held.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    small = save_model_folder(tmp_path / "small", "llama", tied=True)
    big = tiny("qwen3", layers=4, dtype=torch.bfloat16, hidden_size=1024, intermediate_size=3072, vocab_size=20_000)
    big.save_pretrained(tmp_path / "big", max_shard_size="40MB")
    run_ranks(2, [(loading_holds_little_more_than_shards, (str(tmp_path / "big"), str(small)))], fresh=True)


def test_two_ranks(tmp_path):
    folders = {
        family: str(save_model_folder(tmp_path / family, family, tied=family == "llama")) for family in ("llama", "qwen3_moe")
    }
    shape = tmp_path / "shape.json"
    shape.write_text((Path(folders["llama"]) / "config.json").read_text())
    broken = save_model_folder(tmp_path / "broken", "qwen3", tied=False)
    from safetensors.torch import load_file, save_file

    weights = load_file(broken / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    run_ranks(
        2,
        [
            (_step, ("qwen3", {"tied": True})),
            (_step, ("qwen3", {"prepared_first": True, "dtype": torch.float32})),
            (_step, ("qwen3", {"tied": True, "prepared_first": True, "loss": "nll", "vocab_size": 129})),
            (_step, ("gemma3", {"tied": True})),
            (_step, ("qwen3_moe", {"dtype": torch.float32})),
            (_step, ("qwen3", {"adapter": True})),
            (_step, ("qwen3", {"adapter": True, "train_head": True})),
            (bf16_is_summed_in_fp32, ()),
            (states_may_lie_anywhere, ("qwen3", {"tied": True})),
            (states_may_lie_anywhere, ("gpt_oss", {"num_attention_heads": 1, "num_key_value_heads": 1})),  # one sink
            (pure_bf16, ()),
            (weights_without_gradients_are_not_reduced, ()),
            (the_embedding_is_not_held_to_the_end_of_the_backward, ()),
            (the_output_layer_is_held_only_where_a_backward_reads_it, (True, "chunked_nll")),
            (the_output_layer_is_held_only_where_a_backward_reads_it, (False, "chunked_nll")),
            (the_output_layer_is_held_only_where_a_backward_reads_it, (False, "nll")),
            (whoever_reads_the_output_layer_beside_the_logits_may, (False,)),
            (a_step_that_was_broken_off_leaves_shards, ()),
            (random_weights_are_those_of_one_device, ("gemma3", True, torch.bfloat16)),
            (random_weights_are_those_of_one_device, ("gpt_oss", False, torch.float32)),
            (folder_weights_are_those_of_one_device, ("llama", folders["llama"])),
            (folder_weights_are_those_of_one_device, ("qwen3_moe", folders["qwen3_moe"])),
            (load_sharded_is_load_model, (folders["llama"], False, None)),
            (load_sharded_is_load_model, (str(shape), False, None)),
            (load_sharded_is_load_model, (folders["llama"], True, None)),
            (load_sharded_is_load_model, (str(shape), True, ["lm_head"])),
            (missing_weights_are_named, (str(broken),)),
        ],
    )


def test_four_ranks():
    """Shards of unequal and of no rows, and shards that are replicated."""
    uneven = {"vocab_size": 131, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
    run_ranks(
        4,
        [
            (_step, ("gpt_oss", uneven | {"dtype": torch.float32})),
            (_step, ("qwen3", {"tied": True, "replicate": 2})),
        ],
    )


def _step(rank: int, world: int, family: str, changes: dict[str, Any]) -> None:
    same_step_as_one_process(rank, world, family, **changes)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_and_saved_weights_of_every_family(tmp_path, dtype):
    from tests.models import FAMILIES

    cases: list[Any] = [(random_weights_are_those_of_one_device, (family, False, dtype)) for family in FAMILIES]
    if dtype == torch.float32:
        for family in FAMILIES:
            folder = str(save_model_folder(tmp_path / family, family))
            cases.append((folder_weights_are_those_of_one_device, (family, folder)))
    run_ranks(2, cases)
