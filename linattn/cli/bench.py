"""``linattn bench``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Suite(StrEnum):
    """What can be measured."""

    ops = "ops"
    train = "train"
    vision = "vision"


class Device(StrEnum):
    """Where it is measured."""

    cpu = "cpu"
    cuda = "cuda"


SUITES = (
    "ops: the recurrence beside the code that one would use without it. train: steps of a whole language model. "
    "vision: mixers of images against the resolution."
)

TAKES = {
    (Suite.ops, Device.cpu): {"--peers"},
    (Suite.ops, Device.cuda): {"--peers", "--families", "--shapes", "--modes", "--seconds"},
    (Suite.train, Device.cpu): {"--models"},
    (Suite.train, Device.cuda): {"--models", "--peers", "--seconds"},
    (Suite.vision, Device.cpu): {"--models"},
    (Suite.vision, Device.cuda): {"--models"},
}  # which options mean something to what


def bench(
    suite: Annotated[Suite, typer.Argument(help=SUITES, show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="Few and short measurements: does everything run?")] = False,
    device: Annotated[Device | None, typer.Option(help="Measure here. [default: cuda if there is one]", show_default=False)] = None,
    peers: Annotated[
        str | None, typer.Option(metavar="A,B,...", help='Compare with these only; "" for ours alone. [default: all]', show_default=False)
    ] = None,
    families: Annotated[str, typer.Option(metavar="A,B,...", help="On a GPU: only these kinds of recurrence.")] = "",
    shapes: Annotated[str, typer.Option(metavar="A,B,...", help="On a GPU: only these shapes, such as B1T32768H16D128.")] = "",
    modes: Annotated[str, typer.Option(metavar="A,B,...", help='On a GPU: only these, such as "forward" or "first call".')] = "",
    models: Annotated[str, typer.Option(metavar="A,B,...", help="Train only these models, or measure only these mixers of images.")] = "",
    seconds: Annotated[float | None, typer.Option(min=0, help="On a GPU: end after so long with what is measured by then.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the figures to this file, as JSON; a GPU's are added to those in it.")
    ] = None,
) -> None:
    """Measure the library's speed on this machine.

    On a CPU the two sides of each comparison take turns in one process, and what is told are medians of their ratios. On a
    GPU each library has a process of its own and the card to itself while it is timed.
    """
    chosen = None if peers is None else _names(peers)
    given = {
        "--peers": peers, "--families": families or None, "--shapes": shapes or None, "--modes": modes or None,
        "--models": models or None, "--seconds": seconds,
    }  # fmt: skip
    if device is None:
        import torch

        device = Device.cuda if torch.cuda.is_available() else Device.cpu
    if foreign := [option for option, value in given.items() if value is not None and option not in TAKES[suite, device]]:
        raise ValueError(f"{' and '.join(foreign)} mean nothing to {suite.value} on {device.value}")
    match suite, device:
        case Suite.ops, Device.cpu:
            from linattn.bench.ops import run

            run(quick=quick, out=out, only=chosen)
        case Suite.ops, _:
            from linattn.bench.gpu.ops import Wish
            from linattn.bench.gpu.ops import run as run_gpu

            wish = Wish(quick=quick, families=_names(families), shapes=_names(shapes), modes=_names(modes), peers=chosen, seconds=seconds)
            run_gpu(wish, device=device.value, out=out)
        case Suite.vision, _:
            from linattn.bench.vision import run as run_vision

            run_vision(quick=quick, device=device.value, models=_names(models), out=out)
        case Suite.train, Device.cpu:
            from linattn.bench.training import run as run_training

            run_training(quick=quick, models=_names(models), out=out)
        case _:
            from linattn.bench.gpu.train import run as run_train

            run_train(quick=quick, device=device.value, models=_names(models), peers=chosen, seconds=seconds, out=out)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
