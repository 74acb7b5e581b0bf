"""What a training changes in its process for as long as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

from linattn.train import checkpoint


@contextmanager
def own_surroundings() -> Iterator[None]:
    """Leave the caller's random generators and transformers' progress bars as they were."""
    before, bars = checkpoint.generators(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        checkpoint.set_generators(*before)
        if bars:
            logging.enable_progress_bar()
