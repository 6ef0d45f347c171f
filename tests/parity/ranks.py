"""Cases of training over several ranks, and what plain transformers finds for each of them in one process.

A case is a mesh, a family, a kind of row, what is labelled, how layers run, how many rows a window has and what trains. Rows go
the trainer's way: `Share` deals and cuts them, `Accumulator` runs them. The reference runs document by document, on an
unprepared model that is not sharded; rank 0 finds it, all ranks compare with it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

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
from tests.layers.test_streamed_ranks import by_hand
from tests.model.support import settings
from tests.models import VOCAB, assert_same_gradients, gradients, tiny
from tests.parity.pairwise import Case

CPU, IGNORED, RUN, STEP, RATE = torch.device("cpu"), -100, 7, 3, 0.3

Sizes = tuple[int, int, int, int]  # dp_replicate, dp_shard, cp, sp

TWO: tuple[Sizes, ...] = ((1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2))
FOUR: tuple[Sizes, ...] = ((1, 1, 4, 1), (1, 1, 1, 4), (1, 1, 2, 2), (1, 2, 2, 1), (2, 1, 2, 1), (2, 2, 1, 1))
EIGHT: tuple[Sizes, ...] = ((1, 1, 8, 1), (1, 1, 1, 8), (1, 1, 4, 2), (1, 1, 2, 4), (2, 2, 2, 1), (1, 2, 2, 2), (2, 1, 1, 4))

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("llama", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {}),
    "gemma2": ("gemma2", {}),
    "gpt_oss": ("gpt_oss", {}),
    "qwen3_moe": ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
}
EXPERTS = ("gpt_oss", "qwen3_moe")  # in fp32: torch multiplies groups of experts in no wider type

# Documents of the rows of a window, as many of them as the window has rows, and padding behind them.
ROWS: dict[str, tuple[tuple[int, ...], ...]] = {
    "plain": ((32,), (20,), (44,), (26,)),
    "prime": ((29,), (37,), (23,), (31,)),
    "short": ((3,), (1,), (2,), (3,)),
    "packed": ((13, 1, 20, 9), (5, 17, 2), (1, 1, 19, 8), (30, 3)),
    "singles": ((*(1,) * 7, 9, *(1,) * 6), (1,) * 13, (2, *(1,) * 9), (1,) * 5),
    "padded": ((21,), (6, 12), (15,), (3, 1)),
}
PADDING = 3

# How a layer runs: all heads and the row in one tile; one KV head a call, tiles that divide nothing and segments of layers;
# what was kept read back in tiles; checkpointed whole.
PATHS: dict[str, dict[str, Any]] = {
    "streamed": {"keep": "device", "heads": None, "tile": 64},
    "segments": {"keep": "segments", "heads": 1, "tile": 5},
    "back": {"keep": "host", "heads": 1, "tile": 7, "back": True},
    "whole": {"keep": None},
}
FACTORS: dict[str, Sequence[Any]] = {
    "family": tuple(FAMILIES),
    "rows": tuple(ROWS),
    "labels": ("all", "few", "none in one"),
    "path": tuple(PATHS),
    "window": ("one", "two", "odd", "joined"),
    "trains": ("all", "frozen embedding", "lora"),
}


@cache
def axes_of(mesh: Mesh) -> DeviceAxes:
    """Process groups, made once a mesh."""
    return device_axes(mesh, "cpu")


def window_of(case: Case) -> tuple[list[Row], int]:
    """The rows of a step, and how many of them run in one forward.

    A window has a row for each data rank, or two, or two without one so that a rank has none left, or two that run as one.
    """
    data = math.prod(case["mesh"][:2])
    count = data * (1 if case["window"] == "one" else 2) - (case["window"] == "odd" and data > 1)
    if case["labels"] == "none in one":
        count = max(count, 2)
    rows = []
    for number in range(count):
        draw = np.random.default_rng(number)
        documents = ROWS[case["rows"]][number % 4]
        ids = draw.integers(VOCAB, size=sum(documents))
        starts = np.cumsum((0, *documents[:-1]))
        labels = ids.copy()
        if case["labels"] == "few":
            first = starts[int(np.argmax(documents))]
            labels[:] = IGNORED
            labels[first + 1 : first + 3] = ids[first + 1 : first + 3]
        elif case["labels"] == "none in one" and number == count - 1:
            labels[:] = IGNORED
        labels[starts] = IGNORED
        padding = PADDING if case["rows"] == "padded" else 0
        ids, labels = np.append(ids, np.zeros(padding, np.int64)), np.append(labels, np.full(padding, IGNORED))
        rows.append(Row(ids, labels, documents, padding, documents))
    return rows, 2 if case["window"] == "joined" else 1


def model_of(case: Case, dtype: torch.dtype | None = None) -> Any:
    """The unprepared model; an adapter's B is not zero."""
    name, options = FAMILIES[case["family"]]
    if case["mesh"][3] == 8:
        options = options | {"num_attention_heads": 8}
    if "output_router_logits" in options and (case["path"] == "whole" or case["rows"] == "padded"):
        # Checkpointed layers keep no router logits, which is refused. The balance loss counts padding that was asked for, where
        # transformers' own mask would leave it out.
        options = options | {"output_router_logits": False}
    dtype = dtype or (torch.float32 if name in EXPERTS else torch.float64)
    model: Any = tiny(name, layers=3, dtype=dtype, **options)
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
    """Tokens and labels of each document of rows; padding is none."""
    for row in rows:
        sizes = [*row.document_lengths, row.padding]
        ids, labels = (torch.from_numpy(values).split(sizes) for values in (row.input_ids, row.labels))
        yield from zip(ids[:-1], labels[:-1], strict=True)


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
    shard(model, axes.fsdp, masters=True, compute=next(model.parameters()).dtype)
    with patch("megaspan.layers.streamed.prove_family", _proven):
        prepare(model, args, by_hand(**PATHS[case["path"]]))
    placed = levers(model)
    assert placed is not None
    if PATHS[case["path"]]["keep"] is not None:
        assert placed.checkpointing.reasons == [None] * 3  # type: ignore[union-attr]
    share = Share.of(model, CPU, mesh, axes, together)
    if case["rows"] == "plain":  # with every family and path
        refuse_shared_rows(model)
    placed.reserve(model, share.slots(rows))
    accumulator = Accumulator(model, share, RUN)
    accumulator.backward(rows, STEP)
    sums = accumulator.sums()
    found = Found({name: getattr(sums, name) for name in ("loss", "entropy", "correct", "trained", "tokens")})
    found.gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            found.gradients[name] = torch.zeros(parameter.shape) if gradient is None else gradient.full_tensor()
    placed.close()
    return found


_PROOFS: dict[tuple[type, bool], str | None] = {}


def _proven(model: nn.Module, fused: bool = True) -> str | None:
    """The proof at load, once a class: it is no part of what is compared here."""
    key = (type(unwrap(model)), fused)
    if key not in _PROOFS:
        _PROOFS[key] = prove_family(model, fused)
    return _PROOFS[key]


def wanted(case: Case, rank: int, model: Any) -> Found:
    """`plain_window` of a case, found by rank 0 and told to all."""
    rows, together = window_of(case)
    data, lengths = math.prod(case["mesh"][:2]), [len(row.input_ids) for row in rows]
    shares = [Share(CPU, Mesh(dp_shard=data, rank=place), together=together) for place in range(data)]
    forwards = [places for share in shares for places in share.deal(lengths, together) if places]
    assert sorted(place for places in forwards for place in places) == list(range(len(rows)))
    if rank == 0:
        found = plain_window(model, rows, forwards)
    else:
        found = Found(loss=0.0, entropy=0.0, correct=0, trained=0, tokens=0)
        found.gradients = gradients(model)
    numbers = torch.tensor(list(found.values()), dtype=torch.float64)
    flat = torch.cat([gradient.flatten() for gradient in found.gradients.values()])
    dist.broadcast(numbers, 0)
    dist.broadcast(flat, 0)
    found.update(zip(found, numbers.tolist(), strict=True))
    parts = flat.split([gradient.numel() for gradient in found.gradients.values()])
    for part, (name, gradient) in zip(parts, list(found.gradients.items()), strict=True):
        found.gradients[name] = part.view(gradient.shape)
    return found


def compare(case: Case, got: Found, want: Found) -> None:
    """Loss 1e-6 relative, each gradient 1e-5 (1e-4 with experts); counts are equal.

    Raises:
        AssertionError: they are not.
    """
    for name in ("trained", "tokens", "correct"):
        assert got[name] == want[name], f"{name}: {got[name]}, wanted {want[name]}"
    for name in ("loss", "entropy"):
        assert abs(got[name] - want[name]) <= 1e-6 * abs(want[name]), f"{name}: {got[name]}, wanted {want[name]}"
    if want["trained"]:
        assert_same_gradients(got.gradients, want.gradients, 1e-4 if case["family"] in EXPERTS else 1e-5)
    else:
        assert not any(bool(gradient.any()) for gradient in got.gradients.values())


def check(rank: int, world: int, cases: Sequence[Case]) -> None:
    """Runs every case on all ranks.

    Raises:
        AssertionError: with every case that failed, on any rank.
    """
    failed = [said for case in cases if (said := failure(case, rank)) is not None]
    assert not failed, f"{len(failed)} of {len(cases)} cases:\n" + "\n".join(failed)


def failure(case: Case, rank: int) -> str | None:
    """What is wrong with a case on some rank, the same on all; None where nothing is."""
    said = None
    try:
        got, want = ranks_window(case, rank), wanted(case, rank, model_of(case))
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
        plain = wanted(case, rank, model_of(case, torch.bfloat16))
        exact = wanted(case, rank, model_of(case, torch.bfloat16).double())
        assert all(gradient.dtype == torch.float32 for gradient in got.gradients.values())
        assert (got["trained"], got["tokens"]) == (exact["trained"], exact["tokens"])
        errors = [
            sum(float((found.gradients[name].double() - true).square().sum()) for name, true in exact.gradients.items())
            for found in (got, plain)
        ]
        assert errors[0] <= 1.5**2 * errors[1], f"{case}: {errors}"
