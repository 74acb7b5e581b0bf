"""``linattn export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linattn.cli.source import source_of, tokenizer_beside


def export(
    run: Annotated[
        Path, typer.Argument(help="A run of linattn train, one of its checkpoints, a model folder or a GGUF file.", show_default=False)
    ],
    out: Annotated[
        Path, typer.Argument(help="The folder to write, which must not exist; for gguf the file, which is replaced.", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option(metavar="TYPE", help="Family: mamba, rwkv, qwen3_next, ...; gguf: a file for llama.cpp.", show_default=False),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="For gguf: F32, F16, BF16, Q8_0 or Q4_0 for the matrices. [default: F32]", show_default=False),
    ] = None,
) -> None:
    """Write a model in the format of another library.

    OUT gets config.json and model.safetensors with the names of transformers or flash-linear-attention, whose model then has the
    same logits, and the tokenizer beside the model or in its GGUF file. It is written atomically. A model that the other library
    cannot express is refused with the reason. With --to gguf OUT is one file that includes the tokenizer, for the families that
    llama.cpp reads.
    """
    from linattn.arguments import suggestion
    from linattn.hf.convert import FAMILIES, family
    from linattn.hf.load import export as write
    from linattn.hf.load import load
    from linattn.models.quantised import parameter_count

    known = sorted(["gguf", *FAMILIES])
    if to not in known:
        raise ValueError(f"--to must be a family of models or gguf, but came as {to!r}{suggestion(to, known)}")
    target = None if to == "gguf" else family(to)
    if target is not None and dtype is not None:
        raise ValueError(f"--dtype can only be used with --to gguf, but came with --to {to}")
    source = source_of(run)
    model = load(source)
    with tokenizer_beside(source) as tokenizer:
        if target is None:
            from linattn.hf.gguf.write import export_gguf

            beside = tokenizer is not None and (tokenizer / "tokenizer.json").is_file()
            name = export_gguf(model, out, dtype=dtype or "F32", tokenizer=tokenizer if beside else None)
        else:
            write(model, to, out, tokenizer=tokenizer)
            name = target.architecture
    print(f"{out}: {name}, {parameter_count(model):,} parameters, from {source}")
