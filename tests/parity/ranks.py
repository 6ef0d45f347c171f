"""Runs the cases of `cases.py` on several ranks, and compares with what plain transformers finds for each in one process.

Rows go the trainer's way: `Share` deals and cuts them, `Accumulator` runs them. The reference runs document by document, on an
unprepared model that is not sharded; ranks take turns in finding it, before they run anything together, and all compare.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaspan.attention.mask import Mask
from megaspan.config.parallel import AXES
from megaspan.data import Row
from megaspan.layers.dropout import counter_mask, row_seed
from megaspan.layers.selfcheck import prove_family
from megaspan.model import levers, prepare, wrap_lora
from megaspan.model.kinds import refuse_shared_rows, unwrap
from megaspan.model.shard import shard
from megaspan.trainer.share import Share
from megaspan.trainer.step import Accumulator
from megaspan.world.axes import DeviceAxes, Mesh, device_axes
from tests.attention.rows import visible
from tests.layers.test_streamed_ranks import by_hand
from tests.model.support import settings
from tests.models import HIDDEN, assert_same_gradients, gradients, tiny
from tests.parity import own
from tests.parity.cases import (
    EXPERTS,
    FAMILIES,
    IGNORED,
    LAYERS,
    is_moe_balanced,
    plan_of,
    seen_by_the_label,
    stretches,
    window_of,
)
from tests.parity.pairwise import Case

CPU, RUN, STEP, RATE = torch.device("cpu"), 7, 3, 0.3
PAIRS_OF_64 = {Mask(window=8): 484, Mask(): 2080}  # R34


@cache
def axes_of(mesh: Mesh) -> DeviceAxes | None:
    """Process groups, made once a mesh; one rank alone has none."""
    return device_axes(mesh, "cpu") if mesh.ranks > 1 else None


def model_of(case: Case, dtype: torch.dtype | None = None) -> Any:
    """The unprepared model; an adapter's B is not zero."""
    heads, kv_heads = case["heads"]
    # Some configurations want a hidden size that the heads divide.
    sizes = {"num_key_value_heads": kv_heads, "hidden_size": -(-HIDDEN // heads) * heads}
    dtype = dtype or (torch.float32 if case["family"] in EXPERTS else torch.float64)
    model: Any
    if case["family"] in own.FAMILIES:
        if is_moe_balanced(case):
            sizes |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
        model = own.model_of(case["family"], dtype, LAYERS, heads=heads, **sizes)
    else:
        name, options = FAMILIES[case["family"]]
        if "output_router_logits" in options:
            options = options | {"output_router_logits": is_moe_balanced(case)}
        model = tiny(name, layers=LAYERS, dtype=dtype, **(options | {"num_attention_heads": heads} | sizes))
    if case["trains"] == "frozen embedding":
        model.get_input_embeddings().weight.requires_grad_(False)
    if case["trains"] == "lora":
        model = wrap_lora(model, args_of(case)).train()
        generator = torch.Generator().manual_seed(5)
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.data = (0.2 * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return model


def args_of(case: Case) -> Any:
    targets = ["q_proj", "o_proj"]
    targets += [] if case["family"] in EXPERTS else ["down_proj"]
    targets += [] if case["family"] == "llama tied" else ["lm_head"]
    lora = {"use_peft": True, "lora_r": 4, "lora_alpha": 6, "lora_dropout": RATE, "lora_target_modules": targets}
    return settings(
        cp_size=case["mesh"][2], sp_size=case["mesh"][3], packing=True, **(lora if case["trains"] == "lora" else {})
    )


class Found(dict[str, float]):
    """`loss`, `entropy`, `correct`, `trained` and `tokens` of a window, all sums, and its gradients."""

    gradients: dict[str, Tensor]


def plain_window(model: Any, rows: Sequence[Row], forwards: Sequence[Sequence[int]]) -> Found:
    """What transformers finds, document by document.

    Args:
        model: unprepared; its dropouts are given the masks that belong to the tokens.
        rows: the window.
        forwards: rows that run together: they share the numbers of their tokens, and a balance loss.
    """
    found = Found(loss=0.0, entropy=0.0, correct=0, trained=0, tokens=0)
    items = sum(int((labels[1:] != IGNORED).sum()) for _, labels in _documents(rows))
    model.zero_grad()
    for places in forwards:
        total, routers, number, trained = torch.zeros(()), [], 0, 0
        for ids, labels in _documents([rows[place] for place in places]):
            with _masks(model, row_seed(RUN, STEP, places[0]), number):
                output = model(input_ids=ids[None], use_cache=False)
            number += len(ids)
            logits, wanted = output.logits[0, :-1], labels[1:]
            total = total + nn.functional.cross_entropy(logits, wanted, reduction="sum", ignore_index=IGNORED)
            seen = torch.log_softmax(logits.detach()[wanted != IGNORED].double(), -1)
            found["entropy"] -= float((seen.exp() * seen).sum())
            found["correct"] += int((seen.argmax(-1) == wanted[wanted != IGNORED]).sum())
            trained += len(seen)
            routers.append(getattr(output, "router_logits", None))
        found["trained"] += trained
        found["tokens"] += number
        if routers[0] is not None:
            inner: Any = unwrap(model)
            layers = tuple(torch.cat(layer) for layer in zip(*routers, strict=True))
            balance = sys.modules[type(inner).__module__].load_balancing_loss_func
            total = total + inner.router_aux_loss_coef * trained * balance(layers, inner.num_experts, inner.num_experts_per_tok)
        (total / max(items, 1)).backward()
        found["loss"] += float(total.detach())
    found.gradients = gradients(model)
    return found


def _documents(rows: Sequence[Row]) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels of each document of rows."""
    for ids, labels in stretches(rows):
        yield torch.from_numpy(ids), torch.from_numpy(labels)


@contextmanager
def _masks(model: Any, seed: int, first: int) -> Iterator[None]:
    """Dropouts of adapters in layers and head become products with the masks of tokens from `first` on."""
    inner = unwrap(model)
    layers = enumerate(inner.get_decoder().layers)
    places = [(module, index, name) for index, layer in layers for name, module in layer.named_modules()]
    places += [(module, -1, "head 0") for module in inner.get_output_embeddings().modules()]
    changed = [(module, index, name) for module, index, name in places if isinstance(module, nn.Dropout)]
    for module, index, name in changed:
        module.__dict__["forward"] = _by_mask(seed, index, name, first, module.p)
    yield
    for module, _, _ in changed:
        del module.__dict__["forward"]


def _by_mask(seed: int, index: int, name: str, first: int, p: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * counter_mask(seed, index, name, first, x.shape[-2], x.shape[-1], p) / (1 - p)


def ranks_window(case: Case, rank: int, dtype: torch.dtype | None = None) -> Found:
    """What the ranks find together, on the trainer's way."""
    mesh = Mesh(**dict(zip(AXES, case["mesh"], strict=True)), rank=rank)
    axes, model, args = axes_of(mesh), model_of(case, dtype), args_of(case)
    rows, together = window_of(case)
    if axes is not None:
        shard(model, axes.fsdp, masters=True, compute=next(model.parameters()).dtype)
    with _proven(case):
        prepare(model, args, by_hand(**plan_of(case)))
    placed = levers(model)
    assert placed is not None
    if case["path"] != "whole":
        assert placed.checkpointing.reasons == [None] * LAYERS  # type: ignore[union-attr]
    share = Share.of(model, CPU, mesh, axes, together)
    if case["rows"] == "plain":  # with every family and path
        refuse_shared_rows(model)
    check_pairs(share, rows[0])
    placed.reserve(model, share.slots(rows))
    accumulator = Accumulator(model, share, RUN)
    accumulator.backward(rows, STEP)
    sums = accumulator.sums()
    found = Found({name: getattr(sums, name) for name in ("loss", "entropy", "correct", "trained", "tokens")})
    found.gradients = gradients(model) if axes is None else whole_gradients(model, axes)
    placed.close()
    return found


def whole_gradients(model: nn.Module, axes: DeviceAxes) -> dict[str, Tensor]:
    """Every gradient of a sharded model, put together on all ranks by one collective."""
    group = axes.group("shard")
    ranks, parts, shapes = group.size(), [], {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shapes[name] = parameter.shape
            mine = torch.zeros(-(-parameter.shape[0] // ranks), *parameter.shape[1:], dtype=parameter.dtype)
            if parameter.grad is not None:
                rows = parameter.grad.to_local()  # type: ignore[attr-defined]
                mine[: len(rows)] = rows
            parts.append(mine.flatten())
    flat = torch.cat(parts)
    everyone = [torch.empty_like(flat) for _ in range(ranks)]
    dist.all_gather(everyone, flat, group=group)
    columns = torch.stack(everyone).split([len(part) for part in parts], dim=1)
    return {
        name: column.reshape(-1, *shape[1:])[: shape[0]] for (name, shape), column in zip(shapes.items(), columns, strict=True)
    }


def check_pairs(share: Share, row: Row) -> None:
    """R34: queries and keys that the slices of all ranks show to each other, for each kind of layer, are those of the mask.

    Raises:
        AssertionError: they are not.
    """
    if not share.shares_rows:
        return
    masks = sorted(share.work.layers, key=lambda mask: mask.window or 0)
    context, lengths = share.inputs(row)["megaspan_row"], share.stretches(row)
    mine = [sum(call.visible_pairs() for call, _ in context.plan(mask).calls) for mask in masks]
    pairs = torch.tensor(mine, dtype=torch.int64)
    dist.all_reduce(pairs)
    found = [count * share.mesh.cp // share.mesh.ranks for count in pairs.tolist()]  # all others have this rank's row too
    wanted = [int(visible(list(lengths), mask).sum()) for mask in masks]
    assert found == wanted, f"visible pairs: {found}, wanted {wanted}"
    if lengths == (64,):
        assert found == [PAIRS_OF_64[mask] for mask in masks]


_PROVEN: set[str] = set()
_FAMILIES: dict[tuple[type, bool], str | None] = {}


@contextmanager
def _proven(case: Case) -> Iterator[None]:
    """The proofs at load, once a family, on one and two ranks: they are no part of what is compared here."""
    with ExitStack() as patches:
        few = math.prod(case["mesh"]) <= 2
        patches.enter_context(patch("megaspan.layers.streamed.prove_family", _prove_once if few else lambda *_: None))
        if case["family"] in _PROVEN or not few:
            patches.enter_context(patch("megaspan.model.proof.reference", lambda model: None))
            patches.enter_context(patch("megaspan.model.proof.prove_attention", lambda model, before: None))
        yield
    _PROVEN.add(case["family"])


def _prove_once(model: nn.Module, fused: bool = True) -> str | None:
    key = (type(unwrap(model)), fused)
    if key not in _FAMILIES:
        _FAMILIES[key] = prove_family(model, fused)
    return _FAMILIES[key]


def wanted(case: Case, model: Any) -> Found:
    """`plain_window` of a case, its rows joined as the ranks join them."""
    rows, together = window_of(case)
    data, lengths = math.prod(case["mesh"][:2]), [len(row.input_ids) for row in rows]
    shares = [Share(CPU, Mesh(dp_shard=data, rank=place), together=together) for place in range(data)]
    forwards = [places for share in shares for places in share.deal(lengths, together) if places]
    assert sorted(place for places in forwards for place in places) == list(range(len(rows)))
    return plain_window(model, rows, forwards)


def told(found: Found | None, like: Found, owner: int) -> Found:
    """What the owner found, on all ranks; the others give None. `like` has the same names and shapes."""
    numbers = torch.tensor(list((found or like).values()), dtype=torch.float64)
    names = list(like.gradients)
    source = like if found is None else found
    flat = torch.cat([source.gradients[name].flatten() for name in names])
    dist.broadcast(numbers, owner)
    dist.broadcast(flat, owner)
    got = Found(zip(like, numbers.tolist(), strict=True))
    parts = flat.split([like.gradients[name].numel() for name in names])
    got.gradients = {name: part.view(like.gradients[name].shape) for name, part in zip(names, parts, strict=True)}
    return got


def compare(case: Case, got: Found, want: Found) -> None:
    """Counts are equal, loss and entropy 1e-6 relative (2e-5 of few tokens in fp32), each gradient 1e-5 (1e-4 for some).

    And a single label sees what it should and nothing else.

    Raises:
        AssertionError: they are not.
    """
    for name in ("trained", "tokens", "correct"):
        assert got[name] == want[name], f"{name}: {got[name]}, wanted {want[name]}"
    # In fp32 (all entropies, and losses of experts) a single token is some roundings off, which a sum over many averages.
    few, experts = want["trained"] < 10, case["family"] in EXPERTS
    rounded = 2e-5 if few and experts else 5e-6 if few else 1e-6
    for name, near in (("loss", rounded if experts else 1e-6), ("entropy", rounded)):
        assert abs(got[name] - want[name]) <= near * abs(want[name]), f"{name}: {got[name]}, wanted {want[name]}"
    if want["trained"]:
        # BitNet's norms behind norms round to fp32 in whatever type they are given, and streamed ones do not.
        near = 1e-4 if case["family"] in (*EXPERTS, "bitnet") else 1e-5
        assert_same_gradients(got.gradients, want.gradients, near)
    else:
        assert not any(bool(gradient.any()) for gradient in got.gradients.values())
    seen = seen_by_the_label(case, window_of(case)[0])
    if seen is not None:
        embedding = next(gradient for name, gradient in got.gradients.items() if "embed_tokens" in name)
        reached = set(embedding.any(1).nonzero().flatten().tolist())
        assert reached == seen, f"tokens seen: {sorted(reached)}, wanted {sorted(seen)}"


def check(rank: int, world: int, cases: Sequence[Case]) -> None:
    """Runs every case on all ranks.

    Raises:
        AssertionError: with every case that failed, on any rank.
    """
    mine = {number: wanted(cases[number], model_of(cases[number])) for number in range(rank, len(cases), world)}
    failed = []
    for number, case in enumerate(cases):
        said = failure(case, rank, mine.pop(number, None), number % world)
        failed += [] if said is None else [said]
    assert not failed, f"{len(failed)} of {len(cases)} cases:\n" + "\n".join(failed)


def check_alone(case: Case, rank: int) -> str | None:
    """`failure` of one case, whose reference is found now."""
    return failure(case, rank, wanted(case, model_of(case)) if rank == 0 else None, 0)


def failure(case: Case, rank: int, want: Found | None, owner: int) -> str | None:
    """What is wrong with a case on some rank, the same on all; None where nothing is.

    Args:
        case: of all ranks.
        rank: this one.
        want: what plain transformers finds, on the owner.
        owner: the rank that has it.
    """
    said = None
    try:
        got = ranks_window(case, rank)
        want = told(want, got, owner)
    except BaseException as error:
        raise RuntimeError(f"{case}") from error
    try:
        compare(case, got, want)
    except AssertionError as error:
        said = f"{case}: rank {rank}: {str(error).splitlines()[0]}"
    said_by: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said_by, said)
    return next((each for each in said_by if each is not None), None)


def check_masters(rank: int, world: int, cases: Sequence[Case]) -> None:
    """fp32 masters that are gathered in bf16: gradients are no farther from fp64 than those of the plain model in bf16."""
    for case in cases:
        got = ranks_window(case, rank, torch.bfloat16)
        assert all(gradient.dtype == torch.float32 for gradient in got.gradients.values())
        if rank != 0:
            continue
        plain = wanted(case, model_of(case, torch.bfloat16))
        exact = wanted(case, model_of(case, torch.bfloat16).double())
        assert (got["trained"], got["tokens"]) == (exact["trained"], exact["tokens"])
        errors = [
            sum(float((found.gradients[name].double() - true).square().sum()) for name, true in exact.gradients.items())
            for found in (got, plain)
        ]
        assert errors[0] <= 1.5**2 * errors[1], f"{case}: {errors}"
