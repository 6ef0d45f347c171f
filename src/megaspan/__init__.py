"""megaspan: fine-tune causal language models on sequences of a million tokens, exactly, on few GPUs."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaspan.config import SFTConfig as SFTConfig
    from megaspan.model import prepare as prepare
    from megaspan.trainer import SFTTrainer as SFTTrainer

__version__ = "0.1.0"
__all__ = ["SFTConfig", "SFTTrainer", "__version__", "prepare"]

# Loaded on first use: importing torch takes seconds, and `megaspan --help` must not.
_HOMES = {"SFTConfig": "megaspan.config", "SFTTrainer": "megaspan.trainer", "prepare": "megaspan.model"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megaspan' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def _said_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A wrong option is found by every rank of a script: one says so, the others end in silence. Else as it was before."""
    human = sys.modules.get("megaspan.human")
    if human is not None and issubclass(kind, human.UserError):
        from megaspan import world
        from megaspan.config.spelling import as_python

        error.spell(as_python)  # type: ignore[attr-defined]
        if world.launch().several:
            world.exit_once(kind, error, trace)
    _shown_before(kind, error, trace)


_shown_before, sys.excepthook = sys.excepthook, _said_once
