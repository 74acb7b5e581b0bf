"""``linattn convert``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.cli.options import options_of, takes
from linattn.distill.options import ConvertOptions


@takes(*options_of(ConvertOptions))
def convert(
    given: dict[str, Any],
    teacher: Annotated[Path, typer.Argument(help="A softmax model that linattn.load reads: a folder, GGUF file or run.")],
    plan: Annotated[bool, typer.Option("--plan", help="Show tokens, time and memory, without converting.")] = False,
    no_calibrate: Annotated[bool, typer.Option("--no-calibrate", help="Start stage 1 without the least-squares fit.")] = False,
) -> None:
    """Convert a softmax Transformer to linear attention.

    Copies matching weights, sets gates and output projections in closed form, and distils: first each mixer's output, then the
    next-token distributions, then the text itself at a longer context. Writes a model for linattn generate, linattn.load and
    transformers to DIR. A killed conversion continues with --resume and ends with the same bits.
    """
    from linattn.distill.conversion import folder_of, run
    from linattn.distill.files import saved_options
    from linattn.train.processes import world

    given |= {"calibrate": False} if no_calibrate else {}
    asked = replace(ConvertOptions(), **given)
    if asked.resume and (begun := saved_options(folder_of(teacher, asked.out))) is not None:
        asked = replace(begun, **given)
    if plan:
        from linattn.distill.plan import plan_of

        typer.echo(str(plan_of(teacher, asked)))
        return
    result = run(teacher, asked)
    if world()[1] > 0:  # one of several processes; the first says it
        return
    last = result.history[-1]
    typer.echo(
        f"{result.folder}: KL {last['kl']:.3g} nats per token from the teacher ({result.history[0]['kl']:.3g} as copied), top-1"
        f" {last['top1']:.1%}, {last['bits_per_byte']:.3f} bits per byte of held-out text (teacher {result.teacher_bits_per_byte:.3f})"
    )
