"""``linattn show``."""

from __future__ import annotations

import inspect
import json
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linattn.cli.list import described

if TYPE_CHECKING:
    from linattn.mixers import Cost
    from linattn.mixers.registry import Info

WIDTH = 16  # of the column of names


def show(
    name: Annotated[str, typer.Argument(help="A mixer's name in `linattn list`.", show_default=False)],
    dim: Annotated[int, typer.Option(metavar="D", help="Width for the costs.")] = 512,
    heads: Annotated[
        int | None, typer.Option(metavar="H", help="Heads for the costs. [default: the mixer's own]", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="T", help="Tokens for the costs.")] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="The same as a JSON object.")] = False,
) -> None:
    """Show one mixer: its paper, equation, options, costs and code.

    Also shows the implementation that tests compare it with, and the largest relative error of these tests.

    Costs are those of one layer for one sequence in bfloat16; "FLOPs" counts multiplications and additions.
    """
    from linattn.mixers import cost, info
    from linattn.mixers.option_texts import options as listed

    known = info(name)
    options: dict[str, Any] = {} if heads is None else {"heads": heads}
    try:
        costs = cost(name, dim=dim, tokens=tokens, **options)
    except TypeError as error:  # --heads for a mixer without heads
        raise ValueError(str(error)) from None
    if as_json:
        figures = {k: v for k, v in asdict(costs).items() if k not in ("name", "dtype")}
        print(
            json.dumps(
                {
                    **described(known),
                    "options": [asdict(o) for o in listed(known)],
                    "source": _source(known),
                    "errors": _errors(name),
                    "cost": {**figures, "dtype": "bfloat16"},
                },
                indent=1,
                ensure_ascii=False,
            )
        )
    else:
        print(_sheet(known, costs, heads))


def _sheet(known: Info, costs: Cost, heads: int | None) -> str:
    from linattn.mixers.errors import measured_errors
    from linattn.mixers.option_texts import options
    from linattn.mixers.taxonomy import families

    paper = known.paper or "-"
    paper = f"{paper} ({known.year})" if known.year else paper
    errors = measured_errors(known.name)
    facts = {
        "name": known.name,
        "title": known.title,
        "paper": paper,
        "arXiv": f"https://arxiv.org/abs/{known.arxiv}" if known.arxiv else "-",
        "equation": known.equation or "-",
        "kind": f"{known.kind}, {'causal' if known.causal else 'not causal'}, {_grows(known)}",
        "family": ", ".join(families(known)),
        "checked against": known.oracle or "-",
        "relative error": errors.told() if errors else "not recorded",
        "code": _source(known),
    }
    lines = [f"{key:{WIDTH}}{value}" for key, value in facts.items()]
    for check, reason in known.exemptions.items():
        lines.append(f"{'exempt':{WIDTH}}{check}: {reason}")
    width = max((len(option.name) + 2 for option in options(known)), default=0)
    found = [f"{option.name:{max(WIDTH, width)}}{option.text} ({option.type}, default {option.default})" for option in options(known)]
    return "\n".join([*lines, "", *(["Options besides dim:", *found, ""] if found else []), _costs(costs, heads)])


def _errors(name: str) -> dict[str, Any] | None:
    """Recorded errors of a mixer's tests as JSON values; None if there are none."""
    from linattn.mixers.errors import measured_errors

    errors = measured_errors(name)
    return None if errors is None else asdict(errors)


def _grows(known: Info) -> str:
    if known.kind != "sequence" or not known.causal:
        return f"grows with the tokens as {known.growth}"
    state = "state of constant size" if known.recurrent else "state grows with the sequence"
    return f"{state}, a whole sequence costs {known.growth}"


def _costs(costs: Cost, heads: int | None) -> str:
    """Format the costs of one layer in readable units."""
    from linattn.report.words import figure, memory, times

    figures = {"parameters": f"{costs.parameters:,}", "prefill": f"{figure(costs.flops / 1e9)} GFLOPs for all {costs.tokens:,} tokens"}
    if costs.state_bytes is not None and costs.step_flops is not None:
        ratio = costs.softmax_cache_bytes / costs.state_bytes if costs.state_bytes else 0.0
        figures |= {
            "decode": f"{figure(costs.step_flops / 1e6)} MFLOPs for the token after them",
            "state": memory(costs.state_bytes),
            "softmax's cache": f"{memory(costs.softmax_cache_bytes)}" + (f", {times(ratio)} as much" if ratio > 1 else ""),
        }
    head = f"A layer of width {costs.dim}" + (f" with {heads} heads" if heads else "") + f", {costs.tokens:,} tokens, bfloat16:"
    return textwrap.dedent(head) + "\n" + "\n".join(f"{key:{WIDTH}}{value}" for key, value in figures.items())


def _source(known: Info) -> str:
    return inspect.getsourcefile(known.cls) or "-"
