"""``linattn export``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer


@contextmanager
def _tokenizer(source: Path) -> Iterator[Path | None]:
    """Folder with the tokenizer of ``source``, for a while that of a GGUF file; None if such a file has none."""
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


def export(
    run: Annotated[
        Path, typer.Argument(help="A run of linattn train, one of its checkpoints, or what linattn.load reads.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not be there.", show_default=False)],
    to: Annotated[str, typer.Option(metavar="TYPE", help="Whose model: mamba, rwkv, qwen3_next, ...", show_default=False)],
) -> None:
    """Write a model as another library reads it.

    OUT gets config.json and model.safetensors with the names of transformers or flash-linear-attention, whose model then has the
    same logits, and the tokenizer that lies beside the model or in its GGUF file. It appears whole or not at all. What the other
    library cannot express is refused, with the reason.
    """
    from linattn.hf.convert import family
    from linattn.hf.load import export as write
    from linattn.hf.load import load
    from linattn.train import checkpoint

    target = family(to)
    folder = run if (run / "config.json").is_file() and not (run / "run.json").is_file() else checkpoint.newest(run)
    source = run if folder is None else folder
    model = load(source)
    with _tokenizer(source) as tokenizer:
        write(model, to, out, tokenizer=tokenizer)
    count = sum(p.numel() for p in model.parameters())
    print(f"{out}: {target.architecture}, {count:,} parameters, from {source}")
