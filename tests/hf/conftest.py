"""Disables progress bars; a folder with a transformers model."""

import pytest
import transformers

from tests.hf.theirs import theirs_of


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture
def folder(tmp_path):
    theirs_of("mamba", num_hidden_layers=1).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"
