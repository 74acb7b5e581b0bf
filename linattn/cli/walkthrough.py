"""``linattn walkthrough``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.cli.options import options_of, takes
from linattn.cli.sampling import Prompt, Run, Sampled, Stop, check


@takes(*options_of(Sampled))
def walkthrough(
    given: dict[str, Any],
    run: Run,
    prompt: Prompt,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Maximum number of new tokens; the stages are those of the first.")] = 16,
    stop: Stop = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Also draw it: an .svg file in English or an .html page in English and Chinese. [default: no drawing]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show every stage of one step of generation.

    Prints the stages of the model: the prompt's tokens, their embedding, every layer's mixer and feed-forward (with the chosen
    experts of a mixture), the classifier, the choice of the next token, and the loop until the stop. Beside each stage are the shape
    of its output and the largest entries for the last token.
    """
    from linattn.generate.sampling import Sampling, generator
    from linattn.generate.walkthrough import walkthrough as walk_through
    from linattn.report.walkthrough import lines
    from linattn.state import writable
    from linattn.train import load_run

    check(prompt, stop)
    if out is not None and out.suffix not in (".svg", ".html"):
        raise ValueError(f"--out must be a file that ends in .svg or .html, but came as {out}")
    if out is not None:
        writable(out)
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, but came as {max_new_tokens}")
    chosen = Sampled(**given)
    model, codec = load_run(run, device=chosen.device)
    found = walk_through(
        model,
        codec,
        prompt,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(chosen.temperature, chosen.top_k, chosen.top_p),
        stop=stop or (),
        generator=generator(chosen.seed, chosen.device),
    )
    print("\n".join(lines(found)))
    if out is not None:
        from linattn.atlas.walkthrough import page, svg
        from linattn.report.folder import write_text

        write_text(out, svg(found) if out.suffix == ".svg" else page(found))
        print(f"\ndrawing: {out}")
