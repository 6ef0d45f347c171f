"""What libraries say that no user can do anything about, or that belongs on a terminal and not in a log file."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bar_on_terminals_only() -> Iterator[None]:
    """transformers draws a bar while it reads weights: welcome for 16 GB on a terminal, noise in a log file."""
    from transformers.utils import logging

    hidden = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            logging.enable_progress_bar()


@contextmanager
def peft_at_work() -> Iterator[None]:
    """peft 0.21 asks transformers by a name that is to go, which no user can change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield
