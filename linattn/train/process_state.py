"""Process-wide settings that a training changes and restores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

from linattn.train import checkpoint


@contextmanager
def restored_process_state() -> Iterator[None]:
    """Context without transformers' progress bars; restores them and the random generators when it ends."""
    before, bars = checkpoint.generators(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        checkpoint.set_generators(*before)
        if bars:
            logging.enable_progress_bar()
