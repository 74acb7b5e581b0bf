"""The model that a command reads: a run's newest checkpoint, a folder or a GGUF file, and the tokenizer beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def source_of(run: Path) -> Path:
    """The newest checkpoint of a run of ``linattn train``; any other path itself."""
    from linattn.train import checkpoint

    folder = run if (run / "config.json").is_file() and not (run / "run.json").is_file() else checkpoint.newest(run)
    return run if folder is None else folder


@contextmanager
def tokenizer_beside(source: Path) -> Iterator[Path | None]:
    """Context with the tokenizer's folder: ``source``, or a temporary one for a GGUF file; None if such a file has no tokenizer."""
    from linattn.hf import gguf

    if source.is_dir():
        yield source
        return
    file = gguf.GGUFFile(source)
    if "tokenizer.ggml.model" not in file.metadata:
        yield None
        return
    with TemporaryDirectory() as folder:
        gguf.tokenizer_of(file).save_pretrained(folder)
        yield Path(folder)
