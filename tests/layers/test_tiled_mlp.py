"""MLPs in tiles inside layers that run whole: P1 against plain transformers, and what is never held."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.phi.modeling_phi import PhiMLP

from megaspan.attention import install as install_attention
from megaspan.layers.checkpoint import Checkpointing
from megaspan.layers.dropout import counter_mask
from megaspan.layers.tiled_mlp import find_mlps
from megaspan.model import levers, prepare, wrap_lora
from megaspan.model.shard import shard
from megaspan.world.axes import Mesh, device_axes
from tests.gloo import run_ranks
from tests.layers.test_streamed_ranks import by_hand
from tests.model.support import plan, settings, step
from tests.models import HIDDEN, VOCAB, assert_same_gradients, batch, gradients, randomise, tiny

WIDTH = 80  # neither it nor its double is a width of anything else
# Families that do not stream: up and down, side by side with attention or after it; gate and up apart, or in one; four norms.
WHOLE: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "gpt_neox in a row": {"use_parallel_residual": False},
    "phi": {},
    "stablelm": {},
    "phi3": {},
    "glm4": {"head_dim": 16},
}


@functools.cache
def _built(family: str) -> Any:
    config = AutoConfig.for_model(
        family.split()[0], vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=4096, pad_token_id=None, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False, **WHOLE[family],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, 0)
    return model.double().train()


def whole(family: str) -> Any:
    """A plain model in fp64 (its `eager` softmax and phi3's norms are fp32 all the same)."""
    return copy.deepcopy(_built(family))


def tiled(plain: Any, tile: int = 5, **options: Any) -> tuple[Any, Checkpointing]:
    """A copy with megaspan's attention, checkpointed whole, MLPs in tiles."""
    model = copy.deepcopy(plain)
    install_attention(model)
    checkpointing = Checkpointing(True, **options)
    checkpointing.install(model)
    checkpointing.tile_mlps(model, tile)
    return model, checkpointing


def backward(model: Any, length: int) -> tuple[float, dict[str, Tensor]]:
    """The loss, or of one token, which predicts nothing, the squares of the logits; and all gradients."""
    model.zero_grad()
    data = batch(length)
    out = model(**data, use_cache=False)
    loss = out.loss if length > 1 else out.logits.square().sum()
    loss.backward()
    return float(loss.detach()), gradients(model)


@pytest.mark.parametrize("family", WHOLE)
def test_loss_and_every_gradient_equal_plain_transformers(family: str) -> None:
    """P1, in tiles that divide nothing; and to the last digits what the layer finds without tiles."""
    plain = whole(family)
    model, checkpointing = tiled(plain)
    once, _ = tiled(plain, 1000)
    assert (checkpointing.stats().tiled, checkpointing.untiled) == (2, {})
    for length, tile in ((1, 5), (7, 3), (129, 50)):
        checkpointing._tiling.tile_tokens = tile  # type: ignore[union-attr]
        want_loss, want = backward(plain, length)
        loss, got = backward(model, length)
        assert loss == pytest.approx(want_loss, rel=1e-6)
        assert_same_gradients(got, want, 1e-5)
        loss_once, got_once = backward(once, length)
        assert loss == pytest.approx(loss_once, rel=1e-12)
        for name, gradient in got_once.items():
            assert float((got[name] - gradient).norm()) <= 1e-9 * float(gradient.norm()) + 1e-12, name


class _Rows(TorchDispatchMode):
    """The most rows of a tensor of the MLP's width, and how many matrix products made one."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.made = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.ndim >= 2 and out.shape[-1] in (WIDTH, 2 * WIDTH):
            rows = out.numel() // out.shape[-1]
            weights = tuple(out.shape) in ((HIDDEN, WIDTH), (HIDDEN, 2 * WIDTH))
            self.most = max(self.most, 0 if weights else rows)
            self.made += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) and not weights
        return out


@pytest.mark.parametrize("family", ["gpt_neox", "stablelm", "phi3"])
def test_the_wide_tensors_are_never_there_for_the_whole_row(family: str) -> None:
    """Forward, backward and evaluation; and no product is made once more than without tiles."""
    plain, seen, made = whole(family), [], []
    for tile in (48, 1000):
        model, _ = tiled(plain, tile)
        with _Rows() as watch:
            backward(model, 129)
            made.append(watch.made)
            with torch.no_grad():
                model(**batch(129))
        seen.append(watch.most)
    assert seen == [43, 129]  # three equal tiles
    assert made[0] == 3 * made[1]


def test_lora_with_dropout() -> None:
    """The masks are those of the token's number in the row, whatever the tile."""
    peft = pytest.importorskip("peft")
    targets = {"phi": ["fc1", "fc2", "v_proj"], "gpt_neox": ["dense_h_to_4h", "dense_4h_to_h", "dense"]}
    for family, names in targets.items():
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=names, task_type="CAUSAL_LM", init_lora_weights=False)
        plain = peft.get_peft_model(whole(family), lora).double().train()
        model, checkpointing = tiled(plain)
        loss, got = backward(model, 23)
        seed = checkpointing.dropout.step_seed
        decoder: Any = plain.get_base_model().get_decoder()
        for index, layer in enumerate(decoder.layers):
            for name, module in layer.named_modules():
                if isinstance(module, nn.Dropout) and module.p:
                    module.forward = functools.partial(_masked, seed, index, name)  # type: ignore[method-assign]
        want_loss, want = backward(plain, 23)
        assert loss == pytest.approx(want_loss, rel=1e-6)
        assert_same_gradients(got, want, 1e-5)


def _masked(seed: int, index: int, name: str, x: Tensor) -> Tensor:
    return torch.where(counter_mask(seed, index, name, 0, x.shape[1], x.shape[2], 0.3), x / 0.7, 0.0)


def test_weight_gradients_are_summed_in_fp32() -> None:
    """128 tiles in bf16: as near to fp32 as one product is, where sums in bf16 would lose most of it."""
    plain = whole("phi").float()
    exact = backward(tiled(plain, 10_000)[0], 1024)[1]
    rough = copy.deepcopy(plain).bfloat16()
    name = "model.layers.1.mlp.fc1.weight"
    found = [backward(tiled(rough, tile)[0], 1024)[1][name].float() for tile in (8, 10_000)]
    distances = [float((each - exact[name]).norm()) for each in found]
    assert distances[0] <= 1.2 * distances[1]


def test_frozen_parts() -> None:
    """Frozen MLPs pass gradients on; an MLP that trains above a frozen input has its own alone."""
    for frozen in (("mlp",), ("embed", "layers.0", "self_attn", "norm"), ("embed", "layers.0", "layers.1.self_attn", "fc2")):
        plain = whole("phi")
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        model, _ = tiled(plain)
        assert_same_gradients(backward(model, 23)[1], backward(plain, 23)[1], 1e-5)


class _Shifted(PhiMLP):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states + 0.05 * nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1])


class _Centred(PhiMLP):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - 0.3 * hidden_states.mean(1, keepdim=True))


class _Numbered(PhiMLP):
    def forward(self, hidden_states: Tensor) -> Tensor:
        places = torch.arange(hidden_states.shape[1]).to(hidden_states.dtype)
        return super().forward(hidden_states * (1 + places[:, None] / 50))


class _Asking(PhiMLP):
    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states)


class _Opening(PhiMLP):
    """Mixes tokens by a weight that is zero until it is trained, behind a gate that is shut."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.open = nn.Parameter(torch.tensor(0.0))

    def forward(self, hidden_states: Tensor) -> Tensor:
        before = nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return super().forward(hidden_states + torch.relu(-self.open) * before)


class _Drawing(PhiMLP):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(hidden_states), 0.1, self.training)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_mixing_behind_a_weight_that_is_zero_runs_whole(dtype: torch.dtype) -> None:
    """It is tried with other weights too, once for all layers that are alike, and these stay as they are."""
    layer: Any = copy.deepcopy(whole("phi").model.layers[0])
    tried: set[str] = set()
    assert find_mlps(layer, HIDDEN, tried) == (["mlp"], [])
    assert len(tried) == 1
    layer.mlp = _Opening(whole("phi").config)
    layer = layer.to(dtype)
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    expected = ([], ["mlp (_Opening) does not work token by token with other weights than it has now"])
    assert find_mlps(layer, HIDDEN, tried) == expected
    assert len(tried) == 1
    assert all(torch.equal(parameter, before[name]) for name, parameter in layer.named_parameters())


class _Borrowing(nn.Module):
    """Reads a weight of a module that it does not hold as a child."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.lenders = [lender]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x * self.lenders[0].weight.mean(1))


def test_weights_that_are_somebody_elses_run_whole() -> None:
    """They would get no gradient from tiles; here they get it."""
    plain = whole("phi")
    plain.model.layers[1].mlp.activation_fn = _Borrowing(plain.model.layers[0].mlp.fc1)
    model, checkpointing = tiled(plain)
    assert checkpointing.untiled == {1: "mlp (PhiMLP) reads weights that are not its own"}
    assert_same_gradients(backward(model, 23)[1], backward(plain, 23)[1], 1e-5)


def test_an_mlp_that_draws_where_no_name_tells_runs_whole_and_draws_the_same_again() -> None:
    """Under one seed the gradients are those of plain transformers, whose masks are those of its one forward."""
    plain = whole("phi")
    for layer in plain.model.layers:
        layer.mlp.__class__ = _Drawing
    model, checkpointing = tiled(plain)
    assert set(checkpointing.untiled.values()) == {"mlp (_Drawing) draws random numbers in its own code"}
    found = []
    for each in (plain, model):
        torch.manual_seed(3)
        found.append(backward(each, 23))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert_same_gradients(found[1][1], found[0][1], 1e-5)
    torch.manual_seed(4)
    assert backward(model, 23)[0] != pytest.approx(found[0][0], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [(_Shifted, "token by token"), (_Centred, "token by token"), (_Numbered, "token by token"), (_Asking, "more than hidden")],
)
def test_what_is_not_token_wise_runs_whole(kind: type, reason: str, dtype: torch.dtype) -> None:
    layer = copy.deepcopy(whole("phi").model.layers[0]).to(dtype)
    assert find_mlps(layer, HIDDEN) == (["mlp"], [])
    layer.mlp.__class__ = kind
    found, reasons = find_mlps(layer, HIDDEN)
    assert found == []
    assert reason in reasons[0]
    assert kind.__name__ in reasons[0]


def test_experts_run_whole() -> None:
    layer: Any = tiny("qwen3_moe").model.layers[0]
    assert find_mlps(layer, HIDDEN) == ([], ["mlp (Qwen3MoeSparseMoeBlock) chooses experts"])
    assert all(module.training for module in layer.modules())


def test_an_mlp_that_changes_itself_in_training_runs_whole() -> None:
    """Statistics of a batch, which the trial in evaluation does not see; they are as before, too."""
    layer: Any = copy.deepcopy(whole("phi").model.layers[0])
    width = layer.mlp.fc1.out_features
    layer.mlp.activation_fn = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(width).double(), nn.Unflatten(0, (1, -1)))
    assert find_mlps(layer, HIDDEN) == ([], ["mlp (PhiMLP) changes its buffers in training"])
    assert all(module.training for module in layer.modules())
    assert not layer.mlp.activation_fn[1].running_mean.any()


def test_hooks_inside_see_the_whole_row_and_those_of_parameters_run_once() -> None:
    plain = copy.deepcopy(whole("phi"))
    for length in (7, 23):
        want = {name: 0.5 * gradient for name, gradient in backward(plain, length)[1].items()}
        model, _ = tiled(plain)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient)
        assert_same_gradients(backward(model, length)[1], want, 1e-5)
    model, checkpointing = tiled(plain)
    rows: list[int] = []
    model.model.layers[0].mlp.fc1.register_forward_hook(lambda module, given, out: rows.append(out.shape[1]))
    assert checkpointing.now_untiled() == {0: "PhiMLP: a hook on fc1 is to see whole rows"}
    backward(model, 23)
    assert rows == [23, 23]


def test_a_layer_that_draws_in_its_own_code_runs_whole() -> None:
    """A tile that runs again would draw other numbers."""
    model, checkpointing = tiled(whole("phi"))
    model.model.layers[1].mlp.jitter_noise = 0.1
    with _Rows() as watch:
        backward(model, 23)
    assert watch.most == 23
    del model.model.layers[1].mlp.jitter_noise
    with _Rows() as watch:
        backward(model, 23)
    assert watch.most == 5
    checkpointing.remove()
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(("family", "streams"), [("gpt_neox", True), ("stablelm", False)])
def test_a_prepared_model_tiles_and_says_so(family: str, streams: bool) -> None:
    """By itself where the plan says whole, and where it says streamed and the family is not proven. (StableLM's class does not
    say that its attention can be another one.)"""
    plain, model = whole(family), whole(family)
    want_loss, want = step(plain, **batch(37))
    prepare(model, settings(), plan(streamed=streams))
    with _Rows() as watch:
        loss, got = step(model, **batch(37))
    assert watch.most == 8
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert_same_gradients(got, want, 1e-5)
    placed = levers(model)
    assert placed is not None
    lines = [line for line in placed.read_back() if line[0] == "layers"]
    assert lines[0][1] == "2 of 2 checkpointed whole, MLP in tiles of 9 tokens"
    assert "twice" in lines[0][2]
    assert len(lines) == 1
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert step(twin, **batch(37))[0] == loss  # a copy runs its own MLPs


def _two_ranks(rank: int, world: int) -> None:
    """FSDP2, a row each and one row shared; LoRA with dropout. Weights are gathered once for a layer's run."""
    args = settings(use_peft=True, lora_r=4, lora_target_modules=["fc1", "fc2", "q_proj"], lora_dropout=0.3)
    for trains in ("all", "lora"):
        plain = whole("phi")
        if trains == "lora":
            torch.manual_seed(0)
            plain = wrap_lora(plain, args).double()
            for name, parameter in plain.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.1)
        axes = device_axes(Mesh(dp_shard=2, rank=rank), "cpu")
        gathered = []
        for tile in (1000, 5):
            model = copy.deepcopy(plain)
            shard(model, axes.fsdp, masters=False, compute=torch.float64)
            prepare(model, args, by_hand(None, tile=tile))
            calls: list[int] = []
            for layer in levers(model).checkpointing._layers:  # type: ignore[union-attr]
                _count(layer, calls)
            loss = model(**batch(29 + rank, seed=rank), num_items_in_batch=40, megaspan_seed=7).loss
            loss.backward()
            gathered.append(len(calls))
            dist.all_reduce(loss := loss.detach())
            got = {
                name: parameter.grad.full_tensor() for name, parameter in model.named_parameters() if parameter.requires_grad
            }
            if tile == 1000:
                want_loss, want = loss, got
        assert gathered[0] == gathered[1] > 0
        assert float(loss) == pytest.approx(float(want_loss), rel=1e-12)
        assert_same_gradients(got, want, 1e-9)
        if trains == "all":
            plain.zero_grad()
            total = 0.0
            for other in range(world):
                data = batch(29 + other, seed=other)
                items = int((data["labels"][:, 1:] >= 0).sum())
                part = plain(**data, use_cache=False).loss * items / 40
                part.backward()
                total += float(part.detach())
            assert float(loss) == pytest.approx(total, rel=1e-6)
            assert_same_gradients(got, gradients(plain), 1e-5)


def _count(layer: Any, calls: list[int]) -> None:
    group = layer._get_fsdp_state()._fsdp_param_group
    own = group._all_gather if hasattr(group, "_all_gather") else group.unshard

    def unshard(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    setattr(group, own.__name__, unshard)


def test_two_ranks_find_what_one_plain_process_finds() -> None:
    run_ranks(2, [(_two_ranks, ())])
