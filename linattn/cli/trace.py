"""``linattn trace``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def trace(
    run: Annotated[Path, typer.Argument(help="A run of linattn train, or one of its checkpoints.", show_default=False)],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.", show_default=False)],
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens to write at most; the first is looked at.")] = 16,
    temperature: Annotated[float, typer.Option(metavar="X", help="0 takes the likeliest token; above 1 is wilder.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(metavar="K", help="Choose among the K likeliest tokens.", show_default="all")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Choose among the likeliest tokens that hold P of the probability.", show_default="all"),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be given again.", show_default="none")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="S", help="The same seed, the same text.", show_default="another each time")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Draw it, too: a file .svg, or a page .html.", show_default="no drawing"),
    ] = None,
) -> None:
    """Follow one step of a generation from text to text.

    Printed is what a model does with the prompt: its tokens, their embedding, every layer's mixer and feed-forward (of a mixture the
    experts that were asked), the classifier, the choice of the next token, and then the loop up to the stop. Beside each stage stand
    the shape of what comes out of it and the largest entries for the last token.
    """
    from linattn.generate.sampling import Sampling, generator
    from linattn.generate.trace import trace as traced
    from linattn.report.trace import lines
    from linattn.state import writable
    from linattn.train import load_run

    if not prompt:
        raise ValueError("--prompt is empty: give the model a text to continue")
    if any(not s for s in stop or ()):
        raise ValueError("--stop is empty: give a text to stop at")
    if out is not None and out.suffix not in (".svg", ".html"):
        raise ValueError(f"--out must be a file that ends in .svg or .html, but came as {out}")
    if out is not None:
        writable(out)
    if max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, but came as {max_tokens}")
    model, codec = load_run(run)
    found = traced(
        model,
        codec,
        prompt,
        max_new_tokens=max_tokens,
        sampling=Sampling(temperature, top_k, top_p),
        stop=stop or (),
        generator=generator(seed),
    )
    print("\n".join(lines(found)))
    if out is not None:
        from linattn.atlas.trace import page, svg
        from linattn.report.folder import write_text

        write_text(out, svg(found) if out.suffix == ".svg" else page(found))
        print(f"\ndrawing: {out}")
