"""What a prepared model refuses because it cannot go well: rows past its positions, full logits past the memory.

Both would otherwise fail late or not at all: past its window a model's loss climbs without an error, and the full logits of
131,072 tokens of a 151,936-word model are 111 GiB that are asked for after minutes of forward.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from megaspan.human import UserError, format_bytes
from megaspan.plan.logits import NLL_BYTES

_LEARNED = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?|pos_emb\w*)$")


def past_window(length: int, window: int) -> UserError:
    """The refusal of a row longer than the positions that the model has."""
    return UserError(
        f"a row of {length:,} tokens is longer than the {window:,} positions of this model",
        do="Shorten it (max_length), or extend the model (model_init_kwargs: {rope_parameters: auto}), "
        "or go on all the same (allow_past_window: true): past its window a model's loss climbs",
    )


def check_positions(model: torch.nn.Module, name: str, max_length: int, *, wish: object = None) -> None:
    """Refuse what no rotary setting can do for a model without rotary positions (GPT-BigCode, some of Granite 4).

    Args:
        model: with weights or without memory.
        name: for messages.
        max_length: tokens of a row.
        wish: `rope_parameters`, as the user wrote them.

    Raises:
        UserError: rows run past a learned table of positions, or `rope_parameters` would have no effect.
    """
    if any(buffer.endswith("inv_freq") for buffer, _ in model.named_buffers()):
        return
    tables = {
        part.num_embeddings
        for place, part in model.named_modules()
        if isinstance(part, torch.nn.Embedding) and _LEARNED.search(place)
    }
    if tables and max_length > min(tables):
        raise UserError(
            f"{name} has learned a table of {min(tables):,} positions, which nothing extends",
            found=f"max_length {max_length:,}",
            do=f"Write max_length: {min(tables)}, or choose a model with rotary positions",
        )
    if wish is not None:
        raise UserError(
            f"{name} has no rotary positions, so rope_parameters would have no effect",
            do="Remove rope_parameters; allow_past_window: true trains past the positions that its configuration tells of",
        )


def check_logits_fit(tokens: int, vocabulary: int, free: int) -> None:
    """Refuse `loss_type: nll` where the full logits cannot fit.

    Raises:
        UserError: they need more than `free` bytes.
    """
    need = tokens * vocabulary * NLL_BYTES
    if need > free:
        raise UserError(
            f"loss_type: nll holds all logits, {tokens:,} x {vocabulary:,} x {NLL_BYTES} bytes = "
            f"{format_bytes(need)}, and {format_bytes(free)} are free",
            do="Use loss_type: chunked_nll, the same loss in tiles; newer TRL means the chunked one when it says nll",
        )


def check_host_room(plan: Any) -> None:
    """Refuse a plan whose layers keep something on a host that other things fill: the first layer would fail, with no number
    that means anything.

    Raises:
        UserError: with what the host has to have.
    """
    keep, left = plan.keep, plan.host_for_layers
    if left > 0 or "host" not in {*keep.places, *([keep.again] if keep.runs_again else [])}:
        return
    ranks = plan.machine.host_ranks
    raise UserError(
        f"host memory has no room for what layers keep: all else takes {format_bytes(plan.host_limit - left)}, "
        f"{format_bytes(-left)} more than there is",
        found=f"{format_bytes(plan.host_limit)} ({plan.limits_from[1]})" + (f" for each of {ranks} ranks" if ranks > 1 else ""),
        do="Raise host_memory if the machine has more, or lower max_length; megaspan plan shows what takes it",
    )


def free_bytes(device: torch.device, host_bytes: int) -> int:
    """Bytes that a new tensor may take: on a GPU what the driver and the allocator have left, on a CPU `host_bytes`."""
    if device.type != "cuda":
        return host_bytes
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def device_of(model: Any) -> torch.device:
    """Where the model takes its tokens."""
    device: torch.device = model.get_input_embeddings().weight.device
    return device
