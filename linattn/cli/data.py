"""``linattn data``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Action(StrEnum):
    """What can be done with data."""

    prepare = "prepare"
    check = "check"


ACTIONS = "prepare: tokenise files into the folder --out. check: compare a prepared folder with its checksums."


def data(
    action: Annotated[Action, typer.Argument(help=ACTIONS, show_default=False)],
    inputs: Annotated[
        list[str],
        typer.Argument(help="Files or quoted patterns: .jsonl, .parquet, else text. For check: the folder.", show_default=False),
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder to write; it must not be there.", show_default=False)] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Hugging Face tokenizer.json.", show_default="a token per byte")
    ] = None,
    end: Annotated[str | None, typer.Option(metavar="TEXT", help="The one token that ends each document.", show_default="none")] = None,
    field: Annotated[str, typer.Option(metavar="NAME", help="Key or column that holds the text.")] = "text",
    validation: Annotated[float, typer.Option(metavar="SHARE", help="Share of the documents that is held out.")] = 0.01,
    shard_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of a shard.")] = 1 << 28,
) -> None:
    """Prepare tokens for linattn train --data.

    Documents are the lines of .jsonl, the rows of .parquet and other files as they are, in pieces of 1 MiB. Tokens go to shards that are
    mapped into memory, so that sets may be larger than it; the folder appears whole or not at all.
    """
    if action is Action.check:
        from linattn.data.shards import check

        for folder in inputs:
            print(f"{folder}: {check(folder):,} tokens, whole")
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
    print(f"{out}: {count['documents']:,} documents, {count['train']:,} tokens to train on and {count['validation']:,} to validate on")
    print(f"Train on it with: linattn train --data {out}")
