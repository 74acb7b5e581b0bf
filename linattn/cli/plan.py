"""``linattn plan``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linattn.cli.options import options_of, takes
from linattn.train.plan_options import PlanOptions

if TYPE_CHECKING:
    from linattn.train.plan import Plan


@takes(*options_of(PlanOptions))
def plan(given: dict[str, Any], as_json: Annotated[bool, typer.Option("--json", help="The same as a JSON object.")] = False) -> None:
    """Plan a training on many GPUs.

    Prints the memory and the traffic of each GPU and the time of a step. Nothing is allocated, and no GPU is needed.
    Times follow from the given link speeds and share of the peak; activations are those of the portable form.
    """
    from linattn.train.plan import plan as planned

    found = planned(PlanOptions(**given))
    print(json.dumps(found.json(), indent=1) if as_json else _sheet(found))


def _sheet(plan: Plan) -> str:
    from linattn.report.words import memory

    lines = [f"{plan.parameters:,} parameters on {plan.cards:,} GPUs, {plan.tokens:,} tokens a step", "", "memory of a GPU"]
    lines += [f"  {name:12}{memory(n):>10}" for name, n in plan.memory.items() if name != "states"]
    room = "fits into" if plan.total <= plan.capacity else "DOES NOT FIT INTO"
    lines += [f"  {'all':12}{memory(plan.total):>10}  {room} {memory(plan.capacity)}"]
    lines += [f"  (recurrent states of its sequences: {memory(plan.memory['states'])})", "", "a step"]
    for name, seconds in plan.seconds.items():
        sent = f"  {memory(plan.traffic[name])} sent by each GPU" if name in plan.traffic else ""
        lines.append(f"  {name:12}{1000 * seconds:>8,.1f} ms{sent}")
    return "\n".join([*lines, f"  {plan.tokens / plan.seconds['step']:,.0f} tokens/s"])
