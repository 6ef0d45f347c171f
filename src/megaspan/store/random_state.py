"""The states of the random number generators, so that a resumed run draws what the uninterrupted one would have drawn.

Dropout (LoRA's default is 0.05) draws on the device, the data order comes from the seed alone; user callbacks may use any of
the generators. Only the current device's generator is read: asking for all would open a context of hundreds of MB on every
GPU.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """States of Python's, numpy's, torch's CPU and, where there is one, the current GPU's generator."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Puts the states back; a GPU's state is left out on a machine without one."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
