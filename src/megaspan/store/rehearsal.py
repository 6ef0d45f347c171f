"""The save, rehearsed at step 0.

Saving is what kills finished runs (case R88): the disk is full, the folder is read-only, the settings are refused by
transformers, and a week of training is gone. All of that is known before the first step, so it is tried then, and what saving
takes is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaspan.human import UserError, format_bytes
from megaspan.store.checkpoint import HasState, checkpoints, trained_tensors
from megaspan.store.folder import SPARE_BYTES, free_bytes, new_folder, remove_folder
from megaspan.store.plain import saved_bytes, write_settings
from megaspan.store.sharded import is_sharded, together
from megaspan.store.tensors import split_state, tensor_bytes


@dataclass(frozen=True)
class Rehearsal:
    """What saving will take.

    Attributes:
        checkpoint_bytes: one checkpoint.
        model_bytes: the final save.
        needed_bytes: both, with the checkpoints that exist at the same time.
        free_bytes: free on the run folder's disk now.
    """

    checkpoint_bytes: int
    model_bytes: int
    needed_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        return (
            f"a checkpoint {format_bytes(self.checkpoint_bytes)}, the final model {format_bytes(self.model_bytes)}; "
            f"{format_bytes(self.needed_bytes)} needed, {format_bytes(self.free_bytes)} free"
        )


def rehearse_save(
    run: Path | str,
    *,
    model: torch.nn.Module,
    optimizer: HasState,
    optimizer_bytes: int,
    saves: int,
    keep: int | None = None,
    dtype: torch.dtype | None = None,
    progress: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> Rehearsal:
    """Tries at step 0 what would otherwise fail after the training is done (case R88).

    The run folder is made and written to, the optimizer's state is checked for things that a checkpoint cannot hold, and the
    disk must have room for the checkpoints that will exist at one time and for the final model. Of a sharded model all ranks
    call this together.

    Args:
        run: the run folder.
        model: as for `save_checkpoint`.
        optimizer: as for `save_checkpoint`; its moments need not exist yet.
        optimizer_bytes: its whole state once it has stepped, as planned: 8 bytes a trained parameter for fp32 moments, 4 more
            for fp32 masters; 4 in all when everything is bf16.
        saves: checkpoints that the run is going to write, as far as is known (0: `save_strategy` is "no").
        keep: `save_total_limit`; one more exists while a new one is written.
        dtype: of the final save, when it is not that of the weights.
        progress, identity, tokenizer: as for `save_checkpoint`, to find out now whether they can be saved.

    Raises:
        UserError: no room, or the folder cannot be written to.
    """
    run = Path(run)
    whole = {"optimizer": optimizer.state_dict(), "progress": dict(progress or {}), "identity": dict(identity or {})}
    split_state(whole, "state")

    def rehearse() -> Rehearsal:
        return _rehearse(run, model, optimizer_bytes, saves, keep, dtype, tokenizer)

    return together(rehearse) if is_sharded(model) else rehearse()


def _rehearse(
    run: Path,
    model: torch.nn.Module,
    optimizer_bytes: int,
    saves: int,
    keep: int | None,
    dtype: torch.dtype | None,
    tokenizer: Any,
) -> Rehearsal:
    try:
        with new_folder(run / "rehearsal") as folder:
            write_settings(model, tokenizer, folder)
        remove_folder(run / "rehearsal")
    except OSError as error:
        raise UserError(f"cannot write to the run folder {run}: {error.strerror}", do="Choose another output_dir") from error
    at_once = saves if keep is None else min(saves, keep + 1)
    one = tensor_bytes(trained_tensors(model)) + optimizer_bytes
    final = saved_bytes(model, dtype)
    existing = sum(_folder_bytes(path) for path in checkpoints(run))
    rehearsal = Rehearsal(one, final, at_once * one + final, free_bytes(run) + (existing if keep is not None else 0))
    if rehearsal.needed_bytes + SPARE_BYTES > rehearsal.free_bytes:  # a save wants so much more, and is refused without
        checkpoints_text = f"{at_once} checkpoint{'s' * (at_once != 1)} of {format_bytes(one)} at a time and "
        raise UserError(
            f"{run} has no room for what this run is going to save: {checkpoints_text * (at_once > 0)}a final model of "
            f"{format_bytes(final)} need {format_bytes(rehearsal.needed_bytes)} and {format_bytes(SPARE_BYTES)} to spare, "
            f"{format_bytes(rehearsal.free_bytes)} are free",
            do="Make room there, set save_total_limit: 1 or save_strategy: no, or choose another output_dir",
        )
    return rehearsal


def _folder_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
