"""Process-wide settings that a training changes and restores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR

from transformers.utils import logging

from linattn.train import checkpoint


@contextmanager
def restored_process_state() -> Iterator[None]:
    """Context without transformers' progress bars; restores them and the random generators when it ends.

    Also suppresses its warning that a resumed run saves at other steps, as an extended run does.
    """
    before, bars = checkpoint.generators(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    logger = logging.get_logger("transformers.trainer_utils")
    level = logger.level
    logger.setLevel(ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        checkpoint.set_generators(*before)
        if bars:
            logging.enable_progress_bar()
