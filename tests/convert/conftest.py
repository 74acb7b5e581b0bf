"""Fixtures of conversions; imports are deferred, since transformers may be missing when tests are only collected."""

import pytest


@pytest.fixture(autouse=True)
def _quiet(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    from tests.convert.models import TEXT

    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """A folder with a softmax model, never written to."""
    import torch

    from tests.convert.models import softmax_model

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("teacher") / "softmax"
    softmax_model().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def done(tmp_path_factory, text, teacher):
    """A finished conversion, never written to."""
    from linattn.distill.conversion import convert
    from tests.convert.models import SMALL

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        out = tmp_path_factory.mktemp("done") / "student"
        return convert(teacher, mixer="gated_deltanet*2, softmax", text=[str(text)], out=out, tokens3=128, progress=False, **SMALL)
