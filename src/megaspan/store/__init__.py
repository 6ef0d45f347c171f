"""Runs on disk: the run folder, checkpoints that are complete or absent, the final save, export.

At a million tokens a step lasts from minutes to an hour, and a checkpoint of an 8B model is 115 GB: what is on disk has to
survive kills and full disks, be written without a second copy in host memory, and load in plain transformers and peft
afterwards.
"""

from megaspan.store.checkpoint import checkpoints, latest_checkpoint, load_checkpoint, read_identity, save_checkpoint
from megaspan.store.export import FINAL, export
from megaspan.store.options import another_run, changed_options, differing
from megaspan.store.plain import save_model
from megaspan.store.random_state import random_state, restore_random_state
from megaspan.store.rehearsal import Rehearsal, rehearse_save
from megaspan.store.run import (
    check_place,
    checkpoint_of,
    lock_run,
    open_run,
    read_run_facts,
    write_run_facts,
)
from megaspan.store.sharded import together

__all__ = [
    "FINAL",
    "Rehearsal",
    "another_run",
    "changed_options",
    "check_place",
    "checkpoint_of",
    "checkpoints",
    "differing",
    "export",
    "latest_checkpoint",
    "load_checkpoint",
    "lock_run",
    "open_run",
    "random_state",
    "read_identity",
    "read_run_facts",
    "rehearse_save",
    "restore_random_state",
    "save_checkpoint",
    "save_model",
    "together",
    "write_run_facts",
]
