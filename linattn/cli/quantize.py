"""``linattn quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linattn.cli.source import source_of, tokenizer_beside

if TYPE_CHECKING:
    from torch import Tensor


def quantize(
    run: Annotated[
        Path, typer.Argument(help="A run of linattn train, one of its checkpoints, or what linattn.load reads.", show_default=False)
    ],
    to: Annotated[str, typer.Option(metavar="TYPE", help="int8, with a scale per output channel, or int4, in groups.")] = "int4",
    group: Annotated[int, typer.Option(metavar="N", help="Adjacent weights that share a scale in int4: 32, 64 or 128.")] = 64,
    head: Annotated[str, typer.Option(metavar="TYPE", help="Type of the embedding and the head: int8 or int4.")] = "int8",
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(metavar="TEXT", help="Text of the kind that the model will read, to compensate for rounding.", show_default=False),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Maximum number of tokens of that text.")] = 32768,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens of one piece of that text.")] = 512,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to write, which must not exist. [default: RUN-TYPE]", show_default=False)
    ] = None,
) -> None:
    """Quantise the weights of a model.

    Linear maps, the embedding and the head are kept in 8 or 4 bits; gates, decays, time constants, short convolutions, norms and
    states stay as they are. DIR can be given to linattn generate, chat, evaluate, export and linattn.load; it is written atomically.
    """
    from linattn.hf.load import load
    from linattn.models.quantised import FORMATS
    from linattn.ops.checks import choice
    from linattn.quantization import quantize as quantise
    from linattn.quantization import save
    from linattn.quantization.sparing import formats
    from linattn.report.progress import Progress
    from linattn.state import writable

    choice("--to", to, tuple(FORMATS))  # before anything is read
    source = source_of(run)
    named = run if run.name not in ("", "..") else run.resolve()
    place = out or named.parent / f"{named.stem if named.is_file() else named.name}-{to}"
    if place.exists():
        raise FileExistsError(f"{place} already exists: give another folder with --out, or remove it")
    writable(place)  # fail now, not after the work
    model = load(source)
    ids = None if calibrate is None else _tokens(source, calibrate, tokens, context)
    with Progress(True).counted("quantising", len(formats(model, to, group, head))) as done:
        new = quantise(model, to, group, head=head, calibrate=ids, progress=done)
    with tokenizer_beside(source) as tokenizer:
        save(new, place, tokenizer=tokenizer)
    sizes = [sum(t.nbytes for t in m.state_dict().values()) / 1e6 for m in (model, new)]
    print(f"{place}: {to}, {sizes[1]:,.1f} MB of {sizes[0]:,.1f}, from {source}")


def _tokens(source: Path, texts: list[Path], most: int, context: int) -> Tensor:
    """Tokens [N, context] of ``texts``."""
    import torch

    from linattn.data import sources
    from linattn.train.published import codec_at

    if not 1 <= context <= most:
        raise ValueError(f"--context must be at least 1 and at most --tokens {most}, but came as {context}")
    text = b"\n".join(sources.read(path) for path in sources.files(texts))[: 16 * most]  # more bytes than that many tokens
    ids = codec_at(source).encode(text.decode(errors="replace"))[:most]
    if len(ids) < context:
        raise ValueError(f"--calibrate must have at least --context {context} tokens, but has {len(ids)}")
    return torch.tensor(ids[: len(ids) // context * context]).unflatten(0, (-1, context))
