"""``linattn data``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Action = StrEnum("Action", ["prepare", "check"])
ACTIONS = "prepare: tokenise files into the folder --out. check: compare a prepared folder with its checksums."


def data(
    action: Annotated[Action, typer.Argument(help=ACTIONS, show_default=False)],
    inputs: Annotated[
        list[str],
        typer.Argument(help="Files or quoted patterns: .jsonl, .parquet, else text. For check: the folder.", show_default=False),
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder to write; it must not exist.", show_default=False)] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Hugging Face tokenizer.json. [default: a token per byte]", show_default=False)
    ] = None,
    end: Annotated[str | None, typer.Option(metavar="TEXT", help="The one token that ends each document.", show_default=False)] = None,
    field: Annotated[str, typer.Option(metavar="NAME", help="Key or column that holds the text.")] = "text",
    validation: Annotated[float, typer.Option(metavar="SHARE", help="Share of the documents to hold out; of a small text its end.")] = 0.01,
    shard_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens per shard.")] = 1 << 28,
) -> None:
    """Prepare tokens for linattn train --data.

    Documents are the lines of .jsonl, the rows of .parquet, and other files as they are, in pieces of 1 MiB. Tokens are written to shards
    that are memory-mapped, so a data set may exceed the memory. The folder is written atomically.
    """
    if action is Action.check:
        from linattn.data.shards import check

        for folder in inputs:
            print(f"{folder}: {check(folder):,} tokens, intact")
        return
    if out is None:
        raise ValueError("--out is missing: name the folder to write")
    from linattn.data import prepare
    from linattn.report.progress import Progress

    bar = Progress(True)
    count = prepare(
        inputs, out, tokenizer=tokenizer, end=end, field=field, validation=validation, shard_tokens=shard_tokens,
        progress=lambda documents, tokens: bar.say(f"{documents:,} documents, {tokens:,} tokens"),
    )  # fmt: skip
    print(f"{out}: {count['documents']:,} documents, {count['train']:,} training tokens and {count['validation']:,} validation tokens")
    print(f"Train on it with: linattn train --data {out}")
